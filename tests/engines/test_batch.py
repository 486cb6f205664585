"""Requests come and go by rows, end when they are told to, and nobody else notices."""

import threading
import time
from collections import Counter
from dataclasses import replace

import numpy as np
import pytest
import torch
from transformers import LlamaConfig

from qurl_ray.engines.torch.batch import RunningBatch
from qurl_ray.engines.torch.engine import TorchEngine
from qurl_ray.errors import EngineError
from qurl_ray.types import Completion, Request, SamplingParams
from tests.engines.test_decoder import loaded, policy_of
from tests.engines.test_torch_engine import assert_same, engine_with

pytestmark = pytest.mark.usefixtures("one_thread")


def request(name: str, *, prompt=(1, 2, 3), tokens: int = 8, seed: int | None = None, **sampling) -> Request:
    return Request(
        uid=name,
        prompt_ids=np.array(prompt, dtype=np.int32),
        seed=sum(map(ord, name)) * 7919 if seed is None else seed,
        sampling=SamplingParams(**{"max_new_tokens": tokens, "ignore_eos": True} | sampling),
    )


def several(count: int, *, seed: int = 0, longest: int = 24) -> list[Request]:
    """Prompts of 1 to 12 tokens; answers of a length drawn log-uniformly."""
    rng = np.random.default_rng(seed)
    return [
        request(
            f"r/{i}",
            prompt=rng.integers(3, 12, size=rng.integers(1, 13)),
            tokens=int(np.exp(rng.uniform(0, np.log(longest + 1)))),
        )
        for i in range(count)
    ]


@pytest.fixture
def engine(tiny_spec, model) -> TorchEngine:
    return engine_with(tiny_spec, model, "none", slots=4)


def every_step(engine: TorchEngine, monkeypatch, act) -> Counter:
    """Calls act(n) before the n-th forward, from 0. What is returned counts forwards, prompts and rows."""
    seen: Counter = Counter()
    own = engine._forward

    def forward(ids, positions, cache):
        act(seen["forwards"])
        seen["forwards"] += 1
        seen["prompts" if cache.hidden is None else "rows"] += len(ids)
        return own(ids, positions, cache)

    monkeypatch.setattr(engine, "_forward", forward)
    return seen


def in_a_thread(call, *args) -> None:
    thread = threading.Thread(target=call, args=args)
    thread.start()
    thread.join()


def assert_cut_short(found: Completion, whole: Completion, finish: str) -> None:
    """`found` is the beginning of what the undisturbed run drew."""
    assert (found.uid, found.finish) == (whole.uid, finish)
    assert len(found.token_ids) == len(found.logprobs) < len(whole.token_ids)
    np.testing.assert_array_equal(found.token_ids, whole.token_ids[: len(found.token_ids)])
    np.testing.assert_array_equal(found.logprobs, whole.logprobs[: len(found.token_ids)])


# --- rows ---------------------------------------------------------------------------------------------------------


def test_rows_are_given_back_and_compacted_as_a_plain_list_would_be():
    """Against a list of (request, tokens left) from which finished ones are dropped, the last taking their places."""
    rng = np.random.default_rng(0)
    requests = [request(f"r/{i}", tokens=int(rng.integers(1, 6))) for i in range(60)]
    batch, running, next_one = RunningBatch(requests, 1), [], 0
    logits = torch.randn(60, 11, generator=torch.Generator().manual_seed(0))
    drawn: Counter = Counter()
    while running or next_one < 60:
        admitted = list(range(next_one, min(60, next_one + int(rng.integers(0, 9 - len(running))))))
        next_one += len(admitted)
        rows = batch.admit([(i, requests[i]) for i in admitted])
        assert rows.tolist() == list(range(len(running), len(running) + len(admitted)))
        running += admitted
        assert batch.running().tolist() == running
        if not running:
            continue
        batch.draw(logits[running])
        drawn.update(running)
        done = [i for i in running if drawn[i] == requests[i].sampling.max_new_tokens]
        sources, targets = batch.retire()
        places = list(running)
        for source, target in zip(sources, targets, strict=True):
            places[target] = running[source]
        running = places[: len(running) - len(done)]
        assert sorted(running) == sorted(
            set(drawn) - {i for i in drawn if drawn[i] == requests[i].sampling.max_new_tokens}
        )
        assert batch.running().tolist() == running
        assert not set(sources) & set(targets)
    for one, completion in zip(requests, batch.completions(), strict=True):
        assert completion.uid == one.uid
        assert len(completion.token_ids) == one.sampling.max_new_tokens
        assert completion.finish == "length"


