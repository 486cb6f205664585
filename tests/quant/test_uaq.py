"""Update-aware quantization: the same function, smaller weights, codes that move further; and what is quantized."""

import copy

import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    CohereConfig,
    Gemma2Config,
    Gemma3TextConfig,
    GemmaConfig,
    GPT2Config,
    LlamaConfig,
    MixtralConfig,
    Olmo2Config,
    Phi3Config,
    PhiConfig,
    Qwen2Config,
    Qwen2MoeConfig,
    Qwen3Config,
    StableLmConfig,
)
from transformers.models.llama.modeling_llama import LlamaRMSNorm
from transformers.models.qwen3.modeling_qwen3 import Qwen3RMSNorm

from qurl_ray.config.quantization import QuantizationConfig
from qurl_ray.errors import QuantizationError
from qurl_ray.quant.formats import FORMATS
from qurl_ray.quant.quantize import quantize
from qurl_ray.quant.uaq import fold, folded_offsets, unfolded
from qurl_ray.quant.units import units

pytestmark = pytest.mark.usefixtures("one_thread")

SHAPE = {
    "vocab_size": 40,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
HEAD = {"head_dim": 16}
CONFIGS = {
    "llama": LlamaConfig(**SHAPE),
    "qwen2": Qwen2Config(**SHAPE, tie_word_embeddings=True),
    "qwen3": Qwen3Config(**SHAPE | HEAD),
    "phi3": Phi3Config(**SHAPE),
    "gemma1": GemmaConfig(**SHAPE | HEAD),
    "gemma2": Gemma2Config(**SHAPE | HEAD),
    "gemma3": Gemma3TextConfig(**SHAPE | HEAD, sliding_window=8, layer_types=["sliding_attention", "full_attention"]),
}
IDS = torch.randint(1, 40, (2, 24), generator=torch.Generator().manual_seed(0))
INT8 = FORMATS["int8"]
QKV = {f"self_attn.{x}_proj.weight" for x in "qkv"}
MLP = {"mlp.gate_proj.weight", "mlp.up_proj.weight"}


def model_of(architecture: str):
    """Random, but far from uniform: matrices four times the initial size, biases that are not 0, gains that differ."""
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(CONFIGS[architecture], attn_implementation="eager")
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(4) if parameter.ndim == 2 else parameter.add_(0.1 * torch.randn(parameter.shape))
    return model.eval()


def logits_of(model) -> torch.Tensor:
    with torch.no_grad():
        return model(input_ids=IDS, use_cache=False).logits


def weights_of(model) -> dict[str, torch.Tensor]:
    return {name: parameter.detach().clone() for name, parameter in model.named_parameters()}


@torch.no_grad()
def unfold_in_place(model, scale: float) -> None:
    for name, value in unfolded(model.named_parameters(), folded_offsets(model), scale):
        model.get_parameter(name).data.copy_(value)


@pytest.fixture
def exact(monkeypatch):
    """Norms in the precision of their weights: transformers computes them in float32, whatever the model is in."""

    def normalized(self, x):
        return self.weight * (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.variance_epsilon))

    monkeypatch.setattr(torch.Tensor, "float", torch.Tensor.double)  # for Gemma's
    for norm in (LlamaRMSNorm, Qwen3RMSNorm):
        monkeypatch.setattr(norm, "forward", normalized)


@pytest.mark.parametrize("layers", ["qkv", "qkv+mlp"])
@pytest.mark.parametrize("scale", [1.5, 2.0, 3.0])
@pytest.mark.parametrize("architecture", CONFIGS)
def test_folding_keeps_the_function(architecture, scale, layers, exact):
    model = model_of(architecture).double()
    before = logits_of(model)
    fold(model, scale, layers)
    assert (logits_of(model) - before).abs().max() < 1e-10 * before.abs().max()


@pytest.mark.parametrize("layers", ["qkv", "qkv+mlp"])
@pytest.mark.parametrize("scale", [1.5, 2.0, 3.0])
@pytest.mark.parametrize("architecture", CONFIGS)
def test_folding_in_float32_stays_within_rounding(architecture, scale, layers):
    model = model_of(architecture)
    before = logits_of(model)
    fold(model, scale, layers)
    assert (logits_of(model) - before).abs().max() < 1e-5 * before.abs().max()


