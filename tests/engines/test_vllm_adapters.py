"""Adapters in vLLM: beside its fused and divided linears, in memory of their own, written and verified like weights."""

from dataclasses import replace
from functools import partial

import numpy as np
import pytest
import torch

from qurl_ray.errors import SyncError
from qurl_ray.learner.batching import to_tensors
from qurl_ray.policy.load import load_tokenizer
from qurl_ray.policy.save import save_policy
from qurl_ray.quant.equalize import equalized
from qurl_ray.types import Adapters, PolicySpec
from qurl_ray.weights.receiver import decode_buckets
from qurl_ray.weights.stream import Publisher, assemble_manifest
from tests.conftest import requests_for, taken
from tests.engines.test_vllm_engine import TOLERANCE, policy
from tests.engines.test_vllm_engine import spec as spec  # a fixture
from tests.engines.test_vllm_engine import tokenizer as tokenizer  # a fixture
from tests.engines.vllm_process import EngineProcess
from tests.learner.test_adapters import adapted, scatter
from tests.learner.test_flow import trajectories
from tests.learner.test_noise import NOISE

pytest.importorskip("vllm", reason="needs the extra cpu or gpu")

ALL = Adapters(rank=4, alpha=8.0, targets=("all_linear",))
SOME = Adapters(rank=3, alpha=6.0, targets=("q_proj", "v_proj", "down_proj"))


@pytest.fixture(scope="module")
def base(spec, tokenizer, tmp_path_factory) -> PolicySpec:
    folder = tmp_path_factory.mktemp("base") / "policy"
    save_policy(policy(spec), load_tokenizer(spec), folder)
    return replace(spec, source=str(folder))


@pytest.fixture(scope="module")
def engine(base):
    with EngineProcess(replace(base, adapters=ALL), slots=8, threads=1, timeout_s=240) as process:
        yield process


def sent(engine, publisher, learner, fmt, version: int, *, subset_of: int | None = None, call: str = "load"):
    """Send a version as a run does. Returns its manifest."""
    parameters = learner.named_parameters() if subset_of is None else learner.changing_parameters()
    named = equalized(parameters, learner.factors())
    options = {"base_version": subset_of, "complete": subset_of is None}
    buckets = list(publisher.prepare(named, fmt, version=version, **options))
    manifest = assemble_manifest(version, fmt, [bucket.records for bucket in buckets], subset_of=subset_of)
    payloads = [bucket.payloads for bucket in buckets]
    engine.call(call, manifest, list(decode_buckets(payloads, manifest, partial(engine.call, "resident"))))
    return manifest


def gaps(engine, learner, tokenizer, version: int) -> np.ndarray:
    """|Δ| between the engine's log-probs and those of the learner's own forward pass."""
    requests = requests_for(tokenizer, 8, 2, max_new_tokens=20, ignore_eos=True)
    samples = trajectories(requests, engine.call("generate", requests, version=version), seed=version)
    batch = to_tensors(samples)
    with torch.no_grad():
        own_BT, *_ = learner._policy(batch)
    return (own_BT - batch.behavior_BT)[batch.mask_BT].abs().numpy()


def assert_near(found: np.ndarray, format_name: str) -> None:
    most, mean = TOLERANCE[format_name]
    assert found.max() <= most
    assert found.mean() <= mean


@pytest.mark.parametrize("format_name", ["none", "int8", "fp8_block"])
def test_the_engine_computes_with_the_learners_adapter_and_takes_its_changes(engine, base, tokenizer, format_name):
    learner, quantized = adapted(base, None if format_name == "none" else format_name, lora=ALL, equalize=True)
    fmt = None if format_name == "none" else taken(format_name)
    publisher = Publisher(quantized)
    sent(engine, publisher, learner, fmt, 1)
    assert_near(gaps(engine, learner, tokenizer, 1), format_name)
    scatter(learner, scale=0.3)
    assert gaps(engine, learner, tokenizer, 1).mean() > 10 * TOLERANCE[format_name][1], "the adapter changes nothing"
    manifest = sent(engine, publisher, learner, fmt, 2, subset_of=1)
    assert all(".lora_" in record.name for record in manifest.tensors)
    assert_near(gaps(engine, learner, tokenizer, 2), format_name)


