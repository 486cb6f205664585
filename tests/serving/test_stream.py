"""The torch engine, open-ended: arrivals join what runs and change nothing; what is cancelled goes, and leaves room."""

import asyncio
import contextlib
from dataclasses import replace

import numpy as np
import pytest
import torch

from qurl_ray.errors import EngineError
from qurl_ray.policy.logprobs import log_softmax
from qurl_ray.serving.protocol import ApiError
from qurl_ray.serving.stream import Ask, Stream
from tests.conftest import requests_for
from tests.engines.test_torch_engine import engine_with

SLOTS, LENGTH = 4, 64


@contextlib.asynccontextmanager
async def streamed(engine, *, slots: int = SLOTS, queue: int = 100):
    """A stream with the engine's thread behind it."""
    stream = Stream(engine, slots=slots, queue=queue, length=LENGTH)
    try:
        yield stream
    finally:
        stream.close()


async def drawn(mailbox):
    """(tokens, finish) of each answer, and all draws."""
    draws: dict[int, list] = {}
    ends: dict[int, str] = {}
    with contextlib.closing(mailbox):
        while len(ends) < len(mailbox._uids):
            for index, news in await mailbox.take():
                draws.setdefault(index, []).extend(news.draws)
                if news.finish:
                    assert index not in ends
                    ends[index] = news.finish
    return [(draws.get(i, []), ends[i]) for i in sorted(ends)]


def asks_for(requests, top=None):
    return [Ask(request=replace(request, uid=str(i)), top=top) for i, request in enumerate(requests)]


@pytest.mark.parametrize("format_name", ["none", "int8"])
def test_arrivals_join_mid_flight_and_draw_what_they_draw_alone(tiny_spec, tokenizer, model, format_name):
    requests = requests_for(tokenizer, 10, 2, max_new_tokens=30)
    requests += requests_for(tokenizer, 5, 1, max_new_tokens=12, temperature=0.7, top_p=0.9)
    requests += requests_for(tokenizer, 5, 1, max_new_tokens=12, temperature=0.0)
    engine = engine_with(tiny_spec, model, format_name, slots=SLOTS)
    expected = engine.generate(requests, version=1)
    rng = np.random.default_rng(0)
    together = []

    async def main():
        async with streamed(engine) as stream:

            async def one(ask):
                await asyncio.sleep(float(rng.uniform(0, 0.05)))
                found = (await drawn(stream.ask([ask])))[0]
                together.append(stream._batch.count)
                return found

            return await asyncio.gather(*(one(ask) for ask in asks_for(requests, top=2)))

    for (draws, finish), completion in zip(asyncio.run(main()), expected, strict=True):
        assert [draw.token for draw in draws] == completion.token_ids.tolist()
        assert finish == completion.finish
    assert max(together) > 1, "nothing ran beside anything else"


@pytest.mark.equal_bits
def test_log_probs_are_the_policys_own_whatever_the_temperature(tiny_spec, tokenizer, model):
    (request,) = requests_for(tokenizer, 1, 1, max_new_tokens=10, temperature=0.5, ignore_eos=True)

    async def main():
        async with streamed(engine_with(tiny_spec, model, "none", slots=SLOTS)) as stream:
            return (await drawn(stream.ask(asks_for([request], top=3))))[0][0]

    draws = asyncio.run(main())
    ids = torch.tensor([[*request.prompt_ids.tolist(), *(draw.token for draw in draws)]])
    with torch.no_grad():
        logprobs_TV = log_softmax(model(ids).logits[0], 1.0)[len(request.prompt_ids) - 1 :]
    for draw, logprobs_V in zip(draws, logprobs_TV[:-1], strict=True):
        assert draw.logprob == float(logprobs_V[draw.token])
        best = logprobs_V.topk(3)
        assert draw.top == tuple(zip(best.indices.tolist(), best.values.tolist(), strict=True))


