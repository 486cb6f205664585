"""The engine's own forward is transformers' to the bit, and models that compute anything else are left to those."""

from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    CohereConfig,
    Gemma2Config,
    GemmaConfig,
    GraniteConfig,
    LlamaConfig,
    MistralConfig,
    MixtralConfig,
    Olmo2Config,
    Phi3Config,
    PreTrainedConfig,
    PreTrainedModel,
    Qwen2Config,
    Qwen3Config,
    Qwen3MoeConfig,
    SmolLM3Config,
)

from qurl_ray.engines.torch.decoder import knows
from qurl_ray.engines.torch.engine import TorchEngine
from qurl_ray.engines.torch.weights import RowsOf
from qurl_ray.policy.load import empty_model, tied_head
from qurl_ray.policy.logprobs import token_logprobs
from qurl_ray.quant.formats import get_format
from qurl_ray.quant.linear import QuantizedLinear
from qurl_ray.quant.quantize import quantize
from qurl_ray.quant.units import units
from qurl_ray.types import Completion, PolicySpec, Request, SamplingParams
from qurl_ray.weights.local import load_into

pytestmark = pytest.mark.usefixtures("one_thread")

KEEP = (r"lm_head\.",)
SMALL = {
    "vocab_size": 131,
    "hidden_size": 72,
    "intermediate_size": 128,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 96,
    "rms_norm_eps": 1e-3,
    "pad_token_id": None,
    "bos_token_id": None,
    "eos_token_id": None,
    "tie_word_embeddings": False,
}


def rope(kind: str, **values: Any) -> dict:
    return {"rope_parameters": {"rope_type": kind, "rope_theta": 500.0} | values}


LLAMA3 = {
    "factor": 4.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 24,
}
YARN = {"factor": 4.0, "original_max_position_embeddings": 24}
# Heads of at least 14: torch multiplies smaller ones of one token by another kernel than those of several.
HEADS = {"multi-head": (4, 4), "grouped": (6, 2), "multi-query": (4, 1), "one head": (1, 1)}

KNOWN: dict[str, tuple[type[PreTrainedConfig], dict]] = {
    "llama": (LlamaConfig, {}),
    "llama, tied": (LlamaConfig, {"tie_word_embeddings": True}),
    "llama with biases": (LlamaConfig, {"attention_bias": True, "mlp_bias": True}),
    "llama with biases in attention": (LlamaConfig, {"attention_bias": True}),
    "llama with biases in the mlp": (LlamaConfig, {"mlp_bias": True}),
    "llama with wide heads": (LlamaConfig, {"head_dim": 20}),
    "llama, odd widths": (LlamaConfig, {"hidden_size": 36, "intermediate_size": 64, "head_dim": 14}),
    "llama, ragged mlp": (LlamaConfig, {"intermediate_size": 80}),
    "llama, pretraining_tp": (LlamaConfig, {"pretraining_tp": 2}),
    "llama, linear rope": (LlamaConfig, rope("linear", factor=2.5)),
    "llama, llama3 rope": (LlamaConfig, rope("llama3", **LLAMA3)),
    "llama, yarn": (LlamaConfig, rope("yarn", **YARN)),
    "llama, dynamic rope": (LlamaConfig, rope("dynamic", factor=2.0)),
    "llama, partial rotary factor": (LlamaConfig, rope("default", partial_rotary_factor=0.5)),
    "llama that names a sliding window": (LlamaConfig, {"sliding_window": 4}),
    "mistral": (MistralConfig, {"sliding_window": None}),
    "mistral with wide heads, tied": (
        MistralConfig,
        {"sliding_window": None, "head_dim": 26, "tie_word_embeddings": True},
    ),
    "qwen2": (Qwen2Config, {}),
    "qwen2, tied": (Qwen2Config, {"tie_word_embeddings": True}),
    "qwen2, yarn": (Qwen2Config, rope("yarn", attention_factor=1.3, **YARN)),
    "qwen2 that names a head_dim": (Qwen2Config, {"head_dim": 22}),
    "qwen2, window of no use": (Qwen2Config, {"sliding_window": 4, "max_window_layers": 1}),
    "qwen3": (Qwen3Config, {"head_dim": 16}),
    "qwen3 with wide heads, tied": (Qwen3Config, {"head_dim": 20, "tie_word_embeddings": True}),
    "qwen3 with biases": (Qwen3Config, {"head_dim": 16, "attention_bias": True}),
} | {
    f"{kind.model_type}, {name}": (kind, {"num_attention_heads": heads, "num_key_value_heads": shared, "head_dim": 16})
    for name, (heads, shared) in HEADS.items()
    for kind in (LlamaConfig, Qwen2Config, Qwen3Config)
}

