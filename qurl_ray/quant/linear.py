"""The quantized linear: one definition of its forward pass, and the module that computes it.

`reference_linear` is the definition: quantize the activations, multiply codes, scale, in float32. `QuantizedLinear`
computes it either in this way (emulation, on any device) or by a kernel of quant/kernels.py.
"""

from dataclasses import replace

import torch
from torch import nn

from qurl_ray.errors import StaleWeights
from qurl_ray.numerics.products import linear
from qurl_ray.quant.elements import floats
from qurl_ray.quant.formats import Format
from qurl_ray.quant.kernels import IN_PLACE, kernel_for, named_kernel
from qurl_ray.quant.quantize import Codes, QTensor, dequantize, dequantize_rows, quantize_rows

_ROWS = 5
"""Rows with which a packed weight is compared with the one before."""


def reference_linear(
    x: torch.Tensor, q: QTensor, bias: torch.Tensor | None, codes: Codes | None = None
) -> torch.Tensor:
    """Return y = (codes(x) · codes(w)ᵀ) · scales + bias, in float32; x [..., K] to [..., N] of x's dtype.

    Weight-only formats multiply x with the dequantized weight. Where scales change along a row, both factors are
    dequantized first. Products of integer codes add up exactly in float32 as long as
    K · activation_max · weight_max < 2^24. Products of float codes are exact; their sum is rounded as in any float32
    product.

    Args:
        codes: `quantize_rows` of x, if they were made before.
    """
    dtype, x = x.dtype, x.float()
    bias = None if bias is None else bias.float()
    if q.fmt.activation_max is None:
        return linear(x, dequantize(q), bias).to(dtype)
    codes = codes or quantize_rows(x, q.fmt)
    if q.fmt.activation_group:
        return linear(dequantize_rows(codes, q.fmt).view(x.shape), dequantize(q), bias).to(dtype)
    rows, amax = codes
    # One factor after the other, in the order of the integer kernels, so that both round alike.
    y = linear(rows, floats(q.codes)) * (q.scale[:, 0] * q.fmt.activation_step) * amax
    return (y if bias is None else y + bias).to(dtype)


def weight_max_code(fmt: Format, device: torch.device) -> int:
    """Return the largest weight code that the kernel here multiplies without saturating."""
    kernel = kernel_for(fmt, device)
    return kernel.weight_max(fmt) if kernel else fmt.weight_max


class QuantizedLinear(nn.Module):
    """Linear whose weight is codes and scales. The codes can be read back.

    Where a kernel multiplies codes as they are, it does so until `pack`, which brings them into the layout of the
    kernel that is fastest in the long run. Both have the same bits.

    It computes on the device of `q`, and stays there. Its result has the dtype of its input. To quantize an input that
    several linears read only once, give their `concatenate`d weight to one QuantizedLinear.

    Args:
        emulate: compute the definition, even if there is a kernel.
        kernel: "auto" uses the kernel that kernel_for finds, or else emulation. "emulation" is emulate=True. Any other
            value is the name of the kernel to use.

    Raises:
        QuantizationError: the named kernel is not known, or cannot multiply this weight here.
    """

    bias: torch.Tensor | None
    scale: torch.Tensor
    _codes: torch.Tensor

    def __init__(self, q: QTensor, bias: torch.Tensor | None, *, emulate: bool = False, kernel: str = "auto") -> None:
        super().__init__()
        self.fmt = q.fmt
        self.out_features, self.in_features = shape = tuple(q.shape)
        if emulate or kernel == "emulation":
            self._fastest = None
        elif kernel == "auto":
            self._fastest = kernel_for(q.fmt, q.codes.device, shape)
        else:
            self._fastest = named_kernel(kernel, q.fmt, q.codes.device, shape)
        self.register_buffer("bias", bias)
        self._kernel = self._fastest
        """Kernel that multiplies now; None if the linear is emulated."""
        if self._fastest and kernel == "auto" and IN_PLACE.supports(q.fmt, q.codes.device, shape):
            self._kernel = IN_PLACE
        if self._kernel:
            self._packed = self._kernel.pack(q)
        elif q.fmt.codec:
            self._parts = len(q.parts)
            for number, part in enumerate(q.parts):
                self.register_buffer(f"_part_{number}", part.clone())
        else:
            # Emulation multiplies floats: codes are stored as floats, exactly, and not converted at every call.
            self.register_buffer("_codes", floats(q.codes))
            self.register_buffer("scale", q.scale.clone())  # the sender's memory is not written to

    @property
    def kernel(self) -> str | None:
        """Name of the kernel that multiplies once codes are packed; None if the linear is emulated."""
        return self._fastest.name if self._fastest else None

    def codes(self, x: torch.Tensor) -> Codes | None:
        """Return codes of x [..., K] that `forward` takes, in its own form; None if it makes them by itself."""
        if self._kernel:
            return self._kernel.codes(x, self.fmt)
        return None if self.fmt.activation_max is None else quantize_rows(x.float(), self.fmt)

    def forward(self, x: torch.Tensor, codes: Codes | None = None) -> torch.Tensor:
        if self._kernel is None:
            return reference_linear(x, self._emulated(), self.bias, codes)
        return self._kernel.forward(x, self._packed, self.bias, codes)

    def pack(self) -> None:
        """Bring the codes into the layout of the kernel that is fastest in the long run, if they are not in it.

        Raises:
            StaleWeights: the codes read back from that layout are others, or some products with them have other bits.
        """
        if self._fastest is None or self._kernel is None or self._kernel is self._fastest:
            return
        before = self._kernel.unpack(self._packed)
        packed = self._fastest.pack(before)
        after = self._fastest.unpack(packed)
        alike = torch.equal(after.codes, before.codes) and torch.equal(after.scale, before.scale)
        x = torch.arange(_ROWS * self.in_features, device=before.codes.device).sin().view(_ROWS, -1)
        if not alike or not torch.equal(
            self._fastest.forward(x, packed, None), self._kernel.forward(x, self._packed, None)
        ):
            raise StaleWeights(
                f"codes of {tuple(before.shape)} are others, or give other products, as {self._fastest.name} holds them"
            )
        self._packed, self._kernel = packed, self._fastest

    def write(self, q: QTensor) -> None:
        """Write the codes and scales of another version, of the same format and shape, where an emulated linear holds
        the old ones."""
        if self.fmt.codec:
            for held, part in zip(self._emulated().parts, q.parts, strict=True):
                held.copy_(part)
            return
        self._codes.copy_(floats(q.codes))
        self.scale.copy_(q.scale)

    def resident(self) -> QTensor:
        """Return the codes and scales that the next forward pass will use, read back from the kernel's own memory."""
        if self._kernel is None:
            q = self._emulated()
            return q if self.fmt.codec else replace(q, codes=q.codes.to(self.fmt.dtype))
        return self._kernel.unpack(self._packed)

    def _emulated(self) -> QTensor:
        """Return the weight that an emulated linear multiplies with; codes as floats, unless the format has a codec."""
        if self.fmt.codec:
            return QTensor.of([getattr(self, f"_part_{number}") for number in range(self._parts)], self.fmt)
        return QTensor(codes=self._codes, scale=self.scale, fmt=self.fmt)
