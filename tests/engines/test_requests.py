"""What comes back from an engine is looked at before anything is learned from it; what was cut short can go on."""

from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from qurl_ray.engines.requests import check_logprobs, check_requests, continued, joined, make_requests, probe_requests
from qurl_ray.errors import EngineError
from qurl_ray.types import Completion, Problem, Request, SamplingParams


def completion(uid: str, *logprobs: float) -> Completion:
    ids = np.zeros(len(logprobs), dtype=np.int32)
    values = np.array(logprobs, dtype=np.float32)
    return Completion(uid=uid, token_ids=ids, logprobs=values, versions=ids + 1, finish="stop")


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_a_logprob_that_is_not_finite_is_an_error_that_names_the_answer(bad):
    with pytest.raises(EngineError, match=r"1 of 3 answers .* 7/1 first"):
        check_logprobs([completion("7/0", -1.0), completion("7/1", -0.5, bad), completion("8/0")])


def test_finite_logprobs_and_empty_answers_pass():
    check_logprobs([completion("7/0", -1.0, -30.0), completion("7/1")])
    check_logprobs([])


def test_a_probe_is_drawn_from_the_whole_distribution_after_the_beginning_of_a_prompt():
    prompt = np.arange(100, dtype=np.int32)
    problem = Problem(uid="7", prompt="", answer="")
    one, other = probe_requests(problem, lambda _: prompt, tokens=8, longest=4, temperature=0.5, seed=3)
    assert (one.uid, other.uid) == ("7/0", "7/1")
    assert one.seed != other.seed
    assert one.prompt_ids.tolist() == other.prompt_ids.tolist() == list(range(24))
    assert one.sampling == SamplingParams(temperature=0.5, max_new_tokens=4, ignore_eos=True)
    many = probe_requests(problem, lambda _: prompt, tokens=8192, longest=4096, seed=3)
    assert (len(many), {request.sampling.max_new_tokens for request in many}) == (512, {16})  # side by side


# --- parts --------------------------------------------------------------------------------------------------------

ANSWER = 12
REQUEST = Request(
    uid="7/0",
    prompt_ids=np.array([5, 6, 7], dtype=np.int32),
    seed=3,
    sampling=SamplingParams(max_new_tokens=ANSWER, temperature=0.5, stop_ids=(2,)),
)
WHOLE = Completion(
    uid="7/0",
    token_ids=np.arange(10, 10 + ANSWER, dtype=np.int32),
    logprobs=-np.arange(ANSWER, dtype=np.float32),
    versions=np.arange(ANSWER, dtype=np.int32) // 4,
    finish="length",
)


def pieces(whole: Completion, cuts: list[int]) -> list[Completion]:
    """Split before these tokens; all but the last are cut short."""
    bounds = [0, *sorted(cuts), len(whole.token_ids)]
    return [
        replace(
            whole,
            token_ids=whole.token_ids[start:stop],
            logprobs=whole.logprobs[start:stop],
            versions=whole.versions[start:stop],
            finish="cancelled" if place < len(cuts) else whole.finish,
        )
        for place, (start, stop) in enumerate(pairwise(bounds))
    ]


@settings(deadline=None)
@given(st.lists(st.integers(0, ANSWER - 1), max_size=5))
def test_parts_join_to_the_whole_and_each_request_asks_for_what_is_missing(cuts):
    parts, request, drawn = pieces(WHOLE, cuts), REQUEST, 0
    for part in parts:
        assert request.drawn == drawn
        assert request.prompt_ids.dtype == np.int32
        assert request.prompt_ids.tolist() == [5, 6, 7, *WHOLE.token_ids[:drawn].tolist()]
        assert request.sampling == replace(REQUEST.sampling, max_new_tokens=ANSWER - drawn)
        assert (request.uid, request.seed) == (REQUEST.uid, REQUEST.seed)
        check_requests([request], held=1, version=1, context=3 + ANSWER)
        with pytest.raises(EngineError, match=rf"7/0: 3 prompt \+ {ANSWER} new tokens do not fit the context of 14"):
            check_requests([request], held=1, version=1, context=2 + ANSWER)
        request, drawn = continued(request, part), drawn + len(part.token_ids)
    found = joined(parts)
    for name in ("token_ids", "logprobs", "versions"):
        np.testing.assert_array_equal(getattr(found, name), getattr(WHOLE, name), strict=True)
    assert (found.uid, found.finish) == (WHOLE.uid, WHOLE.finish)
    with pytest.raises(EngineError, match="do not fit"):  # nothing is left to draw
        check_requests([request], held=1, version=1, context=100)


def test_a_prompt_of_drawn_tokens_alone_is_an_error():
    with pytest.raises(EngineError, match=r"7/0: 0 prompt"):
        check_requests([replace(REQUEST, drawn=3)], held=1, version=1, context=100)


# --- random streams -----------------------------------------------------------------------------------------------


@given(
    salts=st.sets(st.text(max_size=4), min_size=1, max_size=4),
    seeds=st.sets(st.integers(0, 2**64), min_size=1, max_size=3),
    problems=st.integers(1, 12),
    samples=st.integers(1, 4),
)
def test_each_sample_of_each_call_has_a_random_stream_of_its_own(salts, seeds, problems, samples):
    """Also where a problem is drawn several times."""
    asked = [Problem(uid=f"train-{i % 3}", prompt="", answer="") for i in range(problems)]
    found = [
        request.seed
        for seed in seeds
        for salt in salts
        for request in make_requests(
            asked, lambda _: REQUEST.prompt_ids, samples=samples, sampling=SamplingParams(), seed=seed, salt=salt
        )
    ]
    assert len(set(found)) == len(found) == len(seeds) * len(salts) * problems * samples
