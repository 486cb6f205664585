"""Write report.html, rollouts/ and the timeline into a run's folder: python jobs/report.py runs/quickstart"""

import typer

from qurl_ray.cli.report import main

if __name__ == "__main__":
    typer.run(main)
