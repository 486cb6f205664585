"""Rollouts of several turns: python benchmarks/agents.py (55 minutes), --only calculator|game|waiting, or --quick.

- calculator: the preset, whose tiny policy cannot multiply two-digit numbers in its head, with INT8 rollouts, in full
  precision, and with a calculator that answers nothing (control), all with the same number of steps.
- game: the preset smollm2_guess, in which SmolLM2-135M plays TextArena's Guess The Number: reward of held-out games,
  answered greedily, and of the games that it learns from.
- waiting: tokens/s of SmolLM2-135M in INT8, 32 tokens a turn, four times as many trajectories as slots. Environments
  take 0 to 4 turns' time at random, or none: medians of the ratios of rounds in which both take turns. `make smollm2`
  installs the weights. The fleet, the engine and the processes of the environments are the real ones, without Ray.

Writes benchmarks/results/agents.{json,md}.
"""

import asyncio
import json
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Annotated, Any, Literal

import engines
import numpy as np
import torch
import typer
from shared import RESULTS, machine

from qurl_ray.actors.environments import EnvironmentHost
from qurl_ray.actors.local import fleet_here, pool_here
from qurl_ray.actors.trajectories import TrajectoryRunner
from qurl_ray.config import RunConfig
from qurl_ray.policy.load import load_tokenizer
from qurl_ray.types import Problem, Request, SamplingParams

Part = Literal["calculator", "game", "waiting"]
ARMS = {
    "INT8": [],
    "full precision": ["rollout.quantization=none", "quantization.uaq_scale=1"],
    "INT8, a calculator that answers nothing": ["environment.params={works: false}"],
}
_QURL = "from qurl_ray.cli.main import main; main()"
STEPS, SLOTS, TURNS, TOKENS, ROUNDS = 30, 8, 4, 32, 3


# --- the presets -----------------------------------------------------------------------------------------------------


def run_of(preset: str, *settings: str) -> dict[str, Any]:
    """Return the seconds, the summary, and the values of evaluations and steps of a run of a preset."""
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-c", _QURL, "train", preset, f"output_dir={folder}", "tracking.mlflow=false"]
        began = time.perf_counter()
        subprocess.run([*command, *settings], check=True)
        seconds, run = time.perf_counter() - began, Path(folder, preset)
        lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
        values = {kind: [line["values"] for line in lines if line["kind"] == kind] for kind in ("step", "evaluation")}
        return {"seconds": seconds, "summary": json.loads((run / "summary.json").read_text())} | values


def calculator(quick: bool) -> list[dict[str, Any]]:
    rows = []
    for name, settings in ARMS.items():
        steps = 2 if quick else STEPS
        run = run_of("calculator", f"steps={steps}", "evaluation.target_reward=null", *settings)
        rows.append(
            {
                "arm": name,
                "before": run["summary"]["accuracy_before"],
                "after": run["summary"]["accuracy_after"],
                "calls": [step["environment/calls"] for step in run["step"]],
                "failed": [step["environment/failed"] for step in run["step"]],
                "seconds": run["seconds"],
            }
        )
        print(rows[-1], flush=True)
    return rows


def game(quick: bool) -> list[dict[str, Any]]:
    run = run_of("smollm2_guess", *(["steps=1", "evaluation.problems=4"] if quick else []))
    row = {
        "evaluations": [
            {"when": one["label"], **{name: one[f"eval/{name}"] for name in ("reward", "reward_low", "reward_high")}}
            for one in run["evaluation"]
        ],
        "p": run["summary"]["reward_p_value"],
        "rewards": [step["reward/mean"] for step in run["step"]],
        "failed_calls": [step["environment/failed_calls"] for step in run["step"]],
        "seconds": run["seconds"],
    }
    print(row, flush=True)
    return [row]


# --- waiting for environments ----------------------------------------------------------------------------------------


