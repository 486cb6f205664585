"""Equalization: powers of two that keep every bit of the network, and codes that are truer with them."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import (
    AutoModelForCausalLM,
    GemmaConfig,
    LlamaConfig,
    MixtralConfig,
    Phi3Config,
    Qwen2Config,
    Qwen3Config,
)

from qurl_ray.config.quantization import QuantizationConfig
from qurl_ray.errors import QuantizationError
from qurl_ray.learner.equalizer import equalizer_for
from qurl_ray.policy.ranges import measured_factors, measuring
from qurl_ray.quant.equalize import Factors, column_maxima, equalized, equalized_sites, exponents, factors_of
from qurl_ray.quant.formats import FORMATS, get_format
from qurl_ray.quant.linear import QuantizedLinear
from qurl_ray.quant.quantize import dequantize, dequantize_rows, quantize, quantize_rows
from qurl_ray.quant.unified import unified_linear
from qurl_ray.quant.units import units
from tests.quant.test_uaq import HEAD, SHAPE

pytestmark = pytest.mark.usefixtures("one_thread")

CONFIGS = {
    "llama": LlamaConfig(**SHAPE, mlp_bias=True, attention_bias=True),
    "qwen2": Qwen2Config(**SHAPE, tie_word_embeddings=True),
    "qwen3": Qwen3Config(**SHAPE | HEAD),
    "phi3": Phi3Config(**SHAPE),
    "gemma1": GemmaConfig(**SHAPE | HEAD),
}
SITES = {"llama": 6, "qwen2": 6, "qwen3": 6, "phi3": 4, "gemma1": 2}
"""Norms and MLPs of two layers that are equalized."""
IDS = torch.randint(1, 40, (2, 24), generator=torch.Generator().manual_seed(0))
KEEP = QuantizationConfig().keep


def model_of(architecture: str):
    """Return a random model whose channels differ as those of trained ones do: some are 30 times as large."""
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(CONFIGS[architecture], attn_implementation="eager").eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.mul_(4) if parameter.ndim == 2 else parameter.add_(0.1 * torch.randn(parameter.shape))
            if "layernorm" in name or "up_proj" in name:
                parameter[torch.randperm(len(parameter))[:3]] *= 30
    return model


def logits_of(model) -> torch.Tensor:
    with torch.no_grad():
        return model(input_ids=IDS, use_cache=False).logits


@pytest.mark.parametrize("architecture", CONFIGS)
def test_folding_keeps_every_bit_of_the_network(architecture):
    model = model_of(architecture)
    before = logits_of(model)
    names = units(model, KEEP)
    assert len(equalized_sites(model, names)) == SITES[architecture]
    factors = measured_factors(model, names)
    changed = {name: value.clone() for name, value in equalized(model.named_parameters(), factors)}
    moved = [name for name, value in model.named_parameters() if not torch.equal(value, changed[name])]
    assert len(moved) >= 2 * SITES[architecture], "a fold that changes nothing would pass"
    model.load_state_dict(changed, strict=False)
    assert torch.equal(logits_of(model), before)


def test_codes_are_truer():
    """INT8's error of the logits falls by a third and more where channels differ."""
    model = model_of("qwen3")
    exact, names = logits_of(model), units(model, KEEP)

    def error(factors) -> float:
        made = AutoModelForCausalLM.from_config(CONFIGS["qwen3"], attn_implementation="eager").eval()
        made.load_state_dict(dict(equalized(model.state_dict().items(), factors)))
        for name in names:
            path = name.removesuffix(".weight")
            linear = made.get_submodule(path)
            made.set_submodule(
                path, QuantizedLinear(quantize(linear.weight, FORMATS["int8"]), linear.bias, emulate=True)
            )
        return float((logits_of(made) - exact).norm() / exact.norm())

    assert error(measured_factors(model, names)) < 0.6 * error({}), (error(measured_factors(model, names)), error({}))


