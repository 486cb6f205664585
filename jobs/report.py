"""Write report.html, rollouts/ and the timeline into a run's folder: python jobs/report.py runs/quickstart"""

from pathlib import Path
from typing import Annotated

import typer

from qurl_ray.report.report import write_report
from qurl_ray.report.timeline import write_timeline
from qurl_ray.report.viewer import write_rollouts


def main(
    run: Annotated[
        Path, typer.Argument(metavar="RUN_FOLDER", help="Folder of a run, such as runs/quickstart; it may still go on.")
    ],
) -> None:
    """Write the pages of a run into its folder, and print their paths.

    report.html shows accuracy, reward, mismatch and time over the steps. rollouts/ shows every recorded rollout token
    by token, a page per step. timeline.html (and timeline.json, for Perfetto) shows what every process did and when.
    The pages need no network and no server; older ones are replaced.
    """
    if not (run / "metrics.jsonl").is_file():
        typer.echo(f"error: {run} holds no metrics.jsonl; give the folder of a run, such as runs/quickstart", err=True)
        raise typer.Exit(2)
    try:
        others = [write_timeline(run), write_rollouts(run)]
        for page in (write_report(run), *others):  # the report links to the others
            if page:
                print(page)
    except OSError as error:
        typer.echo(f"error: cannot read or write {error.filename or run}: {error.strerror}", err=True)
        raise typer.Exit(2) from None


if __name__ == "__main__":
    typer.run(main)
