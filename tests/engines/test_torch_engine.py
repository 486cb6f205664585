"""The engine: exact agreement with the learner, independence of the batch, verified weights, continuous batching."""

import json
import shutil

import numpy as np
import pytest
import torch

from qurl_ray.engines.torch import engine as torch_engine
from qurl_ray.engines.torch.engine import TorchEngine
from qurl_ray.errors import EngineError, QuantizationError, StaleWeights, SyncError
from qurl_ray.numerics import products
from qurl_ray.policy.load import load_tokenizer, stop_ids
from qurl_ray.policy.logprobs import token_logprobs
from qurl_ray.quant.fingerprint import fingerprint
from qurl_ray.quant.formats import get_format
from qurl_ray.quant.kernels import kernel_for
from qurl_ray.quant.linear import QuantizedLinear
from qurl_ray.quant.quantize import quantize
from qurl_ray.quant.units import units
from qurl_ray.types import Manifest, PolicySpec, TensorRecord
from tests.conftest import arrays_of, requests_for, taken
from tests.engines.damage import dropped, swapped, transposed

KEEP = (r"lm_head\.",)
FORMATS = ["none", "int8", "fp8", "fp8_block", "int4", "nvfp4", "nvfp4_w4a4", "mxfp4", "mxfp8"]


def weights_of(model, format_name: str, version: int = 1, keep=KEEP):
    """(manifest, buckets) of a policy, as a sender makes them."""
    fmt = None if format_name == "none" else taken(format_name)
    names = units(model, keep) if fmt else {}
    buffers, records = {}, []
    for name, parameter in model.named_parameters():
        if name in names:
            q = quantize(parameter, fmt)
            tensors, buffers[name] = q.parts, arrays_of(q)
        else:
            tensors = (parameter.detach().clone(),)
            buffers[name] = (tensors[0].numpy(),)
        record = TensorRecord(
            name=name,
            shape=tuple(parameter.shape),
            format=format_name if name in names else "none",
            fingerprint=fingerprint(*tensors),
            bytes=sum(tensor.nbytes for tensor in tensors),
        )
        records.append(record)
    manifest = Manifest(
        version=version,
        precision=format_name,
        weight_max_code=fmt.weight_max if fmt else 0,
        tensors=tuple(records),
    )
    return manifest, [buffers]


def engine_with(spec, model, format_name: str, *, slots: int = 64, kernel: str = "auto") -> TorchEngine:
    engine = TorchEngine(spec, slots=slots, kernel=kernel)
    engine.load(*weights_of(model, format_name))
    return engine


@pytest.mark.equal_bits
@pytest.mark.parametrize("kv_cache", ["full", "fp8"])
@pytest.mark.parametrize("format_name", FORMATS)
def test_scored_answers_have_the_log_probs_with_which_they_were_drawn(
    tiny_spec, model, tokenizer, monkeypatch, format_name, kv_cache
):
    engine = TorchEngine(tiny_spec, slots=8, kv_cache=kv_cache)
    engine.load(*weights_of(model, format_name))
    requests = requests_for(tokenizer, 7, 3, temperature=0.7)
    completions = engine.generate(requests, version=1)
    texts = [(r.prompt_ids, c.token_ids) for r, c in zip(requests, completions, strict=True)]
    for limit in (8192, 30):  # all in one pass, and few at a time
        monkeypatch.setattr(torch_engine, "_PREFILL_TOKENS", limit)
        scored = engine.score(texts, temperature=0.7)
        assert all(np.array_equal(own, c.logprobs) for own, c in zip(scored, completions, strict=True))


def with_quantized_linears(model, format_name: str, keep=KEEP):
    """The learner's model computing through the same codes, by emulation."""
    if format_name == "none":
        return model
    for unit in units(model, keep).values():
        linear = model.get_submodule(unit.module)
        bias = linear.bias.detach() if linear.bias is not None else None
        model.set_submodule(
            unit.module, QuantizedLinear(quantize(linear.weight, taken(format_name)), bias, emulate=True)
        )
    return model


