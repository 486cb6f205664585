"""Update-aware quantization: the same function, smaller weights; and what is selected for quantization."""

import pytest
import torch
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM, Qwen3Config, Qwen3ForCausalLM

from qurl_ray.config.models import QuantizationConfig
from qurl_ray.errors import QuantizationError
from qurl_ray.quant.formats import FORMATS
from qurl_ray.quant.quantize import quantize
from qurl_ray.quant.select import quantized_linears
from qurl_ray.quant.uaq import fold, unfold

SHAPE = {
    "vocab_size": 40,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
}
IDS = torch.arange(12)[None]


def llama():
    torch.manual_seed(0)
    return LlamaForCausalLM(LlamaConfig(**SHAPE))


def qwen3():
    torch.manual_seed(0)
    return Qwen3ForCausalLM(Qwen3Config(**SHAPE))


@pytest.fixture(params=["qwen2", "llama", "qwen3"])
def any_model(request, model):
    return {"qwen2": lambda: model, "llama": llama, "qwen3": qwen3}[request.param]().requires_grad_(False)


@pytest.mark.parametrize("layers", ["qkv", "qkv+mlp"])
@pytest.mark.parametrize("scale", [1.5, 2.0])
def test_folding_keeps_the_function(any_model, scale, layers):
    any_model.double()
    before = any_model(input_ids=IDS).logits
    fold(any_model, scale, layers)
    assert (any_model(input_ids=IDS).logits - before).abs().max() < 1e-10 * before.abs().max()


def test_folding_in_float32_stays_within_rounding(any_model):
    before = any_model(input_ids=IDS).logits
    fold(any_model, 1.5)
    assert (any_model(input_ids=IDS).logits - before).abs().max() < 1e-5 * before.abs().max()


def test_fold_divides_what_a_norm_feeds_and_nothing_else(model):
    before = {name: parameter.clone() for name, parameter in model.named_parameters()}
    fold(model, 2.0)
    changed = {name.split(".", 3)[3]: p for name, p in model.named_parameters() if not torch.equal(p, before[name])}
    halved = {f"self_attn.{x}_proj.weight" for x in "qkv"} | {"mlp.gate_proj.weight", "mlp.up_proj.weight"}
    assert set(changed) == halved | {"input_layernorm.weight", "post_attention_layernorm.weight"}
    assert torch.equal(changed["mlp.up_proj.weight"], before["model.layers.1.mlp.up_proj.weight"] / 2)
    fold(model, 0.5)


@pytest.mark.parametrize(("scale", "ulps"), [(2.0, 0), (1.5, 1)])
def test_unfolding_gives_the_weights_back(model, scale, ulps):
    before = {name: parameter.clone() for name, parameter in model.named_parameters()}
    fold(model, scale)
    unfold(model, scale)
    for name, parameter in model.named_parameters():
        distance = (parameter.view(torch.int32) - before[name].view(torch.int32)).abs().max()
        assert int(distance) <= ulps, name


def test_the_codes_at_step_0_do_not_change(model):
    linear = model.model.layers[0].mlp.up_proj
    before = quantize(linear.weight, FORMATS["int8"]).codes
    fold(model, 1.5)
    flipped = (quantize(linear.weight, FORMATS["int8"]).codes != before).float().mean()
    assert flipped <= 1e-4


def test_a_model_without_known_norm_fed_linears_is_refused():
    gpt2 = GPT2LMHeadModel(GPT2Config(vocab_size=40, n_embd=32, n_layer=1, n_head=2))
    with pytest.raises(QuantizationError, match=r"GPT2LMHeadModel has no linear that a norm feeds.*uaq_scale=1"):
        fold(gpt2, 1.5)


def test_the_linears_of_the_blocks_are_selected_by_name(model):
    names = quantized_linears(model, QuantizationConfig().keep)
    per_layer = [f"self_attn.{x}_proj" for x in "qkvo"] + [f"mlp.{x}_proj" for x in ("gate", "up", "down")]
    assert sorted(names) == sorted(f"model.layers.{i}.{leaf}" for i in range(2) for leaf in per_layer)
    assert "lm_head" in quantized_linears(model, ())
    assert len(quantized_linears(model, (r"lm_head\.", r"layers\.0\."))) == len(per_layer)
    with pytest.raises(QuantizationError, match="no linear to quantize"):
        quantized_linears(model, (".",))
