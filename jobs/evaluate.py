"""Evaluate a policy: python jobs/evaluate.py runs/quickstart --samples 8"""

import typer

from qurl_ray.cli.evaluate import main

if __name__ == "__main__":
    typer.run(main)
