"""The unified linear: training uses the same quantized graph as generation (Jet-RL, arXiv 2601.14243).

Three products, M tokens, weights [N, K]. Their operands with backward="quantized", in E4M3 with float32 scales:

| product | left, scales | right, scales |
|---|---|---|
| FProp y = x · Wᵀ | x, 1 × 128 along K | W, 128 × 128 |
| DGrad dx = dy · W | dy, 1 × 128 along N | W's own codes, transposed: blocks are square, nothing is rounded again |
| WGrad dW = dyᵀ · x | dy, 128 tokens × 1 column | x's saved codes, rounded again for 128 tokens × 1 column |

FProp is a QuantizedLinear, and so is DGrad, with the transposed codes: both use the kernel that quant/kernels.py finds,
or else emulation. WGrad is `_wgrad`: emulated, or with scaled_mm on Hopper. The latter, like every CUDA kernel, was
checked on a CPU against torch's documentation, and not measured on a GPU.

Between forward and backward pass, x is held as codes of one byte with float32 scales, and W as the parameter itself.
The codes of W are computed again in the backward pass: to keep them would cost one byte per weight for the whole time,
on every rank of ZeRO-3.
"""

from dataclasses import dataclass
from typing import Literal, get_args

import torch
from torch.autograd.function import once_differentiable
from torch.nn import functional
from torch.nn.functional import ScalingType, pad

from qurl_ray.errors import QuantizationError
from qurl_ray.quant.equalize import Factors
from qurl_ray.quant.formats import Format
from qurl_ray.quant.kernels import KERNELS
from qurl_ray.quant.linear import QuantizedLinear
from qurl_ray.quant.quantize import QTensor, dequantize, dequantize_rows, floats, quantize, quantize_rows

Backward = Literal["quantized", "straight_through", "full"]
BACKWARDS = get_args(Backward)
_NO_FACTORS = Factors()


def unified_linear(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    *,
    fmt: Format,
    backward: Backward,
    codes: QTensor | None = None,
    factors: Factors = _NO_FACTORS,
    emulate: bool = False,
) -> torch.Tensor:
    """Return y = QuantizedLinear(quantize(weight, fmt), bias)(x), with the same bits as an engine, with a gradient.

    The gradients are those of y = x · Wᵀ + bias, as if nothing were rounded, with these factors in place of x, W, dy:

        "quantized"         dx = Q(dy) · Q(W)     dW = Qt(dy)ᵀ · Qt(Q(x))    all of them in FP8: the table above
        "straight_through"  dx = dy · Q(W)        dW = dyᵀ · Q(x)
        "full"              dx = dy · W           dW = dyᵀ · x

    Q quantizes and dequantizes as in the forward pass, Qt does the same in groups of tokens. Sums are accumulated in
    float32 and rounded once, to the dtype of x, weight or bias. The gradient of the bias is the sum of dy. A nan or inf
    in dy makes everything that depends on it nan or inf. Autocast has no effect on these computations.

    Args:
        x: [..., K] in float32, bfloat16 or float16.
        weight: [N, K], the master, in full precision. Only `save_for_backward` keeps it, so that it may be freed after
            the forward pass and gathered again before the backward pass.
        bias: [N].
        backward: one of BACKWARDS. "quantized" is for square blocks (fp8_block).
        codes: the codes of this weight, if they exist already; it is then not quantized again.
        factors: of equalization, with which the weight is quantized and x rounded. The network stays the same.
        emulate: compute the definition even if there is a kernel, as an engine that emulates does.

    Returns:
        [..., N] of x's dtype. It can be differentiated once.

    Raises:
        QuantizationError: the backward is unknown or does not exist for the format, the codes are of another shape or
            format, or the weight cannot be quantized.
    """
    _check(weight, fmt, backward, codes)
    how = _How(fmt=fmt, backward=backward, factors=factors, emulate=emulate)
    if torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in (x, weight, bias)):
        return _UnifiedLinear.apply(x, weight, bias, codes, how)
    return _forward(x, codes or how.quantize(weight), bias, how)


@dataclass(frozen=True, slots=True, kw_only=True)
class _How:
    fmt: Format
    backward: Backward
    factors: Factors
    emulate: bool

    def quantize(self, weight: torch.Tensor) -> QTensor:
        # Each linear would wait for the GPU to look at its weight. The scales of a weight that is not finite are not,
        # nor is then the loss, and no update is made of that. On a CPU, to look is faster than to clip.
        return quantize(self.factors.weight(weight), self.fmt, finite=not weight.is_cpu)


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
        # The caller's codes may differ from those of the weight now, and their memory is the caller's.
        ctx.from_codes = codes is not None and how.backward != "full"
        kept = (codes.codes, codes.scale) if ctx.from_codes else (weight,)
        ctx.save_for_backward(*kept, *(_saved_inputs(how.factors.inputs(x), how) if ctx.needs_input_grad[1] else ()))
        return _forward(x, codes or how.quantize(weight), bias, how)

    @staticmethod
    @once_differentiable
    def backward(ctx, dy):
        how, (needs_dx, needs_dw, needs_db, *_) = ctx.how, ctx.needs_input_grad
        saved, first = ctx.saved_tensors, 2 if ctx.from_codes else 1
        weight, inputs = saved[:first], saved[first:]
        x_dtype, weight_dtype, bias_dtype = ctx.dtypes
        unfolded_MN = dy.reshape(-1, dy.shape[-1])
        dy_MN = how.factors.outputs(unfolded_MN)
        dx = dw = db = None
        with torch.autocast(dy.device.type, enabled=False):
            if needs_dx:
                dx = how.factors.inputs(_dgrad(dy_MN, weight, how)).to(x_dtype).view(ctx.shape)
            if needs_dw:
                dw = how.factors.weight(_wgrad(dy_MN, inputs, how)).to(weight_dtype)
            if needs_db:
                db = unfolded_MN.float().sum(dim=0).to(bias_dtype)
        return dx, dw, db, None, None