EXPERTS = {"num_experts_per_tok": 2, "head_dim": 16}
MIXTURES: dict[str, tuple[type[PreTrainedConfig], dict]] = {
    "qwen3_moe": (Qwen3MoeConfig, EXPERTS | {"num_experts": 5, "moe_intermediate_size": 48}),
    "qwen3_moe, some layers dense": (
        Qwen3MoeConfig,
        EXPERTS | {"num_experts": 5, "moe_intermediate_size": 48, "decoder_sparse_step": 2, "norm_topk_prob": True},
    ),
    "mixtral": (MixtralConfig, EXPERTS | {"num_local_experts": 4, "sliding_window": None}),
}

OTHERS: dict[str, tuple[type[PreTrainedConfig], dict]] = {
    "llama, gelu": (LlamaConfig, {"hidden_act": "gelu"}),
    "qwen3, gelu_pytorch_tanh": (Qwen3Config, {"hidden_act": "gelu_pytorch_tanh", "head_dim": 16}),
    "mistral with a window": (MistralConfig, {"sliding_window": 5}),
    "qwen2 with windows": (
        Qwen2Config,
        {"use_sliding_window": True, "sliding_window": 5, "max_window_layers": 1},
    ),
    "qwen3 with windows": (
        Qwen3Config,
        {"use_sliding_window": True, "sliding_window": 5, "max_window_layers": 0, "head_dim": 16},
    ),
    "gemma": (GemmaConfig, {"head_dim": 16}),
    "gemma2": (
        Gemma2Config,
        {"head_dim": 16, "attn_logit_softcapping": None, "final_logit_softcapping": None, "sliding_window": 5},
    ),
    "phi3": (Phi3Config, {"original_max_position_embeddings": 96}),
    "granite": (
        GraniteConfig,
        {"embedding_multiplier": 3.0, "residual_multiplier": 0.5, "attention_multiplier": 0.2, "logits_scaling": 1.0},
    ),
    "olmo2": (Olmo2Config, {}),
    "smollm3": (SmolLM3Config, {"no_rope_layers": [1, 0, 1]}),
    "cohere": (CohereConfig, {"logit_scale": 1.0}),
}


@dataclass(frozen=True)
class Policy:
    spec: PolicySpec
    model: PreTrainedModel


def policy_of(kind: type[PreTrainedConfig], options: dict, folder) -> Policy:
    """Random weights of which each matters: norms far from 1, biases from 0, logits from each other."""
    values = {name: value for name, value in SMALL.items() if not (name == "rms_norm_eps" and kind is CohereConfig)}
    kind(**values | options).save_pretrained(folder)
    spec = PolicySpec(source=str(folder))
    model = empty_model(spec).requires_grad_(False)
    noise = torch.Generator().manual_seed(3)
    for name, parameter in model.named_parameters():
        drawn = torch.randn(parameter.shape, generator=noise)
        if parameter.ndim == 1:
            parameter.copy_(0.3 * drawn + (0.0 if name.endswith("bias") else 1.0))
        else:
            parameter.copy_(drawn * (0.5 if "embed" in name or "lm_head" in name else 2 * parameter.shape[1] ** -0.5))
    return Policy(spec, model)


