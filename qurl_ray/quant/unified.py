"""The unified linear: training runs through the very quantized graph that generates (Jet-RL, arXiv 2601.14243).

Three products, M tokens, weights [N, K]. What each reads with backward="quantized", in E4M3 with float32 scales:

| product | left, scales | right, scales |
|---|---|---|
| FProp y = x · Wᵀ | x, 1 × 128 along K | W, 128 × 128 |
| DGrad dx = dy · W | dy, 1 × 128 along N | W's own codes, transposed: blocks are square, nothing is rounded again |
| WGrad dW = dyᵀ · x | dy, 128 tokens × 1 column | x's saved codes, rounded again for 128 tokens × 1 column |

FProp is a QuantizedLinear, and so is DGrad, with the transposed codes: both take the kernel that quant/kernels.py finds
or else its emulation. WGrad is `_wgrad`: emulated, or with scaled_mm on Hopper. That one, like every kernel for CUDA,
was checked on a CPU against what torch documents, and not measured on a GPU.

Between forward and backward x is held as codes of one byte with float32 scales, W as the parameter itself: its codes
are made again in the backward, as they would cost a byte a weight for the whole time, on every rank of ZeRO-3.
"""

from dataclasses import dataclass
from typing import Literal, get_args

import torch
from torch.autograd.function import once_differentiable
from torch.nn import functional
from torch.nn.functional import ScalingType, pad

from qurl_ray.errors import QuantizationError
from qurl_ray.quant.formats import Format
from qurl_ray.quant.kernels import KERNELS
from qurl_ray.quant.linear import QuantizedLinear
from qurl_ray.quant.quantize import QTensor, dequantize, dequantize_rows, floats, quantize, quantize_rows

Backward = Literal["quantized", "straight_through", "full"]
BACKWARDS = get_args(Backward)


def unified_linear(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    *,
    fmt: Format,
    backward: Backward,
    codes: QTensor | None = None,
    emulate: bool = False,
) -> torch.Tensor:
    """y = QuantizedLinear(quantize(weight, fmt), bias)(x), bit for bit what an engine computes, with a gradient.

    The gradients are those of y = x · Wᵀ + bias, as if nothing were rounded, with these factors in place of x, W, dy:

        "quantized"         dx = Q(dy) · Q(W)     dW = Qt(dy)ᵀ · Qt(Q(x))    all of them in FP8: the table above
        "straight_through"  dx = dy · Q(W)        dW = dyᵀ · Q(x)
        "full"              dx = dy · W           dW = dyᵀ · x

    Q is quantized and dequantized as in the forward, Qt the same in groups of tokens. Sums are made in float32 and
    rounded once, to the dtype of x, weight or bias. The gradient of the bias is the sum of dy. A nan or inf in dy makes
    what depends on it nan or inf. Autocast does not reach any of this, which has the dtypes it is given.

    Args:
        x: [..., K] in float32, bfloat16 or float16.
        weight: [N, K], the master, in full precision. Kept by `save_for_backward` alone, so that it may be freed after
            the forward and gathered again before the backward.
        bias: [N].
        backward: one of BACKWARDS. "quantized" is for square blocks (fp8_block).
        codes: the codes of this very weight, where there are some; it is then not quantized again.
        emulate: compute the definition, whatever kernels there are, as in an engine that does.

    Returns:
        [..., N] of x's dtype. It can be differentiated once.

    Raises:
        QuantizationError: no such backward, one that the format does not have, codes of another weight or format, or a
            weight that cannot be quantized.
    """
    _check(weight, fmt, backward, codes)
    how = _How(fmt=fmt, backward=backward, emulate=emulate)
    if torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in (x, weight, bias)):
        return _UnifiedLinear.apply(x, weight, bias, codes, how)
    return _forward(x, codes or quantize(weight, fmt), bias, how)


@dataclass(frozen=True, slots=True, kw_only=True)
class _How:
    fmt: Format
    backward: Backward
    emulate: bool


def _check(weight: torch.Tensor, fmt: Format, backward: str, codes: QTensor | None) -> None:
    if backward not in BACKWARDS:
        raise QuantizationError(f"unknown backward {backward!r}; known: {', '.join(BACKWARDS)}")
    if backward == "quantized" and not _square(fmt):
        raise QuantizationError(
            f"{fmt.name} has no quantized backward: that multiplies with the weight's codes transposed, whose scales "
            "must belong to square blocks as wide as the groups of activations (fp8_block); use straight_through"
        )
    if codes is not None and (codes.fmt != fmt or codes.shape != weight.shape):
        raise QuantizationError(
            f"the codes are {codes.fmt.name} to ±{codes.fmt.weight_max} of {tuple(codes.shape)}, not {fmt.name} to "
            f"±{fmt.weight_max} of {tuple(weight.shape)}"
        )


def _square(fmt: Format) -> bool:
    return fmt.activation_group is not None and fmt.rows == fmt.group == fmt.activation_group