@settings(max_examples=60)
@given(
    st.lists(st.tuples(st.floats(1e-3, 1e3), st.floats(1e-3, 1e3)), min_size=2, max_size=9),
    st.sampled_from([0.25, 0.5, 0.75]),
)
def test_exponents_follow_the_formula(pairs, alpha):
    activations, weights = (torch.tensor(values) for values in zip(*pairs, strict=True))
    wanted = [math.log2(float(a) ** alpha / float(w) ** (1 - alpha)) for a, w in zip(activations, weights, strict=True)]
    middle = sorted(wanted)[(len(wanted) - 1) // 2]
    found = exponents(activations, weights, alpha).tolist()
    assert all(abs(e - max(-12, min(12, w - middle))) <= 0.5 + 1e-4 for e, w in zip(found, wanted, strict=True)), (
        "nearest power of two"
    )


def test_a_factor_moves_only_if_it_is_off_by_more_than_two():
    weights = torch.ones(5)
    before = exponents(torch.tensor([1.0, 1.0, 1.0, 1.0, 1.0]), weights, 0.5)
    activations = torch.tensor([1.0, 1.0, 1.0, 3.9, 4.5]) ** 2 / torch.tensor([1.0, 1.0, 1.0, 3.9, 1.0])
    after = exponents(activations, weights, 0.5, before)  # wants log2 s = 0, 0, 0, 0.98, 2.17
    assert before.tolist() == [0] * 5
    assert after.tolist() == [0, 0, 0, 0, 2]


@pytest.mark.parametrize("broken", [math.nan, math.inf])
def test_ranges_that_are_not_finite_change_nothing(broken):
    activations, before = torch.tensor([1.0, broken, 8.0]), torch.tensor([6, 0, -6], dtype=torch.int8)
    assert exponents(activations, torch.ones(3), 0.5).tolist() == [0, 0, 0]
    assert exponents(activations, torch.ones(3), 0.5, before).tolist() == [6, 0, -6]
    assert exponents(torch.ones(3), activations, 0.5, before).tolist() == [6, 0, -6]


def test_silent_channels_count_like_the_faintest_other():
    """Else a channel that speaks later would take all the codes of its token."""
    assert exponents(torch.tensor([0.0, 1.0, 2.0, 16.0]), torch.ones(4), 0.5).tolist() == [0, 0, 0, 2]
    assert exponents(torch.ones(4), torch.tensor([0.0, 0.25, 0.25, 4.0]), 0.5).tolist() == [0, 0, 0, -2]
    assert exponents(torch.zeros(3), torch.ones(3), 0.5).tolist() == [0, 0, 0]
    assert exponents(torch.tensor([1e-30, 1.0, 1e30]), torch.ones(3), 0.5).abs().max() <= 12


def test_maxima_are_those_of_what_the_linears_read():
    """Against inputs caught at every reader, over two passes, and columns of all readers by hand."""
    model = model_of("llama")
    sites = equalized_sites(model, units(model, KEEP))
    maxima, seen = {}, {}
    hooks = [
        model.get_submodule(reader.module).register_forward_pre_hook(
            lambda _, args, reader=reader.module: seen.setdefault(reader, []).append(
                args[0].reshape(-1, args[0].shape[-1])
            )
        )
        for site in sites
        for reader in site.readers
    ]
    with measuring(model, sites, maxima), torch.no_grad():
        for row in IDS:
            model(row[None])
    for hook in hooks:
        hook.remove()
    columns = column_maxima(sites, model.named_parameters())
    for site in sites:
        for reader in site.readers:
            assert torch.equal(maxima[site.writer], torch.cat(seen[reader.module]).abs().amax(dim=0))
        weights = torch.cat([model.get_parameter(reader.weight) for reader in site.readers])
        assert torch.equal(columns[site.writer], weights.abs().amax(dim=0))


@pytest.mark.parametrize("format_name", ["int8", "fp8", "int4", "fp8_block", "nvfp4", "nvfp4_w4a4"])
@pytest.mark.parametrize("backward", ["straight_through", "full"])
def test_a_unified_linear_has_the_engines_bits_and_the_straight_gradient(format_name, backward):
    torch.manual_seed(1)
    fmt = get_format(format_name, 63 if format_name == "int8" else None)
    x, weight, bias = (torch.randn(s, requires_grad=True) for s in ((5, 128), (128, 128), (128,)))
    reads, writes = (torch.exp2(torch.randint(-3, 4, (128,)).float()) for _ in range(2))
    factors = Factors(reads=reads, writes=writes)
    y = unified_linear(x, weight, bias, fmt=fmt, backward=backward, factors=factors, emulate=True)
    engine = QuantizedLinear(quantize(weight.detach() * reads / writes[:, None], fmt), bias / writes, emulate=True)
    assert torch.equal(y, engine(x / reads) * writes)
    assert not torch.equal(y, unified_linear(x, weight, bias, fmt=fmt, backward=backward, emulate=True))
    dy = torch.randn_like(y)
    y.backward(dy)
    assert torch.equal(bias.grad, dy.sum(dim=0))
    seen_x, seen_w = x.detach(), weight.detach()
    if backward == "straight_through":  # what the forward pass multiplied, without the factors
        seen_w = dequantize(quantize(seen_w * reads / writes[:, None], fmt)) / reads * writes[:, None]
        if fmt.activation_max:
            seen_x = dequantize_rows(quantize_rows(seen_x / reads, fmt), fmt) * reads
    assert torch.allclose(x.grad, dy @ seen_w, rtol=1e-4, atol=1e-3)
    assert torch.allclose(weight.grad, dy.t() @ seen_x, rtol=1e-4, atol=1e-3)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_factors_keep_the_type_of_what_they_scale(dtype):
    """Or a learner under autocast would compute in float32 what a bfloat16 engine rounds."""
    factors = Factors(reads=torch.exp2(torch.arange(-8.0, 8.0)), writes=torch.exp2(torch.arange(8.0, -8.0, -1)))
    x, weight = torch.randn(3, 16, dtype=dtype), torch.randn(16, 16, dtype=dtype)
    for found, before in (
        (factors.inputs(x), x),
        (factors.outputs(x), x),
        (factors.bias(x[0]), x[0]),
        (factors.weight(weight), weight),
    ):
        assert found.dtype == dtype
        assert not torch.equal(found, before)
    assert torch.equal(factors.inputs(x).float(), x.float() / factors.reads), "exact"
    y = unified_linear(x, weight, None, fmt=FORMATS["fp8"], backward="straight_through", factors=factors, emulate=True)
    assert y.dtype == dtype


def test_an_unknown_architecture_has_no_factors_or_an_error():
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(MixtralConfig(**SHAPE, num_local_experts=2))
    names = units(model, KEEP)
    with pytest.raises(QuantizationError, match="not known"):
        measured_factors(model, names)
    assert equalizer_for(model, QuantizationConfig(), names, {"int8"}) is None
    with pytest.raises(QuantizationError, match="not known"):
        equalizer_for(model, QuantizationConfig(equalize=True), names, {"int8"})


def test_auto_equalizes_what_it_makes_truer():
    truer = {name for name in FORMATS if QuantizationConfig().equalizes(name)}
    assert truer == {"int8", "fp8", "int4", "nvfp4", "nvfp4_w4a4"}
    assert all(QuantizationConfig(equalize=True).equalizes(name) for name in FORMATS)
    assert not any(QuantizationConfig(equalize=False).equalizes(name) for name in FORMATS)


def test_layers_that_are_kept_are_left_alone():
    model = model_of("llama")
    names = units(model, QuantizationConfig(keep_first_layers=1).kept(2))
    assert {site.writer.split(".")[2] for site in equalized_sites(model, names)} == {"1"}


def test_factors_join_what_a_module_reads_and_writes():
    sites = equalized_sites(model_of("llama"), units(model_of("llama"), (r"^(?!.*layers\.0\.mlp\.(up|down)_proj)",)))
    found = factors_of(sites, {s.writer: torch.tensor([1, -2], dtype=torch.int8) for s in sites})
    assert found["model.layers.0.mlp.up_proj"].reads.tolist() == [2.0, 0.25]
    assert found["model.layers.0.mlp.up_proj"].writes.tolist() == [2.0, 0.25]
    assert found["model.layers.0.post_attention_layernorm"].reads is None
    assert found["model.layers.0.mlp.down_proj"].writes is None
    assert "model.layers.0.self_attn.q_proj" not in found
