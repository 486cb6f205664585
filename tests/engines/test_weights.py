"""What the engine holds is what was sent, whichever linears are fused, quantized or neither."""

import itertools

import numpy as np
import pytest
import torch
from transformers import LlamaConfig, NemotronConfig, Qwen2Config

from qurl_ray.engines.torch.engine import TorchEngine
from qurl_ray.engines.torch.weights import RowsOf
from qurl_ray.errors import QuantizationError, StaleWeights, SyncError
from qurl_ray.policy.load import HEAD, tied_head
from qurl_ray.quant.formats import get_format
from qurl_ray.quant.linear import QuantizedLinear
from qurl_ray.quant.quantize import quantize
from qurl_ray.quant.units import units
from qurl_ray.weights.local import load_into
from qurl_ray.weights.receiver import decode_buckets
from qurl_ray.weights.stream import Publisher, assemble_manifest
from tests.engines.test_decoder import Policy, learned, policy_of, random_requests

pytestmark = pytest.mark.usefixtures("one_thread")

BIASED = (LlamaConfig, {"attention_bias": True, "mlp_bias": True})
KEEPS = {
    "the head": (r"lm_head\.",),
    "nothing": (),
    "all but k_proj": (r"^(?!.*\.k_proj\.).*",),
    "all but gate_proj": (r"^(?!.*\.gate_proj\.).*",),
    "q_proj": (r"lm_head\.", r"\.q_proj\."),
    "the first layer": (r"lm_head\.", r"layers\.0\."),
    "up_proj and v_proj": (r"lm_head\.", r"up_proj", r"v_proj"),
}


def send(engine: TorchEngine, policy: Policy, format_name: str, keep: tuple[str, ...], version: int, **options) -> None:
    fmt = None if format_name == "none" else get_format(format_name, engine.weight_max_code(format_name))
    names = units(policy.model, keep) if fmt else {}
    parameters = options.pop("parameters", policy.model.named_parameters)()
    load_into(engine, parameters, fmt, quantized=names, tied=tied_head(policy.model), version=version, **options)


def assert_held(engine: TorchEngine, policy: Policy, format_name: str, keep: tuple[str, ...]) -> None:
    """Each tensor is what quantizing the parameter alone gives, or the parameter."""
    names = units(policy.model, keep) if format_name != "none" else {}
    for name, parameter in policy.model.named_parameters():
        found = engine.resident(name)
        if name in names:
            q = quantize(parameter, get_format(format_name, engine.weight_max_code(format_name)))
            np.testing.assert_array_equal(found[0], q.codes.view(torch.uint8).numpy())
            np.testing.assert_array_equal(found[1], q.scale.numpy())
        else:
            assert len(found) == 1
            np.testing.assert_array_equal(found[0], parameter.numpy())


def through_codes(policy: Policy, format_name: str, keep: tuple[str, ...], max_code: int):
    """A learner's model, made here from nothing but the quantizer and the reference of the linear; and back."""
    replaced = {}
    for name in [unit.module for unit in units(policy.model, keep).values()] if format_name != "none" else []:
        linear = replaced[name] = policy.model.get_submodule(name)
        q = quantize(linear.weight, get_format(format_name, max_code))
        policy.model.set_submodule(name, QuantizedLinear(q, linear.bias, emulate=True))
    return replaced


def assert_generates(engine: TorchEngine, policy: Policy, format_name: str, keep: tuple[str, ...], version: int):
    requests = random_requests(4, seed=version)
    completions = engine.generate(requests, version=version)
    replaced = through_codes(policy, format_name, keep, engine.weight_max_code(format_name))
    for completion, expected in zip(completions, learned(policy.model, requests, completions), strict=True):
        np.testing.assert_array_equal(completion.logprobs, expected)
    for name, linear in replaced.items():
        policy.model.set_submodule(name, linear)


def moved(policy: Policy, seed: int) -> None:
    """Another version of all parameters, biases included."""
    noise = torch.Generator().manual_seed(seed)
    for parameter in policy.model.parameters():
        parameter.add_(0.05 * torch.randn(parameter.shape, generator=noise))


@pytest.fixture
def biased(tmp_path) -> Policy:
    return policy_of(*BIASED, tmp_path)


@pytest.mark.sampled(3)
@pytest.mark.equal_bits
@pytest.mark.parametrize("kernel", ["auto", "emulation"])
@pytest.mark.parametrize("keep", KEEPS)
def test_each_tensor_is_held_as_it_was_sent_and_computed_with(biased, keep, kernel):
    engine = TorchEngine(biased.spec, slots=4, kernel=kernel)
    for version, format_name in enumerate(("int8", "fp8_block"), start=1):
        send(engine, biased, format_name, KEEPS[keep], version)
        assert_held(engine, biased, format_name, KEEPS[keep])
        assert_generates(engine, biased, format_name, KEEPS[keep], version)