class _UnifiedLinear(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight, bias, codes, how):
        ctx.how, ctx.shape = how, x.shape
        ctx.dtypes = x.dtype, weight.dtype, None if bias is None else bias.dtype
        # The caller's codes may be others than the weight would give now, and are the caller's memory.
        ctx.from_codes = codes is not None and how.backward != "full"
        kept = (codes.codes, codes.scale) if ctx.from_codes else (weight,)
        ctx.save_for_backward(*kept, *(_saved_inputs(x, how) if ctx.needs_input_grad[1] else ()))
        return _forward(x, codes or quantize(weight, how.fmt), bias, how)

    @staticmethod
    @once_differentiable
    def backward(ctx, dy):
        how, (needs_dx, needs_dw, needs_db, *_) = ctx.how, ctx.needs_input_grad
        saved, first = ctx.saved_tensors, 2 if ctx.from_codes else 1
        weight, inputs = saved[:first], saved[first:]
        x_dtype, weight_dtype, bias_dtype = ctx.dtypes
        dy_MN = dy.reshape(-1, dy.shape[-1])
        dx = dw = db = None
        with torch.autocast(dy.device.type, enabled=False):
            if needs_dx:
                dx = _dgrad(dy_MN, weight, how).to(x_dtype).view(ctx.shape)
            if needs_dw:
                dw = _wgrad(dy_MN, inputs, how).to(weight_dtype)
            if needs_db:
                db = dy_MN.float().sum(dim=0).to(bias_dtype)
        return dx, dw, db, None, None


def _forward(x: torch.Tensor, q: QTensor, bias: torch.Tensor | None, how: _How) -> torch.Tensor:
    """By the engine's own module, which on a CPU and on CUDA may mean a kernel."""
    with torch.autocast(x.device.type, enabled=False):
        return QuantizedLinear(q, bias, emulate=how.emulate)(x)


def _saved_inputs(x: torch.Tensor, how: _How) -> tuple[torch.Tensor, ...]:
    """What WGrad needs of x: (codes [M, K] of one byte, maxima [M, groups]), or x itself where there are no codes."""
    x_MK = x.reshape(-1, x.shape[-1])
    if how.backward == "full" or how.fmt.activation_max is None:
        return (x_MK,)
    codes_MK, amax_MG = quantize_rows(x_MK.float(), how.fmt)
    return codes_MK.to(how.fmt.dtype), amax_MG


def _dgrad(dy_MN: torch.Tensor, weight: tuple[torch.Tensor, ...], how: _How) -> torch.Tensor:
    """dy · W, [M, K]; `weight` is the parameter, or codes and scales of it."""
    if how.backward == "full":
        return dy_MN.float() @ weight[0].float()
    q = QTensor(codes=weight[0], scale=weight[1], fmt=how.fmt) if len(weight) > 1 else quantize(weight[0], how.fmt)
    if how.backward == "straight_through":
        return dy_MN.float() @ dequantize(q)
    return QuantizedLinear(transposed(q), None, emulate=how.emulate)(dy_MN)


def _wgrad(dy_MN: torch.Tensor, inputs: tuple[torch.Tensor, ...], how: _How) -> torch.Tensor:
    """dyᵀ · x, float32 [N, K]; `inputs` is what `_saved_inputs` returned."""
    codes_MK, *amax_MG = inputs
    x_MK = dequantize_rows(floats(codes_MK), amax_MG[0], how.fmt) if amax_MG else codes_MK.float()
    if how.backward != "quantized":
        return dy_MN.float().t() @ x_MK
    dy, x = across_tokens(dy_MN, how.fmt), across_tokens(x_MK, how.fmt)
    shape = (dy_MN.shape[1], x_MK.shape[1])
    if not how.emulate and KERNELS["scaled_mm_block"].supports(how.fmt, dy_MN.device, shape):
        return _product_on_hopper(dy, x, how.fmt)
    return functional.linear(dequantize_rows(*dy, how.fmt), dequantize_rows(*x, how.fmt))


def transposed(q: QTensor) -> QTensor:
    """The weight [K, N] of the same values: codes and scales change places, and nothing is rounded.

    Raises:
        QuantizationError: blocks that are not square, whose transposed scales are those of no format.
    """
    if q.fmt.rows != q.fmt.group:
        raise QuantizationError(f"{q.fmt.name}: only square blocks can be transposed")
    codes = q.codes.view(torch.uint8).t().contiguous().view(q.fmt.dtype)
    return QTensor(codes=codes, scale=q.scale.t().contiguous(), fmt=q.fmt)


def across_tokens(x_MK: torch.Tensor, fmt: Format) -> tuple[torch.Tensor, torch.Tensor]:
    """`quantize_rows` of columns: (codes as float32 [K, M], maxima [K, M / activation_group, rounded up]).

    Here the range does depend on which tokens share a group. The gradient of a weight therefore depends on their order
    and on where micro-batches are cut, to the precision of the codes: not where each but the last has a multiple of
    activation_group tokens. The last group is filled up with zeros.
    """
    return quantize_rows(x_MK.float().t().contiguous(), fmt)


# --- Hopper, not measured on a GPU ----------------------------------------------------------------------------------

Codes = tuple[torch.Tensor, torch.Tensor]
"""What `across_tokens` returns."""


def _product_on_hopper(dy: Codes, x: Codes, fmt: Format) -> torch.Tensor:
    """dyᵀ · x as one product of codes with scales for 1 × 128 on both sides, float32 [N, K]."""
    (dy_NM, dy_scale), (x_KM, x_scale) = _operand(dy, fmt), _operand(x, fmt)
    kind = ScalingType.BlockWise1x128
    return functional.scaled_mm(dy_NM, x_KM.t(), dy_scale, kind, x_scale, kind, output_dtype=torch.float32)


def _operand(rows: Codes, fmt: Format) -> Codes:
    """Codes up to whole groups of tokens, and scales one column after the other in memory, as scaled_mm wants both."""
    codes_RM, amax_RG = rows
    filled = pad(codes_RM, (0, -codes_RM.shape[1] % (fmt.activation_group or 1)))
    return filled.to(fmt.dtype), (amax_RG * fmt.activation_step).t().contiguous().t()
