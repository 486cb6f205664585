"""Captured decode steps change nothing, whatever happens between two steps.

`Recording` is a CUDA graph in miniature: a step's operations, repeated on the same memory, and none of its Python.
"""

from collections import Counter
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import LlamaConfig, MistralConfig, Qwen2Config, Qwen3Config

from qurl_ray.config.rollout import RolloutConfig
from qurl_ray.engines.make import rollout_options, torch_engine
from qurl_ray.engines.torch import graphs
from qurl_ray.engines.torch.engine import TorchEngine
from qurl_ray.engines.torch.graphs import CudaCapture, DecodeGraphs
from qurl_ray.engines.torch.slots import Fp8SlotCache, SlotCache
from qurl_ray.errors import EngineError
from qurl_ray.types import Request
from tests.engines.test_decoder import OTHERS, Policy, loaded, policy_of, random_requests, rope
from tests.engines.test_torch_engine import assert_same
from tests.engines.test_weights import KEEPS, moved, send

pytestmark = pytest.mark.usefixtures("one_thread")

LONG = {"max_position_embeddings": 192, "num_hidden_layers": 2}
MODELS = {
    "llama": (LlamaConfig, LONG | {"attention_bias": True}),
    "mistral": (MistralConfig, LONG | {"sliding_window": None}),
    "qwen2": (Qwen2Config, LONG | {"num_attention_heads": 4, "num_key_value_heads": 4, "head_dim": 16}),
    "qwen3": (Qwen3Config, LONG | {"head_dim": 16}),
}


