"""Whole steps of a run on this machine: jobs/qurl_dapo.py with a policy of random weights, with and without codes.

On a GPU, engine and learner take turns on it (placement=colocated); on a CPU the policy is a tiny one. A run is ended
after its last step, before it evaluates.
"""

import json
import statistics
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import torch

from benchmarks.gpu.bench import Bench, Figures, lacks, policy_of
from benchmarks.gpu.child import run as run_child
from qurl_ray.policy.load import empty_model
from qurl_ray.policy.save import save_policy
from qurl_ray.policy.tiny import make_tokenizer

PHASES = ("step", "rollout", "reward", "logprob", "update", "sync")


def run(bench: Bench) -> None:
    if reason := lacks("ray"):
        bench.skip("all of it", reason)
        return
    with policy_folder(bench) as folder:
        for name in bench.scale.formats[:3]:  # one without codes, and two with
            made = settings(bench, name, "colocated" if bench.cuda else "disaggregated")
            if figures := bench.attempt(name, partial(measured, bench, folder, made)):
                bench.add(name, figures, summary(figures))


@contextmanager
def policy_folder(bench: Bench) -> Iterator[Path]:
    """Yield the folder of a policy of the first shape, with random weights and a tokenizer of few characters."""
    shape = bench.scale.shapes[0]
    with tempfile.TemporaryDirectory(prefix="qurl-kit-") as folder:
        with policy_of(shape, shape.layers, shape.vocab) as spec, bench.device:
            model = empty_model(spec, torch.bfloat16)
        save_policy(model, make_tokenizer(), Path(folder, "policy"))
        del model
        yield Path(folder, "policy")


def settings(bench: Bench, format_name: str, placement: str) -> list[str]:
    """Return the settings of a run. Each answer has the same length, and the same work is done in every step."""
    scale = bench.scale
    made = [
        f"placement={placement}",
        "model.type=pretrained",
        f"model.max_length={scale.run_tokens + 32}",
        "task.reward=benchmarks.gpu.coin:coin",
        f"rollout.quantization={format_name}",
        f"rollout.prompts_per_step={scale.run_prompts}",
        "rollout.samples_per_prompt=8",
        f"rollout.max_new_tokens={scale.run_tokens}",
        "rollout.ignore_eos=true",
        f"rollout.slots={8 * scale.run_prompts}",
        "algorithm.dynamic_sampling=false",
        "algorithm.updates_per_rollout=1",
        "evaluation.problems=8",
        "checkpoint.every=0",
        "checkpoint.grace_s=1",
        "tracking.mlflow=false",
        "tracking.console=none",
    ]
    if not bench.cuda:
        return made
    return [
        *made,
        f"rollout.engine={'torch' if lacks('vllm') else 'vllm'}",
        "rollout.device=cuda",
        "rollout.dtype=bfloat16",
        "rollout.vllm.kv_cache_gb=16",
        "learner.device=cuda",
        "learner.compute=bfloat16",
        "learner.packing=true",
        "learner.gradient_checkpointing=true",
        "learner.tokens_per_micro_batch=16384",
        "learner.offload_while_waiting=false",
        *(["sync.transport=ipc"] if placement == "colocated" else []),
    ]


def measured(bench: Bench, folder: Path, made: Sequence[str]) -> Figures:
    """Return medians over the steps of a run but the first."""
    steps = steps_of(bench, folder, made)[1:]
    return {
        "steps": len(steps),
        "seconds": {name: middle(steps, f"time/{name}") for name in PHASES},
        "rollout_tokens_per_second": middle(steps, "rollout/tokens_per_second"),
        "probe_gaps": [step["sync/probe_gap"] for step in steps if "sync/probe_gap" in step],
    }


def middle(steps: Sequence[dict[str, Any]], key: str) -> float:
    """Return the median of a metric."""
    return statistics.median(step[key] for step in steps)


def steps_of(bench: Bench, policy: Path, made: Sequence[str]) -> list[dict[str, Any]]:
    """Run a job until it has made its steps. Return the metrics of each."""
    count = bench.scale.run_steps
    with tempfile.TemporaryDirectory(prefix="qurl-kit-") as folder:
        path = Path(folder, "kit", "metrics.jsonl")
        own = ["name=kit", f"output_dir={folder}", f"steps={count}", f"model.path={policy}"]
        run_child(bench, ["jobs/qurl_dapo.py", *made, *own], until=lambda: len(recorded(path)) >= count)
        return recorded(path)


def recorded(path: Path) -> list[dict[str, Any]]:
    """Return the metrics of the steps that were written so far."""
    lines = path.read_text().splitlines(keepends=True) if path.exists() else []
    events = [json.loads(line) for line in lines if line.endswith("\n")]
    return [event["values"] for event in events if event["kind"] == "step"]


def summary(figures: Figures) -> str:
    took = ", ".join(f"{name} {value:.2f}" for name, value in figures["seconds"].items())
    return f"{took} s; {figures['rollout_tokens_per_second']:.0f} tokens/s while it rolls out"
