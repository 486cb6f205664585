"""Compare runs: python jobs/compare.py --runs quickstart quickstart.1"""

import typer

from qurl_ray.cli.compare import main

if __name__ == "__main__":
    typer.run(main)