def _forward(x: torch.Tensor, q: QTensor, bias: torch.Tensor | None, how: _How) -> torch.Tensor:
    """Compute y with the engine's own module, which may use a kernel, on a CPU and on CUDA."""
    with torch.autocast(x.device.type, enabled=False):
        bias = bias if bias is None else how.factors.bias(bias)
        return how.factors.outputs(QuantizedLinear(q, bias, emulate=how.emulate)(how.factors.inputs(x)))


def _saved_inputs(x: torch.Tensor, how: _How) -> tuple[torch.Tensor, ...]:
    """Return what WGrad needs of x: (codes [M, K] of one byte, maxima [M, groups]), or (x,) if there are no codes."""
    x_MK = x.reshape(-1, x.shape[-1])
    if how.backward == "full" or how.fmt.activation_max is None:
        return (x_MK,)
    codes_MK, amax_MG = quantize_rows(x_MK.float(), how.fmt)
    return codes_MK.to(how.fmt.dtype), amax_MG


def _dgrad(dy_MN: torch.Tensor, weight: tuple[torch.Tensor, ...], how: _How) -> torch.Tensor:
    """Return dy · W, [M, K]; `weight` is the parameter, or its codes and scales."""
    if how.backward == "full":
        return dy_MN.float() @ how.factors.weight(weight[0].float())
    q = QTensor(codes=weight[0], scale=weight[1], fmt=how.fmt) if len(weight) > 1 else how.quantize(weight[0])
    if how.backward == "straight_through":
        return dy_MN.float() @ dequantize(q)
    return QuantizedLinear(transposed(q), None, emulate=how.emulate)(dy_MN)


def _wgrad(dy_MN: torch.Tensor, inputs: tuple[torch.Tensor, ...], how: _How) -> torch.Tensor:
    """Return dyᵀ · x, float32 [N, K]; `inputs` is the result of `_saved_inputs`."""
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
    """Return the transposed weight [K, N]: codes and scales are transposed, and nothing is rounded.

    Raises:
        QuantizationError: blocks are not square, so that no format has the transposed scales.
    """
    if q.fmt.rows != q.fmt.group:
        raise QuantizationError(f"{q.fmt.name}: only square blocks can be transposed")
    codes = q.codes.view(torch.uint8).t().contiguous().view(q.fmt.dtype)
    return QTensor(codes=codes, scale=q.scale.t().contiguous(), fmt=q.fmt)


def across_tokens(x_MK: torch.Tensor, fmt: Format) -> tuple[torch.Tensor, torch.Tensor]:
    """Return `quantize_rows` of columns: (codes as float32 [K, M], maxima [K, M / activation_group, rounded up]).

    Here the range does depend on which tokens share a group. The gradient of a weight therefore depends, within the
    precision of the codes, on the order of tokens and on the borders of micro-batches. Borders have no effect if each
    micro-batch but the last has a multiple of activation_group tokens. The last group is padded with zeros.
    """
    return quantize_rows(x_MK.float().t().contiguous(), fmt)


# --- Hopper, not measured on a GPU ----------------------------------------------------------------------------------

CodesAndMaxima = tuple[torch.Tensor, torch.Tensor]
"""Codes and maxima, as `across_tokens` returns them."""


def _product_on_hopper(dy: CodesAndMaxima, x: CodesAndMaxima, fmt: Format) -> torch.Tensor:
    """Return dyᵀ · x, float32 [N, K], as one product of codes with a scale per 1 × 128 on both sides."""
    (dy_NM, dy_scale), (x_KM, x_scale) = _operand(dy, fmt), _operand(x, fmt)
    kind = ScalingType.BlockWise1x128
    return functional.scaled_mm(dy_NM, x_KM.t(), dy_scale, kind, x_scale, kind, output_dtype=torch.float32)


def _operand(rows: CodesAndMaxima, fmt: Format) -> CodesAndMaxima:
    """Return codes, padded to whole groups of tokens, and column-major scales, as scaled_mm needs them."""
    codes_RM, amax_RG = rows
    filled = pad(codes_RM, (0, -codes_RM.shape[1] % (fmt.activation_group or 1)))
    return filled.to(fmt.dtype), (amax_RG * fmt.activation_step).t().contiguous().t()