@pytest.mark.parametrize(
    ("architecture", "layers", "divided", "norms"),
    [
        ("qwen2", "qkv", QKV, {"input_layernorm"}),
        ("qwen2", "qkv+mlp", QKV | MLP, {"input_layernorm", "post_attention_layernorm"}),
        ("qwen3", "qkv+mlp", QKV | MLP, {"input_layernorm", "post_attention_layernorm"}),
        (
            "phi3",
            "qkv+mlp",
            {"self_attn.qkv_proj.weight", "mlp.gate_up_proj.weight"},
            {"input_layernorm", "post_attention_layernorm"},
        ),
        ("gemma1", "qkv+mlp", QKV | MLP, {"input_layernorm", "post_attention_layernorm"}),
        ("gemma2", "qkv+mlp", QKV | MLP, {"input_layernorm", "pre_feedforward_layernorm"}),
        ("gemma3", "qkv", QKV, {"input_layernorm"}),
        ("gemma3", "qkv+mlp", QKV | MLP, {"input_layernorm", "pre_feedforward_layernorm"}),
    ],
)
def test_fold_changes_what_a_norm_feeds_and_its_gain_and_nothing_else(architecture, layers, divided, norms):
    model = model_of(architecture)
    before = weights_of(model)
    fold(model, 2.0, layers)
    changed = {name for name, weight in weights_of(model).items() if not torch.equal(weight, before[name])}
    gains = {f"{norm}.weight" for norm in norms}
    assert changed == {f"model.layers.{i}.{leaf}" for i in range(2) for leaf in divided | gains}
    added = 1 if architecture.startswith("gemma") else 0
    for name in changed:
        after = model.get_parameter(name)
        if name.endswith("norm.weight"):
            torch.testing.assert_close(added + after, 2 * (added + before[name]), rtol=1e-6, atol=0)
        else:
            assert torch.equal(after, before[name] / 2)


@pytest.mark.parametrize(("scale", "ulps"), [(2.0, 0), (1.5, 1)])
@pytest.mark.parametrize("architecture", CONFIGS)
def test_unfolding_gives_the_weights_back(architecture, scale, ulps):
    model = model_of(architecture)
    before = weights_of(model)
    fold(model, scale)
    unfold_in_place(model, scale)
    for name, after in weights_of(model).items():
        if "gemma" in architecture and name.endswith("norm.weight"):
            continue  # below
        distance = (after.view(torch.int32) - before[name].view(torch.int32)).abs().max()
        assert int(distance) <= ulps, name


@pytest.mark.parametrize("scale", [1.5, 2.0, 3.0])
@pytest.mark.parametrize("architecture", ["gemma1", "gemma3"])
def test_unfolding_gives_gains_of_the_form_1_plus_w_back(architecture, scale):
    """Folded, w is held beside s - 1, so what returns is as exact as 1 + w is, even where w itself is tiny."""
    model = model_of(architecture)
    norm = model.model.layers[0].input_layernorm
    with torch.no_grad():  # Gemma's gains are large: 1 + w of 50 occurs
        norm.weight.copy_(torch.logspace(-8, 2, 64) * torch.tensor([1.0, -1.0]).repeat(32))
    before = norm.weight.detach().clone()
    fold(model, scale)
    torch.testing.assert_close(1 + norm.weight.double(), scale * (1 + before.double()), rtol=0, atol=1e-5)
    unfold_in_place(model, scale)
    assert ((norm.weight - before).abs() <= 2**-23 * (1 + before.abs())).all()


@pytest.fixture(scope="module")
def realistic():
    """The norm-fed weights of one layer of 1024 units, 9.4 million in all, as they are initialized."""
    torch.manual_seed(0)
    config = SHAPE | {"hidden_size": 1024, "intermediate_size": 4096, "num_hidden_layers": 1}
    return AutoModelForCausalLM.from_config(LlamaConfig(**config))


def codes_of(model) -> torch.Tensor:
    """INT8 codes of all norm-fed weights."""
    weights = [model.get_parameter(name) for name, offset in folded_offsets(model).items() if offset is None]
    return torch.cat([quantize(weight, INT8).codes.flatten() for weight in weights])


def changed_share(codes: torch.Tensor, others: torch.Tensor) -> float:
    return (codes != others).double().mean().item()


