"""A real pretrained model, INT8 rollouts against full precision: python benchmarks/smollm2.py (an hour on 2 cores).

Runs two arms of qurl_ray/configs/smollm2_135m.yaml, each of `--steps` steps: INT8 with ACR and UAQ, and full precision,
uncorrected. Each is a job of its own and resumes where it was stopped; finished ones are kept. A table, the figures and
the curves go to benchmarks/results/smollm2_135m.{md,json,png}. `make smollm2` installs the weights.
"""

import json
import statistics
from pathlib import Path
from typing import Annotated

import typer
from cells import Arm, Cell, cell, draw_series
from matplotlib import pyplot as plt
from shared import RESULTS, ROOT, machine

from qurl_ray.report.text import duration

NAME = "smollm2_135m"
ARMS = (
    Arm(name="INT8, ACR, UAQ", settings=(), color="#0072B2"),
    Arm(
        name="full precision",
        settings=("rollout.quantization=none", "quantization.uaq_scale=1", "algorithm.correction=ignore"),
        color="#777777",
    ),
)
PANELS = {"reward/mean": "reward of the rollouts (T = 1)", "mismatch/kl": "KL(b‖p), nats per token"}


def evaluations(one: Cell) -> list[dict]:
    """Return the evaluations of the policy as it rolls out, and the last one in full precision."""
    return [event for event in one.events if event["kind"] == "evaluation" and "quantized" not in event["message"]]


def rows(cells: dict[str, Cell]) -> list[str]:
    """Return a Markdown table of the arms."""
    lines = [
        "| | before % | after % (95 %) | after, its rollout format % | steps | of it rollouts | s/step, median | "
        "rollout tokens/s | smallest ESS | largest ρ |",
        "|---|---|---|---|---|---|---|---|---|---|",
    ]
    for name, one in cells.items():
        s, last = one.summary, evaluations(one)[-1]["values"]
        lines.append(
            f"| {name} | {100 * s['accuracy_before']:.1f} | {100 * s['accuracy_after']:.1f} "
            f"({100 * last['eval/low']:.1f} to {100 * last['eval/high']:.1f}) | "
            f"{100 * s['accuracy_after_quantized']:.1f} | {duration(s['train_seconds'])} | "
            f"{100 * s['phase_seconds']['rollout'] / s['train_seconds']:.0f} % | "
            f"{statistics.median(one.series('time/step')):.1f} | {s['rollout_tokens_per_second']:.0f} | "
            f"{min(v for v in one.series('mismatch/ess') if v == v):.2f} | {s['max_rho']:.1f} |"
        )
    return lines


def draw(cells: dict[str, Cell], path: Path) -> None:
    """Draw held-out accuracy as rolled out with its intervals, reward and mismatch, over steps."""
    figure, (accuracy, *others) = plt.subplots(1, 3, figsize=(12, 3.2), constrained_layout=True)
    for arm in ARMS:
        shown = [event for event in evaluations(cells[arm.name]) if event["message"] != "after"]
        middle = [100 * line["values"]["eval/accuracy"] for line in shown]
        below = [m - 100 * line["values"]["eval/low"] for m, line in zip(middle, shown, strict=True)]
        above = [100 * line["values"]["eval/high"] - m for m, line in zip(middle, shown, strict=True)]
        accuracy.errorbar(
            [line["step"] for line in shown], middle, yerr=[below, above], color=arm.color, marker="o", capsize=3,
            label=arm.name,
        )  # fmt: skip
    accuracy.set(title="held-out accuracy as rolled out, greedy, %", xlabel="step")
    accuracy.legend(fontsize=8)
    accuracy.grid(alpha=0.3)
    for axis, (key, title) in zip(others, PANELS.items(), strict=True):
        draw_series(axis, ARMS, {name: [one] for name, one in cells.items()}, key, width=3)
        axis.set_title(title)
    others[-1].set_yscale("symlog", linthresh=1e-4)
    figure.savefig(path, dpi=110)


def main(
    steps: Annotated[int, typer.Option(help="Number of steps of each arm.")] = 60,
    runs: Annotated[Path, typer.Option(help="Where the runs are kept.")] = ROOT / "runs" / "smollm2",
    out: Annotated[Path, typer.Option(help="The JSON file; the rest goes beside it.")] = RESULTS / f"{NAME}.json",
) -> None:
    """Train both arms and compare them."""
    common = (f"steps={steps}", "evaluation.every=10", "checkpoint.every=2")
    config = f"qurl_ray/configs/{NAME}.yaml"
    cells = {arm.name: cell(f"smollm2-{steps}", config, common, arm, 0, runs.resolve()) for arm in ARMS}
    text = [f"`python benchmarks/smollm2.py --steps {steps}`; {machine()}", "", *rows(cells), ""]
    print("\n".join(text))
    draw(cells, out.with_suffix(".png"))
    out.with_suffix(".md").write_text("\n".join(["# SmolLM2-135M-Instruct", "", *text, f"![curves]({NAME}.png)", ""]))
    figures = {
        name: {
            "summary": {k: v for k, v in one.summary.items() if k not in ("initial_policy", "mlflow_run_id")},
            "evaluations": [{"step": line["step"], **line["values"]} for line in evaluations(one)],
            **{key: one.series(key) for key in (*PANELS, "time/step", "time/rollout")},
        }
        for name, one in cells.items()
    }
    out.write_text(json.dumps(figures | {"machine": machine()}, indent=1) + "\n")


if __name__ == "__main__":
    typer.run(main)
