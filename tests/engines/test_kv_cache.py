"""The FP8 cache: engine, learner and a reference that rounds keys and values by itself agree to the bit."""

import math

import numpy as np
import pytest
import torch
from transformers import AttentionInterface, AutoModelForCausalLM, Gemma2Config, Gemma3TextConfig, Qwen3Config

from qurl_ray.config import load_config
from qurl_ray.config.idle import idle_settings
from qurl_ray.config.learner import LearnerConfig
from qurl_ray.engines.torch.engine import TorchEngine
from qurl_ray.engines.torch.slots import Fp8SlotCache, SlotCache
from qurl_ray.learner.learner import make_learner
from qurl_ray.learner.protocol import EnginePrecision
from qurl_ray.policy.attention import invariant_attention
from qurl_ray.policy.kv import calibration_ids
from qurl_ray.policy.load import load_model
from qurl_ray.quant.units import units
from qurl_ray.training.rank.objectives import objective_settings
from qurl_ray.types import PolicySpec, Request, SamplingParams
from tests.conftest import requests_for, taken
from tests.engines.test_torch_engine import KEEP, assert_same, learner_logprobs, weights_of, with_quantized_linears
from tests.ranks import run_ranks

SHAPE = {
    "vocab_size": 60,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 64,
    "sliding_window": 12,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
OTHERS = {
    "qwen3": Qwen3Config(**SHAPE),
    # Through the forward of transformers; sliding windows in some layers.
    "gemma2": Gemma2Config(**SHAPE, attn_logit_softcapping=None, final_logit_softcapping=None),
    "gemma3": Gemma3TextConfig(**SHAPE),
}


def engine_with(spec, model, format_name="none", *, slots=64, kernel="auto", kv_cache="fp8") -> TorchEngine:
    engine = TorchEngine(spec, slots=slots, kernel=kernel, kv_cache=kv_cache)
    engine.load(*weights_of(model, format_name))
    return engine


class Reference:
    """A model's attention through keys and values that are rounded here, by formulas of this file."""

    def __init__(self, model) -> None:
        self._model, self._seen, self.scales = model, {}, {}
        AttentionInterface.register("reference_cache", self._attention)
        model.set_attn_implementation("reference_cache")
        ids = torch.tensor([calibration_ids(model.config)[:-1]])
        with torch.no_grad():
            model(input_ids=ids, position_ids=torch.arange(ids.shape[1])[None], use_cache=False)
        self.scales = {
            layer: [[self._scale(head) for head in part[0]] for part in parts] for layer, parts in self._seen.items()
        }

    @staticmethod
    def _scale(head) -> float:
        largest = float(head.abs().max())
        return 2.0 ** math.ceil(math.log2(2 * largest / 448)) if largest else 1.0

    def _attention(self, module, query, key, value, attention_mask=None, **options):
        if not self.scales:
            self._seen[module.layer_idx] = key, value
            return invariant_attention(module, query, key, value, attention_mask, **options)
        key, value = (
            torch.stack([self._round(part[:, i], scale) for i, scale in enumerate(scales)], dim=1)
            for part, scales in zip((key, value), self.scales[module.layer_idx], strict=True)
        )
        return invariant_attention(module, query, key, value, attention_mask, **options)

    @staticmethod
    def _round(x, scale):
        """E4M3 by arithmetic: a step is an eighth of the power of two below, at least 2^-9."""
        x = x / scale
        step = torch.exp2(torch.floor(torch.log2(x.abs().clamp(min=2.0**-6))) - 3)
        return ((x / step).round() * step).clamp(-448, 448) * scale


def assert_equal_to_reference(spec, model, requests, format_name="none", kernel="auto"):
    completions = engine_with(spec, model, format_name, kernel=kernel).generate(requests, version=1)
    assert np.unique(np.concatenate([c.token_ids for c in completions])).size > 10
    model = with_quantized_linears(model, format_name)
    Reference(model)
    for completion, logprobs in zip(completions, learner_logprobs(model, requests, completions), strict=True):
        np.testing.assert_array_equal(completion.logprobs, logprobs)


@pytest.mark.equal_bits
@pytest.mark.parametrize(
    ("format_name", "kernel"), [("none", "auto"), ("int8", "auto"), ("int8", "emulation"), ("fp8", "auto")]
)
def test_the_engine_computes_with_rounded_keys_and_values_to_the_bit(tiny_spec, tokenizer, model, format_name, kernel):
    requests = requests_for(tokenizer, 15, 2, max_new_tokens=40, ignore_eos=True)
    assert_equal_to_reference(tiny_spec, model, requests, format_name, kernel)


@pytest.fixture(params=OTHERS)
def other(request, tmp_path):
    """(spec, model) of another architecture, random but far from uniform, with requests for it."""
    model = AutoModelForCausalLM.from_config(OTHERS[request.param], dtype=torch.float32)
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator) * (0.15 if parameter.ndim == 2 else 0.5))
    model.save_pretrained(tmp_path)
    spec = PolicySpec(source=str(tmp_path))
    rng = np.random.default_rng(5)
    requests = [
        Request(
            uid=str(i),
            prompt_ids=rng.integers(3, 60, size=4 + i).astype(np.int32),
            seed=i,
            sampling=SamplingParams(max_new_tokens=30, ignore_eos=True),
        )
        for i in range(12)
    ]
    return spec, load_model(spec), requests


