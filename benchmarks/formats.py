"""A short run in each number format and flow: python benchmarks/formats.py (an hour on 2 cores).

The quickstart's sums, 60 steps, from three cold starts: with quantized rollouts alone, corrected by ACR, and in a
unified flow, in which the learner computes with the engine's codes. Solved are all held-out sums, greedily, once by the
trained weights in full precision and once by their codes. The KL of a real model's answers is that of
equalization.py --quick. Runs are kept (cells.py): the same command makes the missing ones.
Writes benchmarks/results/formats_learning.{json,md}.
"""

import json
import statistics
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Annotated

import typer
from cells import Arm, Cell, cell
from shared import RESULTS, ROOT, machine

FORMATS = ("int8", "fp8", "fp8_block", "mxfp8", "nvfp4", "nvfp4_w4a4", "mxfp4", "int4")
FLOWS = {
    "rollouts alone": ("precision_flow=rollout_only",),
    "unified": ("precision_flow=unified", "algorithm.correction=ignore"),
}
FULL = Arm(
    name="full precision",
    settings=("rollout.quantization=none", "algorithm.correction=ignore"),
    color="#777777",
)
COMMON = (
    "steps=60",
    "rollout.prompts_per_step=64",
    "quantization.uaq_scale=1",
    "guard.enabled=false",
    "evaluation.problems=1620",
    "rollout.threads=1",
    "learner.threads=1",
)


def arms() -> list[Arm]:
    """Return the rows of the table."""
    coded = [
        Arm(name=f"{name}, {flow}", settings=(f"rollout.quantization={name}", *settings), color="#0072B2")
        for name in FORMATS
        for flow, settings in FLOWS.items()
    ]
    return [FULL, *coded]


def table(cells: dict[str, list[Cell]]) -> list[str]:
    """Return a row for each arm: means over seeds, and each seed's."""
    lines = [
        "| | in full precision %: mean, by seed | in its format %: mean, by seed | KL(b‖p) | ESS, least |",
        "|" + "---|" * 5,
    ]
    for name, runs in cells.items():
        if runs:
            solved = [[100 * run.summary[f"accuracy_{when}"] for run in runs] for when in ("after", "after_quantized")]
            each = [f"{statistics.mean(some):.1f}: {', '.join(f'{one:.1f}' for one in some)}" for some in solved]
            kl, ess = (
                [value for run in runs for value in run.series(f"mismatch/{key}") if value == value]
                for key in ("kl", "ess")
            )
            lines.append(f"| {name} | {' | '.join(each)} | {statistics.mean(kl):.2g} | {min(ess):.3f} |")
    return lines


def main(
    seeds: Annotated[int, typer.Option(help="Cold starts of each row.")] = 3,
    jobs: Annotated[int, typer.Option(help="Runs at a time, with a core each.")] = 2,
    runs: Annotated[Path, typer.Option(help="Where the runs are kept.")] = ROOT / "runs" / "formats",
    out: Annotated[Path, typer.Option(help="The JSON file; the table goes beside it.")] = RESULTS
    / "formats_learning.json",
) -> None:
    """Train in each format and flow, and write the table after every run."""
    cells: dict[str, list[Cell]] = {arm.name: [] for arm in arms()}
    places = [(seed, arm) for seed in range(seeds) for arm in arms()]

    def make(place: tuple[int, Arm]) -> Cell:
        seed, arm = place
        config, common = "qurl_ray/configs/quickstart.yaml", (*COMMON, f"model.seed={seed}")
        run = cell("formats", config, common, arm, seed, runs.resolve(), quiet=True)
        assert run
        return run

    with ThreadPoolExecutor(jobs) as pool:
        for number, ((_, arm), run) in enumerate(zip(places, pool.map(make, places), strict=True), start=1):
            cells[arm.name].append(run)
            lines = table(cells)
            kept = ("accuracy_before", "accuracy_after", "accuracy_after_quantized", "max_rho")
            summaries = {name: [{k: one.summary[k] for k in kept} for one in some] for name, some in cells.items()}
            out.write_text(json.dumps({"machine": machine(), "runs": summaries}, indent=1) + "\n")
            command = f"`python benchmarks/formats.py --seeds {seeds}`; {machine()}"
            text = ["# A short run in each format", "", command, "", *lines, ""]
            out.with_suffix(".md").write_text("\n".join(text))
            print(f"{number} of {len(places)}: {arm.name}, {run.summary['accuracy_after']:.3f}", flush=True)
    print("\n".join(lines))


if __name__ == "__main__":
    typer.run(main)