def test_a_part_of_a_version_is_verified_and_never_more_than_it_says(engine, base, tokenizer):
    learner, quantized = adapted(base, "int8", lora=ALL)
    publisher = Publisher(quantized)
    sent(engine, publisher, learner, taken("int8"), 1)
    scatter(learner, scale=0.3)
    named = learner.named_parameters(trained=True)
    buckets = list(publisher.prepare(named, taken("int8"), version=2, complete=False))
    manifest = assemble_manifest(2, taken("int8"), [bucket.records for bucket in buckets], subset_of=1)
    decoded = [dict(bucket) for bucket in decode_buckets([b.payloads for b in buckets], manifest, None)]
    name = manifest.tensors[3].name
    for bucket in decoded:
        if name in bucket:
            damaged = dict(bucket) | {name: (bucket[name][0] + np.float32(1e-3),)}
    with pytest.raises(SyncError, match=name.replace(".", r"\.")):
        engine.call("load", manifest, [damaged])
    missing = [{key: value for key, value in bucket.items() if key != name} for bucket in decoded]
    with pytest.raises(SyncError, match="incomplete: missing"):
        engine.call("load", manifest, missing)
    engine.call("load", manifest, decoded)
    assert_near(gaps(engine, learner, tokenizer, 2), "int8")


def test_the_base_is_verified_after_a_sleep_though_adapters_alone_are_sent(engine, base):
    learner, quantized = adapted(base, "int8", lora=ALL)
    other, _ = adapted(base, "int8", lora=ALL)
    with torch.no_grad():
        next(p for name, p in other.named_parameters() if name == "model.norm.weight").mul_(1.5)
    publisher = Publisher(quantized)
    sent(engine, publisher, learner, taken("int8"), 1)
    sent(engine, Publisher(quantized), other, taken("int8"), 1, call="wake_with")
    with pytest.raises(SyncError, match=r"model\.norm\.weight is .* in the engine"):
        sent(engine, publisher, learner, taken("int8"), 2, subset_of=1)
    sent(engine, Publisher(quantized), learner, taken("int8"), 2)


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [1, 2])
def test_some_of_a_fused_linears_tensors_have_adapters_on_every_rank(base, tokenizer, ranks):
    """q and v, but not k; and down, whose columns are divided over the ranks of an engine. With noise on the gains."""
    format_name = "int8" if ranks == 1 else None  # ranks quantize their parts of a row by ranges of their own
    learner, quantized = adapted(base, format_name, lora=SOME, noise=NOISE)
    fmt = taken(format_name) if format_name else None
    scatter(learner, scale=0.3)
    options = {"slots": 8, "threads": 1, "timeout_s": 240, "tensor_parallel": ranks}
    with EngineProcess(replace(base, adapters=SOME), **options) as engine:
        publisher = Publisher(quantized)
        sent(engine, publisher, learner, fmt, 1)
        assert_near(gaps(engine, learner, tokenizer, 1), format_name or "none")
        scatter(learner, seed=1, scale=0.3)
        sent(engine, publisher, learner, fmt, 2, subset_of=1)
        assert_near(gaps(engine, learner, tokenizer, 2), format_name or "none")
        for name, value in learner.named_parameters(trained=True):
            (held,) = engine.call("resident", name)
            assert np.array_equal(held, value.detach().numpy())
        learner._noise.set(1)
        assert gaps(engine, learner, tokenizer, 2).mean() > 10 * TOLERANCE[format_name or "none"][1]
        sent(engine, publisher, learner, fmt, 3, subset_of=2)
        assert_near(gaps(engine, learner, tokenizer, 3), format_name or "none")
