"""The unified linear: its forward is the engine's, its gradients are those of products written out here in float64."""

import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn.functional import ScalingType
from torch.utils.checkpoint import checkpoint

from qurl_ray.errors import QuantizationError
from qurl_ray.quant import kernels, unified
from qurl_ray.quant import quantize as quantize_module
from qurl_ray.quant.formats import FORMATS, Blocks, get_format
from qurl_ray.quant.kernels import KERNELS
from qurl_ray.quant.linear import QuantizedLinear, reference_linear, weight_max_code
from qurl_ray.quant.quantize import QTensor, dequantize, quantize
from qurl_ray.quant.training import across_tokens, transposed
from qurl_ray.quant.unified import unified_linear
from tests.quant.grid import E4M3

CPU = torch.device("cpu")
BLOCK = FORMATS["fp8_block"]
HERE = [get_format(name, weight_max_code(fmt, CPU)) for name, fmt in FORMATS.items()]
"""The formats as an engine on this CPU uses them."""
MODES = [("fp8_block", "quantized"), *((name, "straight_through") for name in FORMATS), ("int8", "full")]
BLOCKS = ("nvfp4", "nvfp4_w4a4", "mxfp4", "mxfp8")
"""Formats whose codes tests/quant/test_blocks.py computes once more."""
DTYPES = [torch.float32, torch.bfloat16, torch.float16]


def normal(*shape: int, seed: int, gain: float = 1.0) -> torch.Tensor:
    return gain * torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def problem(tokens: int, rows: int, columns: int, dtype=torch.float32) -> tuple[torch.Tensor, ...]:
    """x [M, K], weight [N, K], bias [N], dy [M, N]: x and dy of that dtype, all but dy leaves with a gradient."""
    x, dy = normal(tokens, columns, seed=1, gain=3).to(dtype), normal(tokens, rows, seed=2, gain=1e-3).to(dtype)
    weight, bias = normal(rows, columns, seed=3, gain=0.05), normal(rows, seed=4)
    return x.requires_grad_(), weight.requires_grad_(), bias.requires_grad_(), dy


