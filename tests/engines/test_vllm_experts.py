"""Mixtures of experts in vLLM on a CPU: the learner's routes and sums, and no expert that is lost on the way."""

from dataclasses import replace
from functools import partial

import numpy as np
import pytest
import torch

from qurl_ray.errors import SyncError
from qurl_ray.learner.batching import to_tensors
from qurl_ray.policy.experts import router_weights
from qurl_ray.policy.load import load_model
from qurl_ray.quant.units import units
from qurl_ray.types import Adapters, PolicySpec
from qurl_ray.weights.local import send_into
from qurl_ray.weights.receiver import decode_buckets
from qurl_ray.weights.stream import Publisher, assemble_manifest
from tests.conftest import requests_for, taken
from tests.engines.test_vllm_engine import TOLERANCE
from tests.engines.vllm_process import EngineProcess
from tests.learner.test_adapters import adapted, scatter
from tests.learner.test_experts import EXPERT, _damaged, _missing, _swapped, _zeroed_router
from tests.learner.test_experts import mixture as mixture  # a fixture
from tests.learner.test_experts import mixture_spec as mixture_spec  # a fixture
from tests.learner.test_flow import KEEP, flow_of, learner_of, trajectories
from tests.policy.test_experts import folders as folders  # a fixture

pytest.importorskip("vllm", reason="needs the extra cpu or gpu")


class Remote(EngineProcess):
    """The calls of an engine that a sender makes."""

    def load(self, manifest, buckets) -> None:
        self.call("load", manifest, list(buckets))

    def resident(self, name: str):
        return self.call("resident", name)


@pytest.fixture(scope="module")
def engine(mixture_spec):
    with Remote(mixture_spec, slots=8, threads=1, timeout_s=240) as process:
        yield process


def gaps(engine, learner, tokenizer, version: int) -> np.ndarray:
    """|Δ| between the engine's log-probs and those of the learner's own forward pass."""
    requests = requests_for(tokenizer, 8, 2, max_new_tokens=20, ignore_eos=True)
    batch = to_tensors(trajectories(requests, engine.call("generate", requests, version=version), seed=version))
    with torch.no_grad():
        own_BT, *_ = learner._policy(batch)
    return (own_BT - batch.behavior_BT)[batch.mask_BT].abs().numpy()


@pytest.mark.parametrize(
    "format_name",
    ["none", "int8", *(pytest.param(name, marks=pytest.mark.slow) for name in ("fp8", "fp8_block", "int4"))],
)
def test_it_is_the_learners_network(engine, mixture, tokenizer, format_name):
    """In full precision to 1e-4: attention and norms are vLLM's. Codes of activations may differ by one."""
    flow = None if format_name == "none" else flow_of(mixture, format_name)
    learner = learner_of(mixture, flow)
    publisher = Publisher(units(mixture, KEEP) if flow else {}, exact=router_weights(mixture))
    send_into(publisher, engine, learner.named_parameters(), flow.fmt if flow else None, version=1)
    found = gaps(engine, learner, tokenizer, 1)
    most, mean = TOLERANCE[format_name] if flow else (1e-4, 1e-5)
    assert found.max() <= most
    assert found.mean() <= mean
    if flow:
        assert engine.call("kernels")
    with torch.no_grad():  # another expert is another network: the tolerance would notice it
        experts = mixture.model.layers[1].mlp.experts
        for part in ("gate_proj", "up_proj", "down_proj"):
            first, second = (experts[index].get_submodule(part).weight for index in (0, 1))
            first.data, second.data = second.data, first.data
    assert gaps(engine, learner_of(mixture, flow), tokenizer, 1).mean() > 3 * mean


def test_every_expert_is_read_back_as_it_was_sent_and_a_delta_changes_its_expert_alone(engine, mixture):
    names = units(mixture, KEEP)
    publisher = Publisher(names, exact=router_weights(mixture))
    send_into(publisher, engine, mixture.named_parameters(), taken("int8"), version=1)
    before = {name: engine.resident(name) for name in names if ".experts." in name}
    assert len(before) == 2 * 8 * 3
    assert len({codes.tobytes() for codes, *_ in before.values()}) == len(before)
    with torch.no_grad():
        mixture.get_parameter(EXPERT).mul_(-1)
    manifest = send_into(publisher, engine, mixture.named_parameters(), taken("int8"), version=2, base_version=1)
    assert {record.name for record in manifest.tensors if record.format != "none" and record.changed} == {EXPERT}
    for name, (codes, *scales) in before.items():
        now, *others = engine.resident(name)
        assert np.array_equal(now, -codes if name == EXPERT else codes)
        assert all(map(np.array_equal, others, scales))


