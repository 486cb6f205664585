"""Time that the learner saves by computing a group's prompt once: python benchmarks/sharing.py (about 2 minutes).

One update of the quickstart's policy on 8 to 64 prompts with 8 answers each, with and without `learner.share_prompts`.
Lengths are those of the quickstart, those of `bench_step`, and longer ones. Both variants take turns in
one process.
"""

import json
from dataclasses import replace
from pathlib import Path
from typing import Annotated

import numpy as np
import torch
import typer
from engines import ratio, take_turns
from shared import ROOT, machine

from qurl_ray.config import load_config
from qurl_ray.learner.batching import MiniBatch, plan
from qurl_ray.learner.learner import PolicyLearner, make_learner
from qurl_ray.policy.tiny import make_model, make_tokenizer
from qurl_ray.training.rank.objectives import objective_settings
from qurl_ray.types import Trajectory

SAMPLES, VOCABULARY = 8, 18
CASES = {"6 + 3, the quickstart": (64, 6, 3), "6 + 16": (64, 6, 16), "64 + 64": (16, 64, 64), "64 + 256": (8, 64, 256)}
"""Number of prompts, tokens of a prompt, and tokens of an answer, by name."""


def batch(prompts: int, prompt: int, answer: int) -> list[MiniBatch]:
    rng = np.random.default_rng(0)
    ids = lambda count: rng.integers(VOCABULARY, size=count).astype(np.int32)  # noqa: E731
    blank = Trajectory(
        uid="", prompt_ids=ids(0), token_ids=ids(0), logprobs=np.full(answer, -2.9, dtype=np.float32), reward=0.0,
        advantage=1.0, versions=np.zeros(answer, dtype=np.int32),
    )  # fmt: skip
    groups = [
        [replace(blank, uid=f"{p}/{i}", prompt_ids=shared, token_ids=ids(answer), group=p) for i in range(SAMPLES)]
        for p, shared in enumerate(ids(prompt) for _ in range(prompts))
    ]
    return plan(groups, updates=1, ranks=1, token_budget=4096, seed=0)[0]


def learner(share: bool) -> PolicyLearner:
    config = load_config(ROOT / "qurl_ray" / "configs" / "quickstart.yaml", [f"learner.share_prompts={share}"])
    model = make_model(config.model, make_tokenizer())
    return make_learner(model, config.learner, objective_settings(config), temperature=1.0, total_updates=1000)


def main(
    repeats: Annotated[int, typer.Option(help="Number of measurements of each case.")] = 7,
    threads: Annotated[int, typer.Option(help="Number of threads that torch uses.")] = 2,
    out: Annotated[Path | None, typer.Option(help="Also write the figures there as JSON.")] = None,
) -> None:
    """Measure updates that compute the prompt again for each sample, and once."""
    torch.set_num_threads(threads)
    made = {"again for each sample": learner(False), "once": learner(True)}
    figures = {"machine": machine(), "over": {}, "seconds": {}}
    print(f"{figures['machine']}\n\n| prompt + answer tokens | again s | once s | times as fast |\n|---|---|---|---|")
    for name, sizes in CASES.items():
        work = batch(*sizes)
        calls = {kind: lambda one=one, work=work: one.learn(work) for kind, one in made.items()}
        take_turns(calls, 2)  # warm-up
        took = take_turns(calls, repeats)
        figures["over"][name] = ratio(took, *made)
        figures["seconds"][name] = {kind: sorted(seconds)[repeats // 2] for kind, seconds in took.items()}
        again, once = figures["seconds"][name].values()
        print(f"| {name} | {again:.2f} | {once:.2f} | {figures['over'][name]:.2f} |", flush=True)
    if out:
        out.write_text(json.dumps(figures, indent=2) + "\n")


if __name__ == "__main__":
    typer.run(main)
