"""Mixtures of experts in learner and engine: the same bits, syncs by expert, and no expert that is lost on the way."""

import pickle
from dataclasses import replace

import numpy as np
import pytest
import torch

from qurl_ray.config.model import TinyModel
from qurl_ray.config.quantization import QuantizationConfig
from qurl_ray.engines.torch.engine import TorchEngine
from qurl_ray.errors import SyncError
from qurl_ray.learner.batching import plan, to_tensors
from qurl_ray.learner.equalizer import equalizer_for
from qurl_ray.learner.protocol import EnginePrecision
from qurl_ray.learner.scorer import Scores
from qurl_ray.policy.experts import replay_routes, router_weights
from qurl_ray.policy.load import load_model
from qurl_ray.policy.tiny import cached_tiny_policy
from qurl_ray.quant.equalize import equalized
from qurl_ray.quant.units import units
from qurl_ray.rl.diagnostics import policy_metrics
from qurl_ray.types import Adapters, PolicySpec
from qurl_ray.weights.local import load_into, send_into
from qurl_ray.weights.receiver import decode_buckets
from qurl_ray.weights.stream import Publisher, assemble_manifest
from tests.conftest import SUMS, requests_for, taken
from tests.learner.test_adapters import adapted, scatter
from tests.learner.test_flow import KEEP, flow_of, learner_of, trajectories
from tests.learner.test_torch_backend import groups
from tests.policy.gpt_oss import written

EXPERT = "model.layers.1.mlp.experts.5.down_proj.weight"


@pytest.fixture(scope="session")
def mixture_spec(_quiet_machine) -> PolicySpec:
    """Eight experts, two for each token."""
    config = TinyModel(cold_start=False, layers=2, hidden_size=128, heads=4, intermediate_size=128, experts=8)
    return PolicySpec(source=str(cached_tiny_policy(config, SUMS, lambda *_: None)))


@pytest.fixture
def mixture(mixture_spec):
    """Random, but far from uniform: weights four times the initial size."""
    model = load_model(mixture_spec)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 2:
                parameter.mul_(4)
    return model


@pytest.mark.sampled(3)
@pytest.mark.equal_bits
@pytest.mark.parametrize(("slots", "packing"), [(1, False), (24, True)])
@pytest.mark.parametrize("format_name", [None, "int8", "fp8", "fp8_block", "int4"])
def test_engine_and_learner_have_the_same_bits(mixture_spec, mixture, tokenizer, format_name, slots, packing):
    flow = flow_of(mixture, format_name) if format_name else None
    learner = learner_of(mixture, flow, lr=1e-2, packing=packing)
    for version in (1, 2):
        engine = TorchEngine(mixture_spec, slots=slots)
        fmt = flow.fmt if flow else None
        load_into(engine, learner.named_parameters(), fmt, quantized=units(mixture, KEEP), version=version)
        requests = requests_for(tokenizer, count=6, samples=4)
        samples = trajectories(requests, engine.generate(requests, version=version), seed=version)
        batch = to_tensors(samples)
        found_BT, *_ = learner._policy(batch)
        assert torch.equal(found_BT[batch.mask_BT].detach(), batch.behavior_BT[batch.mask_BT])
        result = learner.learn(
            plan([[s] for s in samples], updates=2, ranks=1, token_budget=80, seed=1, packed=packing)[0]
        )
        assert result.sums["max_rho"] == 1.0
        assert result.grad_norm > 0


GPT_OSS = {"hidden_size": 128, "num_hidden_layers": 2, "intermediate_size": 128, "num_local_experts": 8, "scale": 0.15}


@pytest.fixture(scope="session")
def gpt_oss_spec(tiny_spec, tmp_path_factory) -> PolicySpec:
    """A window of five tokens in the first of two layers, and sinks."""
    return written(tmp_path_factory.mktemp("learner") / "gpt_oss", tiny_spec, **GPT_OSS)


