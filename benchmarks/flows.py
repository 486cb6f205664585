"""Training in each precision flow: python benchmarks/flows.py (about 2 hours), or --only TABLE, --seeds N.

Each cell is a job of its own, jobs/jet_rl.py or jobs/qurl_dapo.py, whose folder is kept: a second call runs what is
missing. Tables and a picture go to benchmarks/results/flows.{json,md,png}.

- same: the task of jobs/configs/jet_rl.yaml in full precision, with quantized rollouts alone, and in unified flows.
- coarse: sums of six digits, so answers of seven to eight tokens, with weights of ±2 and nothing corrected: rollouts
  alone quantized against the unified flow.
"""

import json
import statistics
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import matplotlib
import typer
from loop import ROOT, machine

matplotlib.use("agg")
from matplotlib import pyplot as plt

RESULTS = ROOT / "benchmarks" / "results"
CONFIG = "jobs/configs/jet_rl.yaml"
_PLAIN = ("precision_flow=rollout_only", "rollout.quantization=none")


@dataclass(frozen=True, slots=True, kw_only=True)
class Arm:
    """One row of a table."""

    name: str
    settings: tuple[str, ...]
    color: str


TABLES: dict[str, tuple[tuple[str, ...], tuple[Arm, ...]]] = {
    "same": (
        (),
        (
            Arm(name="full precision", settings=_PLAIN, color="#777777"),
            Arm(
                name="rollouts in FP8 blocks, ACR",
                settings=("precision_flow=rollout_only", "algorithm.correction=qurl"),
                color="#D55E00",
            ),
            Arm(name="unified, FP8 blocks", settings=(), color="#0072B2"),
            Arm(
                name="unified, INT8",
                settings=("precision_flow=unified_int8", "rollout.quantization=int8"),
                color="#009E73",
            ),
        ),
    ),
    "coarse": (
        (
            "rollout.quantization=int4",
            "quantization.weight_max_code=2",
            "task.min_operand=100000",
            "task.max_operand=999999",
            "rollout.max_new_tokens=8",
        ),
        (
            Arm(name="full precision", settings=_PLAIN, color="#777777"),
            Arm(name="rollouts alone, not corrected", settings=("precision_flow=rollout_only",), color="#D55E00"),
            Arm(name="unified", settings=(), color="#0072B2"),
        ),
    ),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Cell:
    """A finished run."""

    seed: int
    summary: dict[str, Any]
    steps: list[dict[str, Any]]

    @property
    def best(self) -> float:
        """Accuracy in the format that does better: full precision, or the one it was trained with."""
        return max(self.summary["accuracy_after"], self.summary["accuracy_after_quantized"])


def cell(table: str, common: tuple[str, ...], arm: Arm, seed: int, runs: Path) -> Cell:
    """The run of an arm and seed, made if it is not there."""
    name = f"{table}-{arm.name.replace(' ', '-').replace(',', '')}-{seed}"
    folder = runs / name
    if not (folder / "summary.json").exists():
        settings = [*common, *arm.settings]
        job = "qurl_dapo.py" if "precision_flow=rollout_only" in settings else "jet_rl.py"
        subprocess.run(
            [
                sys.executable,
                f"jobs/{job}",
                "--config",
                CONFIG,
                f"name={name}",
                f"seed={seed}",
                f"output_dir={runs}",
                "export.quantized=none",
                "tracking.mlflow=false",
                "tracking.console=plain",
                *settings,
            ],
            cwd=ROOT,
            check=True,
        )
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    steps = [line for line in lines if line["kind"] == "step"]
    return Cell(seed=seed, summary=json.loads((folder / "summary.json").read_text()), steps=steps)


def rows(cells: dict[str, list[Cell]]) -> list[str]:
    """A Markdown table; means over seeds, the seeds in brackets."""
    lines = [
        "| | before % | after % | after, in its format % | better of both, by seed | KL(b‖p), last step | max ρ | "
        "s/step |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for name, found in cells.items():
        means = [
            statistics.mean(one.summary[key] for one in found)
            for key in ("accuracy_before", "accuracy_after", "accuracy_after_quantized")
        ]
        each = " · ".join(f"{100 * one.best:.1f}" for one in found)
        kl = statistics.mean(one.steps[-1]["values"]["mismatch/kl"] for one in found)
        seconds = statistics.mean(one.summary["train_seconds"] / one.summary["steps"] for one in found)
        rho = max(one.summary["max_rho"] for one in found)
        figures = " | ".join(f"{100 * mean:.1f}" for mean in means)
        lines.append(f"| {name} | {figures} | {each} | {kl:.2g} | {rho:.3g} | {seconds:.2f} |")
    return lines


def draw(tables: dict[str, dict[str, list[Cell]]], path: Path) -> None:
    """Reward over steps, a thin line per seed and a thick one for their mean."""
    figure, axes = plt.subplots(
        1, len(tables), figsize=(5.5 * len(tables), 3.6), constrained_layout=True, squeeze=False
    )
    for axis, (table, cells) in zip(axes[0], tables.items(), strict=True):
        colors = {arm.name: arm.color for arm in TABLES[table][1]}
        for name, found in cells.items():
            curves = [_smooth([line["values"]["reward/mean"] for line in one.steps]) for one in found]
            for curve in curves:
                axis.plot(range(1, len(curve) + 1), curve, color=colors[name], linewidth=0.6, alpha=0.5)
            mean = [statistics.mean(values) for values in zip(*curves, strict=False)]
            axis.plot(range(1, len(mean) + 1), mean, color=colors[name], linewidth=2, label=name)
        axis.set(title={"same": "Two-digit sums", "coarse": "Six-digit sums, weights of ±2"}[table], xlabel="step")
        axis.set_ylabel("reward of the rollouts")
        axis.legend(fontsize=8)
        axis.grid(alpha=0.3)
    figure.savefig(path, dpi=120)


def _smooth(values: list[float], width: int = 8) -> list[float]:
    """Means over the last `width` steps."""
    return [statistics.mean(values[max(0, i + 1 - width) : i + 1]) for i in range(len(values))]


def main(
    only: Annotated[list[str] | None, typer.Option(help="Tables to make: same, coarse; both if absent.")] = None,
    seeds: Annotated[int, typer.Option(help="Runs of each row.")] = 3,
    runs: Annotated[Path, typer.Option(help="Where the runs are kept.")] = ROOT / "runs" / "flows",
    out: Annotated[Path, typer.Option(help="The JSON file; the table and the picture go beside it.")] = RESULTS
    / "flows.json",
) -> None:
    """Train in each precision flow and compare."""
    tables: dict[str, dict[str, list[Cell]]] = {}
    for table in only or TABLES:
        common, arms = TABLES[table]
        tables[table] = {
            arm.name: [cell(table, common, arm, seed, runs.resolve()) for seed in range(seeds)] for arm in arms
        }
    text = [f"`python benchmarks/flows.py --seeds {seeds}`; {machine()}", ""]
    for table, cells in tables.items():
        text += [f"**{table}**", "", *rows(cells), ""]
    print("\n".join(text))
    out.parent.mkdir(parents=True, exist_ok=True)
    figures = {
        table: {name: [one.summary for one in found] for name, found in cells.items()}
        for table, cells in tables.items()
    }
    out.write_text(json.dumps({**figures, "seeds": seeds, "machine": machine()}, indent=2) + "\n")
    out.with_suffix(".md").write_text("\n".join(text))
    draw(tables, out.with_suffix(".png"))


if __name__ == "__main__":
    typer.run(main)
