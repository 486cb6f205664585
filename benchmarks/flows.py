"""Training in each precision flow: python benchmarks/flows.py (about 2 hours), or --only TABLE, --seeds N.

Each cell is a job of its own (cells.py). Tables and a picture go to benchmarks/results/flows.{json,md,png}.

- same: the task of qurl_ray/configs/jet_rl.yaml in full precision, with quantized rollouts alone, and in unified flows.
- coarse: the same task with ternary weights, twice the learning rate and fewer prompts. Quantized rollouts alone,
  uncorrected (naive importance sampling) and with ACR, are compared with the unified flow.
"""

import json
import statistics
from pathlib import Path
from typing import Annotated

import typer
from cells import Arm, Cell, cell, draw_series, percent
from matplotlib import pyplot as plt
from shared import RESULTS, ROOT, machine

CONFIG = "qurl_ray/configs/jet_rl.yaml"
_PLAIN = ("precision_flow=rollout_only", "rollout.quantization=none")


TITLES = {"same": "Two-digit sums", "coarse": "Ternary weights"}
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
            "quantization.weight_max_code=1",
            "algorithm.correction=naive",
            "algorithm.max_refill_rounds=2",
            "rollout.prompts_per_step=32",
            "learner.lr=8e-5",
            "learner.lr_final_share=1",
            "steps=60",
            "guard.enabled=false",
        ),
        (
            Arm(name="full precision", settings=_PLAIN, color="#777777"),
            Arm(name="rollouts alone, naive", settings=("precision_flow=rollout_only",), color="#D55E00"),
            Arm(
                name="rollouts alone, ACR",
                settings=("precision_flow=rollout_only", "algorithm.correction=qurl"),
                color="#E69F00",
            ),
            Arm(name="unified", settings=(), color="#0072B2"),
        ),
    ),
}


def rows(cells: dict[str, list[Cell]]) -> list[str]:
    """Return a Markdown table of means over seeds; the better accuracy of each seed is shown as well."""
    lines = [
        "| | before % | after % | after, in its format % | better of both, by seed | KL(b‖p), last step | max ρ |",
        "|---|---|---|---|---|---|---|",
    ]
    for name, found in cells.items():
        means = [percent(found, f"accuracy_{when}") for when in ("before", "after", "after_quantized")]
        each = " · ".join(f"{100 * one.best:.1f}" for one in found)
        kl = statistics.mean(one.last("mismatch/kl") for one in found)
        rho = max(one.summary["max_rho"] for one in found)
        figures = " | ".join(f"{mean:.1f}" for mean in means)
        lines.append(f"| {name} | {figures} | {each} | {kl:.2g} | {rho:.3g} |")
    return lines


def draw(tables: dict[str, dict[str, list[Cell]]], path: Path) -> None:
    """Draw the reward over steps, a thin line per seed and a thick one for their mean."""
    figure, axes = plt.subplots(
        1, len(tables), figsize=(5.5 * len(tables), 3.6), constrained_layout=True, squeeze=False
    )
    for axis, (table, cells) in zip(axes[0], tables.items(), strict=True):
        draw_series(axis, TABLES[table][1], cells, "reward/mean", width=8)
        axis.set(title=TITLES[table], ylabel="reward of the rollouts")
        axis.legend(fontsize=8)
    figure.savefig(path, dpi=120)


def main(
    only: Annotated[list[str] | None, typer.Option(help="Tables to make: same, coarse; both if absent.")] = None,
    seeds: Annotated[int, typer.Option(help="Runs of each row.")] = 3,
    runs: Annotated[Path, typer.Option(help="Where the runs are kept.")] = ROOT / "runs" / "flows",
    out: Annotated[Path, typer.Option(help="The JSON file; the table and the picture go beside it.")] = RESULTS
    / "flows.json",
) -> None:
    """Train in each precision flow, and compare the results."""
    tables: dict[str, dict[str, list[Cell]]] = {}
    for table in only or TABLES:
        common, arms = TABLES[table]
        tables[table] = {
            arm.name: [cell(table, CONFIG, common, arm, seed, runs.resolve()) for seed in range(seeds)] for arm in arms
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