@pytest.mark.sampled(3)
@pytest.mark.equal_bits
@pytest.mark.parametrize(
    ("slots", "layout"),
    [(1, {"share_prompts": False}), (7, {}), (64, {"packing": True}), (64, {"gradient_checkpointing": True})],
    ids=["padded", "shared", "packed", "checkpointing"],
)
@pytest.mark.parametrize("format_name", [None, "int8", "fp8", "fp8_block", "int4"])
def test_gpt_oss_has_the_same_bits_in_engine_and_learner(gpt_oss_spec, tokenizer, format_name, slots, layout):
    """Answers are longer than the window; sinks and biases move with each update."""
    model = load_model(gpt_oss_spec)
    flow = flow_of(model, format_name) if format_name else None
    learner = learner_of(model, flow, lr=1e-2, **layout)
    sinks = model.model.layers[0].self_attn.sinks.detach().clone()
    for version in (1, 2):
        engine = TorchEngine(gpt_oss_spec, slots=slots)
        load_into(engine, learner.named_parameters(), flow and flow.fmt, quantized=units(model, KEEP), version=version)
        requests = requests_for(tokenizer, count=4, samples=3, max_new_tokens=14, ignore_eos=True)
        samples = trajectories(requests, engine.generate(requests, version=version), seed=version)
        batch = to_tensors(samples)
        found_BT, *_ = learner._policy(batch)
        assert torch.equal(found_BT[batch.mask_BT].detach(), batch.behavior_BT[batch.mask_BT])
        packed = bool(layout.get("packing"))
        shares = plan([[s] for s in samples], updates=2, ranks=1, token_budget=200, seed=1, packed=packed)
        result = learner.learn(shares[0])
        assert result.sums["max_rho"] == 1.0
    assert (sinks != model.model.layers[0].self_attn.sinks).all()


@pytest.mark.equal_bits
def test_factors_of_experts_change_no_bit_without_codes_and_make_codes_truer(mixture_spec, mixture, tokenizer):
    """Learner and engine over equalized codes of a unified flow are the same network."""
    quantized = units(mixture, KEEP)
    equalizer = equalizer_for(mixture, QuantizationConfig(equalize=True), quantized, ["int8"])
    flow = replace(flow_of(mixture, "int8"), equalized=True)
    learner = learner_of(mixture, flow, equalizer=equalizer)
    factors = learner.factors()
    assert factors["model.layers.0.mlp.gate"].reads is not None
    assert (factors["model.layers.0.mlp.experts.3.up_proj"].reads != 1).any()
    engine = TorchEngine(mixture_spec, slots=8)
    load_into(engine, equalized(learner.named_parameters(), factors), flow.fmt, quantized=quantized)
    requests = requests_for(tokenizer, count=6, samples=2)
    batch = to_tensors(trajectories(requests, engine.generate(requests, version=1), seed=1))
    found_BT, *_ = learner._policy(batch)
    assert torch.equal(found_BT[batch.mask_BT].detach(), batch.behavior_BT[batch.mask_BT])


@pytest.mark.equal_bits
@pytest.mark.parametrize("kind", ["mixture_spec", "gpt_oss_spec"])
def test_adapters_of_experts_over_codes_have_no_gap(request, tokenizer, kind):
    spec = request.getfixturevalue(kind)
    lora = Adapters(rank=4, alpha=8.0, targets=("all_linear",))
    learner, quantized = adapted(spec, "int8", lora=lora)
    scatter(learner)
    names = [name for name, _ in learner.named_parameters(trained=True)]
    assert sum(".experts." in name for name in names) == 2 * 8 * 3 * 2
    assert not any("mlp.gate." in name for name in names)
    engine, publisher = TorchEngine(replace(spec, adapters=lora), slots=8), Publisher(quantized)
    send_into(publisher, engine, learner.named_parameters(), taken("int8"), version=1)
    requests = requests_for(tokenizer, count=4, samples=2)
    batch = to_tensors(trajectories(requests, engine.generate(requests, version=1), seed=1))
    found_BT, *_ = learner._policy(batch)
    assert torch.equal(found_BT[batch.mask_BT].detach(), batch.behavior_BT[batch.mask_BT])


