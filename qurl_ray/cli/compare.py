"""qurl compare: runs side by side."""

import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import numpy as np
import typer
from rich.console import Console

from qurl_ray.config.cli import errors_told
from qurl_ray.config.load import runs_folder
from qurl_ray.config.paths import expanded
from qurl_ray.config.shown import shown_address
from qurl_ray.config.tracking import mlflow_address
from qurl_ray.errors import ConfigError
from qurl_ray.evaluation.statistics import mean_with_bootstrap_interval, paired_p_value
from qurl_ray.files import write_whole
from qurl_ray.report.compare import Difference, Run, compare, newest, read_runs
from qurl_ray.report.compare_page import console_table, render_comparison
from qurl_ray.runs.values import flatten

NEWEST = 4
_FEWEST = 2
_FULL = ("full-precision rollouts", "full", "rollout.quantization=none quantization.uaq_scale=1")
_QUANTIZED = ("INT8 rollouts", "int8", "rollout.quantization=int8")
"""The other run of a pair: its rollouts in words, the end of its name, and its settings."""


def main(
    names: Annotated[
        list[str] | None, typer.Argument(metavar="RUN...", help="Runs by folder, or by name. Without any: the newest.")
    ] = None,
    runs: Annotated[bool, typer.Option("--runs", help="Say what the arguments are; may be left out.")] = False,
    experiment: Annotated[str | None, typer.Option(help="The runs of this MLflow experiment instead.")] = None,
    uri: Annotated[
        str | None,
        typer.Option(help="MLflow's server or database.", show_default="$MLFLOW_TRACKING_URI, or FOLDER/mlflow.db"),
    ] = None,
    folder: Annotated[Path | None, typer.Option(help="Where runs are.", show_default="$QURL_RUNS, or runs")] = None,
    out: Annotated[Path | None, typer.Option(help="The page.", show_default="FOLDER/compare.html")] = None,
) -> None:
    """Put runs side by side: a table here, and one page with charts that needs no network and no server.

    Held-out reward and problems solved (reward > 0.5) with intervals, differences on the same problems, speed,
    mismatch, and the settings that differ.
    """
    with errors_told():
        place = runs_folder(folder)
        comparison = compare(chosen(names or [], experiment, uri, place), difference)
        path = expanded(out or place / "compare.html").resolve()
        try:
            path.parent.mkdir(exist_ok=True)
            write_whole(path, render_comparison(comparison, experiment or "Comparison of runs"))
        except OSError as error:
            raise ConfigError(f"cannot read or write {error.filename}: {error.strerror}") from None
    for warning in comparison.warnings:
        typer.echo(f"note: {warning}", err=True)
    Console().print(console_table(comparison))
    typer.echo(path)


def chosen(names: list[str], experiment: str | None, given: str | None, folder: Path) -> list[Run]:
    """Return the runs that the arguments name.

    Raises:
        ConfigError: a run or the database does not exist, `given` is no address of MLflow, or both runs and an
            experiment are given.
    """
    if experiment is None:
        names = names or newest(folder, NEWEST)
        if len(names) < _FEWEST:
            raise ConfigError(_wants_another(names, folder))
        return read_runs(names, folder)
    if names:
        raise ConfigError("give runs or --experiment, not both")
    uri = mlflow_address(given, folder)
    if uri.startswith("sqlite:///") and not Path(uri.removeprefix("sqlite:///")).is_file():
        raise ConfigError(f"no MLflow database {shown_address(uri)}; give --uri")  # MLflow would make an empty one
    from qurl_ray.tracking.compare_mlflow import experiment_runs  # the import takes over a second

    return experiment_runs(uri, experiment)


def _wants_another(names: list[str], folder: Path) -> str:
    """Return the message where there are less than two runs: the command that makes another one."""
    if not names:
        return f"there are no runs in {folder}; `qurl train quickstart` makes one"
    (run,) = read_runs(names, folder)
    path = Path(names[0]) if (Path(names[0]) / "config.yaml").is_file() else folder / names[0]
    known = dict(flatten(run.record.config, "."))
    quantized = known.get("rollout.quantization") != "none"
    rollouts, end, changed = _FULL if quantized else _QUANTIZED
    changes = {
        "precision_flow": "rollout_only" if known.get("precision_flow") not in (None, "rollout_only") else None,
        "learner.lora.base": "full" if quantized and known.get("learner.lora.base") == "codes" else None,
        "quantization.backward": "auto" if known.get("quantization.backward") not in (None, "auto") else None,
        "algorithm.calibrate_every": 0 if known.get("algorithm.calibrate_every") else None,
        # Corrections are for rollouts of older weights, too.
        "algorithm.correction": None if known.get("rollout.max_staleness") else "ignore" if quantized else "acr",
    }
    changed += "".join(f" {key}={value}" for key, value in changes.items() if value is not None)
    config = shlex.quote(str(path / "config.yaml"))
    return (
        f"one run, {run.name}, is not enough to compare; the same with {rollouts} is made by `qurl train {config} "
        f"name={run.name}_{end} {changed}`"
    )


def difference(first: Sequence[float], second: Sequence[float]) -> Difference:
    """Return the mean difference with its bootstrap interval over the problems, and the p-value of the paired test."""
    change = mean_with_bootstrap_interval(np.subtract(second, first, dtype=float))
    return Difference(value=change.value, low=change.low, high=change.high, p_value=paired_p_value(first, second))