@pytest.mark.parametrize("fault", [_damaged, _swapped, _missing, _zeroed_router])
def test_experts_that_are_lost_on_the_way_are_named(engine, mixture, tokenizer, fault):
    publisher = Publisher(units(mixture, KEEP), exact=router_weights(mixture))
    sent = list(publisher.prepare(mixture.named_parameters(), taken("int8"), version=7))
    manifest = assemble_manifest(7, taken("int8"), [bucket.records for bucket in sent])
    received = partial(decode_buckets, [bucket.payloads for bucket in sent], manifest, engine.resident)
    buckets = [dict(bucket) for bucket in received()]
    fact = fault(buckets, manifest)
    with pytest.raises(SyncError, match=fact):
        engine.load(manifest, buckets)
    engine.load(manifest, received())
    assert engine.call("generate", requests_for(tokenizer, 1, 1), version=7)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["olmoe", "mixtral"])
def test_other_mixtures(folders, tokenizer, name):
    spec = PolicySpec(source=str(folders[name]))
    model = load_model(spec)
    exact = router_weights(model)
    with Remote(spec, slots=8, threads=1, timeout_s=240) as engine:
        for version, fmt in ((1, None), (2, taken("int8"))):
            publisher = Publisher(units(model, KEEP) if fmt else {}, exact=exact)
            send_into(publisher, engine, model.named_parameters(), fmt, version=version)
            names = (*exact, EXPERT, "model.layers.0.self_attn.q_proj.weight")
            for read in names if fmt is None else exact:
                assert np.array_equal(engine.resident(read)[0], model.get_parameter(read).detach().numpy())
            found = gaps(engine, learner_of(model, flow_of(model, "int8") if fmt else None), tokenizer, version)
            assert found.mean() <= (3e-2 if fmt else 1e-4)


@pytest.mark.slow
def test_routers_stay_in_float32_beside_bfloat16(mixture_spec, tokenizer):
    mixture = load_model(mixture_spec)
    exact = router_weights(mixture)
    with Remote(mixture_spec, slots=8, threads=1, timeout_s=240, dtype="bfloat16") as engine:
        publisher = Publisher(units(mixture, KEEP), exact=exact)
        send_into(publisher, engine, mixture.named_parameters(), taken("int8"), version=1, unquantized="bfloat16")
        for name in exact:
            assert np.array_equal(engine.resident(name)[0], mixture.get_parameter(name).detach().numpy())
        assert gaps(engine, learner_of(mixture, None), tokenizer, 1).mean() < 0.05


@pytest.mark.slow
def test_experts_are_divided_over_ranks(mixture_spec, mixture, tokenizer):
    """gate and up by rows, down by columns. In full precision: ranks quantize by ranges of their own."""
    with Remote(mixture_spec, slots=8, threads=1, timeout_s=240, tensor_parallel=2) as engine:
        send_into(Publisher({}), engine, mixture.named_parameters(), None, version=1)
        assert gaps(engine, learner_of(mixture, None), tokenizer, 1).max() <= 1e-3
        assert np.array_equal(engine.resident(EXPERT)[0], mixture.get_parameter(EXPERT).detach().numpy())
        send_into(Publisher(units(mixture, KEEP)), engine, mixture.named_parameters(), taken("int8"), version=2)
        assert gaps(engine, learner_of(mixture, flow_of(mixture, "int8")), tokenizer, 2).mean() < 0.1


@pytest.mark.slow
def test_adapters_of_experts(mixture_spec, tokenizer):
    lora = Adapters(rank=4, alpha=8.0, targets=("all_linear",))
    learner, quantized = adapted(mixture_spec, None, lora=lora)
    scatter(learner)
    with Remote(replace(mixture_spec, adapters=lora), slots=8, threads=1, timeout_s=240) as engine:
        send_into(Publisher(quantized), engine, learner.named_parameters(), None, version=1)
        assert gaps(engine, learner, tokenizer, 1).max() <= 1e-4
