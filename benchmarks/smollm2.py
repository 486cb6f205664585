"""A real pretrained model, from command to curve: python benchmarks/smollm2.py (20 minutes on 2 shared cores).

Runs jobs/configs/smollm2_135m.yaml as its own job and leaves a table, the figures and the curve under
benchmarks/results/smollm2_135m.*. `--run FOLDER` takes a finished run instead. `make smollm2` installs the weights.
"""

import json
import subprocess
import sys
from pathlib import Path
from typing import Annotated, Any

import matplotlib
import typer
from loop import machine

from qurl_ray.tracking.text import duration

matplotlib.use("agg")
from matplotlib import pyplot as plt

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "benchmarks" / "results"
NAME = "smollm2_135m"
COMMAND = f"python jobs/qurl_dapo.py --config jobs/configs/{NAME}.yaml"


def read(run_dir: Path) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """(summary, events) of a finished run."""
    lines = (run_dir / "metrics.jsonl").read_text().splitlines()
    return json.loads((run_dir / "summary.json").read_text()), [json.loads(line) for line in lines]


def draw(steps: list[dict[str, Any]], evaluations: list[dict[str, Any]], path: Path) -> None:
    """Reward of the rollouts, held-out accuracy with its intervals, and the mismatch, over steps."""
    figure, (reward, accuracy, mismatch) = plt.subplots(1, 3, figsize=(12, 3.2), constrained_layout=True)
    at = [line["step"] for line in steps]
    reward.plot(at, [line["values"]["reward/mean"] for line in steps], color="#0072B2", marker="o", markersize=3)
    reward.set_title("reward of the rollouts (T = 1)")
    shown = [line for line in evaluations if line["message"] != "after, quantized"]
    middle = [100 * line["values"]["eval/accuracy"] for line in shown]
    below = [m - 100 * line["values"]["eval/low"] for m, line in zip(middle, shown, strict=True)]
    above = [100 * line["values"]["eval/high"] - m for m, line in zip(middle, shown, strict=True)]
    accuracy.errorbar(
        [line["step"] for line in shown], middle, yerr=[below, above], color="#D55E00", marker="o", capsize=3
    )
    accuracy.set_title("held-out accuracy, greedy, % (95 %)")
    mismatch.semilogy(at, [line["values"]["mismatch/kl"] for line in steps], color="#009E73", marker="o", markersize=3)
    mismatch.set_title("KL(b‖p), nats per token")
    for axes in (reward, accuracy, mismatch):
        axes.set_xlabel("step")
        axes.grid(alpha=0.3)
    figure.savefig(path, dpi=110)


def table(summary: dict[str, Any], steps: list[dict[str, Any]], wall: float) -> str:
    """Markdown: what the run reached, and what each part took."""
    rows = {
        "held-out problems, greedy": f"{summary['eval_problems']}",
        "accuracy before": f"{summary['accuracy_before']:.1%}",
        "accuracy after": f"{summary['accuracy_after']:.1%}",
        "accuracy after, the exported INT8 policy": f"{summary['accuracy_after_quantized']:.1%}",
        "exact paired test, after against before": f"p = {summary['accuracy_p_value']:.2g}",
        "steps": f"{summary['steps']}",
        "from the first evaluation to the last, both included": duration(wall),
        "steps alone": duration(summary["train_seconds"]),
        "rollout tokens per second": f"{summary['rollout_tokens_per_second']:.0f}",
        "seconds by phase": " · ".join(f"{name} {value:.0f}" for name, value in summary["phase_seconds"].items()),
        "largest ρ": f"{summary['max_rho']:.1f}",
        "smallest effective sample size": f"{min(line['values']['mismatch/ess'] for line in steps):.2f}",
        "tokens where ACR was active": f"{summary['acr_active_tokens']}",
    }
    return "\n".join(["| | |", "|---|---|", *(f"| {name} | {value} |" for name, value in rows.items())])


def main(
    run: Annotated[Path | None, typer.Option(help="A finished run of the preset; it is run if absent.")] = None,
    output_dir: Annotated[Path, typer.Option(help="Where the run goes.")] = ROOT / "runs",
) -> None:
    """Run the preset and write its curve, table and figures."""
    if run is None:
        command = [sys.executable, *COMMAND.split()[1:], f"output_dir={output_dir.resolve()}"]
        subprocess.run(command, cwd=ROOT, check=True)
        run = output_dir / NAME
    summary, events = read(run)
    steps = [line for line in events if line["kind"] == "step"]
    evaluations = [line for line in events if line["kind"] == "evaluation"]
    wall = events[-1]["time"] - events[0]["time"]
    RESULTS.mkdir(exist_ok=True)
    draw(steps, evaluations, RESULTS / f"{NAME}.png")
    text = f"`{COMMAND}`\n\n{machine()}\n\n{table(summary, steps, wall)}\n"
    (RESULTS / f"{NAME}.md").write_text(f"# SmolLM2-135M-Instruct\n\n{text}\n![curves]({NAME}.png)\n")
    kept = {key: value for key, value in summary.items() if key not in ("initial_policy", "mlflow_run_id")}
    figures = {"command": COMMAND, "machine": machine(), "wall_seconds": wall, "summary": kept}
    figures["rewards"] = [line["values"]["reward/mean"] for line in steps]
    figures["evaluations"] = [{"step": line["step"], **line["values"]} for line in evaluations]
    (RESULTS / f"{NAME}.json").write_text(json.dumps(figures, indent=1) + "\n")
    print(text)


if __name__ == "__main__":
    typer.run(main)