@pytest.mark.parametrize(("scale", "limit"), [(1.5, 1e-5), (2.0, 0.0)])
def test_codes_hardly_change_at_step_0(realistic, scale, limit):
    """Absmax scales shrink with the weights; W / s is rounded, which can push a weight over the middle of two codes."""
    before = codes_of(realistic)
    assert len(before) > 5e6
    fold(realistic, scale)
    share = changed_share(codes_of(realistic), before)
    unfold_in_place(realistic, scale)
    assert share <= limit


def test_weights_that_were_bfloat16_once_lie_on_the_middle_more_often(realistic):
    """Ratios of 8-bit mantissas often hit the exact middle of two codes, where either code is as good."""
    model = copy.deepcopy(realistic).bfloat16().float()
    before = codes_of(model)
    fold(model, 1.5)
    assert 1e-5 < changed_share(codes_of(model), before) <= 2e-3
    assert changed_share(codes_of(model.bfloat16().float()), before) > 0.03  # why bfloat16 is refused


def trained(model, optimizer: torch.optim.Optimizer, steps: int):
    """The model after `steps` on one batch, whose gradients hardly turn: every step moves a weight the same way."""
    for _ in range(steps):
        optimizer.zero_grad()
        model(input_ids=IDS, labels=IDS, use_cache=False).loss.backward()
        optimizer.step()
    return model


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    ("kind", "lr", "power", "tolerance"), [(torch.optim.AdamW, 1e-5, 1, 0.03), (torch.optim.SGD, 3e-4, 2, 0.1)]
)
@pytest.mark.parametrize("architecture", ["llama", "gemma3"])
def test_updates_change_s_times_as_many_codes_with_adamw_and_s_squared_times_with_sgd(
    architecture, kind, lr, power, tolerance
):
    """A weight's code changes with probability (its way / distance of codes) as long as that is below 1. With AdamW all
    go the same way: 12 % of codes, and other batches were found within 1.1 % of s. SGD moves few weights much and most
    hardly, so lr must be lower: 2.5 % of 41,000 codes, and other batches within 9 % of s squared, mostly below."""
    share = {}
    for scale in (1.0, 1.5, 2.0):
        model = model_of(architecture)
        fold(model, scale)
        before = codes_of(model)
        optimizer = kind(model.parameters(), lr=lr, weight_decay=0.0)
        share[scale] = changed_share(codes_of(trained(model, optimizer, steps=20)), before)
    for scale in (1.5, 2.0):
        assert share[scale] / share[1.0] == pytest.approx(scale**power, rel=tolerance)


@pytest.mark.parametrize("architecture", ["llama", "qwen3", "gemma1", "gemma3"])
def test_with_adamw_folding_is_another_lr_for_the_folded_weights(architecture, exact):
    """AdamW's step does not depend on the size of the gradient (eps aside): s·(W/s - lr·u) = W - s·lr·u for the
    linears, (s·g - lr·u)/s = g - lr/s·u for the gains, w and 1 + w alike. So is every ablation's control row made."""
    scale, lr = 1.5, 1e-3
    options = {"weight_decay": 0.0, "eps": 1e-100}
    start = model_of(architecture).double()
    folded, control = copy.deepcopy(start), copy.deepcopy(start)
    fold(folded, scale)
    trained(folded, torch.optim.AdamW(folded.parameters(), lr=lr, **options), steps=8)
    offsets = folded_offsets(control).items()
    special = {control.get_parameter(name): lr * scale if offset is None else lr / scale for name, offset in offsets}
    groups = [{"params": [p], "lr": special.get(p, lr)} for p in control.parameters()]
    trained(control, torch.optim.AdamW(groups, **options), steps=8)
    assert torch.equal(codes_of(folded), codes_of(control))
    unfold_in_place(folded, scale)
    for (name, weight), other, first in zip(
        folded.named_parameters(), control.parameters(), start.parameters(), strict=True
    ):
        assert (other - first).abs().max() > lr / scale, name  # it was trained
        assert (weight - other).abs().max() <= 1e-9 * other.abs().max(), name


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (GPT2Config(**SHAPE), "GPT2LMHeadModel has no decoder layers"),
        (MixtralConfig(**SHAPE, num_local_experts=2), r"post_attention_layernorm may feed .*mlp\.experts, mlp\.gate"),
        (Qwen2MoeConfig(**SHAPE, num_experts=4, moe_intermediate_size=16), r"mlp\.shared_expert_gate"),
        (CohereConfig(**SHAPE), r"layers\.0 has an unknown set of parts: input_layernorm, mlp, self_attn"),  # parallel
        (PhiConfig(**SHAPE), "unknown set of parts: input_layernorm, mlp, self_attn"),  # parallel
        (Olmo2Config(**SHAPE), "unknown set of parts: .*post_feedforward_layernorm"),  # norms behind the branches
        (StableLmConfig(**SHAPE), "input_layernorm has more than a gain: bias, weight"),
    ],
    ids=lambda value: type(value).__name__,
)
def test_other_architectures_are_refused(config, message):
    model = AutoModelForCausalLM.from_config(config)
    with pytest.raises(QuantizationError, match=rf"cannot fold this model \(set quantization\.uaq_scale=1.*{message}"):
        fold(model, 1.5)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_weights_in_half_precision_are_refused(dtype):
    with pytest.raises(QuantizationError, match=rf"its weights are {dtype}, .*load float32 masters"):
        fold(model_of("llama").to(dtype), 1.5)


