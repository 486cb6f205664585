"""Keys and values that are kept between turns: fewer tokens are computed, and every bit is the same."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from qurl_ray.engines.requests import continued
from qurl_ray.engines.torch.engine import TorchEngine
from qurl_ray.engines.torch.kept import KeptKeys, KeysPool
from tests.conftest import requests_for
from tests.engines.test_continued import assert_equal
from tests.engines.test_torch_engine import weights_of

pytestmark = pytest.mark.usefixtures("one_thread")


def some(tokens: int) -> KeptKeys:
    part = torch.zeros(1, 1, tokens, 4)
    return KeptKeys(token_ids=np.arange(tokens, dtype=np.int32), keys=part, values=part)


def test_the_oldest_make_room_and_what_is_too_large_is_not_kept():
    pool = KeysPool(3 * some(2).bytes)
    for uid in "abcd":
        pool.put(uid, some(2))
    pool.put("e", some(7))
    longer = np.arange(5, dtype=np.int32)
    assert [uid for uid in "abcde" if pool.take(uid, longer)] == ["b", "c", "d"]
    assert pool.take("b", longer) is None  # it is taken


@pytest.mark.parametrize("row", [[0, 1], [0, 2, 3], [5, 0, 1, 2]])
def test_a_row_that_does_not_begin_with_what_was_kept_gets_nothing(row):
    pool = KeysPool(1 << 20)
    pool.put("a", some(2))
    assert pool.take("a", np.array(row, dtype=np.int32)) is None


def test_nothing_is_left_after_clear():
    pool = KeysPool(some(2).bytes)
    pool.put("a", some(2))
    pool.clear()
    pool.put("b", some(2))
    assert pool.take("a", np.arange(3, dtype=np.int32)) is None
    assert pool.take("b", np.arange(3, dtype=np.int32))


def engine_of(
    spec, model, format_name: str, kv_cache: str, kept_bytes: int, slots: int
) -> tuple[TorchEngine, list[int]]:
    """An engine, and the numbers of tokens of its passes over more than one token."""
    engine, passes = TorchEngine(spec, slots=slots, kv_cache=kv_cache, kept_bytes=kept_bytes), []
    engine.load(*weights_of(model, format_name))
    forward = engine._forward

    def counted(ids, *rest):
        passes.append(ids.shape[1]) if ids.shape[1] > 1 else None
        return forward(ids, *rest)

    engine._forward = counted
    return engine, passes


@pytest.mark.sampled(3)
@pytest.mark.equal_bits
@pytest.mark.parametrize("kv_cache", ["full", "fp8"])
@pytest.mark.parametrize("format_name", ["none", "int8"])
def test_turns_after_kept_keys_are_those_after_a_whole_row(tiny_spec, tokenizer, model, format_name, kv_cache):
    rng = np.random.default_rng(0)
    asked = [replace(r, continues=True) for r in requests_for(tokenizer, 5, 2, max_new_tokens=30, stop_ids=(3, 4))]
    said = [[rng.integers(3, 18, size=rng.integers(1, 9)).astype(np.int32) for _ in asked] for _ in range(3)]
    found, longest = {}, {}
    for kept_bytes, slots in ((0, 10), (1 << 30, 10), (1 << 30, 3), (150_000, 4)):
        engine, passes = engine_of(tiny_spec, model, format_name, kv_cache, kept_bytes, slots)
        rows, turns = asked, []
        for extra in said:
            short = [replace(r, sampling=replace(r.sampling, max_new_tokens=5)) for r in rows]
            parts = engine.generate(short, version=1)
            turns.append(parts)
            rows = [continued(row, part) for row, part in zip(rows, parts, strict=True)]
            rows = [
                replace(row, prompt_ids=np.concatenate([row.prompt_ids, ids]))
                for row, ids in zip(rows, extra, strict=True)
            ]
        found[kept_bytes, slots], longest[kept_bytes, slots] = turns, max(passes)
    whole = found.pop((0, 10))
    for turns in found.values():
        for one, other in zip(turns, whole, strict=True):
            assert_equal(one, other)
    assert longest[0, 10] > 20  # whole rows
    assert longest[1 << 30, 10] <= 10  # what was said, and the last token
    assert longest[1 << 30, 3] <= 10


@pytest.mark.equal_bits
def test_other_weights_and_sleep_forget_what_was_kept(tiny_spec, tokenizer, model):
    asked = [replace(r, continues=True) for r in requests_for(tokenizer, 2, 1, max_new_tokens=4, ignore_eos=True)]
    engine, passes = engine_of(tiny_spec, model, "none", "full", 1 << 30, 4)
    for forget in (lambda: engine.load(*weights_of(model, "none", version=1)), engine.sleep):
        parts = engine.generate(asked, version=1)
        rows = [continued(row, part) for row, part in zip(asked, parts, strict=True)]
        rows = [replace(row, sampling=asked[0].sampling, continues=False) for row in rows]
        passes.clear()
        engine.generate(rows, version=1)
        assert not passes  # one token alone
        engine.generate(asked, version=1)
        forget()
        passes.clear()
        engine.generate(rows, version=1)
        assert max(passes) > 4
