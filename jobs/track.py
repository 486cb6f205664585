"""Send a run to MLflow after it has ended: python jobs/track.py runs/quickstart"""

import typer

from qurl_ray.cli.track import main

if __name__ == "__main__":
    typer.run(main)