def learner_logprobs(model, requests, completions, temperature: float = 1.0) -> list[np.ndarray]:
    """Teacher-forced log-probs of the answers, all in one padded batch."""
    rows = [np.concatenate([r.prompt_ids, c.token_ids]) for r, c in zip(requests, completions, strict=True)]
    ids = torch.zeros(len(rows), max(map(len, rows)), dtype=torch.int64)
    mask = torch.zeros(ids.shape, dtype=torch.bool)
    for i, (row, request) in enumerate(zip(rows, requests, strict=True)):
        ids[i, : len(row)] = torch.from_numpy(row)
        mask[i, len(request.prompt_ids) : len(row)] = True
    with torch.no_grad():
        logprobs = token_logprobs(model, ids, mask, temperature)
    return [logprobs[i][mask[i]].numpy() for i in range(len(rows))]


def assert_same(found, expected):
    for one, other in zip(found, expected, strict=True):
        assert one.uid == other.uid
        np.testing.assert_array_equal(one.token_ids, other.token_ids)
        np.testing.assert_array_equal(one.logprobs, other.logprobs)


@pytest.mark.sampled(5)
@pytest.mark.equal_bits
@pytest.mark.parametrize("temperature", [1.0, 0.7])
@pytest.mark.parametrize("kernel", ["auto", "emulation"])
@pytest.mark.parametrize("format_name", FORMATS)
def test_engine_and_learner_agree_to_the_bit(tiny_spec, tokenizer, model, format_name, kernel, temperature):
    requests = requests_for(tokenizer, 30, 3, temperature=temperature, max_new_tokens=40, ignore_eos=True)
    completions = engine_with(tiny_spec, model, format_name, kernel=kernel).generate(requests, version=1)
    expected = learner_logprobs(with_quantized_linears(model, format_name), requests, completions, temperature)
    assert np.unique(np.concatenate([c.token_ids for c in completions])).size > 10
    for completion, logprobs in zip(completions, expected, strict=True):
        np.testing.assert_array_equal(completion.logprobs, logprobs)


def test_int8_does_not_sample_from_the_full_precision_distribution(tiny_spec, tokenizer, model):
    requests = requests_for(tokenizer, 10, 2)
    quantized = engine_with(tiny_spec, model, "int8").generate(requests, version=1)
    full = learner_logprobs(model, requests, quantized)
    assert any((c.logprobs != lp).any() for c, lp in zip(quantized, full, strict=True))


@pytest.mark.sampled(3)
@pytest.mark.equal_bits
@pytest.mark.parametrize("format_name", FORMATS)
def test_slots_order_and_company_change_nothing(tiny_spec, tokenizer, model, format_name):
    requests = requests_for(tokenizer, 20, 3, max_new_tokens=12)
    expected = engine_with(tiny_spec, model, format_name).generate(requests, version=1)
    few_slots = engine_with(tiny_spec, model, format_name, slots=3)
    assert_same(few_slots.generate(requests, version=1), expected)
    backwards = few_slots.generate(requests[::-1], version=1)[::-1]
    assert_same(backwards, expected)
    assert_same(few_slots.generate(requests[7:8], version=1), expected[7:8])


def test_answers_end_where_they_should(tiny_spec, tokenizer, model):
    engine = engine_with(tiny_spec, model, "none", slots=8)
    stop = tokenizer.eos_token_id
    free = engine.generate(requests_for(tokenizer, 40, 2, max_new_tokens=30), version=1)
    for c in free:
        stops = np.flatnonzero(c.token_ids == stop)
        assert c.finish == ("stop" if len(stops) else "length")
        assert len(c.token_ids) == (stops[0] + 1 if len(stops) else 30)
    assert len({len(c.token_ids) for c in free}) > 3
    exact = engine.generate(requests_for(tokenizer, 40, 2, max_new_tokens=11, ignore_eos=True), version=1)
    assert {len(c.token_ids) for c in exact} == {11}
    assert any(stop in c.token_ids[:-1] for c in exact)


def test_answers_end_at_every_token_that_the_files_of_a_policy_list(tiny_spec, tokenizer, model, tmp_path):
    ends = ends_of(tiny_spec, tmp_path, [1, 5, 7])
    engine = engine_with(tiny_spec, model, "none", slots=8)
    assert_ended(engine.generate(requests_for(tokenizer, 40, 2, max_new_tokens=30, stop_ids=ends), version=1))


