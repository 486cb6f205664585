"""Quantizers for CUDA in one pass over their values, by Triton. Bits are those of the definitions in quant/quantize.py.

These take ten to twenty operations on the device, each of which reads or writes all values; where values are few,
to start them takes longer still.

| function | definition |
|---|---|
| codes_of_rows | quantize_rows, of activations |
| codes_of_columns | quantize_rows of the transposed matrix, for the gradient of a weight |
| codes_of_blocks | quantize, of a weight |
| transposed_codes | the transposed codes of a weight |
| scaled_sums | factors and bias of a product of codes, as in linear.reference_linear |
"""

import torch
import triton
from triton import language as tl

from qurl_ray.quant.formats import Format

TOKENS = 128
"""Tokens of a group in `codes_of_columns`, and the side of the squares that programs turn."""
WIDEST = 32768
"""Columns that a program holds in registers at most, where a row has one scale."""
_LEAST = tl.constexpr(torch.finfo(torch.float32).tiny)
_MIDDLE = tl.constexpr(128.0)
_ONE_APART = tl.constexpr(1.5 * 2.0**23)


def codes_of_rows(x_MK: torch.Tensor, fmt: Format, count: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return `quantize_rows`, with codes of the format's type and `count` rows: after the last come rows of zeros.

    Args:
        x_MK: at most WIDEST columns, or any multiple of the format's group of activations.
    """
    x_MK = x_MK.contiguous()
    M, K = x_MK.shape
    group = fmt.activation_group or K
    groups = K // group
    codes_MK = x_MK.new_empty(count, K, dtype=fmt.dtype)
    amax_GM = x_MK.new_empty(groups, count, dtype=torch.float32)  # as cuBLAS needs the scales of groups
    width = triton.next_power_of_2(group)
    lines = max(1, 4096 // width)
    _rows[(triton.cdiv(count * groups, lines),)](
        x_MK, codes_MK, amax_GM, M * groups, count, groups, group, fmt.activation_max, not fmt.dtype.is_floating_point,
        lines, width, num_warps=_warps(lines * width), enable_fp_fusion=False,
    )  # fmt: skip
    return codes_MK, amax_GM.t()


def codes_of_columns(
    x_MK: torch.Tensor, amax_MG: torch.Tensor | None, fmt: Format
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return `quantize_rows` of the columns, in groups of TOKENS: codes of the format's type [K, M padded to whole
    groups] and maxima [K, groups].

    Args:
        x_MK: values, or codes if there are maxima. K is a multiple of TOKENS.
        amax_MG: maxima of these codes, in groups of TOKENS columns.
    """
    x_MK = x_MK.contiguous()
    M, K = x_MK.shape
    groups = max(1, triton.cdiv(M, TOKENS))
    codes_KM = x_MK.new_empty(K, groups * TOKENS, dtype=fmt.dtype)
    amax_GK = x_MK.new_empty(groups, K, dtype=torch.float32)
    strides = (0, 0) if amax_MG is None else amax_MG.stride()
    _columns[(groups, K // TOKENS)](
        x_MK, amax_MG, codes_KM, amax_GK, M, K, *strides, fmt.activation_step, fmt.activation_max, amax_MG is not None,
        TOKENS, num_warps=8, enable_fp_fusion=False,
    )  # fmt: skip
    return codes_KM, amax_GK.t()


def codes_of_blocks(w_NK: torch.Tensor, fmt: Format) -> tuple[torch.Tensor, torch.Tensor]:
    """Return codes and scales of `quantize`, which are not finite where the weight is not.

    Args:
        w_NK: at most WIDEST columns, or any width if the format has groups.
    """
    w_NK = w_NK.detach().contiguous()
    N, K = w_NK.shape
    group = fmt.group or K
    codes_NK = w_NK.new_empty(N, K, dtype=fmt.dtype)
    scale = w_NK.new_empty(triton.cdiv(N, fmt.rows), triton.cdiv(K, group), dtype=torch.float32)
    width = triton.next_power_of_2(group)
    _blocks[tuple(scale.shape)](
        w_NK, codes_NK, scale, N, K, group, fmt.weight_max, not fmt.dtype.is_floating_point, fmt.rows, width,
        num_warps=_warps(fmt.rows * width), enable_fp_fusion=False,
    )  # fmt: skip
    return codes_NK, scale


def transposed_codes(codes_NK: torch.Tensor) -> torch.Tensor:
    """Return the transposed matrix, contiguous: torch takes ten times as long for values of one byte."""
    values_NK = codes_NK.contiguous().view(torch.uint8)
    N, K = values_NK.shape
    values_KN = values_NK.new_empty(K, N)
    _transposed[(triton.cdiv(N, TOKENS), triton.cdiv(K, TOKENS))](values_NK, values_KN, N, K, TOKENS, num_warps=8)
    return values_KN.view(codes_NK.dtype)


def scaled_sums(
    sums_MN: torch.Tensor, scale_N: torch.Tensor, amax_M1: torch.Tensor, bias: torch.Tensor | None, dtype: torch.dtype
) -> torch.Tensor:
    """Return sums · scale · maximum + bias of this type, computed in float32, one factor after the other."""
    sums_MN, scale_N, amax_M1 = sums_MN.contiguous(), scale_N.contiguous(), amax_M1.contiguous()
    bias = None if bias is None else bias.contiguous()
    M, N = sums_MN.shape
    y_MN = sums_MN.new_empty(M, N, dtype=dtype)
    width = min(1024, triton.next_power_of_2(N))
    _scaled[(M, triton.cdiv(N, width))](
        sums_MN, scale_N, amax_M1, bias, y_MN, N, bias is not None, width, num_warps=4, enable_fp_fusion=False
    )
    return y_MN


def _warps(values: int) -> int:
    return max(1, min(16, values // 1024))


# --- kernels ----------------------------------------------------------------------------------------------------------


@triton.jit
def _larger(a, b):
    return tl.maximum(a, b, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def _rounded(values, MIDDLE: tl.constexpr):
    # Where floats are one apart, addition rounds to nearest, ties to even, and the low byte is the code.
    return (values + (_ONE_APART - MIDDLE)).to(tl.int32, bitcast=True).to(tl.int8)


@triton.jit
def _codes_of(values, largest, MAX: tl.constexpr, INTEGERS: tl.constexpr):
    """Return codes of activations, whose sums with the offset are rounded once, as quantize_rows explains."""
    ratios = tl.div_rn(values, largest)
    most = tl.full(ratios.shape, MAX, tl.float32)
    if INTEGERS:
        codes = _rounded(tl.fma(ratios, most, tl.full(ratios.shape, _MIDDLE, tl.float32)), _MIDDLE)
    else:
        codes = (ratios * most + 0.0).to(tl.float8e4nv)
    return codes


@triton.jit
def _rows(
    x, codes, amax, lines, count, groups, width, MAX: tl.constexpr, INTEGERS: tl.constexpr, LINES: tl.constexpr,
    WIDTH: tl.constexpr,
):  # fmt: skip
    """Each program quantizes LINES lines; a line is the group of a row."""
    line = tl.program_id(0).to(tl.int64) * LINES + tl.arange(0, LINES)
    column = tl.arange(0, WIDTH)
    at = line[:, None] * width + column[None, :]
    within = (line < count * groups)[:, None] & (column < width)[None, :]
    values = tl.load(x + at, mask=within & (line < lines)[:, None], other=0.0).to(tl.float32)
    largest = _larger(tl.reduce(tl.abs(values), 1, _larger), _LEAST)
    tl.store(codes + at, _codes_of(values, largest[:, None], MAX, INTEGERS), mask=within)
    tl.store(amax + line % groups * count + line // groups, largest, mask=line < count * groups)


@triton.jit
def _columns(
    x, row_amax, codes, amax, M, K, row_stride, group_stride, step, MAX: tl.constexpr, SCALED: tl.constexpr,
    SIDE: tl.constexpr,
):  # fmt: skip
    """Each program quantizes a square."""
    row = tl.program_id(0).to(tl.int64) * SIDE + tl.arange(0, SIDE)
    column = tl.program_id(1) * SIDE + tl.arange(0, SIDE)
    within = (row < M)[:, None]
    values = tl.load(x + row[:, None] * K + column[None, :], mask=within, other=0.0).to(tl.float32)
    if SCALED:
        scale = tl.load(row_amax + row * row_stride + tl.program_id(1) * group_stride, mask=row < M, other=0.0) * step
        values *= scale[:, None]
    largest = _larger(tl.reduce(tl.abs(values), 0, _larger), _LEAST)
    turned = tl.trans(_codes_of(values, largest[None, :], MAX, False))
    length = tl.num_programs(0).to(tl.int64) * SIDE
    tl.store(codes + column[:, None] * length + row[None, :], turned)
    tl.store(amax + tl.program_id(0).to(tl.int64) * K + column, largest)


@triton.jit
def _blocks(
    w, codes, scale, N, K, width, MAX: tl.constexpr, INTEGERS: tl.constexpr, ROWS: tl.constexpr, WIDTH: tl.constexpr
):
    """Each program quantizes the block of a scale."""
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    within_block = tl.arange(0, WIDTH)
    column = tl.program_id(1) * width + within_block
    at = row[:, None] * K + column[None, :]
    within = (row < N)[:, None] & ((column < K) & (within_block < width))[None, :]
    values = tl.load(w + at, mask=within, other=0.0).to(tl.float32)
    step = tl.div_rn(tl.reduce(tl.reduce(tl.abs(values), 1, _larger), 0, _larger), tl.full((), MAX, tl.float32))
    step = tl.where(step == 0.0, 1.0, step)
    ratios = tl.div_rn(values, tl.zeros_like(values) + step)
    ratios = tl.minimum(_larger(ratios, -1.0 * MAX), 1.0 * MAX, propagate_nan=tl.PropagateNan.ALL)
    rounded = _rounded(ratios, 0.0) if INTEGERS else ratios.to(tl.float8e4nv)
    tl.store(codes + at, rounded, mask=within)
    tl.store(scale + tl.program_id(0) * tl.num_programs(1) + tl.program_id(1), step)


@triton.jit
def _transposed(values, transposed, N, K, SIDE: tl.constexpr):
    """Each program turns a square."""
    row = tl.program_id(0).to(tl.int64) * SIDE + tl.arange(0, SIDE)
    column = tl.program_id(1).to(tl.int64) * SIDE + tl.arange(0, SIDE)
    within = (row < N)[:, None] & (column < K)[None, :]
    square = tl.load(values + row[:, None] * K + column[None, :], mask=within)
    tl.store(transposed + column[:, None] * N + row[None, :], tl.trans(square), mask=tl.trans(within))


@triton.jit
def _scaled(sums, scale, amax, bias, y, N, BIASED: tl.constexpr, WIDTH: tl.constexpr):
    """Each program scales a part of a row."""
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * WIDTH + tl.arange(0, WIDTH)
    within = column < N
    products = tl.load(sums + row * N + column, mask=within).to(tl.float32)
    products = products * tl.load(scale + column, mask=within) * tl.load(amax + row)
    if BIASED:
        products += tl.load(bias + column, mask=within).to(tl.float32)
    tl.store(y + row * N + column, products.to(y.dtype.element_ty), mask=within)
