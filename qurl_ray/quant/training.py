"""The two products of a backward pass in FP8 blocks, by device, in one table. `Emulation` defines their result.

M tokens, weights [N, K]:

| entry | needs | operands are quantized by | products |
|---|---|---|---|
| torchao | what scaled_mm needs, torchao, dy in bfloat16 or float32 | one pass of a Triton kernel each | cuBLAS |
| scaled_mm | CUDA, compute capability 9.0, CUDA 12.9, multiples of 128 | several passes in float32 | cuBLAS |
| emulation | | several passes in float32 | float32 |

`products_for` finds the first that can be used, from shapes and types alone: nothing waits for the GPU. On an
H200 they were right, and slower than bfloat16 (docs/gpu.md).

torchao's quantizers (torchao.prototype.blockwise_fp8_training, https://github.com/pytorch/ao) differ from
`quantize_rows` in three ways. They multiply by 448 / max|x|, where that divides by max|x| and multiplies by 448: codes
differ now and then, in the middle of two. They take 1e-12 for a smaller maximum: of such groups, values below 2e-18
vanish. They make ±448 of nan, so nan is brought back here by way of the scales. The weights of DGrad are not theirs:
those are the codes of the forward pass.
"""

import functools
import importlib
from typing import Any, ClassVar

import torch
from torch.nn import functional
from torch.nn.functional import ScalingType

from qurl_ray.errors import QuantizationError
from qurl_ray.quant.formats import Format
from qurl_ray.quant.kernels import ScaledMmBlock, column_major
from qurl_ray.quant.linear import QuantizedLinear
from qurl_ray.quant.quantize import QTensor, dequantize_rows, filled, floats, fused_kernels, quantize_rows

CodesAndMaxima = tuple[torch.Tensor, torch.Tensor]
"""Codes of rows and the maximum of each group, as `quantize_rows` returns them. Codes may have the format's type."""
_Sizes = tuple[int, int, int]
"""M, N, K."""
_BLOCK = ScaledMmBlock()
_VECTOR = ScalingType.BlockWise1x128


class Emulation:
    """The definition, in float32."""

    name: ClassVar[str] = "emulation"
    _emulate: ClassVar[bool] = True

    def objection(
        self, fmt: Format, device: torch.device, shape: _Sizes | None = None, dtype: torch.dtype = torch.bfloat16
    ) -> str | None:
        """Return why it cannot be used here, or None. With shape None: why it cannot be used for any shape.

        Args:
            dtype: of dy.
        """
        return None

    def gradients(
        self, dy_MN: torch.Tensor, q: QTensor | None, x: CodesAndMaxima | None, fmt: Format
    ) -> tuple[torch.Tensor | None, torch.Tensor | None]:
        """Return (dx = dy · W, [M, K] of dy's dtype; dW = dyᵀ · x, float32 [N, K]), None for that of an operand None.

        Args:
            q: W, whose blocks are square.
            x: `quantize_rows` of x [M, K].
        """
        dx = QuantizedLinear(transposed(q), None, emulate=self._emulate)(dy_MN) if q else None
        return dx, self._of_weight(dy_MN, x, fmt) if x else None

    def _of_weight(self, dy_MN: torch.Tensor, x: CodesAndMaxima, fmt: Format) -> torch.Tensor:
        """Return dW."""
        x_MK = dequantize_rows(floats(x[0]), x[1], fmt)
        dy, x = across_tokens(dy_MN, fmt), across_tokens(x_MK, fmt)
        return functional.linear(dequantize_rows(*dy, fmt), dequantize_rows(*x, fmt))


class ByScaledMm(Emulation):
    """Products of codes by cuBLAS, on Hopper."""

    name = "scaled_mm"
    _emulate = False

    def objection(
        self, fmt: Format, device: torch.device, shape: _Sizes | None = None, dtype: torch.dtype = torch.bfloat16
    ) -> str | None:
        return _BLOCK.objection(fmt, device, shape and shape[1:])

    def _of_weight(self, dy_MN: torch.Tensor, x: CodesAndMaxima, fmt: Format) -> torch.Tensor:
        dy_NM, dy_scale = _operand(dy_MN, None, fmt)
        x_KM, x_scale = _operand(*x, fmt)
        return functional.scaled_mm(dy_NM, x_KM.t(), dy_scale, _VECTOR, x_scale, _VECTOR, output_dtype=torch.float32)


