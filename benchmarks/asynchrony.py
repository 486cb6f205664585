"""Benefit and cost of rollouts that run ahead of the learner: python benchmarks/asynchrony.py (about 15 minutes).

Half of the quickstart runs with `rollout.max_staleness` 0, 1 and 4, where engine and learner have a core each, and in
turns with both cores for either. Each cell is a job of its own (cells.py). Table and picture go to
benchmarks/results/asynchrony.{json,md,png}.
"""

import json
import statistics
from pathlib import Path
from typing import Annotated

import typer
from cells import Arm, Cell, cell, draw_series, percent
from matplotlib import pyplot as plt
from shared import RESULTS, ROOT, machine

CONFIG = "qurl_ray/configs/quickstart.yaml"
COMMON = (
    "guard.enabled=false",
    "steps=80",
    "rollout.prompts_per_step=64",
    "rollout.samples_per_prompt=8",
    "learner.lr=4e-5",
    "learner.warmup_steps=0",
)
_ONE_EACH = ("rollout.threads=1", "learner.threads=1")
ARMS = (
    Arm(name="in turns, both cores", settings=(), color="#777777"),
    Arm(name="in turns, a core each", settings=_ONE_EACH, color="#000000"),
    Arm(name="1 ahead, a core each", settings=(*_ONE_EACH, "rollout.max_staleness=1"), color="#0072B2"),
    Arm(name="4 ahead, a core each", settings=(*_ONE_EACH, "rollout.max_staleness=4"), color="#D55E00"),
)


def rows(cells: dict[str, list[Cell]]) -> list[str]:
    """Return a Markdown table; figures are means over seeds."""
    lines = [
        "| | s/step, median | over in turns, a core each | learner waits, of a step | staleness, mean | ESS | "
        "KL(b‖p) | after % (each seed) |",
        "|---|---|---|---|---|---|---|---|",
    ]
    seconds = {
        name: statistics.mean(statistics.median(one.series("time/step")) for one in found)
        for name, found in cells.items()
    }
    for name, found in cells.items():
        waits = statistics.mean(sum(one.series("time/wait")) / sum(one.series("time/step")) for one in found)
        lag, ess, kl = (
            statistics.mean(statistics.mean(one.series(key)) for one in found)
            for key in ("rollout/staleness_mean", "mismatch/ess", "mismatch/kl")
        )
        each = " · ".join(f"{100 * one.summary['accuracy_after']:.1f}" for one in found)
        gain = seconds["in turns, a core each"] / seconds[name]
        lines.append(
            f"| {name} | {seconds[name]:.2f} | {gain:.2f} | {100 * waits:.0f} % | {lag:.2f} | {ess:.3f} | {kl:.1e} | "
            f"{percent(found, 'accuracy_after'):.1f} ({each}) |"
        )
    return lines


def draw(cells: dict[str, list[Cell]], path: Path) -> None:
    """Draw reward and effective sample size over steps."""
    figure, axes = plt.subplots(1, 2, figsize=(11, 3.6), constrained_layout=True)
    for axis, key, title in zip(
        axes, ("reward/mean", "mismatch/ess"), ("reward of the rollouts", "effective sample size"), strict=True
    ):
        draw_series(axis, ARMS, cells, key, width=8)
        axis.set_title(title)
    axes[0].legend(fontsize=8)
    figure.savefig(path, dpi=120)


def main(
    seeds: Annotated[int, typer.Option(help="Runs of each row.")] = 2,
    runs: Annotated[Path, typer.Option(help="Where the runs are kept.")] = ROOT / "runs" / "asynchrony",
    out: Annotated[Path, typer.Option(help="The JSON file; the table and the picture go beside it.")] = RESULTS
    / "asynchrony.json",
) -> None:
    """Train with rollouts that run ahead of the learner, and compare."""
    cells = {
        arm.name: [cell("ahead", CONFIG, COMMON, arm, seed, runs.resolve()) for seed in range(seeds)] for arm in ARMS
    }
    text = [f"`python benchmarks/asynchrony.py --seeds {seeds}`; {machine()}", "", *rows(cells)]
    print("\n".join(text))
    figures = {name: [one.summary for one in found] for name, found in cells.items()}
    out.write_text(json.dumps({**figures, "seeds": seeds, "machine": machine()}, indent=2) + "\n")
    out.with_suffix(".md").write_text("\n".join(text) + "\n")
    draw(cells, out.with_suffix(".png"))


if __name__ == "__main__":
    typer.run(main)
