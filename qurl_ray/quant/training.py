"""The two products of a backward pass in FP8 blocks, by device, in one table. `Emulation` defines their result.

M tokens, weights [N, K]:

| entry | needs | operands | products |
|---|---|---|---|
| scaled_mm | CUDA, compute capability 9.0, CUDA 12.9, multiples of 128 | one pass each (quant/fused.py) | cuBLAS |
| emulation | | several passes in float32 | float32 |

`products_for` finds the first that can be used, from shapes alone: nothing waits for the GPU. docs/gpu.md has their
speed on an H200.
"""

from typing import ClassVar

import torch
from torch.nn import functional
from torch.nn.functional import ScalingType

from qurl_ray.errors import QuantizationError
from qurl_ray.quant.formats import Format
from qurl_ray.quant.kernels import ScaledMmBlock, column_major
from qurl_ray.quant.linear import QuantizedLinear
from qurl_ray.quant.quantize import Codes, QTensor, dequantize_rows, filled, fused_kernels, quantize_rows

_Sizes = tuple[int, int, int]
"""M, N, K."""
_BLOCK = ScaledMmBlock()
_VECTOR = ScalingType.BlockWise1x128


class Emulation:
    """The definition, in float32."""

    name: ClassVar[str] = "emulation"
    _emulate: ClassVar[bool] = True

    def objection(self, fmt: Format, device: torch.device, shape: _Sizes | None = None) -> str | None:
        """Return why it cannot be used here, or None. With shape None: why it cannot be used for any shape."""
        return None

    def gradients(
        self, dy_MN: torch.Tensor, q: QTensor | None, x: Codes | None, fmt: Format
    ) -> tuple[torch.Tensor | None, torch.Tensor | None]:
        """Return (dx = dy · W, [M, K] of dy's dtype; dW = dyᵀ · x, float32 [N, K]), None for that of an operand None.

        Args:
            q: W, whose blocks are square.
            x: `row_codes` of x [M, K].
        """
        dx = QuantizedLinear(transposed(q), None, emulate=self._emulate)(dy_MN) if q else None
        return dx, self._of_weight(dy_MN, x, fmt) if x else None

    def _of_weight(self, dy_MN: torch.Tensor, x: Codes, fmt: Format) -> torch.Tensor:
        """Return dW."""
        x_MK = dequantize_rows(x, fmt)
        dy, x = across_tokens(dy_MN, fmt), across_tokens(x_MK, fmt)
        return functional.linear(dequantize_rows(dy, fmt), dequantize_rows(x, fmt))


class ByScaledMm(Emulation):
    """Products of codes by cuBLAS, on Hopper."""

    name = "scaled_mm"
    _emulate = False

    def objection(self, fmt: Format, device: torch.device, shape: _Sizes | None = None) -> str | None:
        return _BLOCK.objection(fmt, device, shape and shape[1:])

    def _of_weight(self, dy_MN: torch.Tensor, x: Codes, fmt: Format) -> torch.Tensor:
        dy_NM, dy_scale = _operand(dy_MN, None, fmt)
        codes_MK, amax_MG = x
        x_KM, x_scale = _operand(codes_MK, amax_MG, fmt)
        return functional.scaled_mm(dy_NM, x_KM.t(), dy_scale, _VECTOR, x_scale, _VECTOR, output_dtype=torch.float32)


def transposed(q: QTensor) -> QTensor:
    """Return the transposed weight [K, N]: codes and scales are transposed, and nothing is rounded.

    Raises:
        QuantizationError: blocks are not square, so that no format has the transposed scales.
    """
    if q.fmt.rows != q.fmt.group:
        raise QuantizationError(f"{q.fmt.name}: only square blocks can be transposed")
    fused = fused_kernels(q.codes.device, q.fmt.dtype)
    codes = fused.transposed_codes(q.codes) if fused else q.codes.view(torch.uint8).t().contiguous().view(q.fmt.dtype)
    return QTensor(codes=codes, scale=q.scale.t().contiguous(), fmt=q.fmt)


def across_tokens(x_MK: torch.Tensor, fmt: Format) -> Codes:
    """Return `quantize_rows` of columns: (codes as float32 [K, M], maxima [K, M / activation_group, rounded up]).

    Here the range does depend on which tokens share a group. The gradient of a weight therefore depends, within the
    precision of the codes, on the order of tokens and on the borders of micro-batches. Borders have no effect if each
    micro-batch but the last has a multiple of activation_group tokens. The last group is padded with zeros.
    """
    return quantize_rows(x_MK.float().t().contiguous(), fmt)


def _operand(x_MK: torch.Tensor, amax_MG: torch.Tensor | None, fmt: Format) -> Codes:
    """Return codes [K, M padded to whole groups], and scales, as scaled_mm needs them for dW.

    Args:
        x_MK: values; or, if there are maxima, codes.
    """
    fused = fused_kernels(x_MK.device, fmt.dtype)
    if fused and fmt.activation_group == fused.TOKENS:
        codes_KM, amax_KG = fused.codes_of_columns(x_MK, amax_MG, fmt)
    else:
        values_MK = x_MK if amax_MG is None else dequantize_rows((x_MK, amax_MG), fmt)
        codes_KM, amax_KG = across_tokens(values_MK, fmt)
        groups = max(1, -(-len(x_MK) // 128))
        codes_KM = filled(codes_KM, 0, groups * 128 - len(x_MK)).to(fmt.dtype)
    return codes_KM, column_major(amax_KG * fmt.activation_step)


# --- the table ------------------------------------------------------------------------------------------------------

PRODUCTS: dict[str, Emulation] = {entry.name: entry for entry in (ByScaledMm(), Emulation())}
"""Entries by name. The first that has no objection is used."""


def products_for(fmt: Format, device: torch.device, shape: _Sizes | None = None) -> Emulation:
    """Return the entry for a backward pass of this format here (shape None: of some shape)."""
    return next(entry for entry in PRODUCTS.values() if entry.objection(fmt, device, shape) is None)


def announced(fmt: Format, device: torch.device) -> str:
    """Return the name of the entry for some shape, and why the entries before it are not used.

    Example:
        "emulation: scaled_mm_block needs a device of type cuda, not cpu"
    """
    used = products_for(fmt, device).name
    reasons = dict.fromkeys(why for entry in PRODUCTS.values() if (why := entry.objection(fmt, device)))
    return f"{used}: {'; '.join(reasons)}" if reasons else used
