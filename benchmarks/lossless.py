"""Rollouts without loss against full precision: python benchmarks/lossless.py (15 minutes on 2 cores).

SmolLM2-135M-Instruct draws answers at temperature 1 to the problems of its settings file, so many at a time as there
are streams, on three engines that take turns: in full precision, lossless, and INT8, which draws other tokens. Each
pair of rounds has other problems. Lossless answers must equal those of full precision bit for bit.

The figures go to benchmarks/results/lossless.json after every round; a second call makes only missing ones. `make
smollm2` installs the weights.
"""

import statistics
from collections.abc import Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Annotated

import engines
import numpy as np
import torch
import typer
from engines import take_turns
from shared import RESULTS, ROOT, Figures

from qurl_ray.config.load import load_config
from qurl_ray.data.prompts import encode_prompt
from qurl_ray.data.tasks import load_task
from qurl_ray.engines.torch.drafts import Drafter
from qurl_ray.engines.torch.engine import TorchEngine
from qurl_ray.policy.load import load_tokenizer
from qurl_ray.types import Completion, Request, SamplingParams
from qurl_ray.weights.local import load_into

CONFIG = ROOT / "qurl_ray" / "configs" / "smollm2_135m.yaml"
ARMS = ("full precision", "lossless", "int8")


class Counted(Drafter):
    """A drafter that remembers how many drafts it chose."""

    def __init__(self) -> None:
        super().__init__(emulate=False)
        self.counts: list[int] = []

    def count(self, rows: int, most: int) -> int:
        self.counts.append(super().count(rows, most))
        return self.counts[-1]


def main(
    streams: Annotated[str, typer.Option(help="Numbers of answers at a time.")] = "1,2,4",
    rounds: Annotated[int, typer.Option(help="Rounds of all arms, for each of them.")] = 5,
    new_tokens: Annotated[int, typer.Option(help="Tokens of an answer.")] = 64,
    threads: Annotated[int, typer.Option(help="Threads of each engine.")] = 2,
    out: Annotated[Path, typer.Option(help="The JSON file.")] = RESULTS / "lossless.json",
) -> None:
    """Time the rounds that are missing, and write their figures."""
    torch.set_num_threads(threads)
    spec, model = engines.smollm2()
    config, tokenizer = load_config(CONFIG, []), load_tokenizer(spec)
    task = load_task(config.task, eval_problems=1)
    encode = partial(encode_prompt, tokenizer=tokenizer, task=config.task)
    sampling = SamplingParams(temperature=1.0, max_new_tokens=new_tokens, ignore_eos=True)

    def asked(first: int, count: int) -> list[Request]:
        return [
            Request(uid=problem.uid, prompt_ids=encode(problem), sampling=sampling, seed=first + i)
            for i, problem in enumerate(task.train[first : first + count])
        ]

    lossless = TorchEngine(spec, slots=8, drafts=True)
    lossless._drafter = drafter = Counted()
    load_into(lossless, model.named_parameters(), None, quantized={})
    full, int8 = (engines.engine(spec, model, name, slots=8) for name in ("none", "int8"))
    arms = dict(zip(ARMS, (full, lossless, int8), strict=True))
    for one in arms.values():
        one.generate(asked(0, 2), version=1)  # weights are packed after so many passes
    figures = Figures(out)
    figures.keep("threads", threads)
    figures.keep("tokens of an answer", new_tokens)
    assert drafter._costs
    figures.keep("seconds of a pass", asdict(drafter._costs))
    for count in map(int, streams.split(",")):
        for place in range(rounds):
            name = f"{count} streams"
            if len(figures.values.get(f"{name}, lossless over full precision", [])) > place:
                continue
            drafter.counts.clear()
            answers: dict[str, Sequence[Completion]] = {}
            requests = asked(10 + count * place, count)

            def draw(arm: str, requests: list[Request] = requests, answers: dict = answers) -> None:
                answers[arm] = arms[arm].generate(requests, version=1)

            # There and back, so that a load that grows or shrinks meanwhile affects all of them.
            seconds = take_turns({arm: partial(draw, arm) for arm in ARMS}, 1)
            back = take_turns({arm: partial(draw, arm) for arm in reversed(ARMS)}, 1)
            spent = {arm: seconds[arm][0] + back[arm][0] for arm in ARMS}
            for one, other in zip(answers["lossless"], answers["full precision"], strict=True):
                assert np.array_equal(one.token_ids, other.token_ids)
                assert np.array_equal(one.logprobs, other.logprobs)
            tokens = sum(len(c.token_ids) for c in answers["lossless"])
            agreed, judged = (sum(getattr(c, f) for c in answers["lossless"]) for f in ("agreed", "drafted"))
            figures.add(f"{name}, int8 over full precision", spent["full precision"] / spent["int8"], place)
            figures.add(f"{name}, full precision, tokens/s", 2 * tokens / spent["full precision"], place)
            figures.add(f"{name}, share of drafts that agree", agreed / max(1, judged), place)
            figures.add(f"{name}, tokens per pass", tokens / (tokens - agreed), place)
            figures.add(f"{name}, drafts per pass", statistics.mean(drafter.counts), place)
            figures.add(f"{name}, lossless over full precision", spent["full precision"] / spent["lossless"], place)
        ratios = figures.values.get(f"{count} streams, lossless over full precision", [])
        figures.keep(f"{count} streams, median of lossless over full precision", statistics.median(ratios))


if __name__ == "__main__":
    typer.run(main)