def test_a_delta_grows_with_the_experts_that_changed(mixture_spec, mixture):
    names = units(mixture, KEEP)
    publisher, engine, sizes = Publisher(names), TorchEngine(mixture_spec, slots=4), []
    send_into(publisher, engine, mixture.named_parameters(), taken("int8"), version=1)
    for version, count in ((2, 0), (3, 1), (4, 4)):
        with torch.no_grad():
            for expert in range(count):
                mixture.model.layers[0].mlp.experts[expert].up_proj.weight.mul_(-1)
        manifest = send_into(
            publisher, engine, mixture.named_parameters(), taken("int8"), version=version, base_version=version - 1
        )
        sizes.append(sum(record.bytes for record in manifest.tensors))
        changed = {record.name for record in manifest.tensors if record.format != "none" and record.changed}
        assert changed == {f"model.layers.0.mlp.experts.{expert}.up_proj.weight" for expert in range(count)}
    assert sizes[2] - sizes[0] == pytest.approx(4 * (sizes[1] - sizes[0]), rel=0.05)


def _zeroed_router(buckets, manifest):
    for bucket in buckets:
        if (name := "model.layers.0.mlp.gate.weight") in bucket:
            bucket[name] = (np.zeros_like(bucket[name][0]),)
    return "mlp.gate.weight is"


def _damaged(buckets, manifest):
    for bucket in buckets:
        if EXPERT in bucket:
            codes, *others = bucket[EXPERT]
            codes = codes.copy()
            codes.view(np.uint8)[3, 7] ^= 1
            bucket[EXPERT] = (codes, *others)
    return "experts.5.down_proj.weight is"


def _swapped(buckets, manifest):
    other = EXPERT.replace(".5.", ".6.")
    (own,) = (bucket for bucket in buckets if EXPERT in bucket)
    (theirs,) = (bucket for bucket in buckets if other in bucket)
    own[EXPERT], theirs[other] = theirs[other], own[EXPERT]
    return "down_proj.weight is"


def _missing(buckets, manifest):
    for bucket in buckets:
        bucket.pop(EXPERT, None)
    return "incomplete: missing"


@pytest.mark.parametrize("fault", [_damaged, _swapped, _missing, _zeroed_router])
def test_experts_that_are_lost_on_the_way_are_named(mixture_spec, mixture, tokenizer, fault):
    names, engine = units(mixture, KEEP), TorchEngine(mixture_spec, slots=4)
    publisher = Publisher(names)
    for version in range(1, 21):
        send_into(publisher, engine, mixture.named_parameters(), taken("int8"), version=version)
    sent = list(publisher.prepare(mixture.named_parameters(), taken("int8"), version=21))
    manifest = assemble_manifest(21, taken("int8"), [bucket.records for bucket in sent])

    def received() -> list[dict]:
        return [dict(bucket) for bucket in decode_buckets([b.payloads for b in sent], manifest, engine.resident)]

    buckets = received()
    fact = fault(buckets, manifest)
    with pytest.raises(SyncError, match=fact):
        engine.load(manifest, buckets)
    assert engine.version is None
    engine.load(manifest, received())
    assert engine.generate(requests_for(tokenizer, 1, 1), version=21)


def test_an_update_moves_all_experts_and_the_router(mixture_spec):
    model = load_model(mixture_spec)
    learner = learner_of(model, None, lr=1e-2)
    before = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    learner.learn(plan(groups(), updates=1, ranks=1, token_budget=100, seed=3)[0])
    moved = {name for name, parameter in model.named_parameters() if not torch.equal(parameter, before[name])}
    assert {name for name in before if ".experts." in name} <= moved, "tokens of a batch reach all eight experts"
    assert "model.layers.0.mlp.gate.weight" in moved


