"""A run driven into mismatch on purpose, without and with the guard: python benchmarks/guard.py.

The task is that of `jet_rl` with ternary weights in rollouts, naive importance sampling and twice the
learning rate. Each cell is a job of its own (cells.py). Table and picture go to benchmarks/results/guard.{json,md,png}.
"""

import json
import statistics
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import typer
from cells import Arm, Cell, cell, draw_series, percent
from matplotlib import pyplot as plt
from shared import RESULTS, ROOT, machine

CONFIG = "qurl_ray/configs/jet_rl.yaml"
COMMON = (
    "precision_flow=rollout_only",
    "rollout.quantization=int4",
    "quantization.weight_max_code=1",
    "algorithm.correction=naive",
    "algorithm.max_refill_rounds=2",
    "rollout.prompts_per_step=32",
    "learner.lr=8e-5",
    "learner.lr_final_share=1",
    "steps=60",
)
PANELS = {
    "reward/mean": "reward of the rollouts",
    "mismatch/ess": "effective sample size",
    "guard/level": "level of the guard",
}


ARMS = (
    Arm(name="full precision", settings=("rollout.quantization=none", "guard.enabled=false"), color="#777777"),
    Arm(name="without the guard", settings=("guard.enabled=false",), color="#D55E00"),
    Arm(name="up to tightening", settings=("guard.highest=tighten",), color="#009E73"),
    Arm(name="with the guard", settings=(), color="#0072B2"),
)


def warnings(one: Cell) -> list[dict[str, Any]]:
    """Return the warnings of the guard."""
    return [e for e in one.events if e["kind"] == "warning" and e["message"].startswith("guard: ")]


def rows(cells: dict[str, list[Cell]]) -> list[str]:
    """Return a Markdown table of means over seeds, with the accuracy of each seed in brackets."""
    lines = [
        "| | before % | after % (each seed) | reward, last 10 steps | ESS, least of a step | steps | of these in full "
        "precision |",
        "|---|---|---|---|---|---|---|",
    ]
    for name, found in cells.items():
        before, after = percent(found, "accuracy_before"), percent(found, "accuracy_after")
        each = " · ".join(f"{100 * one.summary['accuracy_after']:.1f}" for one in found)
        reward = statistics.mean(statistics.mean(one.series("reward/mean")[-10:]) for one in found)
        ess = min(np.nanmin(one.series("mismatch/ess")) for one in found)
        steps = statistics.mean(len(one.steps) for one in found)
        # the level after a step is the level that the next step used
        full = statistics.mean(one.series("guard/level")[:-1].count(3.0) for one in found)
        lines.append(
            f"| {name} | {before:.1f} | {after:.1f} ({each}) | {reward:.2f} | {ess:.2g} | {steps:g} | {full:g} |"
        )
    return lines


def draw(cells: dict[str, list[Cell]], path: Path) -> None:
    """Draw the metrics of PANELS over steps."""
    figure, axes = plt.subplots(1, len(PANELS), figsize=(5 * len(PANELS), 3.6), constrained_layout=True)
    for axis, (key, title) in zip(axes, PANELS.items(), strict=True):
        draw_series(axis, ARMS, cells, key)
        axis.set_title(title)
    axes[0].legend(fontsize=8)
    figure.savefig(path, dpi=120)


def main(
    seeds: Annotated[int, typer.Option(help="Runs of each row.")] = 2,
    runs: Annotated[Path, typer.Option(help="Where the runs are kept.")] = ROOT / "runs" / "guard",
    out: Annotated[Path, typer.Option(help="The JSON file; the table and the picture go beside it.")] = RESULTS
    / "guard.json",
) -> None:
    """Train into a mismatch, without and with the guard."""
    cells = {
        arm.name: [cell("guard", CONFIG, COMMON, arm, seed, runs.resolve()) for seed in range(seeds)] for arm in ARMS
    }
    text = [f"`python benchmarks/guard.py --seeds {seeds}`; {machine()}", "", *rows(cells), ""]
    text += ["What the guard said, seed 0:", ""]
    text += [f"- step {one['step']}: {one['message']}" for one in warnings(cells["with the guard"][0])]
    print("\n".join(text))
    out.parent.mkdir(parents=True, exist_ok=True)
    figures = {
        name: [
            {"summary": one.summary, "guard": warnings(one), **{key: one.series(key) for key in PANELS}}
            for one in found
        ]
        for name, found in cells.items()
    }
    out.write_text(json.dumps({**figures, "seeds": seeds, "machine": machine()}, indent=2) + "\n")
    out.with_suffix(".md").write_text("\n".join(text) + "\n")
    draw(cells, out.with_suffix(".png"))


if __name__ == "__main__":
    typer.run(main)