def ends_of(spec, tmp_path, listed) -> tuple[int, ...]:
    """The tokens that end an answer of the same policy, if generation_config.json lists these."""
    folder = shutil.copytree(spec.source, tmp_path / "policy")
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": listed}))
    return stop_ids(PolicySpec(source=str(folder)), load_tokenizer(spec))


def assert_ended(completions, ends=(1, 5, 7)):
    """Each answer ends at the first of these tokens, and each of them ends one."""
    for completion in completions:
        at = np.flatnonzero(np.isin(completion.token_ids, ends))
        assert completion.finish == ("stop" if len(at) else "length")
        assert len(completion.token_ids) == (at[0] + 1 if len(at) else 30)
    assert {int(c.token_ids[-1]) for c in completions if c.finish == "stop"} == set(ends)


@pytest.mark.equal_bits
def test_requests_with_different_sampling_share_a_batch(tiny_spec, tokenizer, model):
    engine = engine_with(tiny_spec, model, "none")
    drawn = requests_for(tokenizer, 6, 2, max_new_tokens=9)
    greedy = requests_for(tokenizer, 6, 2, temperature=0.0, max_new_tokens=4)
    mixed = [request for pair in zip(drawn, greedy, strict=True) for request in pair]
    together = engine.generate(mixed, version=1)
    assert_same(together[::2], engine.generate(drawn, version=1))
    assert_same(together[1::2], engine.generate(greedy, version=1))


def test_greedy_agrees_with_transformers_generate(tiny_spec, tokenizer, model):
    requests = requests_for(tokenizer, 5, 1, temperature=0.0, max_new_tokens=10, ignore_eos=True)
    completions = engine_with(tiny_spec, model, "none").generate(requests, version=1)
    from transformers import AutoModelForCausalLM

    reference = AutoModelForCausalLM.from_pretrained(tiny_spec.source, attn_implementation="sdpa").eval()
    reference.load_state_dict(model.state_dict())
    for request, completion in zip(requests, completions, strict=True):
        ids = torch.from_numpy(request.prompt_ids).long()[None]
        out = reference.generate(
            ids, attention_mask=torch.ones_like(ids), max_new_tokens=10, do_sample=False, eos_token_id=-1
        )
        assert out[0, ids.shape[1] :].tolist() == completion.token_ids.tolist()


def test_precision_changes_in_place_and_back(tiny_spec, tokenizer, model):
    requests = requests_for(tokenizer, 8, 2)
    engine = engine_with(tiny_spec, model, "none")
    full = engine.generate(requests, version=1)
    for version, name in ((2, "int8"), (3, "fp8"), (4, "int4"), (5, "none")):
        engine.load(*weights_of(model, name, version))
        last = engine.generate(requests, version=version)
    for one, other in zip(last, full, strict=True):
        np.testing.assert_array_equal(one.logprobs, other.logprobs)
    assert engine.kernels() == []


def test_nothing_is_generated_without_the_right_weights(tiny_spec, tokenizer, model):
    engine = TorchEngine(tiny_spec, slots=4)
    with pytest.raises(StaleWeights, match="holds unverified weights, caller wants 1"):
        engine.generate(requests_for(tokenizer, 1, 1), version=1)
    engine.load(*weights_of(model, "int8"))
    with pytest.raises(StaleWeights, match="holds weights 1, caller wants 2"):
        engine.generate(requests_for(tokenizer, 1, 1), version=2)


def flipped(buffers):
    name = next(name for name, parts in buffers.items() if len(parts) == 2)
    codes = buffers[name][0].copy()
    codes[3, 5] ^= 1
    return buffers | {name: (codes, buffers[name][1])}


def rescaled(buffers):
    name = next(name for name, parts in buffers.items() if len(parts) == 2)
    codes, scale = buffers[name]
    return buffers | {name: (codes, np.nextafter(scale, np.float32(np.inf)))}


def stale_bias(buffers):
    name = next(n for n in buffers if n.endswith("k_proj.bias"))
    return buffers | {name: (buffers[name][0] + np.float32(1e-7),)}


