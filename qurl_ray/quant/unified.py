"""The unified linear: training uses the same quantized graph as generation (Jet-RL, arXiv 2601.14243).

Three products, M tokens, weights [N, K]. Their operands with backward="quantized", in E4M3 with float32 scales:

| product | left, scales | right, scales |
|---|---|---|
| FProp y = x · Wᵀ | x, 1 × 128 along K | W, 128 × 128 |
| DGrad dx = dy · W | dy, 1 × 128 along N | W's own codes, transposed: blocks are square, nothing is rounded again |
| WGrad dW = dyᵀ · x | dy, 128 tokens × 1 column | x's saved codes, rounded again for 128 tokens × 1 column |

FProp is a QuantizedLinear, which uses the kernel that quant/kernels.py finds, or else emulation. DGrad and WGrad are
those of the table in quant/training.py.

Between forward and backward pass, x is held as codes of one byte with float32 scales, and W as the parameter itself.
The codes of W are computed again in the backward pass: to keep them would cost one byte per weight for the whole time,
on every rank of ZeRO-3.
"""

from dataclasses import dataclass
from typing import Literal, get_args

import torch
from torch.autograd.function import once_differentiable

from qurl_ray.errors import QuantizationError
from qurl_ray.numerics.products import product_with
from qurl_ray.quant.equalize import Factors
from qurl_ray.quant.formats import Format
from qurl_ray.quant.linear import QuantizedLinear
from qurl_ray.quant.quantize import QTensor, dequantize, dequantize_rows, quantize, row_codes
from qurl_ray.quant.training import PRODUCTS, products_for

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
    return _forward(x, codes or how.quantize(weight), bias, how)[0]


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

    def codes(self, weight: tuple[torch.Tensor, ...]) -> QTensor:
        """Return the codes of a weight, which is given as the parameter, or as the parts of its format."""
        if len(weight) == 1:
            return self.quantize(weight[0])
        return QTensor.of(weight, self.fmt)


def _check(weight: torch.Tensor, fmt: Format, backward: str, codes: QTensor | None) -> None:
    if backward not in BACKWARDS:
        raise QuantizationError(f"unknown backward {backward!r}; known: {', '.join(BACKWARDS)}")
    square = fmt.activation_group is not None and fmt.rows == fmt.group == fmt.activation_group
    if backward == "quantized" and not square:
        raise QuantizationError(
            f"{fmt.name} has no quantized backward: that multiplies with the weight's codes transposed, whose scales "
            "must belong to square blocks as wide as the groups of activations (fp8_block); use straight_through"
        )
    if codes is not None and (codes.fmt != fmt or codes.shape != weight.shape):
        raise QuantizationError(
            f"the codes are {codes.fmt.name} to ±{codes.fmt.weight_max} of {tuple(codes.shape)}, not {fmt.name} to "
            f"±{fmt.weight_max} of {tuple(weight.shape)}"
        )


class _UnifiedLinear(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight, bias, codes, how):
        ctx.how, ctx.shape = how, x.shape
        ctx.dtypes = x.dtype, weight.dtype, None if bias is None else bias.dtype
        # The caller's codes may differ from those of the weight now, and their memory is the caller's.
        given = codes if how.backward != "full" else None
        kept = (given.codes, given.scale, *given.more) if given else (weight,)
        ctx.kept = len(kept)
        y, inputs = _forward(x, codes or how.quantize(weight), bias, how, saves=ctx.needs_input_grad[1])
        ctx.save_for_backward(*kept, *inputs)
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx, dy):
        how, (needs_dx, _, needs_db, *_) = ctx.how, ctx.needs_input_grad
        saved = ctx.saved_tensors  # once: a checkpoint unpacks it once
        weight, inputs = saved[: ctx.kept], saved[ctx.kept :]
        x_dtype, weight_dtype, bias_dtype = ctx.dtypes
        unfolded_MN = dy.reshape(-1, dy.shape[-1])
        dy_MN = how.factors.outputs(unfolded_MN)
        db = None
        with torch.autocast(dy.device.type, enabled=False):
            dx, dw = _gradients(dy_MN, weight if needs_dx else (), inputs, how)
            if dx is not None:
                dx = how.factors.inputs(dx).to(x_dtype).view(ctx.shape)
            if dw is not None:
                dw = how.factors.weight(dw).to(weight_dtype)
            if needs_db:
                db = unfolded_MN.sum(dim=0, dtype=torch.float32).to(bias_dtype)
        return dx, dw, db, None, None


def _forward(
    x: torch.Tensor, q: QTensor, bias: torch.Tensor | None, how: _How, *, saves: bool = False
) -> tuple[torch.Tensor, tuple[torch.Tensor, ...]]:
    """Compute y with the engine's own module, which may use a kernel, on a CPU and on CUDA.

    Returns:
        y, and if it `saves`, x as WGrad needs it: (codes [M, K] of one byte, maxima [M, groups]), or (x [M, K],) if
        there are no codes. They are the codes of which y was made, unless a kernel makes these itself.
    """
    with torch.autocast(x.device.type, enabled=False):
        linear = QuantizedLinear(q, bias if bias is None else how.factors.bias(bias), emulate=how.emulate)
        x = how.factors.inputs(x)
        x_MK = x.reshape(-1, x.shape[-1])
        if not saves or how.backward == "full" or how.fmt.activation_max is None:
            return how.factors.outputs(linear(x)), (x_MK,) if saves else ()
        codes = linear.codes(x)
        parts = [part.reshape(-1, part.shape[-1])[: len(x_MK)] for part in codes or row_codes(x_MK, how.fmt)]
        return how.factors.outputs(linear(x, codes)), (parts[0].to(how.fmt.dtype), *parts[1:])


def _gradients(
    dy_MN: torch.Tensor, weight: tuple[torch.Tensor, ...], inputs: tuple[torch.Tensor, ...], how: _How
) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    """Return (dy · W [M, K], dyᵀ · x [N, K]), None for that of an operand which is ().

    Args:
        weight: the parameter, or the parts of its codes.
        inputs: what `_forward` saves.
    """
    dx = dw = None
    if not weight and not inputs:
        return dx, dw
    if how.backward == "quantized":
        products, K = PRODUCTS["emulation"], (weight or inputs)[0].shape[1]
        if not how.emulate:
            products = products_for(how.fmt, dy_MN.device, (*dy_MN.shape, K))
        q, x = how.codes(weight) if weight else None, (inputs[0], inputs[1]) if inputs else None
        return products.gradients(dy_MN, q, x, how.fmt)
    if weight:
        full = how.backward == "full"
        held = how.factors.weight(weight[0].float()) if full else dequantize(how.codes(weight))
        dx = product_with(dy_MN.float(), held)
    if inputs:
        x_MK = dequantize_rows(inputs, how.fmt) if len(inputs) > 1 else inputs[0].float()
        dw = dy_MN.float().t() @ x_MK
    return dx, dw
