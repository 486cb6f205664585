"""Are the kernels right? They are compared with a float64 product of the same operands, dequantized.

Errors are relative, in the norm of the whole result: of `QuantizedLinear` for every format, shape and number of rows,
and of the three products of `unified_linear`. Where there is no kernel, its emulation is checked instead.
"""

from collections.abc import Iterator
from functools import partial

import torch

from benchmarks.gpu.bench import Bench, Figures
from qurl_ray.planning.shapes import Shape
from qurl_ray.quant.elements import floats
from qurl_ray.quant.formats import FORMATS, Format, get_format
from qurl_ray.quant.kernels import why_emulated
from qurl_ray.quant.linear import QuantizedLinear, weight_max_code
from qurl_ray.quant.quantize import QTensor, dequantize, dequantize_rows, quantize, quantize_rows
from qurl_ray.quant.training import across_tokens, products_for
from qurl_ray.quant.unified import unified_linear

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
LIMITS = {"integers": 1e-5, "floats": 2e-3, "bfloat16": 5e-3}
"""Largest relative error: of a float32 result from integer codes, of one from FP8, and of any result in bfloat16.
Tensor cores add up FP8 with fewer bits than float32 has."""


def run(bench: Bench) -> None:
    weights = dict.fromkeys([*(size for shape in bench.scale.shapes for size in fused(shape)), *bench.scale.ragged])
    formats = [get_format(name, weight_max_code(FORMATS[name], bench.device)) for name in FORMATS]
    checks = [(fmt.name, checked, fmt) for fmt in formats] + [("unified fp8_block", products, FORMATS["fp8_block"])]
    for name, check, fmt in checks:
        for N, K in weights:
            if fmt.group and fmt.rows == 1 and K % fmt.group:
                continue  # no such weight in this format
            key = f"{name}, {N} × {K}"
            if figures := bench.attempt(key, partial(check, bench, fmt, N, K)):
                errors = ", ".join(f"{value:.1e} in {dtype}" for dtype, value in figures["errors"].items())
                verdict = "right" if figures["right"] else "WRONG"
                bench.add(key, figures, f"{verdict}, error {errors}; {figures['kernel']}")


def fused(shape: Shape) -> Iterator[tuple[int, int]]:
    """Yield N, K of a layer's linears as an engine fuses them: q, k and v; out; gate and up; down."""
    width = shape.heads * shape.head_dim
    yield width + 2 * shape.kv_heads * shape.head_dim, shape.hidden
    yield shape.hidden, width
    yield 2 * shape.intermediate, shape.hidden
    yield shape.hidden, shape.intermediate


def checked(bench: Bench, fmt: Format, N: int, K: int) -> Figures:
    """Return the largest error over the numbers of rows, by input type, and whether a row's bits depend on others."""
    random = torch.Generator(bench.device).manual_seed(0)
    new = partial(torch.randn, generator=random, device=bench.device)
    linear = QuantizedLinear(quantize(0.05 * new(N, K), fmt), new(N).bfloat16().float())  # both types hold this bias
    weight, x_MK = exact_weight(linear.resident()), 3 * new(max(bench.scale.rows), K)
    errors, alone = {}, True
    for dtype, kind in DTYPES.items():
        x_MK = x_MK.to(kind)
        expected = exact_rows(x_MK, fmt) @ weight.t() + linear.bias.double()
        found = {count: linear(x_MK[:count]) for count in bench.scale.rows}
        assert all(y.dtype == kind for y in found.values())
        errors[dtype] = max(error(y, expected[:count]) for count, y in found.items())
        alone &= all(torch.equal(y[:1], linear(x_MK[:1])) for y in found.values())
    kernel = linear.kernel or f"emulation: {why_emulated(fmt, bench.device, (N, K))}"
    return _judged({"kernel": kernel, "errors": errors, "row_is_the_same_in_any_batch": alone}, fmt)


def products(bench: Bench, fmt: Format, N: int, K: int) -> Figures:
    """Return the largest error of y, dx and dW, in the terms of quant/unified.py, by the type of x and dy."""
    random = torch.Generator(bench.device).manual_seed(0)
    new = partial(torch.randn, generator=random, device=bench.device)
    weight_NK, M = (0.05 * new(N, K)).requires_grad_(), max(bench.scale.rows)
    w = exact_weight(quantize(weight_NK, fmt))
    errors, by_product = {}, {}
    for dtype, kind in DTYPES.items():
        x_MK, dy_MN = new(M, K).to(kind).requires_grad_(), (1e-3 * new(M, N)).to(kind)
        y_MN = unified_linear(x_MK, weight_NK, None, fmt=fmt, backward="quantized")
        dx_MK, dw_NK = torch.autograd.grad(y_MN, (x_MK, weight_NK), dy_MN)
        seen_MK = dequantize_rows(quantize_rows(x_MK.detach().float(), fmt), fmt)  # WGrad rounds this once more
        expected = {
            "FProp": (y_MN, exact_rows(x_MK, fmt) @ w.t()),
            "DGrad": (dx_MK, exact_rows(dy_MN, fmt) @ w),
            "WGrad": (dw_NK, exact(*across_tokens(dy_MN, fmt), fmt) @ exact(*across_tokens(seen_MK, fmt), fmt).t()),
        }
        by_product[dtype] = {gemm: error(*pair) for gemm, pair in expected.items()}
        errors[dtype] = max(by_product[dtype].values())
    used = products_for(fmt, bench.device, (M, N, K)).name
    reason = why_emulated(fmt, bench.device, (N, K))
    kernel = f"emulation: {reason}" if reason else f"scaled_mm_block, gradients by {used}"
    return _judged({"kernel": kernel, "errors": errors, "by_product": by_product}, fmt)


# --- float64 --------------------------------------------------------------------------------------------------------


def exact_weight(q: QTensor) -> torch.Tensor:
    """Return the dequantized weight, float64 [N, K]; values of a format with a codec are rounded to float32 first."""
    if q.fmt.codec:
        return dequantize(q).double()
    N, K = q.shape
    scale = q.scale.double().repeat_interleave(q.fmt.rows, dim=0)[:N]
    return floats(q.codes).double() * scale.repeat_interleave(q.fmt.group or K, dim=1)[:, :K]


def exact_rows(x_MK: torch.Tensor, fmt: Format) -> torch.Tensor:
    """Return activations as they are rounded before a product, if they are, float64 [M, K]."""
    x_MK = x_MK.detach().float()
    if fmt.activation_max is None:
        return x_MK.double()
    codes = quantize_rows(x_MK, fmt)
    return dequantize_rows(codes, fmt).double() if fmt.activations else exact(*codes, fmt)


def exact(codes_MK: torch.Tensor, amax_MG: torch.Tensor, fmt: Format) -> torch.Tensor:
    K = codes_MK.shape[1]
    scale = amax_MG.double().repeat_interleave(fmt.activation_group or K, dim=1)[:, :K]
    return codes_MK.double() * scale / fmt.activation_max


def error(found: torch.Tensor, expected: torch.Tensor) -> float:
    return float((found.detach().double() - expected).norm() / expected.norm())


def _judged(figures: Figures, fmt: Format) -> Figures:
    """Add whether all errors are below their limits."""
    codes = "floats" if fmt.dtype.is_floating_point else "integers"
    limits = {"float32": LIMITS[codes], "bfloat16": LIMITS["bfloat16"]}
    return figures | {"right": all(value < limits[dtype] for dtype, value in figures["errors"].items())}
