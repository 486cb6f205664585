"""Loading and saving policies, and what cannot be used."""

import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    CohereConfig,
    DeepseekV3Config,
    Gemma2Config,
    Gemma3TextConfig,
    GemmaConfig,
    GraniteConfig,
    LlamaConfig,
    LlamaForCausalLM,
    MixtralConfig,
    Qwen2VLConfig,
    Qwen3MoeConfig,
)

from qurl_ray.errors import ConfigError
from qurl_ray.policy.load import context_length, empty_model, load_model, load_tokenizer, stop_ids
from qurl_ray.policy.save import save_policy
from qurl_ray.types import PolicySpec


def test_a_saved_policy_loads_as_what_it_was(model, tokenizer, tmp_path):
    before = model(input_ids=torch.arange(10)[None]).logits
    for _ in range(2):  # the second time it replaces the first
        save_policy(model, tokenizer, tmp_path / "policy")
    stock = AutoModelForCausalLM.from_pretrained(tmp_path / "policy")
    torch.testing.assert_close(stock(input_ids=torch.arange(10)[None]).logits, before, rtol=1e-5, atol=1e-5)
    assert [p.name for p in tmp_path.iterdir()] == ["policy"]
    for name, parameter in stock.named_parameters():
        assert torch.equal(parameter, model.get_parameter(name))


def test_a_model_that_cannot_be_found_is_named():
    for use in (load_model, load_tokenizer, empty_model, context_length):
        with pytest.raises(ConfigError, match="model '/no/such' cannot be loaded"):
            use(PolicySpec(source="/no/such"))


def test_the_context_may_be_shortened_and_not_stretched(tiny_spec):
    assert context_length(tiny_spec) == 64
    assert context_length(PolicySpec(source=tiny_spec.source, max_length=32)) == 32
    with pytest.raises(ConfigError, match="max_length=65 exceeds the context"):
        context_length(PolicySpec(source=tiny_spec.source, max_length=65))


def test_settings_of_the_model_can_be_replaced_and_are_saved(tiny_spec, tokenizer, tmp_path):
    longer = PolicySpec(source=tiny_spec.source, overrides={"max_position_embeddings": 99})
    assert context_length(longer) == 99
    save_policy(load_model(longer), tokenizer, tmp_path / "policy")
    assert context_length(PolicySpec(source=str(tmp_path / "policy"))) == 99
    scaled = {"rope_scaling": {"rope_type": "linear", "factor": 2.0}}
    model = empty_model(PolicySpec(source=tiny_spec.source, overrides=scaled))
    assert "linear" in str(model.config.rope_parameters)
    with pytest.raises(ConfigError, match=r"has no setting 'max_position_embedding'; did you mean 'max_position_em"):
        context_length(PolicySpec(source=tiny_spec.source, overrides={"max_position_embedding": 99}))
    with pytest.raises(ConfigError, match=r"num_hidden_layers` \(99\) must be equal"):
        load_model(PolicySpec(source=tiny_spec.source, overrides={"num_hidden_layers": 99}))


def test_stop_ids_are_the_tokenizers_and_the_models(tiny_spec, tokenizer, tmp_path):
    assert stop_ids(tiny_spec, tokenizer) == (tokenizer.eos_token_id,)
    config = LlamaConfig(vocab_size=20, hidden_size=32, num_hidden_layers=1, num_attention_heads=2, eos_token_id=[5, 7])
    LlamaForCausalLM(config).save_pretrained(tmp_path)
    assert stop_ids(PolicySpec(source=str(tmp_path)), tokenizer) == (tokenizer.eos_token_id, 5, 7)


def test_attention_that_the_shared_one_cannot_compute_is_refused(tmp_path):
    config = LlamaConfig(vocab_size=20, hidden_size=32, num_hidden_layers=1, num_attention_heads=2)
    config.attention_dropout = 0.1
    LlamaForCausalLM(config).save_pretrained(tmp_path)
    with pytest.raises(ConfigError, match=r"attention_dropout=0\.1 is not supported"):
        load_model(PolicySpec(source=str(tmp_path)))


