"""Codes and scales in memory that never moves, multiplied by the kernels that vLLM chooses for its own checkpoints.

A CUDA graph records addresses, so every version of the weights must be written to the same ones. `FixedCodes` registers
a layer's parameters once, in the layout of the kernel, and writes each version through that layout, padding included.
Products are vLLM's own operations. Activations are quantized by an operation of vLLM; where vLLM compiles the model, by
plain operations, which its compiler joins with the norm or SiLU before them. A decoder layer then starts 10 operations
in place of 13 (9 in bfloat16), counted in the graph that is compiled for a CPU. In vLLM's setting `custom_ops`,
`+quant_fp8` and `+quant_int8` force the operation.

| format | kernel on an H100 | layout of the codes |
|---|---|---|
| int8 | CUTLASS | [K, N] with strides (1, K) |
| fp8 | CUTLASS | [K, N] with strides (1, K), K padded to a multiple of 16 |
| fp8_block | DeepGEMM where it is installed, else CUTLASS | [N, K] |

On an H200, INT8 was tested under CUDA graphs, and the codes of FP8's kernel; neither speed nor fp8_block (docs/gpu.md).
"""

import contextlib
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn
from vllm import _custom_ops
from vllm.model_executor.custom_op import CustomOp
from vllm.model_executor.kernels.linear import (
    CutlassInt8ScaledMMLinearKernel,
    init_fp8_linear_kernel,
    init_int8_linear_kernel,
)
from vllm.model_executor.layers.fused_moe.config import fp8_w8a8_moe_quant_config, int8_w8a8_moe_quant_config
from vllm.model_executor.layers.quantization.utils.quant_utils import (
    kFp8Dynamic128Sym,
    kFp8DynamicTokenSym,
    kFp8Static128BlockSym,
    kFp8StaticChannelSym,
)

from qurl_ray.errors import QuantizationError
from qurl_ray.quant.formats import FORMATS, Format
from qurl_ray.quant.quantize import QTensor, quantize_rows

_DTYPES = (torch.bfloat16, torch.float16)
_FUSED = ("int8", "fp8", "fp8_block")
"""Formats of experts that vLLM's fused operation multiplies, with activations by token or by group."""