@pytest.mark.equal_bits
@pytest.mark.parametrize("format_name", ["none", "int8"])
def test_other_architectures_round_the_same(other, format_name):
    assert_equal_to_reference(*other, format_name)


@pytest.mark.sampled(3)
@pytest.mark.equal_bits
@pytest.mark.parametrize("format_name", ["none", "int8", "fp8"])
def test_slots_order_and_company_change_nothing(tiny_spec, tokenizer, model, format_name):
    requests = requests_for(tokenizer, 20, 3, max_new_tokens=12)
    expected = engine_with(tiny_spec, model, format_name).generate(requests, version=1)
    few_slots = engine_with(tiny_spec, model, format_name, slots=3)
    assert_same(few_slots.generate(requests, version=1), expected)
    assert_same(few_slots.generate(requests[::-1], version=1)[::-1], expected)
    assert_same(few_slots.generate(requests[7:8], version=1), expected[7:8])


def test_scales_follow_the_weights_from_load_to_load(tiny_spec, tokenizer, model):
    requests = requests_for(tokenizer, 5, 1)
    engine = engine_with(tiny_spec, model)
    before, drawn = engine._kv_scales, engine.generate(requests, version=1)
    with torch.no_grad():
        layer = model.model.layers[1].self_attn
        layer.v_proj.weight.mul_(64)
        layer.o_proj.weight.div_(64)
    engine.load(*weights_of(model, "none", version=2))
    after = engine._kv_scales
    assert torch.equal(after[1].value, 64 * before[1].value)
    assert torch.equal(after[0].value, before[0].value)
    assert torch.equal(after[1].key, before[1].key)
    # Powers of two move through without a trace, as long as the scales move with them.
    for one, other in zip(engine.generate(requests, version=2), drawn, strict=True):
        np.testing.assert_array_equal(one.logprobs, other.logprobs)


def test_a_head_without_values_gets_scale_one(tiny_spec, model):
    with torch.no_grad():
        for name, parameter in model.model.layers[0].self_attn.named_parameters():
            if "v_proj" in name:
                parameter[:32] = 0
    scales = engine_with(tiny_spec, model)._kv_scales
    assert scales[0].value[0] == 1
    assert scales[0].value[1] != 1


SLOTS = {"layers": 2, "slots": 5, "kv_heads": 2, "head_dim": 32, "length": 40}


def test_the_cache_takes_a_quarter_of_the_memory(tiny_spec, tokenizer, model):
    def held(cache):
        return sum(part.nbytes for parts in (cache._keys, cache._values) for part in parts)

    engines = {kind: engine_with(tiny_spec, model, kv_cache=kind) for kind in ("full", "fp8")}
    for engine in engines.values():
        engine.generate(requests_for(tokenizer, 3, 1), version=1)
    assert held(engines["full"]._cache) == 4 * held(engines["fp8"]._cache)
    assert held(SlotCache(**SLOTS)) == 4 * held(Fp8SlotCache({}, **SLOTS))


def test_prompts_are_seen_as_they_are_seen_from_the_cache(tiny_spec, model):
    scales = engine_with(tiny_spec, model)._kv_scales
    cache = Fp8SlotCache(scales, **SLOTS)
    generator = torch.Generator().manual_seed(0)
    draw = lambda length: 99 * torch.randn(1, 2, length, 32, generator=generator)  # some beyond what scales can hold  # noqa: E731
    key, value = draw(9), draw(9)
    cache.prefill(torch.tensor([0]), torch.tensor([0]))
    prompt = cache.update(key, value, 1)
    cache.decode(torch.tensor([9]))
    later = cache.update(draw(1), draw(1), 1)
    for seen, again, scale in zip(prompt, later, (scales[1].key, scales[1].value), strict=True):
        assert torch.equal(seen, again[:, :, :9])
        assert torch.equal(seen.abs().amax(dim=(0, 2, 3)), 448 * scale)  # saturated, not nan
        assert not torch.equal(seen, key)


def test_rounding_costs_little_and_not_nothing(tiny_spec, tokenizer, model):
    ids = torch.tensor([calibration_ids(model.config)[::-1][:50]])
    positions = torch.arange(50)[None]

    def logprobs(of):
        with torch.no_grad():
            return torch.log_softmax(of(input_ids=ids, position_ids=positions, use_cache=False).logits.double(), -1)

    full = logprobs(model)
    Reference(model)
    rounded = logprobs(model)
    kl = float((full.exp() * (full - rounded)).sum(-1).mean())
    assert 1e-7 < kl < 1e-2