@pytest.mark.parametrize("damage", [flipped, swapped, dropped, transposed, rescaled, stale_bias])
def test_damaged_weights_are_refused_and_leave_the_engine_stale(tiny_spec, tokenizer, model, damage):
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("k_proj.bias"):
                parameter.fill_(0.25)
    engine = engine_with(tiny_spec, model, "int8")
    manifest, (buffers,) = weights_of(model, "int8", version=2)
    with pytest.raises(SyncError, match=r"version 2|expected"):
        engine.load(manifest, [damage(buffers)])
    with pytest.raises(StaleWeights):
        engine.generate(requests_for(tokenizer, 1, 1), version=1)
    engine.load(manifest, [buffers])
    assert engine.generate(requests_for(tokenizer, 1, 1), version=2)


@pytest.mark.parametrize("format_name", ["none", "int8"])
def test_packing_in_mid_answer_changes_no_bit(tiny_spec, tokenizer, model, format_name, monkeypatch):
    requests = requests_for(tokenizer, 4, 2)
    expected = engine_with(tiny_spec, model, format_name).generate(requests, version=1)
    monkeypatch.setattr(torch_engine, "_PACK_CODES_AFTER", 2)
    monkeypatch.setattr(products, "PACK_FLOATS_AFTER", 3)
    engine = engine_with(tiny_spec, model, format_name)
    name = "model.layers.0.mlp.up_proj.weight"
    before = engine.resident(name)
    found = engine.generate(requests, version=1)
    assert all(linear._kernel is linear._fastest for linear in linears_of(engine))
    assert all(np.array_equal(a.logprobs, b.logprobs) for a, b in zip(found, expected, strict=True))
    assert all(np.array_equal(a, b) for a, b in zip(engine.resident(name), before, strict=True))
    engine.load(*weights_of(model, format_name, version=2))
    assert all(linear._kernel is QuantizedLinear(linear.resident(), None)._kernel for linear in linears_of(engine)), (
        "a new version is not packed"
    )


@pytest.mark.parametrize("format_name", ["none", "int8"])
def test_an_engine_whose_weights_do_not_survive_packing_is_stale(tiny_spec, tokenizer, model, format_name, monkeypatch):
    def fails(*_) -> None:
        raise StaleWeights("others")

    engine = engine_with(tiny_spec, model, format_name)
    if format_name == "int8":
        monkeypatch.setattr(torch_engine, "_PACK_CODES_AFTER", 2)
        monkeypatch.setattr(QuantizedLinear, "pack", fails)
    else:
        engine._head = fails
    with pytest.raises(StaleWeights, match="others"):
        engine.generate(requests_for(tokenizer, 4, 2), version=1)
    with pytest.raises(StaleWeights, match="unverified weights"):
        engine.generate(requests_for(tokenizer, 4, 2), version=1)


def linears_of(engine):
    return [m for m in engine._model.modules() if isinstance(m, QuantizedLinear) and m.kernel]


def test_a_request_beyond_the_context_is_an_error_that_names_it(tiny_spec, tokenizer, model):
    engine = engine_with(tiny_spec, model, "none")
    with pytest.raises(EngineError, match=r"0\+0/0: 4 prompt \+ 61 new tokens do not fit the context of 64"):
        engine.generate(requests_for(tokenizer, 1, 1, max_new_tokens=61), version=1)


def test_the_kernel_in_use_is_announced(tiny_spec, model):
    int8 = engine_with(tiny_spec, model, "int8").kernels()
    kernel = kernel_for(get_format("int8"), torch.device("cpu"))
    assert int8 == [kernel.name if kernel else "emulation of int8"]
    assert engine_with(tiny_spec, model, "int8", kernel="emulation").kernels() == ["emulation of int8"]
    for name in ("int4", "fp8"):
        assert engine_with(tiny_spec, model, name).kernels() == [f"emulation of {name}"]


def test_an_unknown_format_is_an_error():
    with pytest.raises(
        QuantizationError,
        match="unknown format 'int9'; known: int8, fp8, fp8_block, int4, nvfp4, mxfp4, mxfp8, nvfp4_w4a4",
    ):
        get_format("int9")
