"""Write report.html into a run's folder: python jobs/report.py runs/quickstart"""

from pathlib import Path
from typing import Annotated

import typer

from qurl_ray.tracking.report import write_report


def main(
    run: Annotated[
        Path, typer.Argument(metavar="RUN_FOLDER", help="Folder of a run, such as runs/quickstart; it may still go on.")
    ],
) -> None:
    """Write RUN_FOLDER/report.html, the whole run on one page, and print its path.

    Accuracy, reward, mismatch and time over the steps, and sampled rollouts token by token. The page needs no network
    and no server; an older one is replaced.
    """
    if not (run / "metrics.jsonl").is_file():
        typer.echo(f"error: {run} holds no metrics.jsonl; give the folder of a run, such as runs/quickstart", err=True)
        raise typer.Exit(2)
    try:
        print(write_report(run))
    except OSError as error:
        typer.echo(f"error: cannot write the report into {run}: {error.strerror}", err=True)
        raise typer.Exit(2) from None


if __name__ == "__main__":
    typer.run(main)