@CustomOp.register("quant_int8")
class QuantInt8(CustomOp):
    """Codes of activations, [M, K] to (int8 [M, K], scales float32 [M, 1]), as vLLM's quant_fp8 makes those of FP8."""

    def forward_native(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        fmt = FORMATS["int8"]
        codes, amax_M1 = quantize_rows(x.float(), fmt)
        return codes.to(fmt.dtype), amax_M1 * fmt.activation_step

    def forward_cuda(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        codes, scale, _ = _custom_ops.scaled_int8_quant(x.contiguous())
        return codes, scale


class FixedCodes:
    """Codes and scales of one of vLLM's linears, in parameters `weight` and `weight_scale` of its layer.

    Args:
        layer: vLLM's linear; parameters of these names are replaced, once.
        widths: outputs, on this rank, of each tensor that the linear is fused from.
        inputs: inputs on this rank.
        dtype: type of activations and of the result.
        name: the layer's name, for errors.
        compiled: the product is part of a model that may be compiled; elsewhere plain operations would stay plain.

    Raises:
        QuantizationError: no kernel of vLLM multiplies codes of this format in this shape here.
    """

    def __init__(
        self,
        layer: Any,
        fmt: Format,
        widths: Sequence[int],
        inputs: int,
        *,
        dtype: torch.dtype,
        device: torch.device,
        name: str,
        compiled: bool = True,
    ) -> None:
        self.fmt, self._layer = fmt, layer
        self._shape = shape = (sum(widths), inputs)
        _, scales = fmt.parts(shape)
        self._scales = scales.shape
        self._kernel = _kernel(fmt, widths, inputs, dtype, name)
        by_cutlass = isinstance(self._kernel, CutlassInt8ScaledMMLinearKernel)
        self._quantize = QuantInt8(enforce_enable=not compiled) if by_cutlass else None
        empty = QTensor(
            codes=torch.zeros(shape, dtype=fmt.dtype, device=device),
            scale=torch.ones(self._scales, dtype=torch.float32, device=device),
            fmt=fmt,
        )
        self._lay_out(layer, empty)

    @property
    def kernel(self) -> str:
        """Name of vLLM's kernel."""
        return type(self._kernel).__name__

    def write(self, q: QTensor) -> None:
        """Write a version, which is on the layer's device. The parameters stay where they are."""
        staged = nn.Module()
        self._lay_out(staged, q)
        for attribute in ("weight", "weight_scale"):
            getattr(self._layer, attribute).data.copy_(getattr(staged, attribute).data)

    def read(self) -> QTensor:
        """Return the codes and scales [outputs, inputs] that the next product will use, without padding."""
        weight, scale = self._layer.weight.data, self._layer.weight_scale.data
        outputs, inputs = self._shape
        codes = weight if self.fmt.rows > 1 else weight.t()
        rows, groups = self._scales
        return QTensor(
            codes=codes[:outputs, :inputs].contiguous(), scale=scale[:rows, :groups].contiguous(), fmt=self.fmt
        )

    def multiply(self, x: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        """Return x · weightᵀ + bias, [..., inputs] to [..., outputs]."""
        if self._quantize is None:
            return self._kernel.apply_weights(self._layer, x, bias)
        codes, scale = self._quantize(x)
        weight, scales = self._layer.weight, self._layer.weight_scale
        return _custom_ops.cutlass_scaled_mm(codes, weight, scale, scales, out_dtype=x.dtype, bias=bias)

    def _lay_out(self, layer: Any, q: QTensor) -> None:
        """Give a layer these codes and scales as parameters, in the kernel's layout."""
        by_block = q.fmt.rows > 1
        layer.logical_widths = [self._shape[0]]
        layer.weight_block_size = [q.fmt.rows, q.fmt.group] if by_block else None
        layer.input_scale = None
        # CUTLASS' INT8 turns the weight by itself, its FP8 expects it turned.
        turned = not by_block and q.fmt.dtype != torch.int8
        layer.weight = nn.Parameter(q.codes.t() if turned else q.codes, requires_grad=False)
        layer.weight_scale = nn.Parameter(q.scale, requires_grad=False)
        self._kernel.process_weights_after_loading(layer)


class StackedCodes:
    """One linear of all experts of a layer: codes [E, N, K] and their scales [E, …], or floats without scales, in the
    layout that vLLM's fused operation reads.

    Args:
        fmt: None for full precision.
        widths: outputs, on this rank, of each tensor that the linear is fused from.
        inputs: inputs on this rank.
        dtype: type of activations and of the result.
        name: name of the first expert's linear, for errors.

    Raises:
        QuantizationError: the operation does not multiply codes of this format in this shape.
    """

    kernel = "vLLM's fused experts"

    def __init__(
        self,
        fmt: Format | None,
        experts: int,
        widths: Sequence[int],
        inputs: int,
        *,
        dtype: torch.dtype,
        name: str,
    ) -> None:
        self.fmt = fmt
        self.scales: torch.Tensor | None = None
        shape = (sum(widths), inputs)
        if fmt is None:
            self.values = torch.empty(experts, *shape, dtype=dtype)
            return
        if dtype not in _DTYPES:
            raise QuantizationError(f"{name}: vLLM's experts return bfloat16 or float16: set rollout.dtype=bfloat16")
        if fmt.name not in _FUSED:
            raise QuantizationError(
                f"{name} cannot be {fmt.name} here: vLLM's experts take {', '.join(_FUSED)}: choose one of them"
            )
        if fmt.rows > 1 and any(width % fmt.rows for width in (*widths, inputs)):
            raise QuantizationError(
                f"{name} cannot be {fmt.name} here: its weights are not whole blocks of {fmt.rows} × {fmt.group}: set "
                "rollout.quantization=fp8"
            )
        _, scales = fmt.parts(shape)
        self.values = torch.zeros(experts, *shape, dtype=fmt.dtype)
        self.scales = torch.ones(experts, *scales.shape, dtype=torch.float32)

    def slice(self, expert: int) -> "ExpertCodes":
        """Return the memory of one expert's linear."""
        return ExpertCodes(self, expert)


class ExpertCodes:
    """Memory of one expert's linear, a slice of that of all."""

    def __init__(self, stack: StackedCodes, expert: int) -> None:
        self.fmt, self.kernel = stack.fmt, stack.kernel
        self.values = stack.values[expert]
        self.scale = None if stack.scales is None else stack.scales[expert]

    def write(self, q: QTensor) -> None:
        """Write a version, which is on the layer's device."""
        assert self.scale is not None
        self.values.copy_(q.codes)
        self.scale.copy_(q.scale)

    def read(self) -> QTensor:
        """Return the codes and scales [outputs, inputs] that the next product will use."""
        assert self.scale is not None
        assert self.fmt is not None
        return QTensor(codes=self.values.clone(), scale=self.scale.clone(), fmt=self.fmt)


def fused_quantization(first: StackedCodes, second: StackedCodes) -> Any:
    """Return how vLLM's fused operation multiplies with these weights; None for floats.

    Raises:
        QuantizationError: one of them is floats, or of another format.
    """
    if first.fmt != second.fmt:
        raise QuantizationError("gate_proj, up_proj and down_proj of experts have one format in vLLM: keep all or none")
    if first.fmt is None:
        return None
    assert first.scales is not None
    assert second.scales is not None
    if first.fmt.dtype == torch.int8:
        return int8_w8a8_moe_quant_config(first.scales, second.scales, None, None, per_act_token_quant=True)
    if first.fmt.rows > 1:
        block = [first.fmt.rows, first.fmt.rows]
        return fp8_w8a8_moe_quant_config(first.scales, second.scales, block_shape=block)
    return fp8_w8a8_moe_quant_config(first.scales, second.scales, per_act_token_quant=True, per_out_ch_quant=True)


def _kernel(fmt: Format, widths: Sequence[int], inputs: int, dtype: torch.dtype, name: str) -> Any:
    """Return vLLM's kernel for a layer, or raise a QuantizationError that names a format which works."""
    if dtype not in _DTYPES:
        raise QuantizationError(
            f"{name}: vLLM's kernels for {fmt.name} return bfloat16 or float16: set rollout.dtype=bfloat16, or "
            "quantization.kernel=emulation, which saves no time"
        )
    try:
        return _made(fmt, widths, inputs, dtype, name)
    except ValueError as error:
        reason = str(error).strip()
    instead = ""
    for other in ("fp8", "int8"):
        with contextlib.suppress(ValueError):
            _made(FORMATS[other], widths, inputs, dtype, name)
            instead = f"set rollout.quantization={other}, or "
            break
    raise QuantizationError(f"{name} cannot be {fmt.name} here: {reason}: {instead}add the layer to quantization.keep")


def _made(fmt: Format, widths: Sequence[int], inputs: int, dtype: torch.dtype, name: str) -> Any:
    """Return vLLM's kernel for a layer, or raise ValueError with the reason that there is none."""
    if fmt.codec:
        raise ValueError("vLLM's kernels for it pack codes in an order that cannot be written in place")
    if fmt.rows > 1 and any(width % fmt.rows for width in (*widths, inputs)):
        sizes = " and ".join(f"{width} × {inputs}" for width in widths)
        raise ValueError(f"{sizes} weights are not whole blocks of {fmt.rows} × {fmt.rows}")
    if fmt.dtype != torch.int8 and sum(widths) % 16:  # vLLM 0.32 fails where it pads both codes and scales
        raise ValueError(f"{sum(widths)} outputs are no multiple of 16")
    if fmt.dtype == torch.int8:
        return init_int8_linear_kernel(
            is_channelwise=True, is_static_input_scheme=False, input_symmetric=True, module_name=name
        )
    return init_fp8_linear_kernel(
        activation_quant_key=kFp8Dynamic128Sym if fmt.rows > 1 else kFp8DynamicTokenSym,
        weight_quant_key=kFp8Static128BlockSym if fmt.rows > 1 else kFp8StaticChannelSym,
        input_dtype=dtype,
        out_dtype=dtype,
        weight_shape=(sum(widths), inputs),
        module_name=name,
    )
