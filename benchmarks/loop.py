"""The whole loop on this machine: python benchmarks/loop.py (about 8 minutes), or --only bench_step.

Runs the presets one after the other, each as its own job, and prints the figures of their summaries: the INT8
quickstart, the same run with full-precision rollouts, and the step of fixed size. `--out` also writes the figures as
JSON.
"""

import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Annotated, Any

import typer
from shared import ROOT, machine

PRESETS = ("quickstart", "quickstart_full", "bench_step")


def run(preset: str, output_dir: Path) -> dict[str, Any]:
    """Run a preset, and return its summary with the seconds of the whole command."""
    command = [
        sys.executable,
        "jobs/qurl_dapo.py",
        "--config",
        f"qurl_ray/configs/{preset}.yaml",
        f"output_dir={output_dir}",
        "--fresh",  # else an interrupted run would be resumed
    ]
    started = time.monotonic()
    subprocess.run(command, cwd=ROOT, check=True)
    summary = json.loads((output_dir / preset / "summary.json").read_text())
    return summary | {"command_seconds": time.monotonic() - started}


def row(s: dict[str, Any]) -> str:
    """Return one line of the Markdown table."""
    share = {phase: seconds / s["train_seconds"] for phase, seconds in s["phase_seconds"].items()}
    cells = [
        s["name"],
        s["quantization"],
        s["correction"],
        f"{s['uaq_scale']:g}",
        *(f"{100 * s[key]:.1f}" for key in ("accuracy_before", "accuracy_after", "accuracy_after_quantized")),
        f"{s['command_seconds']:.0f}",
        f"{s['train_seconds']:.0f}",
        f"{s['samples_per_second']:.0f}",
        f"{s['rollout_tokens_per_second']:,.0f}",
        " · ".join(f"{phase} {100 * part:.0f}" for phase, part in share.items()),
    ]
    return "| " + " | ".join(cells) + " |"


def main(
    only: Annotated[list[str] | None, typer.Option(help="Presets to run; all if absent.")] = None,
    output_dir: Annotated[Path, typer.Option(help="Where the runs go.")] = ROOT / "runs",
    out: Annotated[Path | None, typer.Option(help="Write the summaries here, as JSON.")] = None,
) -> None:
    """Run the presets and print their figures as a Markdown table."""
    summaries = [run(preset, output_dir.resolve()) for preset in only or PRESETS]
    print(f"\n{machine()}\n")
    print("| run | rollouts | correction | UAQ | before % | after % | after, rollout format % | command s | steps s "
          "| samples/s | rollout tokens/s | share of time % |")  # fmt: skip
    print("|" + "---|" * 12)
    for summary in summaries:
        print(row(summary))
    if out:
        out.parent.mkdir(parents=True, exist_ok=True)
        out.write_text(json.dumps({"machine": machine(), "runs": summaries}, indent=2) + "\n")


if __name__ == "__main__":
    typer.run(main)
