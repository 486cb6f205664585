"""The quantized linear: one definition of the forward, and the kernels that compute it.

`reference_linear` is the definition: quantize the activations, multiply codes, scale, in float32. `QuantizedLinear`
computes it either so (emulation, everywhere) or through an integer kernel. On x86 CPUs that is fbgemm: fed with rows
divided by their maximum and the static scale 1/127 it is symmetric per token and independent of the batch, which
`quantized::linear_dynamic` is not (its range spans the batch).
"""

import warnings

import torch
from torch import nn

from qurl_ray.quant.formats import Format
from qurl_ray.quant.quantize import QTensor, dequantize, dequantize_rows, quantize_rows, row_maximum


def reference_linear(x: torch.Tensor, q: QTensor, bias: torch.Tensor | None) -> torch.Tensor:
    """y = (codes(x) · codes(w)ᵀ) · scales + bias, in float32; x [..., K] to [..., N].

    Weight-only formats multiply x with the dequantized weight, and where scales change along a row both factors are
    dequantized first. With activations in integer codes the products add up exactly in float32 as long as
    K · activation_max · weight_max < 2^24; those of float codes are exact, their sum is rounded as any float32
    product's.
    """
    if q.fmt.activation_max is None:
        return nn.functional.linear(x, dequantize(q), bias)
    codes, amax = quantize_rows(x, q.fmt)
    if q.fmt.activation_group:
        return nn.functional.linear(dequantize_rows(codes, amax, q.fmt), dequantize(q), bias)
    # One factor after the other, in the order of the integer kernel, so that both round alike.
    y = nn.functional.linear(codes, q.codes.float()) * (q.scale[:, 0] * (1 / q.fmt.activation_max)) * amax
    return y if bias is None else y + bias


def integer_kernel(fmt: Format, device: torch.device) -> str | None:
    """Name of the integer kernel for this format here, or None: emulation."""
    x86 = "fbgemm" in torch.backends.quantized.supported_engines
    int8_both = fmt.dtype == torch.int8 and fmt.activation_max is not None and fmt.group is None
    return "fbgemm" if int8_both and device.type == "cpu" and x86 else None


def weight_max_code(fmt: Format, device: torch.device) -> int:
    """Largest weight code that the integer kernel here multiplies without saturating.

    Without VNNI, fbgemm adds pairs of 8-bit products in 16 bits; codes within ±63 cannot overflow them. A bit less on
    the weights costs less than a bit less on the activations would.
    """
    if integer_kernel(fmt, device) == "fbgemm" and not torch.cpu._is_vnni_supported():
        return min(63, fmt.weight_max)
    return fmt.weight_max


class QuantizedLinear(nn.Module):
    """A linear whose weight is codes and scales. It holds what its kernel wants, and can give the codes back."""

    def __init__(self, q: QTensor, bias: torch.Tensor | None, *, emulate: bool = False) -> None:
        super().__init__()
        self.fmt = q.fmt
        self.out_features, self.in_features = q.codes.shape
        self.kernel = None if emulate else integer_kernel(q.fmt, q.codes.device)
        self.register_buffer("bias", bias)
        self.register_buffer("scale", q.scale)
        if self.kernel:
            self._packed = _pack_fbgemm(q)
        else:
            # Emulation multiplies floats: the codes are kept as such, exactly, and not converted at every call.
            self.register_buffer("_codes", q.codes.float())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.kernel is None:
            return reference_linear(x, QTensor(codes=self._codes, scale=self.scale, fmt=self.fmt), self.bias)
        amax = row_maximum(x)
        y = torch.ops.quantized.linear_with_input_q_dq_qweight_dq_output_fp32(
            x / amax, 1 / self.fmt.activation_max, 128, self._packed
        ).mul_(amax)
        return y if self.bias is None else y.add_(self.bias)

    def resident(self) -> QTensor:
        """The codes and scales that the next forward will use, read back from the kernel's own memory."""
        if not self.kernel:
            return QTensor(codes=self._codes.to(self.fmt.dtype), scale=self.scale, fmt=self.fmt)
        weight, _ = torch.ops.quantized.linear_unpack(self._packed)
        scale = weight.q_per_channel_scales().float()[:, None]
        return QTensor(codes=weight.int_repr(), scale=scale, fmt=self.fmt)


def _pack_fbgemm(q: QTensor) -> torch.ScriptObject:
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*quantized.*")  # torch's notice about the tensor type's future
        zero_points = torch.zeros(len(q.scale), dtype=torch.int64)
        weight = torch._make_per_channel_quantized_tensor(q.codes, q.scale[:, 0].double(), zero_points, 0)
    return torch.ops.quantized.linear_prepack(weight, None)
