"""qurl report: the pages of a run."""

from pathlib import Path
from typing import Annotated

import typer

from qurl_ray.config.cli import errors_told
from qurl_ray.config.load import runs_folder
from qurl_ray.errors import ConfigError
from qurl_ray.report.compare import find_run
from qurl_ray.report.report import write_report
from qurl_ray.report.timeline import write_timeline
from qurl_ray.report.viewer import write_rollouts


def main(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="A run by its folder or its name; it may still go on.")],
) -> None:
    """Write the pages of a run into its folder, and print their paths.

    report.html shows accuracy, reward, mismatch and time over the steps. rollouts/ shows every recorded rollout token
    by token, a page per step. timeline.html (and timeline.json, for Perfetto) shows what every process did and when.
    The pages need no network and no server; older ones are replaced.
    """
    with errors_told():
        run = find_run(str(run), runs_folder(None))
        try:
            others = [write_timeline(run), write_rollouts(run)]
            pages = [write_report(run), *others]  # the report links to the others
        except OSError as error:
            raise ConfigError(f"cannot read or write {error.filename or run}: {error.strerror}") from None
    for page in filter(None, pages):
        typer.echo(page)
