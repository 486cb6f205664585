"""Tables of training runs. Each cell is a job of its own, whose folder is kept: a second call runs only missing
cells."""

import hashlib
import json
import math
import re
import statistics
import subprocess
import sys
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import matplotlib
from shared import ROOT

matplotlib.use("agg")
from matplotlib import pyplot as plt

WHOLE = ("evaluation.target_reward=null", "evaluation.every=0")
"""Settings that make all steps and evaluate nothing between them. Without them the quickstart ends at its target."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Arm:
    """One row of a table."""

    name: str
    settings: tuple[str, ...]
    color: str
    base: str = "full precision"
    """Name of the arm that the gain is compared with, in tables that do so."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Cell:
    """A finished run: one arm with one seed."""

    folder: Path
    seed: int
    summary: dict[str, Any]
    events: list[dict[str, Any]]

    @property
    def steps(self) -> list[dict[str, Any]]:
        return [event for event in self.events if event["kind"] == "step"]

    def series(self, key: str) -> list[float]:
        """Values of one metric over the steps; nan for a step without it."""
        return [float("nan") if (value := step["values"].get(key)) is None else value for step in self.steps]

    def last(self, key: str) -> float:
        """Value of a metric at the last step that has it. A step without an update has no mismatch metrics."""
        return next(v for step in reversed(self.steps) if (v := step["values"].get(key)) is not None)

    @property
    def best(self) -> float:
        """Larger accuracy after training: in full precision, or in the format of the training run."""
        return max(self.summary["accuracy_after"], self.summary["accuracy_after_quantized"])


def cell(
    table: str,
    config: str,
    common: Sequence[str],
    arm: Arm,
    seed: int,
    runs: Path,
    *,
    job: str = "qurl_dapo",
    begin: bool = True,
    quiet: bool = False,
) -> Cell | None:
    """Return the run of an arm and a seed. Start it if it is missing; return None instead if `begin` is False.

    The folder's name ends with a digest of the settings: changed settings make another run. With `quiet`, the console
    output goes to a log file beside the folder.
    """
    settings = [f"seed={seed}", "export.quantized=none", *WHOLE, *common, *arm.settings]
    digest = hashlib.sha256("\n".join([job, (ROOT / config).read_text(), *settings]).encode()).hexdigest()[:6]
    name = re.sub(r"[^\w.]+", "-", f"{table}-{arm.name}-{seed}-{digest}")
    folder = runs / name
    if not _finished(folder):
        if not begin:
            return None
        settings += [f"name={name}", f"output_dir={runs}", "tracking.mlflow=false", "tracking.console=plain"]
        command = [sys.executable, f"jobs/{job}.py", "--config", config, *settings]
        log = runs / f"{name}.log"
        runs.mkdir(parents=True, exist_ok=True)
        with log.open("w") if quiet else nullcontext() as console:
            status = subprocess.run(command, cwd=ROOT, stdout=console, stderr=console).returncode
        if status not in (0, 3):  # 3: stopped by the guard, which is a valid result too
            raise SystemExit(f"{name} ended with status {status}{f'; see {log}' if quiet else ''}")
    events = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return Cell(folder=folder, seed=seed, summary=json.loads((folder / "summary.json").read_text()), events=events)


def _finished(folder: Path) -> bool:
    """Return True if a run has ended in this folder, by itself or stopped by its guard."""
    if not (folder / "summary.json").exists():
        return False
    summary = json.loads((folder / "summary.json").read_text())
    return summary["stopped_by_guard"] or not summary["interrupted"]


def percent(cells: Sequence[Cell], key: str) -> float:
    """Mean over the cells of a share in their summaries, in percent."""
    return 100 * statistics.mean(one.summary[key] for one in cells)


def draw_series(axis: plt.Axes, arms: Sequence[Arm], cells: dict[str, list[Cell]], key: str, *, width: int = 1) -> None:
    """Draw a thin line per seed and a thick one for their mean. Each point is a mean over the last `width` steps."""
    colors = {arm.name: arm.color for arm in arms}
    for name, found in cells.items():
        curves = [smooth(one.series(key), width) for one in found]
        for curve in curves:
            axis.plot(range(1, len(curve) + 1), curve, color=colors[name], linewidth=0.6, alpha=0.5)
        mean = [mean_of_numbers(values) for values in zip(*curves, strict=False)]
        axis.plot(range(1, len(mean) + 1), mean, color=colors[name], linewidth=2, label=name)
    axis.set_xlabel("step")
    axis.grid(alpha=0.3)


def smooth(values: list[float], width: int) -> list[float]:
    """Running means of the values, each over the last `width` of them."""
    return [mean_of_numbers(values[max(0, i + 1 - width) : i + 1]) for i in range(len(values))]


def mean_of_numbers(values: Sequence[float]) -> float:
    """Mean of the values that are not nan; nan if all are. Steps without an update have nan."""
    numbers = [value for value in values if not math.isnan(value)]
    return statistics.mean(numbers) if numbers else math.nan
