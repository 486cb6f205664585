"""The command `qurl`. The work of its commands is done in the packages that they call. Their imports, of which torch is
a large part, happen when a command runs."""

from collections.abc import Iterator
from pathlib import Path
from typing import Annotated

import typer

from qurl_ray import __version__
from qurl_ray.cli import compare, doctor, evaluate, report, track
from qurl_ray.config.cli import DryRunFlag, ExtendFlag, FreshFlag, errors_told
from qurl_ray.config.help import COMMAND, HelpFlag, help_page
from qurl_ray.config.load import SHIPPED, config_file, describe, load_config
from qurl_ray.config.run import RunConfig
from qurl_ray.config.serving import serving_command
from qurl_ray.errors import ConfigError
from qurl_ray.extensions import find_modules_here
from qurl_ray.planning.__main__ import main as plan
from qurl_ray.serving.job import serve
from qurl_ray.training.driver.job import run_job

_TRAIN = "Train: qurl train quickstart steps=20"
_SERVE = "Serve a trained policy with OpenAI's API: qurl serve policy=runs/quickstart"

app = typer.Typer(no_args_is_help=True, rich_markup_mode=None, pretty_exceptions_enable=False)


def main() -> None:
    """Entry point of the console command."""
    app(prog_name="qurl")


def _version(asked: bool) -> None:
    if asked:
        typer.echo(f"qurl-ray {__version__}")
        raise typer.Exit


@app.callback(context_settings={"help_option_names": ["-h", "--help"]})
def root(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version and stop.")
    ] = False,
) -> None:
    """Reinforcement learning of language models with quantized rollouts, on Ray."""


def shipped() -> dict[str, str]:
    """Return the settings files that come with the package, by name, with the first line of each."""
    files = sorted(SHIPPED.glob("*.yaml"))
    return {file.stem: file.read_text().split("\n", 1)[0].removeprefix("# ") for file in files}


def completed(incomplete: str) -> Iterator[tuple[str, str]]:
    """Yield (text, help) of the settings files and the settings that begin with `incomplete`, for shells."""
    for name, about in shipped().items():
        if name.startswith(incomplete):
            yield name, about
    for key, default, text in describe():
        if default and key.startswith(incomplete):
            yield f"{key}=", text.split(". ")[0]


@app.command("train", help="Train a policy as a settings file says.", **COMMAND)
def train_command(
    context: typer.Context,
    arguments: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[CONFIG] [KEY=VALUE]...",
            help="A YAML file or a name that `qurl configs` lists, and settings that override it, or the defaults if "
            "there is none; with --help, names of settings.",
            autocompletion=completed,
        ),
    ] = None,
    dry_run: DryRunFlag = False,
    fresh: FreshFlag = False,
    extend: ExtendFlag = False,
    show_help: HelpFlag = False,
) -> None:
    """Train a policy as a settings file says."""
    find_modules_here()
    given = arguments or []
    with errors_told():
        if show_help:
            names = [name for name in given if not config_file(Path(name)).is_file()]
            typer.echo(help_page(context, RunConfig, names, _TRAIN))
            return
        if not given:
            raise ConfigError("give a YAML file, a name that `qurl configs` lists, or settings such as model.path=…")
        file, overrides = (None, given) if "=" in given[0] else (Path(given[0]), given[1:])
        status = run_job(load_config(file, overrides), dry=dry_run, fresh=fresh, extend=extend)
    raise typer.Exit(status)


@app.command()
def configs(
    name: Annotated[str | None, typer.Argument(help="Print this one.", autocompletion=completed)] = None,
) -> None:
    """List the settings files that come with the package, or print one: qurl configs quickstart > mine.yaml"""
    files = shipped()
    if name is None:
        width = max(map(len, files)) + 2
        for each, about in files.items():
            typer.echo(f"{each:{width}}{about}")
        return
    with errors_told():
        if name not in files:
            raise ConfigError(f"no settings file {name!r} comes with the package; there are {', '.join(files)}")
        typer.echo((SHIPPED / f"{name}.yaml").read_text(), nl=False)


app.command("evaluate")(evaluate.main)
app.command("report")(report.main)
app.command("compare")(compare.main)
app.command("serve", help="Serve a trained policy with OpenAI's API.", **COMMAND)(serving_command(serve, _SERVE))
app.command("plan")(plan)
app.command("track")(track.main)
app.command("doctor")(doctor.main)
