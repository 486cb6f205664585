"""Requests that are cut short and go on: under the same weights as if nothing had happened, to the bit; under others
with what those draw."""

from copy import deepcopy
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import LlamaConfig

from qurl_ray.engines.requests import continued, joined
from qurl_ray.engines.torch.engine import TorchEngine
from qurl_ray.types import Completion, Request, SamplingParams
from tests.conftest import requests_for
from tests.engines.test_batch import every_step
from tests.engines.test_decoder import learned, loaded, policy_of, random_requests
from tests.engines.test_requests import pieces
from tests.engines.test_torch_engine import engine_with, weights_of, with_quantized_linears

pytestmark = pytest.mark.usefixtures("one_thread")

KINDS = [
    {"temperature": 1.0},
    {"temperature": 0.6, "top_p": 0.9},
    {"temperature": 0.0},
    {"temperature": 1.2, "top_k": 20, "ignore_eos": False, "stop_ids": (3, 7, 40, 41, 42, 90, 91, 92)},
]


def assert_equal(found: list[Completion], expected: list[Completion]) -> None:
    """To the bit, in everything."""
    for one, other in zip(found, expected, strict=True):
        assert (one.uid, one.finish) == (other.uid, other.finish)
        for name in ("token_ids", "logprobs", "versions"):
            np.testing.assert_array_equal(getattr(one, name), getattr(other, name), strict=True)


@pytest.fixture(scope="module")
def answered(tmp_path_factory) -> tuple[TorchEngine, list[Request], list[Completion]]:
    """An engine, requests of all kinds, and what it draws undisturbed."""
    engine = loaded(policy_of(LlamaConfig, {}, tmp_path_factory.mktemp("policy")), "int8")
    asked = [random_requests(16, seed=kind, **sampling)[kind::4] for kind, sampling in enumerate(KINDS)]
    requests = [request for kind in asked for request in kind]
    whole = engine.generate(requests, version=1)
    assert {c.finish for c in whole} == {"length", "stop"}
    return engine, requests, whole


@pytest.mark.equal_bits
@settings(max_examples=20, deadline=None)
@given(data=st.data())
def test_split_anywhere_the_rest_is_drawn_as_if_undisturbed(answered, data):
    engine, requests, whole = answered
    cuts = [data.draw(st.integers(0, len(c.token_ids) - 1), label=c.uid) for c in whole]
    parts = [pieces(completion, [cut])[0] for completion, cut in zip(whole, cuts, strict=True)]
    rest = engine.generate([continued(*pair) for pair in zip(requests, parts, strict=True)], version=1)
    assert_equal([joined(pair) for pair in zip(parts, rest, strict=True)], whole)


@pytest.mark.equal_bits
@pytest.mark.parametrize("format_name", ["none", "int8"])
def test_long_answers_go_on_on_both_sides_of_a_chunk_of_attention(tmp_path, format_name):
    engine = loaded(policy_of(LlamaConfig, {"max_position_embeddings": 144}, tmp_path), format_name)
    sampling = SamplingParams(max_new_tokens=124, ignore_eos=True)
    request = Request(uid="long/0", prompt_ids=np.arange(20, dtype=np.int32), seed=11, sampling=sampling)
    (whole,) = engine.generate([request], version=1)
    parts = [pieces(whole, [cut])[0] for cut in (107, 108, 109, 123)]  # around 128 tokens with the prompt
    rest = engine.generate([continued(request, part) for part in parts], version=1)
    assert_equal([joined(pair) for pair in zip(parts, rest, strict=True)], [whole] * len(parts))


@pytest.mark.equal_bits
@pytest.mark.parametrize("kv_cache", ["full", "fp8"])
@pytest.mark.parametrize("format_name", ["none", "int8"])
def test_cancelled_again_and_again_the_answers_are_those_of_an_undisturbed_run(
    tiny_spec, tokenizer, model, monkeypatch, format_name, kv_cache
):
    engine = TorchEngine(tiny_spec, slots=7, kv_cache=kv_cache)
    engine.load(*weights_of(model, format_name))
    requests = requests_for(tokenizer, 8, 2, max_new_tokens=40)
    whole = engine.generate(requests, version=1)
    uids = [request.uid for request in requests]
    going, parts, rounds = requests, {uid: [] for uid in uids}, 0
    while going:
        with monkeypatch.context() as patch:
            every_step(engine, patch, lambda n, at=3 + rounds: engine.cancel(uids) if n == at else None)
            drawn = engine.generate(going, version=1)
        for part in drawn:
            parts[part.uid].append(part)
        pairs = zip(going, drawn, strict=True)
        going = [continued(request, part) for request, part in pairs if part.finish == "cancelled"]
        rounds += 1
    assert rounds > 4
    assert any(not len(part.token_ids) for several in parts.values() for part in several)  # cancelled while they waited
    assert_equal([joined(parts[uid]) for uid in uids], whole)


@pytest.mark.equal_bits
@pytest.mark.parametrize("format_name", ["none", "int8"])
def test_after_other_weights_came_these_draw_the_rest(tiny_spec, tokenizer, model, monkeypatch, format_name):
    """Each token's log-prob is, to the bit, what the weights that drew it say of it, after all tokens before."""
    engine = engine_with(tiny_spec, model, format_name, slots=12)
    requests = requests_for(tokenizer, 6, 2, max_new_tokens=30, ignore_eos=True)
    with monkeypatch.context() as patch:
        every_step(engine, patch, lambda n: engine.cancel(r.uid for r in requests) if n == 9 else None)
        parts = engine.generate(requests, version=1)
    moved = moved_from(model)
    engine.load(*weights_of(moved, format_name, version=2))
    rest = engine.generate([continued(*pair) for pair in zip(requests, parts, strict=True)], version=2)
    answers = [joined(pair) for pair in zip(parts, rest, strict=True)]
    for one, version in ((model, 1), (moved, 2)):
        expected = learned(with_quantized_linears(one, format_name), requests, answers)
        for answer, logprobs in zip(answers, expected, strict=True):
            drew = answer.versions == version
            assert 5 < drew.sum() < 25
            np.testing.assert_array_equal(answer.logprobs[drew], logprobs[drew])
            assert (answer.logprobs[~drew] != logprobs[~drew]).any()


def moved_from(model):
    """A copy with other weights."""
    moved = deepcopy(model)
    with torch.no_grad():
        for parameter in moved.parameters():
            if parameter.ndim == 2:
                parameter.mul_(0.9)
    return moved


def test_a_deadline_ends_a_continued_request_like_any_other(answered):
    engine, requests, whole = answered
    long = max(range(len(whole)), key=lambda i: len(whole[i].token_ids))
    request = continued(requests[long], pieces(whole[long], [4])[0])
    (late,) = engine.generate([request], version=1, deadline_s=-1)
    assert (late.finish, len(late.token_ids), len(late.versions)) == ("deadline", 0, 0)
    again = continued(request, late)
    assert_equal(engine.generate([again], version=1), pieces(whole[long], [4])[1:])


def test_tokens_are_drawn_from_their_places_in_the_answer(answered):
    """The same prompt, taken for a beginning, draws otherwise."""
    engine, requests, _ = answered
    asked = [replace(r, sampling=replace(r.sampling, max_new_tokens=9, temperature=1.0)) for r in requests]
    asked = [request for request in asked if len(request.prompt_ids) > 3]
    first = engine.generate(asked, version=1)
    later = engine.generate([replace(request, drawn=2) for request in asked], version=1)
    differ = [one.token_ids.tolist() != other.token_ids.tolist() for one, other in zip(first, later, strict=True)]
    assert sum(differ) > len(differ) / 2