@pytest.mark.equal_bits
def test_formats_and_selections_follow_each_other_in_any_order(biased):
    engine = TorchEngine(biased.spec, slots=4)
    forms = [("none", ()), *itertools.product(("int8", "fp8"), (KEEPS["the head"], KEEPS["all but k_proj"]))]
    visited = [form for pair in itertools.permutations(forms, 2) for form in pair]
    for version, (format_name, keep) in enumerate(visited):
        moved(biased, version)
        send(engine, biased, format_name, keep, version)
        assert_held(engine, biased, format_name, keep)
        if version % 7 == 0:
            assert_generates(engine, biased, format_name, keep, version)


@pytest.mark.equal_bits
@pytest.mark.parametrize("order", ["forward", "backward", "shuffled"])
def test_neither_the_order_of_tensors_nor_the_buckets_matter(tmp_path, order):
    policy = policy_of(Qwen2Config, {}, tmp_path)
    engine = TorchEngine(policy.spec, slots=4)
    fmt = get_format("int8", engine.weight_max_code("int8"))
    for version in (1, 2):
        moved(policy, version)
        parameters = list(policy.model.named_parameters())
        if order == "backward":
            parameters.reverse()
        elif order == "shuffled":
            np.random.default_rng(version).shuffle(parameters)
        publisher = Publisher(units(policy.model, KEEPS["the head"]), bucket_bytes=1)
        buckets = list(publisher.prepare(parameters, fmt, version=version))
        manifest = assemble_manifest(version, fmt, [bucket.records for bucket in buckets])
        engine.load(manifest, decode_buckets((bucket.payloads for bucket in buckets), manifest, engine.resident))
        assert len(buckets) == len(parameters)
        assert_held(engine, policy, "int8", KEEPS["the head"])
        assert_generates(engine, policy, "int8", KEEPS["the head"], version)


@pytest.mark.parametrize("format_name", ["none", "int8", "fp8"])
def test_deltas_are_added_to_the_rows_of_fused_linears(biased, format_name):
    engine = TorchEngine(biased.spec, slots=4)
    fmt = None if format_name == "none" else get_format(format_name, engine.weight_max_code(format_name))
    publisher = Publisher(units(biased.model, KEEPS["the head"]), bucket_bytes=4096)
    for version in (1, 2, 3):
        base = version - 1 or None
        parameters = list(biased.model.named_parameters())
        buckets = list(publisher.prepare(parameters, fmt, version=version, base_version=base))
        manifest = assemble_manifest(version, fmt, [bucket.records for bucket in buckets])
        assert manifest.base_version == base
        engine.load(manifest, decode_buckets((bucket.payloads for bucket in buckets), manifest, engine.resident))
        assert_held(engine, biased, format_name, KEEPS["the head"])
        for _, parameter in parameters:
            parameter.view(-1)[version::37] *= 1.02


def test_linears_of_one_input_are_one_product_only_where_all_are_quantized(biased):
    engine = TorchEngine(biased.spec, slots=4)
    for version, keep in enumerate((KEEPS["the head"], KEEPS["q_proj"])):
        send(engine, biased, "int8", keep, version)
        fused = {name.split(".")[-1] for name, m in engine._model.named_modules() if isinstance(m, RowsOf)}
        if not engine.kernels()[0].startswith("emulation"):
            assert fused == ({"q_proj", "k_proj", "v_proj"} if version == 0 else set()) | {"gate_proj", "up_proj"}


@pytest.mark.equal_bits
def test_a_tied_head_is_codes_beside_its_embedding_and_is_tied_again_in_full_precision(tmp_path):
    policy = policy_of(Qwen2Config, {"tie_word_embeddings": True}, tmp_path)
    engine = TorchEngine(policy.spec, slots=4)
    embedding = "model.embed_tokens.weight"
    for version, (format_name, keep) in enumerate(
        [("int8", ()), ("none", ()), ("fp8", ()), ("int8", (r"lm_head\.",)), ("int8", ()), ("none", ())]
    ):
        moved(policy, version)
        send(engine, policy, format_name, keep, version)
        assert_held(engine, policy, format_name, (*keep, r"lm_head\."))
        np.testing.assert_array_equal(engine.resident(embedding)[0], policy.model.get_input_embeddings().weight.numpy())
        head = engine.resident(HEAD)
        if format_name == "none" or keep:
            np.testing.assert_array_equal(head[0], engine.resident(embedding)[0])
            assert engine._model.get_output_embeddings().weight is engine._model.get_input_embeddings().weight
        else:
            q = quantize(policy.model.get_input_embeddings().weight, get_format(format_name))
            codes = q if engine.weight_max_code(format_name) == q.fmt.weight_max else None
            if codes:
                np.testing.assert_array_equal(head[0], q.codes.view(torch.uint8).numpy())
        requests = random_requests(4, seed=version)
        completions = engine.generate(requests, version=version)
        # The quantized head reads the embedding's codes; the embedding itself stays as it is.
        replaced = through_codes(policy, format_name, keep, engine.weight_max_code(format_name))
        for completion, expected in zip(completions, learned(policy.model, requests, completions), strict=True):
            np.testing.assert_array_equal(completion.logprobs, expected)
        for name, linear in replaced.items():
            policy.model.set_submodule(name, linear)


