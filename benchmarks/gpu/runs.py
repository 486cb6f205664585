"""Whole runs that learn: the preset quickstart_gpu, by number format of its rollouts.

The first run makes the policy. On a CPU the preset is small enough for a test. Ratios are of rollouts and steps to
those of the run in full precision.
"""

import json
import tempfile
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path

from benchmarks.gpu.bench import Bench, Figures, lacks
from benchmarks.gpu.child import run as run_child
from benchmarks.gpu.training import middle, recorded

PHASES = ("step", "rollout", "reward", "logprob", "update", "sync", "turns")
FLOWS = {
    "none": ("rollout.quantization=none",),
    "fp8": ("rollout.quantization=fp8",),
    "int8": ("rollout.quantization=int8",),
    "fp8_block, unified": (
        "rollout.quantization=fp8_block",
        "precision_flow=unified",
        "algorithm.correction=ignore",
    ),
}
"""Settings of each run, by format and flow."""
ON_A_CPU = (
    "rollout.device=cpu",
    "rollout.engine=torch",
    "rollout.dtype=float32",
    "learner.device=cpu",
    "learner.compute=float32",
    "learner.packing=false",
    "sync.transport=object_store",
    "model.hidden_size=64",
    "model.intermediate_size=128",
    "model.layers=1",
    "model.heads=2",
    "model.cold_start=false",
    "task.terms=3",
    "rollout.prompts_per_step=4",
    "rollout.max_new_tokens=8",
    "evaluation.problems=8",
)


def run(bench: Bench) -> None:
    if reason := lacks("ray"):
        bench.skip("all of it", reason)
        return
    for name, flow in FLOWS.items():
        if figures := bench.attempt(name, partial(measured, bench, flow)):
            plain = bench.figures["runs"].get("none", figures)
            for key in ("rollout", "step"):
                figures[f"{key}_times_as_fast"] = plain["seconds"][key] / figures["seconds"][key]
            bench.add(name, figures, summary(figures))


def measured(bench: Bench, flow: Sequence[str]) -> Figures:
    """Return what a run reports: its summary, medians of its steps but the first, syncs and probes."""
    own = [*flow, "tracking.mlflow=false", "tracking.console=plain", "checkpoint.every=0"]
    own += [*ON_A_CPU, f"steps={bench.scale.run_steps}"] if not bench.cuda else []
    own += ["rollout.engine=torch", "sync.transport=object_store"] if bench.cuda and lacks("vllm") else []
    with tempfile.TemporaryDirectory(prefix="qurl-kit-") as folder:
        place, started = Path(folder, "kit"), time.monotonic()
        settings = ["--config", "quickstart_gpu", *own, "name=kit", f"output_dir={folder}"]
        run_child(bench, ["jobs/qurl_dapo.py", *settings], until=Path(place, "summary.json").exists)
        return {"whole_seconds": time.monotonic() - started} | figures_of(place)


def figures_of(place: Path) -> Figures:
    """Return the figures of a run's folder."""
    summary = json.loads(Path(place, "summary.json").read_text())
    steps = recorded(Path(place, "metrics.jsonl"))
    counted = steps[1:] or steps
    return {
        "steps": len(steps),
        "accuracy_before": summary["accuracy_before"],
        "accuracy_after": summary["accuracy_after_quantized"],
        "target_reached_at_step": summary["target_reached_at_step"],
        "seconds": {name: middle(counted, f"time/{name}") for name in PHASES if f"time/{name}" in counted[0]},
        "tokens_per_second": middle(counted, "rollout/tokens_per_second"),
        "kl": [step.get("mismatch/kl") for step in steps],
        "probe_gaps": [step["sync/probe_gap"] for step in steps if "sync/probe_gap" in step],
    }


def summary(figures: Figures) -> str:
    took = ", ".join(f"{name} {value:.2f}" for name, value in figures["seconds"].items())
    return (
        f"{figures['accuracy_before']:.1%} to {figures['accuracy_after']:.1%} in {figures['steps']} steps, "
        f"{figures['whole_seconds']:.0f} s in all; seconds of a step: {took}; rollouts "
        f"×{figures['rollout_times_as_fast']:.2f}, steps ×{figures['step_times_as_fast']:.2f}"
    )