def test_kinds_of_sampling_do_not_count_limits(monkeypatch):
    """Each kind costs a call a step, and limits are often all different."""
    calls = []
    from qurl_ray.engines.torch import batch as module

    own = module.sample
    monkeypatch.setattr(module, "sample", lambda *args: calls.append(1) or own(*args))
    requests = [request(f"r/{i}", tokens=i + 1, temperature=1.0 if i % 2 else 0.5) for i in range(20)]
    batch = RunningBatch(requests, 1)
    batch.admit(list(enumerate(requests)))
    batch.draw(torch.randn(20, 11))
    assert len(calls) == 2


# --- cancelled ----------------------------------------------------------------------------------------------------


@pytest.mark.equal_bits
@pytest.mark.parametrize("when", [0, 1, 5, 9])
def test_cancelled_requests_end_with_what_they_drew_and_no_other_changes(engine, monkeypatch, when):
    requests = several(14)
    whole = engine.generate(requests, version=1)
    gone = {f"r/{i}" for i in range(0, 14, 3)} | {"nobody/0"}
    every_step(engine, monkeypatch, lambda n: in_a_thread(engine.cancel, gone) if n == when else None)
    found = engine.generate(requests, version=1)
    cut = 0
    for one, other in zip(found, whole, strict=True):
        if one.finish == "cancelled":
            assert one.uid in gone
            assert_cut_short(one, other, "cancelled")
            cut += 1
        else:
            assert_same([one], [other])
            assert one.finish == other.finish
    assert cut == len(gone) - 1 if when == 0 else cut > 0


def test_waiting_requests_come_back_empty_if_cancelled(engine, monkeypatch):
    requests = [request(f"r/{i}", tokens=10) for i in range(9)]
    whole = engine.generate(requests, version=1)
    late = [r.uid for r in requests[4:]]  # four slots: these wait
    every_step(engine, monkeypatch, lambda n: engine.cancel(late) if n == 3 else None)
    found = engine.generate(requests, version=1)
    assert_same(found[:4], whole[:4])
    assert [(c.finish, len(c.token_ids), len(c.logprobs)) for c in found[4:]] == [("cancelled", 0, 0)] * 5


def test_all_may_be_cancelled(engine, monkeypatch):
    requests = several(11)
    seen = every_step(engine, monkeypatch, lambda n: engine.cancel({r.uid for r in requests}) if n == 2 else None)
    found = engine.generate(requests, version=1)
    assert [c.uid for c in found] == [r.uid for r in requests]
    assert {c.finish for c in found} <= {"cancelled", "length"}
    assert seen["forwards"] == 3


def test_a_request_that_ended_by_itself_stays_what_it_was_when_it_is_cancelled(engine, monkeypatch):
    requests = [request("short/0", tokens=2), request("long/0", tokens=12)]
    whole = engine.generate(requests, version=1)
    every_step(engine, monkeypatch, lambda n: engine.cancel(["short/0"]) if n == 6 else None)
    found = engine.generate(requests, version=1)
    assert_same(found, whole)
    assert [c.finish for c in found] == ["length", "length"]


def test_a_cancel_ends_nothing_of_a_later_call(engine, monkeypatch):
    """A uid names a problem and a sample, not a call: the next epoch asks for it again."""
    requests = several(5)
    whole = engine.generate(requests, version=1)
    engine.cancel(r.uid for r in requests)
    assert_same(engine.generate(requests, version=1), whole)
    last = every_step(engine, monkeypatch, lambda n: None)
    engine.generate(requests, version=1)
    count = last["forwards"]
    # During the last forward it is too late, and it must not wait for the next call either.
    every_step(engine, monkeypatch, lambda n: engine.cancel(r.uid for r in requests) if n == count - 1 else None)
    assert_same(engine.generate(requests, version=1), whole)
    assert_same(engine.generate(requests, version=1), whole)


def test_cancels_of_many_threads_lose_none(engine, monkeypatch):
    requests = [request(f"r/{i}", tokens=40) for i in range(40)]
    threads = [threading.Thread(target=engine.cancel, args=([r.uid],)) for r in requests]

    def act(n):
        if n == 1:
            for thread in threads:
                thread.start()
        if n == 2:
            for thread in threads:
                thread.join()

    every_step(engine, monkeypatch, act)
    found = engine.generate(requests, version=1)
    assert {c.finish for c in found} == {"cancelled"}
    assert max(len(c.token_ids) for c in found) <= 3


# --- deadlines ----------------------------------------------------------------------------------------------------


def test_at_the_deadline_all_come_back_with_what_they_drew(engine, monkeypatch):
    requests = [request(f"r/{i}", tokens=20 if i in (3, 7) else 3) for i in range(14)]
    whole = engine.generate(requests, version=1)
    clock = [100.0]
    monkeypatch.setattr(time, "monotonic", lambda: clock[0])
    every_step(engine, monkeypatch, lambda n: clock.__setitem__(0, 100.0 + n))
    found = engine.generate(requests, version=1, deadline_s=7.5)
    ended = Counter()
    for one, other in zip(found, whole, strict=True):
        if one.finish == "deadline":
            assert_cut_short(one, other, "deadline")
            ended["empty" if not len(one.token_ids) else "begun"] += 1
        else:
            assert_same([one], [other])
            assert one.finish == "length"
            ended["whole"] += 1
    assert all(ended[kind] for kind in ("empty", "begun", "whole"))
    assert_same(engine.generate(requests, version=1), whole)