@pytest.mark.parametrize("layout", [{"share_prompts": False}, {}, {"packing": True}, {"gradient_checkpointing": True}])
def test_replayed_routes_are_those_of_the_engine_in_every_layout(mixture_spec, mixture, tokenizer, layout):
    """An engine with other weights takes other experts. Independent: a pass of one sample with hooks on the routers."""
    engine = TorchEngine(mixture_spec, slots=8, routes=True)
    load_into(engine, mixture.named_parameters(), taken("int4"), quantized=units(mixture, KEEP))
    requests = requests_for(tokenizer, count=5, samples=3)
    completions = engine.generate(requests, version=1)
    samples = [
        replace(sample, routes=completion.routes)
        for sample, completion in zip(trajectories(requests, completions, seed=1), completions, strict=True)
    ]
    for request, completion in zip(requests, completions, strict=True):
        length = len(request.prompt_ids) + len(completion.token_ids)
        assert completion.routes.shape == (length - 1, 2, 2)
        assert completion.routes.dtype == np.uint8
    learner = learner_of(mixture, None, lr=1e-9, **layout)
    own, replayed = [
        Scores(*learner._policy(to_tensors(chosen))).logprobs_BT
        for chosen in ([replace(s, routes=None) for s in samples], samples)
    ]
    mask_BT = to_tensors(samples).mask_BT
    assert (own - replayed)[mask_BT].abs().max() > 1e-3
    for row, sample in enumerate(samples):
        alone = to_tensors([sample])
        replay_routes(mixture, torch.from_numpy(sample.routes.astype(np.int64)))
        with torch.no_grad():
            ids = alone.token_ids_BT[:, :-1]
            logits = mixture(input_ids=ids, position_ids=torch.arange(ids.shape[1])[None], use_cache=False).logits
        expected = logits[0].log_softmax(-1).gather(1, alone.token_ids_BT[0, 1:, None])[:, 0]
        assert torch.allclose(
            replayed[row, 1 : sample.length][mask_BT[row, 1 : sample.length]], expected[alone.mask_BT[0, 1:]], atol=1e-5
        )
    result = learner.learn(plan([[s] for s in samples], updates=1, ranks=1, token_budget=200, seed=1)[0])
    differing = policy_metrics(result.sums)["mismatch/routes_differing"]
    assert 0 < differing < 0.5
    assert result.grad_norm > 0


@pytest.mark.equal_bits
def test_replayed_weights_bring_the_learner_nearer_and_leave_routers_alone(mixture_spec, mixture, tokenizer):
    """Codes of experts differ from the learner's weights, so that later layers' routers see other states."""
    found = {}
    for route_weights in (False, True):
        engine = TorchEngine(mixture_spec, slots=8, routes=True, route_weights=route_weights)
        load_into(engine, mixture.named_parameters(), taken("int4"), quantized=units(mixture, KEEP))
        requests = requests_for(tokenizer, count=8, samples=3)
        completions = engine.generate(requests, version=1)
        samples = [
            replace(sample, routes=completion.routes)
            for sample, completion in zip(trajectories(requests, completions, seed=1), completions, strict=True)
        ]
        routes = completions[0].routes
        assert routes.shape[1:] == (2, 4 if route_weights else 2)
        if route_weights:
            assert routes.dtype == np.float32
            np.testing.assert_allclose(routes[..., 2:].sum(-1), 1, rtol=1e-6)
            assert set(routes[..., :2].flatten()) <= set(range(8))
        learner = learner_of(mixture, None, lr=1e-9)
        (mini_batch,) = plan([[s] for s in samples], updates=1, ranks=1, token_budget=200, seed=1)[0]
        restored = pickle.loads(pickle.dumps(mini_batch))
        result = learner.learn([restored])
        passes = [learner._make_pass(micro_batch) for micro_batch in restored.micro_batches]
        learner._accumulate(passes, restored.denominators, 1.0, None)
        gates = [parameter.grad for name, parameter in mixture.named_parameters() if name.endswith("mlp.gate.weight")]
        assert all((grad is None or not grad.any()) == route_weights for grad in gates)
        mixture.zero_grad()
        found[route_weights] = policy_metrics(result.sums)["mismatch/kl"]
    assert found[True] < found[False]