class ByTorchao(ByScaledMm):
    """The same products, of operands that torchao quantizes: dy is read as it is, and no operand is held in float32."""

    name = "torchao"

    def objection(
        self, fmt: Format, device: torch.device, shape: _Sizes | None = None, dtype: torch.dtype = torch.bfloat16
    ) -> str | None:
        if found := super().objection(fmt, device, shape, dtype):
            return found
        if dtype not in (torch.bfloat16, torch.float32):  # 1e-12 is 0 in float16
            return f"torchao needs gradients in bfloat16 or float32, not {dtype}"
        if shape and (values := _whole(shape[0]) * max(shape[1:])) >= 2**31:  # its offsets have 32 bits
            return f"torchao needs operands of fewer than 2^31 values, not {values}"
        return None if _torchao() else "torchao needs torchao 0.18 and Triton (pip install 'qurl-ray[gpu]')"

    def _of_weight(self, dy_MN: torch.Tensor, x: CodesAndMaxima, fmt: Format) -> torch.Tensor:
        quantizers, M, (codes_MK, amax_MG) = _torchao(), len(dy_MN), x
        dy_MN = filled(dy_MN.contiguous(), 0, 0, 0, _whole(M) - M)
        x_MK = dy_MN.new_empty(len(dy_MN), codes_MK.shape[1])
        x_MK[:M], x_MK[M:] = codes_MK, 0
        x_MK[:M].unflatten(1, (amax_MG.shape[1], -1)).mul_((amax_MG * fmt.activation_step)[..., None])
        dy_NM, dy_scale = quantizers.triton_fp8_blockwise_act_quant_transposed_lhs(dy_MN)
        codes_MK, x_scale = quantizers.triton_fp8_blockwise_act_quant_rhs(x_MK)
        # nan and inf, which the quantizers would hide
        x_scale.unflatten(1, (amax_MG.shape[1], -1)).add_((0 * amax_MG).sum(dim=0)[:, None])
        dy_scale.add_((0 * dy_MN.amax(dim=1)).sum())
        return functional.scaled_mm(
            dy_NM, codes_MK, dy_scale, _VECTOR, x_scale.t(), _VECTOR, output_dtype=torch.float32
        )


@functools.cache
def _torchao() -> Any:
    """Return the module of torchao's quantizers; None if it cannot be imported."""
    try:
        module = importlib.import_module("torchao.prototype.blockwise_fp8_training.kernels")
        for name in ("lhs", "transposed_lhs", "rhs"):
            tuned = getattr(module, f"triton_fp8_blockwise_act_quant_{name}_kernel")
            # For each width Triton compiles and times all of them at the first call: of 45, those with other stages
            # are the same code, as there is no loop.
            few = [one for one in tuned.configs if (one.num_stages, one.num_warps) == (2, 4)]
            tuned.configs = few or tuned.configs
    except (ImportError, AttributeError):
        return None
    return module


def _whole(M: int) -> int:
    """Return the number of tokens with the last group filled, at least one group."""
    return max(1, -(-M // 128)) * 128


def transposed(q: QTensor) -> QTensor:
    """Return the transposed weight [K, N]: codes and scales are transposed, and nothing is rounded.

    Raises:
        QuantizationError: blocks are not square, so that no format has the transposed scales.
    """
    if q.fmt.rows != q.fmt.group:
        raise QuantizationError(f"{q.fmt.name}: only square blocks can be transposed")
    codes = q.codes.view(torch.uint8).t().contiguous().view(q.fmt.dtype)
    return QTensor(codes=codes, scale=q.scale.t().contiguous(), fmt=q.fmt)


def across_tokens(x_MK: torch.Tensor, fmt: Format) -> CodesAndMaxima:
    """Return `quantize_rows` of columns: (codes as float32 [K, M], maxima [K, M / activation_group, rounded up]).

    Here the range does depend on which tokens share a group. The gradient of a weight therefore depends, within the
    precision of the codes, on the order of tokens and on the borders of micro-batches. Borders have no effect if each
    micro-batch but the last has a multiple of activation_group tokens. The last group is padded with zeros.
    """
    return quantize_rows(x_MK.float().t().contiguous(), fmt)


def _operand(x_MK: torch.Tensor, amax_MG: torch.Tensor | None, fmt: Format) -> CodesAndMaxima:
    """Return codes [K, M padded to whole groups], and scales, as scaled_mm needs them for dW.

    Args:
        x_MK: values; or, if there are maxima, codes.
    """
    fused = fused_kernels(x_MK.device, fmt.dtype)
    if fused and fmt.activation_group == fused.TOKENS:
        codes_KM, amax_KG = fused.columns(x_MK, amax_MG, fmt)
    else:
        values_MK = x_MK if amax_MG is None else dequantize_rows(floats(x_MK), amax_MG, fmt)
        codes_KM, amax_KG = across_tokens(values_MK, fmt)
        codes_KM = filled(codes_KM, 0, _whole(len(x_MK)) - len(x_MK)).to(fmt.dtype)
    return codes_KM, column_major(amax_KG * fmt.activation_step)


# --- the table ------------------------------------------------------------------------------------------------------

PRODUCTS: dict[str, Emulation] = {one.name: one for one in (ByTorchao(), ByScaledMm(), Emulation())}
"""Entries by name. The first that has no objection is used."""


def products_for(
    fmt: Format, device: torch.device, shape: _Sizes | None = None, dtype: torch.dtype = torch.bfloat16
) -> Emulation:
    """Return the entry for a backward pass of this format here (shape None: of some shape); dtype: of dy."""
    return next(one for one in PRODUCTS.values() if one.objection(fmt, device, shape, dtype) is None)


def announced(fmt: Format, device: torch.device) -> str:
    """Return the name of the entry for some shape, and why those before it are not used.

    Example:
        "scaled_mm: torchao needs torchao 0.18 and Triton (pip install 'qurl-ray[gpu]')"
    """
    used = products_for(fmt, device).name
    reasons = dict.fromkeys(why for one in PRODUCTS.values() if (why := one.objection(fmt, device)))
    return f"{used}: {'; '.join(reasons)}" if reasons else used