def test_a_deadline_in_the_past_and_one_far_away(engine):
    requests = several(6)
    whole = engine.generate(requests, version=1)
    assert_same(engine.generate(requests, version=1, deadline_s=3600), whole)
    past = engine.generate(requests, version=1, deadline_s=-1)
    assert [(c.uid, c.finish, len(c.token_ids)) for c in past] == [(r.uid, "deadline", 0) for r in requests]


# --- failures -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("when", [0, 1, 4])
def test_after_an_error_in_a_forward_all_slots_work_as_before(engine, monkeypatch, when):
    requests = several(13, seed=2)
    whole = engine.generate(requests, version=1)

    def fail(n):
        if n == when:
            raise RuntimeError("out of memory")

    with monkeypatch.context() as patch:
        every_step(engine, patch, fail)
        with pytest.raises(RuntimeError, match="out of memory"):
            engine.generate(requests, version=1)
    widest = []
    own = engine._forward
    monkeypatch.setattr(engine, "_forward", lambda ids, *args: widest.append(len(ids)) or own(ids, *args))
    assert_same(engine.generate(requests, version=1), whole)
    assert max(widest) == 4


def test_what_a_request_of_no_numbers_leaves_behind_touches_no_other(tmp_path):
    """A slot's last owner may have left nan; its next one sees none of it."""
    engine = loaded(policy_of(LlamaConfig, {}, tmp_path), "none", slots=4)
    clean = [request(f"r/{i}", prompt=(4, 5, 6), tokens=6, temperature=0.0) for i in range(4)]
    clean += [request(f"s/{i}", prompt=(4, 5, 6), tokens=20) for i in range(3)]
    whole = engine.generate(clean, version=1)
    engine._model.get_input_embeddings().weight[13] = torch.nan
    assert not any(13 in c.token_ids for c in whole)
    bad = [request(f"bad/{i}", prompt=(13,) * 20, tokens=9) for i in range(4)]
    found = engine.generate(bad, version=1)
    assert all(np.isnan(c.logprobs).all() for c in found)
    assert_same(engine.generate(clean, version=1), whole)


def test_a_request_too_many_leaves_the_engine_as_it_was(engine):
    requests = several(5)
    whole = engine.generate(requests, version=1)
    with pytest.raises(EngineError, match="big/0"):
        engine.generate([*requests, request("big/0", tokens=64)], version=1)
    assert_same(engine.generate(requests, version=1), whole)
    assert engine.generate([], version=1) == []


# --- admission ----------------------------------------------------------------------------------------------------


@pytest.mark.sampled(3)
@pytest.mark.equal_bits
@pytest.mark.parametrize("slots", [1, 2, 7, 16, 64])
def test_lengths_drawn_log_uniformly_give_the_same_in_any_number_of_slots(tiny_spec, model, slots):
    requests = several(40, seed=3, longest=40)
    expected = engine_with(tiny_spec, model, "none", slots=40).generate(requests, version=1)
    assert len({len(c.token_ids) for c in expected}) > 12
    assert_same(engine_with(tiny_spec, model, "none", slots=slots).generate(requests, version=1), expected)


@pytest.mark.equal_bits
def test_a_prompt_of_a_group_is_computed_once(tiny_spec, model, monkeypatch):
    engine = engine_with(tiny_spec, model, "none", slots=24)
    prompts = [(3, 4, 5), (3, 4, 5, 6), (9,)]
    requests = [request(f"{p}/{g}", prompt=prompt, tokens=5) for p, prompt in enumerate(prompts) for g in range(8)]
    seen = every_step(engine, monkeypatch, lambda n: None)
    together = engine.generate(requests, version=1)
    assert (seen["prompts"], seen["rows"], seen["forwards"]) == (3, 24 * 4, 1 + 4)
    for one in requests[::5]:
        (alone,) = engine.generate([one], version=1)
        assert_same([alone], [together[requests.index(one)]])


def test_samples_of_a_group_that_differ_in_seed_alone_differ(engine):
    requests = [request(f"g/{i}", tokens=20, seed=i) for i in range(4)]
    assert len({c.token_ids.tobytes() for c in engine.generate(requests, version=1)}) == 4
    same = [replace(r, uid=f"s/{i}", seed=5) for i, r in enumerate(requests)]
    assert len({c.token_ids.tobytes() for c in engine.generate(same, version=1)}) == 1