def test_the_emulation_is_announced(tiny_spec, model):
    assert engine_with(tiny_spec, model).kernels() == ["emulation of fp8 keys and values"]
    kernels = engine_with(tiny_spec, model, "int8", kernel="emulation").kernels()
    assert kernels == ["emulation of fp8 keys and values", "emulation of int8"]
    assert engine_with(tiny_spec, model, kv_cache="full").kernels() == []


def test_rollouts_with_a_rounded_cache_are_not_called_full_precision():
    settings = ["rollout.quantization=none", "quantization.uaq_scale=1"]
    assert any("full-precision" in sentence for sentence in idle_settings(load_config(None, settings)))
    assert idle_settings(load_config(None, [*settings, "rollout.kv_cache=fp8"])) == idle_settings(load_config(None, []))


# --- the learner ---------------------------------------------------------------------------------------------------


def learner_of(model, **config):
    settings = objective_settings(load_config(None, []))
    return make_learner(model, LearnerConfig(**config), settings, temperature=1.0, total_updates=1)


def codes_of(model, format_name: str, kv_cache="fp8") -> EnginePrecision:
    fmt = None if format_name == "none" else taken(format_name)
    names = units(model, KEEP) if fmt else {}
    return EnginePrecision(fmt=fmt, quantized=names, unquantized="float32", kv_cache=kv_cache)


def of_one_prompt(tokenizer):
    return requests_for(tokenizer, 1, 6, max_new_tokens=20, ignore_eos=True)


@pytest.mark.equal_bits
@pytest.mark.parametrize("packing", [False, True], ids=["padded", "packed"])
@pytest.mark.parametrize("format_name", ["none", "int8", "fp8"])
def test_the_learner_computes_what_the_engine_does_and_is_left_as_it_was(
    tiny_spec, tokenizer, model, format_name, packing
):
    requests = of_one_prompt(tokenizer)
    drawn = engine_with(tiny_spec, model, format_name).generate(requests, version=1)
    learner, prompt = learner_of(model, packing=packing), requests[0].prompt_ids
    full = codes_of(model, format_name, "full")
    unrounded = learner.logprobs(drawn, prompt, full)
    found = learner.logprobs(drawn, prompt, codes_of(model, format_name))
    for completion, logprobs, other in zip(drawn, found, unrounded, strict=True):
        np.testing.assert_array_equal(completion.logprobs, logprobs)
        assert (logprobs != other).any()
    for one, other in zip(learner.logprobs(drawn, prompt, full), unrounded, strict=True):
        np.testing.assert_array_equal(one, other)


@pytest.mark.equal_bits
def test_the_learner_of_another_architecture_computes_what_the_engine_does(other):
    spec, model, requests = other
    drawn = engine_with(spec, model, "int8").generate(requests[:1], version=1)
    (found,) = learner_of(model).logprobs(drawn, requests[0].prompt_ids, codes_of(model, "int8"))
    np.testing.assert_array_equal(drawn[0].logprobs, found)


def test_fused_attention_rounds_as_well(tiny_spec, tokenizer, model):
    requests = of_one_prompt(tokenizer)
    drawn = engine_with(tiny_spec, model).generate(requests, version=1)
    learner, prompt = learner_of(model, packing=True), requests[0].prompt_ids
    model.set_attn_implementation("qurl_varlen")
    gaps = {}
    for kind in ("full", "fp8"):
        found = learner.logprobs(drawn, prompt, codes_of(model, "none", kind))
        gaps[kind] = max(abs(c.logprobs - own).max() for c, own in zip(drawn, found, strict=True))
    assert gaps["fp8"] < 1e-4 < gaps["full"]


def score_sharded(rank: int, ranks: int, spec, drawn, prompt) -> None:
    for backend in ("deepspeed", "fsdp"):
        model = load_model(spec)
        codes = codes_of(model, "int8")
        sharded = learner_of(model, backend=backend, zero_stage=3)
        for _ in range(2):  # the second time, ZeRO knows the order of the modules and fetches ahead
            found = sharded.logprobs(drawn, prompt, codes)
            for completion, logprobs in zip(drawn, found, strict=True):
                np.testing.assert_array_equal(completion.logprobs, logprobs)


@pytest.mark.slow
def test_a_sharded_learner_computes_what_the_engine_does(tiny_spec, tokenizer):
    requests = of_one_prompt(tokenizer)
    drawn = engine_with(tiny_spec, load_model(tiny_spec), "int8").generate(requests, version=1)
    run_ranks(2, score_sharded, tiny_spec, drawn, requests[0].prompt_ids)
