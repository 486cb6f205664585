"""Command line that all training jobs share: --config FILE, key=value overrides, --dry-run, --help."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated

import typer

from qurl_ray.config.help import COMMAND, HelpFlag, Overrides, help_page
from qurl_ray.config.load import load_config
from qurl_ray.config.run import RunConfig
from qurl_ray.errors import ConfigError, QurlError
from qurl_ray.extensions import find_modules_here

_JET_RL = ["precision_flow=unified", "rollout.quantization=fp8_block"]

DryRunFlag = Annotated[
    bool, typer.Option("--dry-run", help="Check the run and print its settings; start and write nothing.")
]
FreshFlag = Annotated[
    bool,
    typer.Option(
        "--fresh", help="Start from the beginning, not from an unfinished run's checkpoint; that run is kept."
    ),
]
ExtendFlag = Annotated[
    bool, typer.Option("--extend", help="Go on with a finished run of this name, with more steps than it had.")
]


@contextmanager
def errors_told() -> Iterator[None]:
    """Print an error that qurl_ray raises on purpose, without a traceback, and exit with status 2."""
    try:
        yield
    except QurlError as error:
        typer.echo("\n".join([f"error: {error}", *getattr(error, "__notes__", ())]), err=True)
        raise typer.Exit(2) from None


def training_app(algorithm: str | None, train: Callable[..., int], about: str | None = None) -> typer.Typer:
    """Return a command that reads the settings, checks that their algorithm is `algorithm`, and calls `train`.

    Args:
        algorithm: None is for unified precision flows, with any algorithm.
        train: function of (config, dry=…, fresh=…, extend=…) that runs the job and returns the exit status.
        about: docstring of the job: a sentence, a colon, and an example of use.
    """
    app = typer.Typer(add_completion=False, rich_markup_mode=None, pretty_exceptions_enable=False)

    @app.command(**COMMAND)
    def main(
        context: typer.Context,
        overrides: Overrides = None,
        config: Annotated[
            Path | None, typer.Option(help="YAML file with the run's settings, or one of `qurl configs`.")
        ] = None,
        dry_run: DryRunFlag = False,
        fresh: FreshFlag = False,
        extend: ExtendFlag = False,
        show_help: HelpFlag = False,
    ) -> None:
        find_modules_here()
        with errors_told():
            if show_help:
                typer.echo(help_page(context, RunConfig, overrides or [], about))
                return
            settings = _settings(algorithm, config, overrides or [])
            status = train(settings, dry=dry_run, fresh=fresh, extend=extend)
        raise typer.Exit(status)

    return app


def _settings(algorithm: str | None, config: Path | None, given: list[str]) -> RunConfig:
    # Without a file the job decides the algorithm; with one, the file does, and must agree.
    defaults = [f"algorithm.type={algorithm}"] if algorithm else _JET_RL
    settings = load_config(config, given if config else [*defaults, *given])
    other = settings.algorithm.type
    if algorithm not in (None, other):
        place = config or "an override"
        raise ConfigError(f"{place} sets algorithm.type={other}; run it with `qurl train`, or jobs/qurl_{other}.py")
    if algorithm is None and settings.precision_flow == "rollout_only":
        raise ConfigError(
            f"precision_flow is rollout_only; run it with `qurl train`, or jobs/qurl_{other}.py, or set unified"
        )
    return settings