def test_who_leaves_gives_the_slot_back(tiny_spec, tokenizer, model, monkeypatch):
    requests = requests_for(tokenizer, 9, 1, max_new_tokens=50, ignore_eos=True)
    engine = engine_with(tiny_spec, model, "none", slots=2)
    step, steps = engine.step, []
    monkeypatch.setattr(engine, "step", lambda *args, **kwargs: (steps.append(1), step(*args, **kwargs)))

    async def main():
        async with streamed(engine, slots=2) as stream:
            asks = asks_for(requests)
            with contextlib.closing(stream.ask(asks[:4])) as left:  # two run, two wait
                await left.take()
            finished = await drawn(stream.ask(asks[4:5]))
            await stream.drained()
            return finished, stream.running + stream.waiting, stream._batch.free

    ((draws, finish),), left_over, free = asyncio.run(main())
    assert (len(draws), finish, left_over, free) == (50, "length", 0, 2)
    assert len(steps) < 140, "four answers of 50 tokens, two at a time, and one more are 150 steps"


def test_one_answer_of_several_can_be_stopped(tiny_spec, tokenizer, model):
    requests = requests_for(tokenizer, 2, 1, max_new_tokens=55, ignore_eos=True)

    async def main():
        async with streamed(engine_with(tiny_spec, model, "none", slots=SLOTS)) as stream:
            mailbox = stream.ask(asks_for(requests))
            mailbox.stop(1)
            return await drawn(mailbox)

    (_, first), (stopped, second) = asyncio.run(main())
    assert (first, second) == ("length", "cancelled")
    assert len(stopped) < 55


def test_what_does_not_fit_the_queue_is_turned_away_whole(tiny_spec, tokenizer, model):
    requests = requests_for(tokenizer, 9, 1, max_new_tokens=40, ignore_eos=True)

    async def main():
        async with streamed(engine_with(tiny_spec, model, "none", slots=2), slots=2, queue=3) as stream:
            asks = asks_for(requests)
            taken = stream.ask(asks[:4])
            with pytest.raises(ApiError) as caught:
                stream.ask(asks[4:6])
            one_more = stream.ask(asks[6:7])
            await drawn(taken)
            await drawn(one_more)
            return caught.value

    refused = asyncio.run(main())
    assert (refused.status, refused.code) == (429, "rate_limit_exceeded")


def test_an_engine_that_dies_tells_everybody(tiny_spec, tokenizer, model, monkeypatch):
    requests = requests_for(tokenizer, 3, 1, max_new_tokens=40, ignore_eos=True)
    engine = engine_with(tiny_spec, model, "none", slots=2)
    step, left = engine.step, iter(range(5))

    def breaks(*args, **kwargs):
        if next(left, None) is None:
            raise ZeroDivisionError("a fault")
        step(*args, **kwargs)

    monkeypatch.setattr(engine, "step", breaks)

    async def main():
        async with streamed(engine, slots=2) as stream:
            found = await asyncio.gather(*(drawn(stream.ask([a])) for a in asks_for(requests)), return_exceptions=True)
            with pytest.raises(ApiError) as refused:
                stream.ask(asks_for(requests))
            return found, stream.error, refused.value.status

    found, error, status = asyncio.run(main())
    assert [type(one) for one in found] == [EngineError] * 3
    assert isinstance(error, ZeroDivisionError)
    assert status == 503


@pytest.mark.parametrize("tokens", [1, 4])
def test_log_probs_that_are_no_numbers_end_the_engine(tiny_spec, tokenizer, model, tokens):
    (request,) = requests_for(tokenizer, 1, 1, max_new_tokens=tokens)
    engine = engine_with(tiny_spec, model, "none", slots=1)
    with torch.inference_mode():
        engine._model.get_output_embeddings().weight.fill_(torch.nan)

    async def main():
        async with streamed(engine, slots=1) as stream:
            with pytest.raises(EngineError):
                await drawn(stream.ask(asks_for([request])))

    asyncio.run(main())


def test_many_temperatures_one_after_the_other_leave_no_trace(tiny_spec, tokenizer, model):
    engine = engine_with(tiny_spec, model, "none", slots=2)
    warm = [requests_for(tokenizer, 1, 1, max_new_tokens=3, temperature=0.5 + i / 100)[0] for i in range(40)]
    expected = [engine.generate([request], version=1)[0].token_ids.tolist() for request in warm]

    async def main():
        async with streamed(engine, slots=2) as stream:
            found = await asyncio.gather(*(drawn(stream.ask([ask])) for ask in asks_for(warm)))
            return [[draw.token for draw in draws] for ((draws, _),) in found], len(stream._batch._kinds)

    found, kinds = asyncio.run(main())
    assert found == expected
    assert kinds <= 3