@pytest.mark.equal_bits
@pytest.mark.parametrize("format_name", ["none", "int8", "fp8"])
def test_after_a_load_that_failed_half_way_a_good_one_works(biased, format_name):
    engine = TorchEngine(biased.spec, slots=4)
    keep = KEEPS["the head"]
    send(engine, biased, "int8", keep, 1)
    count = len(list(biased.model.named_parameters()))
    fmt = None if format_name == "none" else get_format(format_name, engine.weight_max_code(format_name))
    for broken in range(1, count, 3):
        moved(biased, broken)
        publisher = Publisher(units(biased.model, keep), bucket_bytes=1)
        buckets = list(publisher.prepare(list(biased.model.named_parameters()), fmt, version=2))
        manifest = assemble_manifest(2, fmt, [bucket.records for bucket in buckets])
        arriving = list(decode_buckets((bucket.payloads for bucket in buckets), manifest, engine.resident))

        def torn(arriving=arriving, broken=broken):
            yield from arriving[:broken]
            raise SyncError("the sender is gone")

        with pytest.raises(SyncError, match="the sender is gone"):
            engine.load(manifest, torn())
        with pytest.raises(SyncError, match="incomplete"):
            engine.load(manifest, arriving[:broken])
        with pytest.raises(StaleWeights):
            engine.generate(random_requests(1), version=2)
        engine.load(manifest, arriving)
        assert_held(engine, biased, format_name, keep)
    assert_generates(engine, biased, format_name, keep, 2)


def one_by_one(policy: Policy, format_name: str, version: int):
    """A manifest, and a version in buckets of one tensor."""
    fmt = None if format_name == "none" else get_format(format_name)
    publisher = Publisher(units(policy.model, KEEPS["the head"]) if fmt else {}, bucket_bytes=1)
    buckets = list(publisher.prepare(policy.model.named_parameters(), fmt, version=version))
    manifest = assemble_manifest(version, fmt, [bucket.records for bucket in buckets])
    return manifest, decode_buckets([bucket.payloads for bucket in buckets], manifest, None)


def test_a_tensor_that_a_later_bucket_puts_back_is_named(biased):
    engine = TorchEngine(biased.spec, slots=4)
    engine.load(*one_by_one(biased, "none", 1))
    held = {name: parameter.clone() for name, parameter in engine._model.named_parameters()}
    moved(biased, 1)

    def put_back(buckets):
        for bucket in buckets:
            for name, parameter in engine._model.named_parameters():
                parameter.data.copy_(held[name])
            yield bucket

    manifest, buckets = one_by_one(biased, "none", 2)
    with pytest.raises(SyncError, match=r"version 2: model\.embed_tokens\.weight is .* in the engine, .* was sent"):
        engine.load(manifest, put_back(buckets))
    with pytest.raises(StaleWeights):
        engine.generate(random_requests(1), version=2)
    engine.load(*one_by_one(biased, "none", 2))
    assert_generates(engine, biased, "none", (), 2)


@pytest.mark.parametrize("format_name", ["none", "int8", "fp8_block"])
def test_buffers_may_be_used_for_other_things_after_a_load(biased, format_name):
    engine = TorchEngine(biased.spec, slots=4)
    manifest, buckets = one_by_one(biased, format_name, 1)
    kept = [{name: tuple(np.array(part) for part in parts) for name, parts in bucket.items()} for bucket in buckets]
    engine.load(manifest, kept)
    for part in (part for bucket in kept for parts in bucket.values() for part in parts):
        part.view(np.uint8)[...] = 0xA5
    assert_held(engine, biased, format_name, KEEPS["the head"])
    assert_generates(engine, biased, format_name, KEEPS["the head"], 1)


def test_a_model_that_lacks_a_linear_of_a_group_is_held_as_well(tmp_path):
    """nemotron has up_proj, and no gate_proj that it could be fused with."""
    policy = policy_of(NemotronConfig, {}, tmp_path)
    engine = TorchEngine(policy.spec, slots=4)
    send(engine, policy, "int8", KEEPS["the head"], 1)
    assert_held(engine, policy, "int8", KEEPS["the head"])


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_a_weight_that_is_no_number_is_refused_before_it_is_sent(biased, value):
    engine = TorchEngine(biased.spec, slots=4)
    send(engine, biased, "int8", KEEPS["the head"], 1)
    biased.model.model.layers[1].self_attn.k_proj.weight[3, 5] = value
    for format_name in ("int8", "fp8", "fp8_block"):
        with pytest.raises(QuantizationError, match="nan or inf"):
            send(engine, biased, format_name, KEEPS["the head"], 2)
    assert engine.version == 1  # nothing arrived


def test_weights_of_another_shape_are_refused(biased, tmp_path):
    other = policy_of(LlamaConfig, BIASED[1] | {"intermediate_size": 256}, tmp_path / "other")
    for format_name in ("none", "int8"):
        engine = TorchEngine(biased.spec, slots=4)
        with pytest.raises(SyncError, match=r"mlp\.gate_proj\.weight has shape \(256, 72\), expected \(128, 72\)"):
            send(engine, other, format_name, KEEPS["the head"], 1)
        assert engine.version is None