def waiting(quick: bool) -> list[dict[str, Any]]:
    spec, model = engines.smollm2()
    tokenizer = load_tokenizer(spec)
    engine = engines.engine(spec, model, "int8", slots=SLOTS)
    prompt = np.array(tokenizer("Tell me a story. " * 6)["input_ids"], dtype=np.int32)
    sampling = SamplingParams(max_new_tokens=TURNS * TOKENS, ignore_eos=True)
    problems = [Problem(uid=str(n), prompt="", answer="") for n in range(4 * SLOTS)]
    asked = [Request(uid=p.uid, prompt_ids=prompt, seed=n, sampling=sampling) for n, p in enumerate(problems)]
    began = time.perf_counter()
    one_turn = SamplingParams(max_new_tokens=TOKENS, ignore_eos=True)
    engine.generate([Request(uid="0", prompt_ids=prompt, seed=0, sampling=one_turn)] * SLOTS, version=1)
    turn_s = time.perf_counter() - began
    config = RunConfig.model_validate(
        {
            "model": {"type": "pretrained", "path": spec.source},
            "rollout": {"slots": SLOTS},
            "environment": {
                "type": "waits:Waits",
                "turn_tokens": TOKENS,
                "max_turns": TURNS,
                "cut_turns": "close",
                "concurrency": len(asked),
                "timeout_s": 600.0,
            },
        }
    )

    async def seconds_of(host: EnvironmentHost) -> tuple[float, int]:
        player = TrajectoryRunner(
            config,
            await fleet_here([engine], config.rollout),
            pool_here(host, config.environment),
            tokenizer=tokenizer,
            stop_ids=(tokenizer.eos_token_id,),
            context=1024,
        )
        began = time.perf_counter()
        played = await player.play(asked, problems)
        return time.perf_counter() - began, sum(one.completion.drawn for one in played)

    arms = {"instant": 0.0, "0 to 4 turns": 4 * turn_s}
    hosts = {
        name: EnvironmentHost(config.environment.model_copy(update={"params": {"most_s": most_s}}))
        for name, most_s in arms.items()
    }
    rows = []
    for number in range(1 if quick else 1 + ROUNDS):
        found = {name: asyncio.run(seconds_of(host)) for name, host in hosts.items()}
        speeds = {name: tokens / seconds for name, (seconds, tokens) in found.items()}
        print(turn_s, found, flush=True)
        if number or quick:  # the first starts the processes of the environments
            rows.append(speeds)
    for host in hosts.values():
        host.close()
    return rows


# --- the report ------------------------------------------------------------------------------------------------------


def report(found: dict[str, Any]) -> str:
    lines = ["# Rollouts of several turns", "", "`python benchmarks/agents.py`"]
    lines += [f"- {part}: {one['machine']}" for part, one in found.items()]
    if "calculator" in found:
        lines += ["", f"Two-digit products, tiny policy, {STEPS} steps; calls are of a trajectory.", ""]
        lines += ["| rollouts | solved before | after | calls, first step | last step | whole run, s |"]
        lines += ["|---|---|---|---|---|---|"]
        for row in found["calculator"]["rows"]:
            cells = [f"{row['before']:.1%}", f"{row['after']:.1%}", f"{row['calls'][0]:.2f}", f"{row['calls'][-1]:.2f}"]
            lines.append(f"| {row['arm']} | {' | '.join(cells)} | {row['seconds']:.0f} |")
    if "game" in found:
        (row,) = found["game"]["rows"]
        took = f"{len(row['rewards'])} steps in {row['seconds'] / 60:.0f} minutes"
        lines += ["", f"Guess The Number, SmolLM2-135M, INT8, {took}.", ""]
        lines += ["| held-out games | reward | 95 % interval |", "|---|---|---|"]
        for one in row["evaluations"]:
            interval = f"{one['reward_low']:.3f} to {one['reward_high']:.3f}"
            lines.append(f"| {one['when']} | {one['reward']:.3f} | {interval} |")
        learned = ", ".join(f"{reward:.2f}" for reward in row["rewards"])
        lines += ["", f"Paired test of the reward: p {row['p']:.1g}. Mean rewards of its steps, sampled: {learned}."]
        first, last = row["failed_calls"][0], row["failed_calls"][-1]
        lines.append(f"Moves that the game refused: {first:.0%} in the first step, {last:.0%} in the last.")
    if "waiting" in found:
        rows = found["waiting"]["rows"]
        names = list(rows[0])
        ratios = [row[names[1]] / row[names[0]] for row in rows]
        speeds = [f"{statistics.median(row[name] for row in rows):.0f}" for name in names]
        lines += [
            "",
            f"SmolLM2-135M, INT8, {SLOTS} slots, {4 * SLOTS} trajectories of {TURNS} turns of {TOKENS} tokens.",
        ]
        lines += ["", "| environments | tokens/s | share of the first |", "|---|---|---|"]
        lines.append(f"| {names[0]} | {speeds[0]} | 1 |")
        spread = f"{min(ratios):.2f} to {max(ratios):.2f}"
        lines.append(f"| {names[1]} | {speeds[1]} | {statistics.median(ratios):.2f} ({spread}) |")
    return "\n".join([*lines, ""])


def main(
    only: Annotated[Part | None, typer.Option(help="a part")] = None,
    quick: Annotated[bool, typer.Option(help="little of each, written nowhere")] = False,
) -> None:
    torch.set_num_threads(2)
    path = RESULTS / "agents.json"
    found = json.loads(path.read_text()) if path.is_file() and not quick else {}
    for part, work in (("calculator", calculator), ("game", game), ("waiting", waiting)):
        if only in (None, part):
            found[part] = {"machine": machine(), "rows": work(quick)}
    print(report(found))
    if not quick:
        path.write_text(json.dumps(found, indent=1) + "\n")
        path.with_suffix(".md").write_text(report(found))


if __name__ == "__main__":
    typer.run(main)