@pytest.mark.parametrize("kind", ["mixture_spec", "gpt_oss_spec"])
@pytest.mark.parametrize("route_weights", [False, True])
def test_the_engines_routes_are_its_routers_choice(request, tokenizer, kind, route_weights):
    """Those of a full-precision engine are the learner's own: nothing differs, and no bit changes."""
    spec = request.getfixturevalue(kind)
    mixture, engine = load_model(spec), TorchEngine(spec, slots=3, routes=True, route_weights=route_weights)
    load_into(engine, mixture.named_parameters(), None, quantized={})
    requests = requests_for(tokenizer, count=5, samples=3)
    completions = engine.generate(requests, version=1)
    samples = [
        replace(sample, routes=completion.routes)
        for sample, completion in zip(trajectories(requests, completions, seed=1), completions, strict=True)
    ]
    learner = learner_of(mixture, None, lr=1e-9)
    result = learner.learn(plan([[s] for s in samples], updates=1, ranks=1, token_budget=200, seed=1)[0])
    assert result.sums["max_rho"] == 1.0
    assert result.sums["routes_replayed"] > 0
    assert result.sums["routes_differing"] == 0


def test_a_continued_answer_has_the_routes_of_all_its_tokens(mixture_spec, mixture, tokenizer):
    """With kept keys, and computed again."""
    found = []
    for kept_bytes in (1 << 24, 0):
        engine = TorchEngine(mixture_spec, slots=4, routes=True, kept_bytes=kept_bytes)
        load_into(engine, mixture.named_parameters(), taken("int8"), quantized=units(mixture, KEEP))
        (request,) = requests_for(tokenizer, 1, 1, max_new_tokens=4, ignore_eos=True)
        (first,) = engine.generate([replace(request, continues=True)], version=1)
        more = np.array([5, 6, 7], dtype=np.int32)
        ids = np.concatenate([request.prompt_ids, first.token_ids, more])
        (second,) = engine.generate([replace(request, prompt_ids=ids, drawn=4)], version=1)
        assert len(second.routes) == len(ids) + len(second.token_ids) - 1
        found.append(second.routes)
    assert np.array_equal(*found)


@pytest.mark.equal_bits
@pytest.mark.parametrize("kind", ["mixture_spec", "gpt_oss_spec"])
def test_routers_are_sent_in_float32_beside_bfloat16(request, tokenizer, kind):
    spec = request.getfixturevalue(kind)
    mixture = load_model(spec)
    quantized, exact = units(mixture, KEEP), router_weights(mixture)
    learner, engine = learner_of(mixture, None), TorchEngine(spec, slots=4)
    publisher = Publisher(quantized, exact=exact)
    send_into(publisher, engine, learner.named_parameters(), taken("int8"), version=1, unquantized="bfloat16")
    for name in exact:
        assert np.array_equal(engine.resident(name)[0], mixture.get_parameter(name).detach().numpy())
    norm = "model.layers.0.input_layernorm.weight"
    with torch.no_grad():
        mixture.get_parameter(norm).add_(1e-3)
    send_into(publisher, engine, learner.named_parameters(), taken("int8"), version=2, unquantized="bfloat16")
    assert not np.array_equal(engine.resident(norm)[0], mixture.get_parameter(norm).detach().numpy())
    request, *_ = requests_for(tokenizer, 1, 2)
    drawn = engine.generate([request, replace(request, uid="b", seed=2)], version=2)
    for sent, equal in ((exact, True), (frozenset(), False)):
        precision = EnginePrecision(fmt=taken("int8"), quantized=quantized, unquantized="bfloat16", exact=sent)
        own = learner.logprobs(drawn, request.prompt_ids, precision)
        assert all(np.array_equal(a, c.logprobs) for a, c in zip(own, drawn, strict=True)) == equal
