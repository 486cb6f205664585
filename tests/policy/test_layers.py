"""Which models are taken: those of which each layer is known."""

from types import SimpleNamespace

import pytest
import torch
from transformers import AutoModelForCausalLM, PreTrainedConfig
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from qurl_ray.config import load_config
from qurl_ray.errors import ConfigError
from qurl_ray.policy.attention import NAME, VARLEN, invariant_attention, varlen_attention
from qurl_ray.policy.layers import check_layers, window_of
from qurl_ray.training.driver.prepare import check_model

SHAPE = {
    "vocab_size": 64,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 64,
} | dict.fromkeys(("pad_token_id", "bos_token_id", "eos_token_id"), 0)
FOUR = {"sliding_window": 8, "layer_types": ["sliding_attention"] * 3 + ["full_attention"]}


def outline_of(kind: str, **options):
    config: PreTrainedConfig = CONFIG_MAPPING[kind](**SHAPE | options)
    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(config, attn_implementation=NAME).eval()


TAKEN = {
    "llama": {}, "mistral": {"sliding_window": 8}, "qwen2": {}, "qwen3": {}, "gemma": {}, "gemma3_text": FOUR,
    "olmo2": {}, "olmo3": FOUR, "phi3": {}, "smollm3": {}, "starcoder2": {}, "granite": {"logits_scaling": 1.0},
    "cohere": {"logit_scale": 1.0}, "glm4": {}, "exaone4": FOUR, "ernie4_5": {}, "seed_oss": {},
    "gemma2": FOUR | {"attn_logit_softcapping": None, "final_logit_softcapping": None},
}  # fmt: skip


@pytest.mark.parametrize("kind", TAKEN)
def test_models_of_known_layers_are_taken_as_they_were(kind):
    model = outline_of(kind, **TAKEN[kind])
    check_layers(model, "it")
    assert model.config._attn_implementation == NAME
    assert not any(module._forward_hooks for module in model.modules())


@pytest.mark.parametrize(
    ("kind", "options", "message"),
    [
        ("lfm2", {"layer_types": ["conv", "full_attention"] * 2}, r"layers\.0\.conv\.conv is a Conv1d"),
        ("qwen3_5_text", {}, r"linear_attn is a Qwen3_5GatedDeltaNet, a kind of layer that is not known"),
        ("falcon_h1", {}, "is a FalconH1Mixer"),
        ("recurrent_gemma", {}, "is a Conv1d"),
        ("rwkv", {}, "is a RwkvSelfAttention"),
        ("diffllama", {}, "is a DiffLlamaAttention"),
        ("gpt_oss", {"num_local_experts": 1}, "is a GptOssTopKRouter"),  # one expert is no mixture
        ("gemma2", {"final_logit_softcapping": None}, "layer 0 gives its attention an option .*: softcap"),
        ("gemma2", {"attn_logit_softcapping": None}, "its logits are not the output of its head"),
        ("nanochat", {}, "its logits are not the output of its head"),
        ("gemma3_text", FOUR | {"use_bidirectional_attention": True}, "layer 0 is not causal"),
        ("bloom", {}, "0 calls of the shared attention in 4 layers"),
        ("moshi", {}, "layer 0 has the window None, and its settings have 3000"),
        ("ministral3", {}, "layer 0 does not tell its attention the positions"),
    ],
)
def test_a_model_with_a_layer_that_is_not_known_is_refused_by_its_name(kind, options, message):
    with pytest.raises(ConfigError, match=f"^it: .* is not supported: .*{message}"):
        check_layers(outline_of(kind, **options), "it")


def test_a_kind_of_attention_that_no_option_tells_is_refused_by_the_settings():
    """Llama 4's chunks are a mask, which the shared attention does not get."""
    model = outline_of("llama")
    model.config.layer_types = ["chunked_attention"] * 3 + ["full_attention"]
    with pytest.raises(ConfigError, match="layer 0 is of the kind 'chunked_attention', which is not known here"):
        check_layers(model, "it")


@pytest.mark.parametrize("attention", [invariant_attention, varlen_attention])
def test_the_attention_leaves_out_no_option_that_it_is_given(attention):
    query = torch.zeros(1, 2, 3, 16)
    places = torch.arange(3)[None]
    attention(None, query, query, query, scaling=1.0, position_ids=places, use_cache=False, softcap=None)
    for name in ("softcap", "an option of tomorrow", *(["s_aux"] if attention is varlen_attention else [])):
        with pytest.raises(ValueError, match=f"has no option {name}"):
            attention(None, query, query, query, scaling=1.0, position_ids=places, **{name: 1.0})


@pytest.mark.parametrize(("kind", "options"), [("olmo3", FOUR), ("mistral", {"sliding_window": 8})])
def test_windows_and_a_learner_on_a_gpu_are_refused_before_the_start(kind, options):
    """Unless no sequence is longer."""
    model = outline_of(kind, **options)
    given = ["model.type=pretrained", "model.path=x", "learner.device=cuda", "rollout.quantization=none"]
    with pytest.raises(ConfigError, match=r"no sliding window, and the model has one of 8 tokens: set model\.max_len"):
        check_model(load_config(None, given), model)
    check_model(load_config(None, [*given, "model.max_length=8"]), model)
    check_model(load_config(None, [*given, "learner.device=cpu"]), model)
    assert VARLEN  # whose own refusal would come in the middle of a run


def with_sinks():
    model = outline_of("llama")
    for layer in model.model.layers:
        layer.self_attn.sinks = torch.nn.Parameter(torch.zeros(4, device="meta"))
    return model


def test_sinks_that_the_attention_does_not_get_are_refused():
    with pytest.raises(ConfigError, match="layer 0 has sinks that its attention is not given"):
        check_layers(with_sinks(), "it")


def test_sinks_and_a_learner_on_a_gpu_are_refused_before_the_start():
    given = ["model.type=pretrained", "model.path=x", "rollout.quantization=none"]
    with pytest.raises(ConfigError, match="attention on a GPU has no sinks, and LlamaForCausalLM has some"):
        check_model(load_config(None, [*given, "learner.device=cuda"]), with_sinks())
    check_model(load_config(None, given), with_sinks())


def test_windows_are_those_of_layers_that_have_one():
    assert window_of(CONFIG_MAPPING["qwen2"](use_sliding_window=False, sliding_window=8)) is None
    assert window_of(CONFIG_MAPPING["olmo3"](**SHAPE | FOUR)) == 8
    assert window_of(SimpleNamespace(sliding_window=8, use_sliding_window=False)) is None
    assert window_of(SimpleNamespace(sliding_window=8, layer_types=["full_attention"])) is None
