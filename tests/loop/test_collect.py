"""What a step's rollouts leave to be looked at."""

import asyncio

import numpy as np
import pytest

from qurl_ray.actors.spans import Spans
from qurl_ray.config import load_config
from qurl_ray.data.tasks import Task
from qurl_ray.loop.collect import Collected, Collector
from qurl_ray.types import Completion, Verdict
from tests.conftest import SUMS

G = 3


class Fleet:
    """Draws as many tokens as the request's place says, the first by weights 4 and the others by 5."""

    def __init__(self) -> None:
        self.spans = Spans()

    async def generate(self, requests):
        lengths = [1 + i % 4 for i in range(len(requests))]
        return [
            Completion(
                uid=request.uid,
                token_ids=np.arange(3, 3 + n, dtype=np.int32),
                logprobs=np.full(n, -0.5, np.float32),
                versions=np.array([4] + [5] * (n - 1), np.int32),
                finish="length" if n == 4 else "stop",
            )
            for request, n in zip(requests, lengths, strict=True)
        ]


class Verifiers:
    """The first prompt's answers are all wrong; of each other prompt the last one is right."""

    async def judge(self, items, deadline_s):
        return [Verdict(reward=float(i >= G and i % G == G - 1)) for i in range(len(items))]


@pytest.fixture
def collect(tokenizer):
    def collected(samples: int, *overrides: str) -> Collected:
        sizes = ["rollout.prompts_per_step=4", f"rollout.samples_per_prompt={G}", "algorithm.max_refill_rounds=1"]
        config = load_config(None, [*sizes, f"tracking.samples_per_step={samples}", *overrides])
        task = Task(train=SUMS, held_out=SUMS[:2], reward="exact")
        return asyncio.run(Collector(config, task, tokenizer, (2,), Fleet(), Verifiers()).collect(1))

    return collected


def test_one_sample_of_each_prompt_comes_before_a_second_one_and_uniform_groups_last(collect):
    drawn = [sample["uid"].split("/") for sample in collect(9).shown]
    assert [index for _, index in drawn] == ["0"] * 4 + ["1"] * 4 + ["2"]
    prompts = [prompt for prompt, _ in drawn]
    assert prompts[:4] == prompts[4:8]
    first_drawn = collect(9).prompts[0]  # all of its answers are wrong
    assert prompts[3] == first_drawn
    assert len(collect(99).shown) == 4 * G
    assert collect(0).shown == []


def test_a_sample_has_what_the_viewer_shows(collect, tokenizer):
    collected = collect(99)
    learned = {s.uid: s for group in collected.groups for s in group}
    assert len(learned) == 3 * G
    for sample in collected.shown:
        count = len(sample["tokens"])
        assert sample["tokens"] == [tokenizer.decode([3 + t]) for t in range(count)]
        assert sample["finish"] == ("length" if count == 4 else "stop")
        assert sample["versions"] == ([[4, 1], [5, count - 1]] if count > 1 else [[4, 1]])
        found = learned.get(sample["uid"])
        assert sample["advantage"] == (found and round(found.advantage, 4))
    assert {sample["advantage"] for sample in collected.shown} > {None}


def test_where_a_value_model_gives_credit_no_advantage_is_known_yet(collect):
    shown = collect(99, "algorithm.type=ppo").shown
    assert {sample["advantage"] for sample in shown} == {None}