def random_requests(count: int, *, seed: int = 0, **sampling: Any) -> list[Request]:
    """Prompts of 1 to 40 tokens, some of them twice, and answers of 1 to 18."""
    rng = np.random.default_rng(seed)
    prompts = [rng.integers(0, 131, size=rng.integers(1, 41), dtype=np.int32) for _ in range(count)]
    prompts = [prompts[i // 2 if i % 3 == 0 else i] for i in range(count)]
    return [
        Request(
            uid=f"r/{i}",
            prompt_ids=prompt,
            seed=int(rng.integers(2**63)),
            sampling=SamplingParams(**{"max_new_tokens": int(rng.integers(1, 19)), "ignore_eos": True} | sampling),
        )
        for i, prompt in enumerate(prompts)
    ]


def loaded(policy: Policy, format_name: str, *, slots: int = 5, **options: Any) -> TorchEngine:
    engine = TorchEngine(policy.spec, slots=slots, **options)
    fmt = None if format_name == "none" else get_format(format_name, engine.weight_max_code(format_name))
    names = units(policy.model, KEEP)
    load_into(engine, policy.model.named_parameters(), fmt, quantized=names, tied=tied_head(policy.model))
    return engine


def through_codes(policy: Policy, format_name: str, max_code: int) -> PreTrainedModel:
    """What a learner computes with: transformers' modules, each linear the float32 reference of the same codes."""
    if format_name != "none":
        for unit in units(policy.model, KEEP).values():
            linear = policy.model.get_submodule(unit.module)
            q = quantize(linear.weight, get_format(format_name, max_code))
            policy.model.set_submodule(unit.module, QuantizedLinear(q, linear.bias, emulate=True))
    return policy.model


def learned(model: PreTrainedModel, requests: list[Request], completions: list[Completion]) -> list[np.ndarray]:
    """Teacher-forced log-probs of the answers, by one forward over the whole padded batch, without any cache."""
    rows = [np.concatenate([r.prompt_ids, c.token_ids]) for r, c in zip(requests, completions, strict=True)]
    ids = torch.zeros(len(rows), max(map(len, rows)), dtype=torch.int64)
    mask = torch.zeros(ids.shape, dtype=torch.bool)
    for i, (row, request) in enumerate(zip(rows, requests, strict=True)):
        ids[i, : len(row)] = torch.from_numpy(row)
        mask[i, len(request.prompt_ids) : len(row)] = True
    with torch.no_grad():
        found = token_logprobs(model, ids, mask, 1.0)
    return [row[chosen].numpy() for row, chosen in zip(found, mask, strict=True)]


def watched(engine: TorchEngine, monkeypatch) -> list[torch.Size]:
    """From now on each forward is computed twice, by the decoder and by transformers, and must be the same."""
    shapes: list[torch.Size] = []
    own = engine._forward

    def both(ids, positions, cache):
        states = own(ids, positions, cache)
        decoder, engine._decoder = engine._decoder, None
        theirs = own(ids, positions, cache)  # stores the same keys and values once more
        engine._decoder = decoder
        assert torch.equal(states, theirs)
        shapes.append(ids.shape)
        return states

    monkeypatch.setattr(engine, "_forward", both)
    return shapes


def eager(policy: Policy) -> PreTrainedModel:
    """transformers with its own attention, in float64."""
    model = AutoModelForCausalLM.from_config(policy.model.config, dtype=torch.float64, attn_implementation="eager")
    model.load_state_dict(policy.model.state_dict())
    return model.eval()


def assert_logprobs_of(model: PreTrainedModel, requests: list[Request], completions: list[Completion]) -> None:
    """One sequence at a time through the whole model, as anybody would call it."""
    for request, completion in zip(requests, completions, strict=True):
        ids = torch.from_numpy(np.concatenate([request.prompt_ids, completion.token_ids])).long()
        with torch.no_grad():
            logprobs = model(ids[None]).logits[0].double().log_softmax(-1)
        start = len(request.prompt_ids)
        expected = logprobs[torch.arange(start - 1, len(ids) - 1), ids[start:]]
        np.testing.assert_allclose(completion.logprobs, expected.numpy(), rtol=1e-3, atol=2e-4)


@pytest.mark.sampled(10)
@pytest.mark.parametrize("name", [*KNOWN, *MIXTURES])
def test_every_forward_of_a_known_model_is_that_of_transformers_to_the_bit(name, tmp_path, monkeypatch):
    policy = policy_of(*(KNOWN | MIXTURES)[name], tmp_path)
    assert knows(policy.model)
    requests = random_requests(7)
    for format_name in ("none", "int8", "fp8", "fp8_block"):
        engine = loaded(policy, format_name)
        shapes = watched(engine, monkeypatch)
        engine.generate(requests, version=1)
        assert {len(shape) for shape in shapes} == {2}
        assert any(shape[1] > 1 for shape in shapes)
        assert sum(shape[1] == 1 for shape in shapes) > 12


@pytest.mark.sampled(5)
@pytest.mark.parametrize("name", [*KNOWN, *OTHERS])
def test_logprobs_are_those_of_the_model_that_anybody_would_load(name, tmp_path):
    policy = policy_of(*(KNOWN | OTHERS)[name], tmp_path)
    requests = random_requests(7, seed=1)
    completions = loaded(policy, "none").generate(requests, version=1)
    assert len(np.unique(np.concatenate([c.token_ids for c in completions]))) > 10
    assert_logprobs_of(eager(policy), requests, completions)


@pytest.mark.sampled(7)
@pytest.mark.equal_bits
@pytest.mark.parametrize("format_name", ["none", "int8", "fp8_block"])
@pytest.mark.parametrize("name", [*KNOWN, *OTHERS])
def test_logprobs_of_the_engine_are_the_learners_to_the_bit(name, format_name, tmp_path):
    policy = policy_of(*(KNOWN | OTHERS)[name], tmp_path)
    requests = random_requests(9, seed=2)
    engine = loaded(policy, format_name)
    completions = engine.generate(requests, version=1)
    model = through_codes(policy, format_name, engine.weight_max_code(format_name))
    for completion, expected in zip(completions, learned(model, requests, completions), strict=True):
        np.testing.assert_array_equal(completion.logprobs, expected)


@pytest.mark.parametrize("name", OTHERS)
def test_a_model_with_another_forward_is_left_to_transformers(name, tmp_path):
    policy = policy_of(*OTHERS[name], tmp_path)
    assert not knows(policy.model)
    engine = loaded(policy, "int8")
    assert engine._decoder is None
    # Nor are linears fused there, each of which would compute the others as well.
    assert not any(isinstance(module, RowsOf) for module in engine._model.modules())


@pytest.mark.sampled(3)
@pytest.mark.equal_bits
@pytest.mark.parametrize("name", ["llama, odd widths", "qwen2", "qwen3 with wide heads, tied", "mistral with a window"])
def test_slots_change_no_bit_of_any_architecture(name, tmp_path):
    policy = policy_of(*(KNOWN | OTHERS)[name], tmp_path)
    requests = random_requests(12, seed=4)
    for format_name in ("none", "int8"):
        expected = loaded(policy, format_name, slots=12).generate(requests, version=1)
        few = loaded(policy, format_name, slots=3).generate(requests, version=1)
        engine = loaded(policy, format_name, slots=1)
        alone = [engine.generate([request], version=1)[0] for request in requests]
        for one, two, three in zip(expected, few, alone, strict=True):
            np.testing.assert_array_equal(one.token_ids, two.token_ids)
            np.testing.assert_array_equal(one.logprobs, two.logprobs)
            np.testing.assert_array_equal(one.token_ids, three.token_ids)
            np.testing.assert_array_equal(one.logprobs, three.logprobs)