SHAPE = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 1,
    "head_dim": 32,  # not hidden_size / heads
    "max_position_embeddings": 64,
}


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (Gemma2Config(**SHAPE), "attn_logit_softcapping is not supported by the shared attention"),
        (Gemma2Config(**SHAPE, attn_logit_softcapping=None), r"final_logit_softcapping=30\.0 is not supported"),
        (GraniteConfig(logits_scaling=8.0), r"logits_scaling=8\.0 is not supported: it changes logits"),
        (CohereConfig(), r"logit_scale=0\.0625 is not supported"),
    ],
)
def test_models_whose_logits_are_not_their_heads_output_are_refused(tmp_path, config, message):
    config.save_pretrained(tmp_path)
    for use in (load_model, empty_model, context_length):
        with pytest.raises(ConfigError, match=message):
            use(PolicySpec(source=str(tmp_path)))


def test_a_granite_without_scaling_is_no_exception(tmp_path):
    GraniteConfig(logits_scaling=1.0, max_position_embeddings=77).save_pretrained(tmp_path)
    assert context_length(PolicySpec(source=str(tmp_path))) == 77


MIXED = {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 8, "query_pre_attn_scalar": 64}


@pytest.mark.parametrize(("kind", "own"), [(GemmaConfig, {}), (Gemma3TextConfig, MIXED)])
def test_gemma_computes_what_transformers_computes(tmp_path, tokenizer, kind, own):
    torch.manual_seed(0)
    config = kind(**SHAPE, **own, vocab_size=40, pad_token_id=0, bos_token_id=0, eos_token_id=1)
    stock = AutoModelForCausalLM.from_config(config, attn_implementation="sdpa").requires_grad_(False)
    for parameter in stock.parameters():
        parameter.add_(0.1 * torch.randn(parameter.shape))
    save_policy(stock, tokenizer, tmp_path / "policy")
    loaded = load_model(PolicySpec(source=str(tmp_path / "policy"))).requires_grad_(False)
    ids = torch.randint(2, 40, (2, 48))
    expected = stock(input_ids=ids).logits
    assert (loaded(input_ids=ids).logits - expected).abs().max() < 1e-5 * expected.abs().max()


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (MixtralConfig(num_local_experts=8, router_jitter_noise=0.1), "router_jitter_noise=0.1 is not supported"),
        (Qwen3MoeConfig(num_experts=4), "num_experts_per_tok=8, and there are 4 experts"),
        (
            DeepseekV3Config(n_routed_experts=16),
            "model_type=deepseek_v3 is a mixture of experts that is not known here",
        ),
        (Qwen2VLConfig(), "is a multimodal model, which is not supported: use a text-only model"),
    ],
    ids=lambda value: type(value).__name__,
)
def test_models_of_other_kinds_are_refused_by_name(tmp_path, config, message):
    config.save_pretrained(tmp_path)
    for use in (load_model, empty_model, context_length):
        with pytest.raises(ConfigError, match=message):
            use(PolicySpec(source=str(tmp_path)))


def test_one_expert_is_a_dense_model(tmp_path):
    config = MixtralConfig(num_local_experts=1, max_position_embeddings=77)
    config.save_pretrained(tmp_path)
    assert context_length(PolicySpec(source=str(tmp_path))) == 77


def test_a_folder_without_a_model_is_called_that(tmp_path):
    with pytest.raises(ConfigError, match=r"has no config\.json, so it is no folder of a model"):
        load_model(PolicySpec(source=str(tmp_path)))


@pytest.mark.parametrize("beside_a_model", [False, True])
def test_an_adapter_is_no_base_model(tmp_path, model, beside_a_model):
    if beside_a_model:
        model.save_pretrained(tmp_path)
    (tmp_path / "adapter_config.json").write_text('{"peft_type": "LORA", "base_model_name_or_path": "/no/such"}')
    for use in (load_model, empty_model):
        with pytest.raises(ConfigError, match="is a LoRA adapter: give its base model"):
            use(PolicySpec(source=str(tmp_path)))