class Recording(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self._calls, self._computed = [], set()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if (
            func is torch.ops.aten._local_scalar_dense.default
            and args[0].untyped_storage().data_ptr() in self._computed
        ):
            raise RuntimeError("a number that was computed is read back")
        out = func(*args, **(kwargs or {}))
        self._computed |= {part.untyped_storage().data_ptr() for part in self._tensors(out)}
        self._calls.append((func, args, kwargs or {}, out))
        return out

    @staticmethod
    def _tensors(out):
        return [part for part in tree_leaves(out) if isinstance(part, torch.Tensor)]

    def repeat(self) -> None:
        for func, args, kwargs, out in self._calls:
            again = func(*args, **kwargs)
            for held, new in zip(self._tensors(out), self._tensors(again), strict=True):
                if held.data_ptr() != new.data_ptr():  # else a view, or written in place
                    held.copy_(new)


class Recorder:
    """A Capture that counts."""

    def __init__(self) -> None:
        self.captured, self.repeated = 0, 0

    def __call__(self, step):
        self.captured += 1
        with Recording() as recording:
            states = step()

        def repeat():
            self.repeated += 1
            recording.repeat()
            return states

        return repeat


def requests_of(count: int, seed: int = 0, longest: int = 18) -> list[Request]:
    """Prompts of 1 to 40 tokens, answers of 1 to 18, the third of `longest`."""
    requests = random_requests(count, seed=seed)
    sampling = replace(requests[2].sampling, max_new_tokens=longest)
    return [*requests[:2], replace(requests[2], sampling=sampling), *requests[3:]]


@pytest.mark.sampled(2)
@pytest.mark.equal_bits
@pytest.mark.parametrize(
    ("name", "format_name"),
    [
        ("llama", "none"),
        ("llama", "fp8_block"),
        ("mistral", "int8"),
        ("qwen2", "int8"),
        ("qwen3", "fp8"),
        ("qwen3", "int8"),
    ],
)
def test_captured_steps_change_no_bit(name, format_name, tmp_path):
    policy, recorder = policy_of(*MODELS[name], tmp_path), Recorder()
    requests = requests_of(30, longest=150)
    expected = loaded(policy, format_name, slots=20).generate(requests, version=1)
    engine = loaded(policy, format_name, slots=20, capture=lambda: recorder)
    assert_same(engine.generate(requests, version=1), expected)
    # Rows: 8, 16, 20; keys: 64, 128, and all of the cache. Far from a graph for each length.
    assert 4 <= recorder.captured <= 9
    assert recorder.repeated >= 149  # the first of an answer's tokens are drawn by the prefill
    assert_same(engine.generate(requests[3:4], version=1), expected[3:4])


@pytest.mark.sampled(2)
@pytest.mark.parametrize(("kernel", "dtype"), [("auto", torch.float32), ("emulation", torch.bfloat16)])
def test_with_rounded_keys_and_other_types(tmp_path, kernel, dtype):
    policy, options = policy_of(*MODELS["qwen3"], tmp_path), {"kernel": kernel, "dtype": dtype, "kv_cache": "fp8"}
    if dtype == torch.bfloat16:
        policy.model.to(dtype)
    requests = requests_of(12, seed=1, longest=70)
    expected = loaded(policy, "int8", slots=5, **options).generate(requests, version=1)
    found = loaded(policy, "int8", slots=5, **options, capture=Recorder).generate(requests, version=1)
    assert_same(found, expected)


@pytest.mark.sampled(2)
@pytest.mark.equal_bits
@pytest.mark.parametrize("kv_cache", ["full", "fp8"])
def test_graphs_are_captured_anew_after_each_load(tmp_path, kv_cache):
    policy = policy_of(*MODELS["qwen2"], tmp_path)
    recorders: list[Recorder] = []
    capture = lambda: recorders.append(Recorder()) or recorders[-1]  # noqa: E731
    with_graphs = TorchEngine(policy.spec, slots=6, kv_cache=kv_cache, capture=capture)
    without = TorchEngine(policy.spec, slots=6, kv_cache=kv_cache)
    requests = requests_of(8, seed=2, longest=60)
    for version, format_name in enumerate(("none", "int8", "int8"), start=1):
        moved(policy, version)
        for engine in (with_graphs, without):
            send(engine, policy, format_name, KEEPS["the head"], version)
        found, expected = (engine.generate(requests, version=version) for engine in (with_graphs, without))
        assert_same(found, expected)
        assert len(recorders) == version
        assert recorders[-1].captured > 1
    # These comparisons would have seen a graph of the weights before.
    old = with_graphs._graphs
    moved(policy, 4)
    for engine in (with_graphs, without):
        send(engine, policy, "int8", KEEPS["the head"], 4)
    with_graphs.reserve(6, max(len(r.prompt_ids) + r.sampling.max_new_tokens for r in requests))
    with_graphs._graphs = old
    stale, expected = (engine.generate(requests, version=4) for engine in (with_graphs, without))
    assert any((one.logprobs != other.logprobs).any() for one, other in zip(stale, expected, strict=True))


def test_a_larger_cache_takes_new_graphs_and_the_old_one_is_given_back(tmp_path):
    policy, recorder = policy_of(*MODELS["llama"], tmp_path), Recorder()
    engine, without = (loaded(policy, "int8", slots=9, **more) for more in ({"capture": lambda: recorder}, {}))
    for count, longest, new in ((3, 5, True), (9, 5, True), (9, 90, True), (4, 18, False)):
        requests, before = requests_of(count, seed=count, longest=longest), engine._graphs
        assert_same(engine.generate(requests, version=1), without.generate(requests, version=1))
        assert (engine._graphs is not before) == new
    engine.close()
    assert engine._graphs is None


@pytest.mark.equal_bits
def test_requests_that_are_cancelled_or_late_leave_nothing_behind(tmp_path, monkeypatch):
    policy = policy_of(*MODELS["llama"], tmp_path)
    requests = requests_of(14, seed=3)
    engine = loaded(policy, "int8", slots=6, capture=Recorder)
    draws = iter(range(10**6))
    decode = engine._decode

    def interrupted(cache, batch):
        if next(draws) == 12:
            engine.cancel({requests[4].uid, requests[1].uid, requests[9].uid})
        decode(cache, batch)

    monkeypatch.setattr(engine, "_decode", interrupted)
    found = engine.generate(requests, version=1)
    assert Counter(c.finish for c in found)["cancelled"] >= 1
    expected = loaded(policy, "int8", slots=14).generate(requests, version=1)
    for one, other in zip(found, expected, strict=True):
        count = len(one.logprobs)
        assert count == len(other.logprobs) or one.finish == "cancelled"
        np.testing.assert_array_equal(one.token_ids, other.token_ids[:count])
        np.testing.assert_array_equal(one.logprobs, other.logprobs[:count])
    engine.generate(requests, version=1, deadline_s=0.05)
    assert_same(engine.generate(requests, version=1), expected)


@pytest.mark.parametrize("kind", ["full", "fp8"])
@torch.inference_mode()
def test_rows_that_are_not_running_write_one_key_of_their_own_and_are_read_by_nobody(tmp_path, kind):
    engine = loaded(policy_of(*MODELS["qwen3"], tmp_path), "int8", slots=8, kv_cache=kind)
    shape = {"layers": 2, "slots": 7, "kv_heads": 2, "head_dim": 16, "length": 100}
    generator = torch.Generator().manual_seed(0)
    states = []
    for poison in (0.0, torch.nan, torch.inf):
        cache = Fp8SlotCache(engine._kv_scales, **shape) if kind == "fp8" else SlotCache(**shape)
        generator.manual_seed(0)
        parts = [*cache._keys, *cache._values]
        for part in parts:
            drawn = torch.randn(part.shape, generator=generator)
            drawn[3:] = poison
            part.copy_(drawn.to(torch.float8_e4m3fn).view(torch.uint8) if kind == "fp8" else drawn)
        before = [part.clone() for part in parts]
        step = DecodeGraphs(engine._decoder, cache, Recorder())
        for _ in range(2):
            states.append(step(torch.tensor([5, 6, 7]), torch.tensor([70, 0, 12])).clone())
        for part, old in zip(parts, before, strict=True):
            same = ((part == old) | (part != part) & (old != old)).all(dim=3).all(dim=1)
            assert same.sum(dim=1).tolist() == [part.shape[2] - 1] * 3 + same.sum(dim=1).tolist()[3:]
            assert not same[[0, 1, 2], [70, 0, 12]].any()
            assert same[3:, 1:].all()
    assert all(torch.equal(found, states[0]) for found in states)
    assert states[0].shape == (3, 1, 72)
    assert states[0].isfinite().all()


@torch.inference_mode()
def test_rows_and_keys_are_rounded_up_to_what_there_is(tmp_path, monkeypatch):
    engine = loaded(policy_of(*MODELS["llama"], tmp_path), "none")
    cache = SlotCache(layers=2, slots=37, kv_heads=2, head_dim=18, length=300)
    sizes = []
    monkeypatch.setattr(
        cache,
        "decode",
        lambda positions, keys: sizes.append((len(positions), keys)) or SlotCache.decode(cache, positions, keys),
    )
    step = DecodeGraphs(engine._decoder, cache, Recorder())
    for count, last in ((1, 0), (8, 63), (9, 64), (33, 127), (37, 128), (16, 255), (2, 256), (32, 299), (5, 62)):
        positions = torch.zeros(count, dtype=torch.int64)
        positions[-1] = last
        assert len(step(torch.ones(count, dtype=torch.int64), positions)) == count
    assert sizes == [(8, 64), (16, 128), (37, 128), (37, 256), (16, 256), (8, 304), (32, 304)]


def test_a_step_that_cannot_be_captured_is_an_error_that_says_so(tmp_path):
    policy = policy_of(*MODELS["llama"], tmp_path)

    def no_memory(step):
        raise torch.OutOfMemoryError("CUDA out of memory")

    engine = loaded(policy, "none", capture=lambda: no_memory)
    with pytest.raises(
        EngineError, match=r"a decode step of 5 rows and 48 keys could not be captured; use fewer slots"
    ):
        engine.generate(requests_of(7), version=1)


@pytest.mark.parametrize("name", ["gemma2", "phi3"])
def test_models_with_another_forward_are_refused_by_name(name, tmp_path):
    policy = policy_of(*OTHERS[name], tmp_path)
    with pytest.raises(EngineError, match=f"is not that of {type(policy.model).__name__} as configured here"):
        TorchEngine(policy.spec, slots=2, capture=Recorder)


def test_frequencies_that_depend_on_positions_are_refused(tmp_path):
    policy = policy_of(LlamaConfig, rope("dynamic", factor=2.0), tmp_path)
    with pytest.raises(EngineError, match="rotary embeddings of type dynamic, LlamaForCausalLM looks at positions"):
        TorchEngine(policy.spec, slots=2, capture=Recorder)


def test_the_settings_reach_the_engine(tmp_path, monkeypatch):
    made = {}
    monkeypatch.setattr("qurl_ray.engines.torch.engine.TorchEngine", lambda spec, **options: made.update(options))
    for on in (False, True):
        config = RolloutConfig(device="cuda", cuda_graphs=on)
        torch_engine(Policy, rollout_options(config, kernel="auto", threads=1))
        assert made["capture"] is (CudaCapture if on else None)


def test_the_sizes_of_graphs_are_such_that_attention_takes_them():
    assert graphs.FEWEST_KEYS % 16 == 0