def gradients(x, weight, bias, dy, **options) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(y, dx, dW), from leaves of their own."""
    x, weight = x.detach().clone().requires_grad_(), weight.detach().clone().requires_grad_()
    y = unified_linear(x, weight, bias, **options)
    y.backward(dy)
    return y.detach(), x.grad, weight.grad


def error(found: torch.Tensor, expected: torch.Tensor | np.ndarray) -> float:
    """Relative, in the norm of the whole."""
    expected = torch.as_tensor(expected).double()
    return float((found.double() - expected).norm() / expected.norm())


# --- the definition, once more: numpy, float64, block by block --------------------------------------------------------


def nearest(values: np.ndarray, name: str) -> np.ndarray:
    if not name.startswith("fp8"):
        return np.rint(values)
    middles = (E4M3[1:] + E4M3[:-1]) / 2
    return np.sign(values) * E4M3[np.searchsorted(middles, np.abs(values))]


def rounded(
    values: torch.Tensor | np.ndarray, name: str, top: int, rows: int | None, columns: int | None
) -> np.ndarray:
    """Each block of `rows` × `columns` divided by its maximum / top, rounded to codes, and multiplied again."""
    values = values.detach().double().numpy().copy() if isinstance(values, torch.Tensor) else values.copy()
    rows, columns = rows or len(values), columns or values.shape[1]
    for i in range(0, len(values), rows):
        for j in range(0, values.shape[1], columns):
            block = values[i : i + rows, j : j + columns]
            if scale := np.abs(block).max() / top:
                block[:] = nearest(block / scale, name) * scale
    return values


def alone(x: torch.Tensor) -> np.ndarray:
    """Activations in NVFP4, each token as a matrix of one row."""
    return torch.cat([dequantize(quantize(row[None].detach(), FORMATS["nvfp4"])) for row in x]).numpy()


def products(x, weight, bias, dy, name: str, backward: str) -> dict[str, np.ndarray]:
    """y, dx and dW of a format and a backward, from what papers and docstrings say of them."""
    top = {"int8": 127, "fp8": 448, "fp8_block": 448}.get(name, 7)
    if name in BLOCKS:
        Q_w = dequantize(quantize(weight, FORMATS[name])).double().numpy()
        Q_x = alone(x) if name == "nvfp4_w4a4" else x.detach().double().numpy()
    elif name == "fp8_block":
        Q_w, Q_x = rounded(weight, name, top, 128, 128), rounded(x, name, top, 1, 128)
    else:
        group = 128 if name == "int4" else None
        Q_w = rounded(weight, name, top, 1, group)
        Q_x = x.detach().double().numpy() if name == "int4" else rounded(x, name, top, 1, group)
    X, W, D, b = (t.detach().double().numpy() for t in (x, weight, dy, bias))
    y = Q_x @ Q_w.T + b
    if backward == "full":
        return {"y": y, "dx": D @ W, "dw": D.T @ X}
    if backward == "straight_through":
        return {"y": y, "dx": D @ Q_w, "dw": D.T @ Q_x}
    by_token = rounded(D, name, top, 1, 128)
    return {"y": y, "dx": by_token @ Q_w, "dw": rounded(D, name, top, 128, 1).T @ rounded(Q_x, name, top, 128, 1)}


# --- forward ----------------------------------------------------------------------------------------------------------


@pytest.mark.sampled(3)
@pytest.mark.parametrize("fmt", HERE, ids=lambda fmt: fmt.name)
@settings(max_examples=100, deadline=None)
@given(
    leading=st.lists(st.integers(1, 9), min_size=1, max_size=2),
    rows=st.integers(1, 300),
    columns=st.integers(1, 300),
    dtypes=st.tuples(st.sampled_from(DTYPES), st.sampled_from(DTYPES)),
    with_bias=st.booleans(),
    emulate=st.booleans(),
    seed=st.integers(0, 2**31),
)
def test_the_forward_is_the_engines_bit_for_bit(fmt, leading, rows, columns, dtypes, with_bias, emulate, seed):
    columns = 128 * (1 + columns % 3) if fmt.group and fmt.rows == 1 else columns
    x = normal(*leading, columns, seed=seed).to(dtypes[0])
    weight = normal(rows, columns, seed=seed + 1, gain=0.05).to(dtypes[1]).requires_grad_()
    bias = normal(rows, seed=seed + 2) if with_bias else None
    q = quantize(weight, fmt)
    found = unified_linear(x, weight, bias, fmt=fmt, backward="straight_through", emulate=emulate)
    assert found.requires_grad
    assert found.dtype == x.dtype
    assert torch.equal(found, QuantizedLinear(q, bias, emulate=emulate)(x))
    assert torch.equal(found, reference_linear(x, q, bias))
    with torch.no_grad():
        silent = unified_linear(x, weight, bias, fmt=fmt, backward="straight_through", emulate=emulate)
    assert torch.equal(silent, found)
    assert not silent.requires_grad


@pytest.mark.equal_bits
@pytest.mark.parametrize("fmt", HERE, ids=lambda fmt: fmt.name)
def test_a_row_does_not_depend_on_its_batch(fmt):
    x, weight, bias, _ = problem(64, 200, 640)
    together = unified_linear(x, weight, bias, fmt=fmt, backward="straight_through")
    for start, stop in [(0, 1), (17, 18), (3, 5), (5, 13), (0, 40)]:
        alone = unified_linear(x[start:stop], weight, bias, fmt=fmt, backward="straight_through")
        assert torch.equal(together[start:stop], alone)


def test_autocast_changes_nothing():
    x, weight, bias, dy = problem(8, 128, 256)
    plain = gradients(x, weight, bias, dy, fmt=BLOCK, backward="quantized")
    with torch.autocast("cpu", torch.bfloat16):
        assert all(map(torch.equal, gradients(x, weight, bias, dy, fmt=BLOCK, backward="quantized"), plain))


def test_codes_that_exist_are_used_and_not_made_again(monkeypatch):
    x, weight, bias, dy = problem(40, 200, 330)
    plain = gradients(x, weight, bias, dy, fmt=BLOCK, backward="quantized")
    q = quantize(weight, BLOCK)
    monkeypatch.setattr(unified, "quantize", lambda *_: pytest.fail("quantized again"))
    assert all(map(torch.equal, gradients(x, weight, bias, dy, fmt=BLOCK, backward="quantized", codes=q), plain))
    other = QTensor(codes=q.codes, scale=2 * q.scale, fmt=q.fmt)  # they, and not the weight, are what is multiplied
    y, dx, dw = gradients(x, weight, None, dy, fmt=BLOCK, backward="quantized", codes=other)
    torch.testing.assert_close(y, 2 * (plain[0] - bias), rtol=1e-5, atol=1e-5)
    assert torch.equal(dx, 2 * plain[1])
    assert torch.equal(dw, plain[2])


# --- gradients --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("name", "backward"), MODES)
@pytest.mark.parametrize("tokens", [1, 127, 129, 300])
@pytest.mark.parametrize(("rows", "columns"), [(256, 384), (200, 330), (64, 576)])
def test_each_product_is_that_of_operands_rounded_by_the_definition(name, backward, tokens, rows, columns):
    columns = 384 if name == "int4" or name in BLOCKS else columns
    x, weight, bias, dy = problem(tokens, rows, columns)
    found = gradients(x, weight, bias, dy, fmt=FORMATS[name], backward=backward, emulate=True)
    expected = products(x, weight, bias, dy, name, backward)
    for got, (what, value) in zip(found, expected.items(), strict=True):
        assert error(got, value) < 1e-4, what  # float32 sums; the rounding itself is 2e-2 and more


@pytest.mark.parametrize("tokens", [129, 300])
@pytest.mark.parametrize(("rows", "columns"), [(256, 384), (200, 330)])
def test_fp8_costs_each_product_a_few_percent(tokens, rows, columns):
    """Two operands with 3 bits of mantissa give 3.7 %; a third rounding, of x for dW, makes 4.4 % of it."""
    x, weight, _, dy = problem(tokens, rows, columns)
    y, dx, dw = gradients(x, weight, None, dy, fmt=BLOCK, backward="quantized")
    X, W, D = (t.detach().double() for t in (x, weight, dy))
    assert 0.034 < error(y, X @ W.T) < 0.040
    assert 0.034 < error(dx, D @ W) < 0.040
    assert 0.041 < error(dw, D.T @ X) < 0.048


def per_tensor(values: torch.Tensor) -> torch.Tensor:
    scale = values.abs().max() / 448
    return (values / scale).to(torch.float8_e4m3fn).double() * scale


@pytest.mark.parametrize(("gain", "fails"), [(1e3, False), (1e5, True), (1e6, True)])
def test_an_outlier_costs_others_nothing_in_blocks_and_everything_per_tensor(gain, fails):
    """Column 5 of x and 7 of dy, whose blocks of weights are zero: the products see what became of the others.

    E4M3 has values down to 448 / 2^18, so that a scale per tensor bears a channel that is a thousand times as large.
    """
    x, weight, _, dy = (t.detach().clone() for t in problem(300, 256, 384))
    x[:, 5] *= gain
    dy[:, 7] *= gain
    weight[:128], weight[:, :128] = 0, 0
    found = dict(zip("ydw", gradients(x, weight, None, dy, fmt=BLOCK, backward="quantized"), strict=True))
    X, W, D = x.double(), weight.double(), dy.double()
    exact = {"y": X @ W.T, "d": D @ W, "w": D.T @ X}
    x8, w8, d8 = per_tensor(x), per_tensor(weight), per_tensor(dy)
    crude = {"y": x8 @ w8.T, "d": d8 @ w8, "w": d8.T @ x8}
    others = torch.arange(256) != 7
    for products in (found, exact, crude):
        products["w"] = products["w"][others][:, 128:]
    for what, expected in exact.items():
        assert error(found[what], expected) < 0.048, what
        assert (error(crude[what], expected) > 0.3) == fails, what


def test_the_gradient_of_one_channel_reads_off_the_forwards_weight():
    """dy of a single 1 is a code, so dx is a row of the weight in the forward: nothing was rounded again."""
    _, weight, _, _ = problem(1, 200, 330)
    _, dx, _ = gradients(torch.ones(200, 330), weight, None, torch.eye(200), fmt=BLOCK, backward="quantized")
    torch.testing.assert_close(dx, dequantize(quantize(weight, BLOCK)), rtol=1e-6, atol=0)


@pytest.mark.parametrize("name", FORMATS)
def test_straight_through_is_autograd_through_the_dequantized_product(name):
    fmt = FORMATS[name]
    x, weight, bias, dy = problem(70, 48, 256)
    y, dx, dw = gradients(x, weight, bias, dy, fmt=fmt, backward="straight_through", emulate=True)
    Q_w = dequantize(quantize(weight, fmt)) if name in BLOCKS else None
    Q_w = rounded(weight, name, fmt.weight_max, fmt.rows, fmt.group) if Q_w is None else Q_w.numpy()
    Q_x = alone(x) if fmt.activations else x.detach().numpy()
    if fmt.activation_max and not fmt.activations:
        Q_x = rounded(x, name, fmt.activation_max, 1, fmt.activation_group)
    leaves = [torch.tensor(value, dtype=torch.float32, requires_grad=True) for value in (Q_x, Q_w)]
    expected = torch.nn.functional.linear(*leaves, bias)
    expected.backward(dy)
    for found, other in zip((y, dx, dw), (expected, *(leaf.grad for leaf in leaves)), strict=True):
        torch.testing.assert_close(found, other.detach(), rtol=1e-5, atol=1e-5 * float(other.detach().abs().max()))


@pytest.mark.parametrize(("name", "backward"), MODES)
@pytest.mark.parametrize("dtype", DTYPES)
def test_gradients_have_the_dtypes_of_their_inputs_and_are_rounded_once(name, backward, dtype):
    x, weight, bias, dy = problem(130, 128, 256, dtype)
    options = {"fmt": FORMATS[name], "backward": backward, "emulate": True}
    wide = gradients(x.float(), weight.bfloat16().float(), bias.detach(), dy.float(), **options)
    bias = bias.detach().bfloat16().requires_grad_()
    y, dx, dw = gradients(x, weight.bfloat16(), bias, dy, **options)
    assert (y.dtype, dx.dtype, dw.dtype, bias.grad.dtype) == (dtype, dtype, torch.bfloat16, torch.bfloat16)
    assert torch.equal(dx, wide[1].to(dtype))
    assert torch.equal(dw, wide[2].bfloat16())
    assert torch.equal(bias.grad, dy.float().sum(dim=0).bfloat16())


def test_zeros_stay_zeros_and_only_what_is_asked_for_is_computed():
    x, weight, bias, dy = (t.detach().clone() for t in problem(300, 256, 384))
    x[140], x[:, 128:256], dy[3], dy[:, 40], weight[128:] = 0, 0, 0, 0, 0  # a row, a block, of x and dy; blocks of W
    y, dx, dw = gradients(x, weight, None, dy, fmt=BLOCK, backward="quantized")
    assert all(map(torch.isfinite, map(torch.sum, (y, dx, dw))))
    for part in (y[140], y[:, 128:], dx[3], dw[40], dw[:, 128:256]):
        assert (part == 0).all()
    assert (dx[4] != 0).any()
    assert (dw[41] != 0).any()
    for zero in (torch.zeros_like(x), torch.zeros(0, 384)):
        y, dx, dw = gradients(zero, weight, None, torch.zeros(len(zero), 256), fmt=BLOCK, backward="quantized")
        assert not any(part.count_nonzero() for part in (y, dx, dw))
    bias.requires_grad_()
    unified_linear(x, weight, bias, fmt=BLOCK, backward="quantized").backward(dy)
    assert x.grad is weight.grad is None
    assert torch.equal(bias.grad, dy.sum(dim=0))


@pytest.mark.parametrize(("name", "backward"), MODES)
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_gradients_that_are_not_finite_stay_so(name, backward, bad):
    x, weight, _, dy = problem(300, 256, 384)
    dy[200, 30] = bad
    _, dx, dw = gradients(x, weight, None, dy, fmt=FORMATS[name], backward=backward)
    assert not torch.isfinite(dx[200]).any()
    assert not torch.isfinite(dw[30]).any()
    assert torch.isfinite(dx[torch.arange(300) != 200]).all()
    assert torch.isfinite(dw[torch.arange(256) != 30]).all()


# --- what is kept until the backward ----------------------------------------------------------------------------------


def kept(x, weight, **options) -> dict[torch.dtype, int]:
    """Bytes by dtype of what autograd holds, without the parameter."""
    held: dict[torch.dtype, int] = {}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        if tensor.data_ptr() != weight.data_ptr():
            held[tensor.dtype] = held.get(tensor.dtype, 0) + tensor.untyped_storage().nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        unified_linear(x, weight, None, **options)
    return held


@pytest.mark.parametrize(
    ("name", "backward", "bytes_per_value"),
    [
        ("fp8_block", "quantized", 1 + 4 / 128),
        ("fp8_block", "straight_through", 1 + 4 / 128),
        ("fp8", "straight_through", 1 + 4 / 640),
        ("int8", "straight_through", 1 + 4 / 640),
        ("int4", "straight_through", 2),
        ("nvfp4_w4a4", "straight_through", 1 / 2 + 1 / 16 + 4 / 640),
        ("fp8_block", "full", 2),
    ],
)
def test_inputs_are_kept_as_codes(name, backward, bytes_per_value):
    x, weight, _, _ = problem(300, 128, 640, torch.bfloat16)
    held = kept(x, weight, fmt=FORMATS[name], backward=backward)
    assert sum(held.values()) == round(bytes_per_value * x.numel())
    if bytes_per_value < 2:
        assert sum(held.values()) <= 0.53 * x.nbytes
        assert set(held) == {FORMATS[name].dtype, torch.float32}
    frozen = weight.detach()
    assert kept(x, frozen, fmt=FORMATS[name], backward=backward) == {}  # nothing of x when no gradient needs it


def test_weights_are_kept_as_the_parameter_or_as_the_callers_codes():
    x, weight, _, _ = problem(300, 128, 640)
    q = quantize(weight, BLOCK)
    plain = kept(x, weight, fmt=BLOCK, backward="quantized")
    given = kept(x, weight, fmt=BLOCK, backward="quantized", codes=q)
    assert given[BLOCK.dtype] - plain[BLOCK.dtype] == weight.numel()
    assert given[torch.float32] - plain[torch.float32] == q.scale.nbytes


@pytest.mark.parametrize("name", ["int4", "nvfp4", "mxfp8"])
def test_the_callers_codes_are_what_a_gradient_passes_through(name):
    x, weight, bias, dy = problem(5, 128, 128)
    q = quantize(2 * weight, FORMATS[name])  # no longer those of the weight
    y = unified_linear(x, weight, bias, fmt=FORMATS[name], backward="straight_through", codes=q)
    assert torch.equal(y, reference_linear(x, q, bias))
    (dx,) = torch.autograd.grad(y, x, dy)
    torch.testing.assert_close(dx, dy @ dequantize(q))


@pytest.mark.parametrize("backward", ["quantized", "straight_through", "full"])
def test_a_parameter_may_be_freed_and_gathered_again(backward):
    x, weight, bias, dy = problem(40, 128, 256)
    expected = gradients(x, weight, bias, dy, fmt=BLOCK, backward=backward)
    y = unified_linear(x, weight, bias, fmt=BLOCK, backward=backward)
    gathered, weight.data = weight.data, torch.empty(0)
    weight.data = 2 * gathered  # another memory, and as a proof that it is looked at, other values
    y.backward(dy)
    assert torch.equal(x.grad, 2 * expected[1])
    assert torch.equal(weight.grad, expected[2])


def test_a_parameter_that_was_changed_is_refused():
    x, weight, bias, dy = problem(8, 128, 128)
    y = unified_linear(x, weight, bias, fmt=BLOCK, backward="quantized")
    with torch.no_grad():
        weight.mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.backward(dy)


@pytest.mark.parametrize(("name", "backward"), MODES)
def test_checkpoints_and_accumulation_give_the_same(name, backward):
    options = {"fmt": FORMATS[name], "backward": backward}
    x, weight, bias, dy = problem(260, 128, 256)
    _, dx, dw = gradients(x, weight, bias, dy, **options)
    checkpoint(lambda t: unified_linear(t, weight, bias, **options), x, use_reentrant=False).backward(dy)
    assert torch.equal(x.grad, dx)
    assert torch.equal(weight.grad, dw)
    # In parts of 128 tokens the groups of tokens are the same, so the sum differs by its order only.
    weight.grad = None
    for part in (slice(0, 128), slice(128, 260)):
        unified_linear(x[part], weight, bias, **options).backward(dy[part])
    torch.testing.assert_close(weight.grad, dw, rtol=1e-5, atol=1e-6 * float(dw.abs().max()))


def test_leading_dimensions_are_tokens():
    x, weight, bias, dy = problem(60, 128, 256)
    flat = gradients(x, weight, bias, dy, fmt=BLOCK, backward="quantized")
    deep = gradients(x.view(3, 20, 256), weight, bias, dy.view(3, 20, 128), fmt=BLOCK, backward="quantized")
    assert deep[1].shape == (3, 20, 256)
    assert torch.equal(deep[1].view(60, 256), flat[1])
    assert torch.equal(deep[2], flat[2])


def test_it_can_be_differentiated_once():
    x, weight, bias, _ = problem(4, 128, 128)
    y = unified_linear(x, weight, bias, fmt=BLOCK, backward="full")
    (dx,) = torch.autograd.grad(y.square().sum(), x, create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        dx.sum().backward()


# --- helpers and refusals ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("rows", "columns"), [(128, 128), (200, 330), (1, 300)])
def test_transposing_rounds_nothing(rows, columns):
    q = quantize(normal(rows, columns, seed=5), BLOCK)
    assert torch.equal(dequantize(transposed(q)), dequantize(q).t())
    with pytest.raises(QuantizationError, match="int8: only square blocks"):
        transposed(quantize(normal(8, 8, seed=5), FORMATS["int8"]))


@pytest.mark.parametrize("tokens", [1, 128, 300])
def test_groups_across_tokens_are_columns_of_128(tokens):
    x = normal(tokens, 5, seed=6)
    codes, amax = across_tokens(x, BLOCK)
    assert codes.shape == (5, tokens)
    parts = x.split(128)
    assert torch.equal(amax, torch.stack([part.abs().amax(dim=0) for part in parts], dim=1))
    scales = amax.repeat_interleave(128, dim=1)[:, :tokens] / 448
    np.testing.assert_allclose((codes * scales).t().numpy(), rounded(x, "fp8", 448, 128, 1), rtol=1e-5)


def test_what_cannot_be_computed_is_refused():
    x, weight, bias, _ = problem(4, 128, 128)
    for fmt in (FORMATS["int8"], FORMATS["fp8"], FORMATS["int4"], replace(BLOCK, name="flat", rows=1)):
        with pytest.raises(QuantizationError, match=f"{fmt.name} has no quantized backward.*square blocks"):
            unified_linear(x, weight, bias, fmt=fmt, backward="quantized")
    with pytest.raises(QuantizationError, match="unknown backward 'ste'; known: quantized, straight_through, full"):
        unified_linear(x, weight, bias, fmt=BLOCK, backward="ste")
    for codes in (quantize(weight, FORMATS["int8"]), quantize(weight[:64], BLOCK)):
        with pytest.raises(QuantizationError, match=r"the codes are .* not fp8_block to ±448 of \(128, 128\)"):
            unified_linear(x, weight, bias, fmt=BLOCK, backward="full", codes=codes)
    with pytest.raises(QuantizationError, match="nan or inf in 1 of 128 rows"):
        unified_linear(x, weight.detach().index_fill(0, torch.tensor([3]), math.nan), bias, fmt=BLOCK, backward="full")


# --- on Hopper --------------------------------------------------------------------------------------------------------


def hopper(a, b, scale_a, recipe_a, scale_b, recipe_b, *, output_dtype) -> torch.Tensor:
    """What torch documents of scaled_mm for scales of blocks, which no CPU has, with its demands on the layout."""
    (M, K), N, blocks = a.shape, b.shape[1], a.shape[1] // 128
    assert a.dtype == b.dtype == torch.float8_e4m3fn
    assert K == len(b) == 128 * blocks
    assert a.is_contiguous()
    assert b.t().is_contiguous()
    assert M % 16 == N % 16 == 0
    assert recipe_a == ScalingType.BlockWise1x128
    assert scale_a.dtype == scale_b.dtype == torch.float32
    vector = recipe_b == ScalingType.BlockWise1x128
    filled = -(-blocks // 4) * 4
    for scale, shape in (scale_a, (M, blocks)), (scale_b, (N, blocks) if vector else (filled, N // 128)):
        assert scale.shape == shape
        assert scale.stride(0) == 1
        assert scale.stride(1) == shape[0] or shape[1] == scale.stride(1) == 1
    out = torch.zeros(M, N, dtype=torch.float64)
    for k in range(blocks):
        part = slice(128 * k, 128 * (k + 1))
        columns = scale_b[:, k] if vector else scale_b[k].repeat_interleave(128)
        out += (a[:, part].double() @ b[part].double()) * scale_a[:, k, None].double() * columns.double()
    return out.to(output_dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("tokens", [1, 100, 128, 300])
def test_all_three_products_reach_scaled_mm_as_it_wants_them(monkeypatch, tokens, dtype):
    x, weight, bias, dy = problem(tokens, 256, 640, dtype)
    expected = gradients(x.float(), weight, bias, dy.float(), fmt=BLOCK, backward="quantized")
    recipes = []

    def spy(*operands, **options) -> torch.Tensor:
        recipes.append(operands[5])
        return hopper(*operands, **options)

    monkeypatch.setattr(torch.nn.functional, "scaled_mm", spy)
    monkeypatch.setattr(type(KERNELS["scaled_mm_block"]), "device_type", "cpu")
    monkeypatch.setattr(type(KERNELS["scaled_mm_block"]), "lacks", lambda *_: None)
    found = gradients(x, weight, bias, dy, fmt=BLOCK, backward="quantized")
    square, vector = ScalingType.BlockWise128x128, ScalingType.BlockWise1x128
    assert recipes == [square, square, vector]
    for got, value in zip(found, expected, strict=True):
        assert error(got, value) < (1e-5 if dtype == torch.float32 else 2**-8)


@pytest.mark.parametrize(("rows", "emulate"), [(200, False), (256, True)])
def test_widths_without_a_kernel_are_emulated_there_too(monkeypatch, rows, emulate):
    x, weight, bias, dy = problem(40, rows, 256)
    plain = gradients(x, weight, bias, dy, fmt=BLOCK, backward="quantized")
    monkeypatch.setattr(torch.nn.functional, "scaled_mm", lambda *_, **__: pytest.fail("called"))
    monkeypatch.setattr(type(KERNELS["scaled_mm_block"]), "device_type", "cpu")
    monkeypatch.setattr(type(KERNELS["scaled_mm_block"]), "lacks", lambda *_: None)
    found = gradients(x, weight, bias, dy, fmt=BLOCK, backward="quantized", emulate=emulate)
    assert all(map(torch.equal, found, plain))


@pytest.mark.parametrize("fmt", HERE, ids=lambda fmt: fmt.name)
def test_a_weight_that_is_known_to_be_finite_has_the_same_codes(fmt):
    weights = normal(256, 256, seed=5)
    weights[0] = 0
    weights[1, 0] = 1e-44  # a subnormal scale
    one, other = quantize(weights, fmt), quantize(weights, fmt, finite=True)
    assert torch.equal(one.codes.float(), other.codes.float())
    assert torch.equal(one.scale, other.scale)


@pytest.mark.parametrize("fmt", HERE, ids=lambda fmt: fmt.name)
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_a_weight_that_nobody_looked_at_shows_that_it_is_not_finite(fmt, value):
    weights = normal(256, 256, seed=5)
    weights[3, 7] = value
    assert not dequantize(quantize(weights, fmt, finite=True)).isfinite().all()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("emulate", [False, True], ids=["kernel", "emulated"])
@pytest.mark.parametrize(("fmt", "backward"), [(fmt, mode) for fmt in HERE for name, mode in MODES if name == fmt.name])
def test_activations_are_quantized_once_for_both_passes_which_changes_no_bit(
    fmt, backward, emulate, dtype, monkeypatch
):
    counted, find, encode = [], quantize_module.row_maximum, Blocks.encode
    for module in (quantize_module, kernels):
        monkeypatch.setattr(module, "row_maximum", lambda x: counted.append(x.shape) or find(x))
    if fmt.activations:
        monkeypatch.setattr(
            Blocks, "encode", lambda self, x, of: (of is fmt.activations and counted.append(1)) or encode(self, x, of)
        )
    x, weight, bias, dy = problem(7, 256, 128, dtype)
    options = {"fmt": fmt, "backward": backward, "emulate": emulate}
    unified_linear(x, weight, bias, **options)
    passes = len(counted)
    itself = QuantizedLinear(quantize(weight.detach(), fmt), None, emulate=emulate).codes(x.detach()) is None
    # A kernel that makes its codes itself leaves another pass to whoever needs them.
    assert passes == (0 if fmt.activation_max is None else 1 + (itself and backward != "full"))
    once = gradients(x, weight, bias, dy, **options)
    monkeypatch.setattr(QuantizedLinear, "codes", lambda *_: None)
    twice = gradients(x, weight, bias, dy, **options)
    assert all(map(torch.equal, once, twice))