@pytest.mark.parametrize(
    ("name", "part", "message"),
    [
        ("self_attn.v_proj", torch.nn.Linear(64, 32, dtype=torch.bfloat16), "torch.bfloat16"),
        ("self_attn.v_proj", torch.nn.Embedding(32, 64), "no plain linears"),
        ("mlp.router", torch.nn.Linear(64, 4), r"post_attention_layernorm may feed .*mlp\.router"),
        ("adapter", torch.nn.Linear(64, 64), "unknown set of parts: adapter, "),
        ("input_layernorm", torch.nn.LayerNorm(64, bias=False), "LayerNorm multiplies neither by w nor by 1 \\+ w"),
    ],
)
def test_one_strange_layer_is_enough_to_refuse_and_then_nothing_is_changed(name, part, message):
    model = model_of("llama")
    path, _, leaf = name.rpartition(".")
    model.model.layers[1].get_submodule(path).add_module(leaf, part)
    before = weights_of(model)
    for use in (lambda model: fold(model, 1.5), folded_offsets):
        with pytest.raises(QuantizationError, match=message):
            use(model)
    assert all(torch.equal(weight, before[name]) for name, weight in weights_of(model).items())


ATTENTION = ("input_layernorm", "self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")
MLP = ("pre_feedforward_layernorm", "mlp.gate_proj", "mlp.up_proj")


def test_the_linears_are_found_without_weights():
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(CONFIGS["gemma3"])
    blocks = [f"model.layers.{i}" for i in range(2)]
    attention = [f"{block}.{name}.weight" for block in blocks for name in ATTENTION]
    assert set(folded_offsets(model, "qkv")) == set(attention)
    assert set(folded_offsets(model)) == {*attention, *(f"{block}.{name}.weight" for block in blocks for name in MLP)}


def test_the_linears_of_the_blocks_are_selected_by_name(model):
    chosen = units(model, QuantizationConfig().keep)
    per_layer = [f"self_attn.{x}_proj" for x in "qkvo"] + [f"mlp.{x}_proj" for x in ("gate", "up", "down")]
    assert sorted(chosen) == sorted(f"model.layers.{i}.{leaf}.weight" for i in range(2) for leaf in per_layer)
    assert all(chosen[name].shape == tuple(model.get_parameter(name).shape) for name in chosen)
    assert "lm_head.weight" in units(model)
    assert len(units(model, (r"lm_head\.", r"layers\.0\."))) == len(per_layer)
    with pytest.raises(QuantizationError, match="no linear to quantize"):
        units(model, (".",))


@pytest.mark.parametrize(
    ("first", "last", "layers", "left"),
    [(1, 0, 2, {1}), (0, 1, 2, {0}), (2, 3, 12, {2, 3, 4, 5, 6, 7, 8}), (1, 1, 2, set())],
)
def test_layers_at_both_ends_can_be_kept(first, last, layers, left):
    kept = QuantizationConfig(keep_first_layers=first, keep_last_layers=last).kept(layers)
    blocks = torch.nn.ModuleList([torch.nn.ModuleDict({"q_proj": torch.nn.Linear(2, 2)}) for _ in range(layers)])
    model = torch.nn.ModuleDict({"model": torch.nn.ModuleDict({"layers": blocks}), "lm_head": torch.nn.Linear(2, 2)})
    if not left:
        with pytest.raises(QuantizationError, match="no linear to quantize"):
            units(model, kept)
        return
    assert set(units(model, kept)) == {f"model.layers.{i}.q_proj.weight" for i in left}
