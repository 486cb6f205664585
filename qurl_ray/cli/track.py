"""qurl track: send a run to MLflow after it has ended."""

from pathlib import Path
from typing import Annotated

import typer

from qurl_ray.config.cli import errors_told
from qurl_ray.config.load import run_folder
from qurl_ray.config.shown import shown_address
from qurl_ray.tracking.replay import replay


def main(
    runs: Annotated[list[Path], typer.Argument(metavar="RUN...", help="Runs by their folders or their names.")],
    uri: Annotated[
        str | None, typer.Option(help="Server or database; without it, the one that the run was tracked by.")
    ] = None,
) -> None:
    """Send to MLflow what a run's folder holds and MLflow lacks: metrics, traces, artifacts and the policy.

    Use it for a run whose server was down, or that was tracked without MLflow. Sending again changes nothing.
    """
    for run in runs:
        with errors_told():
            run = run_folder(run)
            done = replay(run, uri)
        typer.echo(f"{run} is run {done.run_id} in {shown_address(done.uri)}")
        for notice in done.notices:
            typer.echo(f"warning: {notice}", err=True)
