"""Quantize and dequantize: two pure functions around a value object.

Rounding is to nearest (ties to even). The learner's master weights stay in float32, so nothing is lost between two
quantizations, and no calibration is needed: scales are computed from the values themselves.
"""

import functools
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch.nn.functional import pad

from qurl_ray.errors import QuantizationError
from qurl_ray.quant.elements import floats
from qurl_ray.quant.formats import Format, Range

warnings.filterwarnings("ignore", message="The given NumPy array is not writable")  # `shared` names the consequence


@dataclass(frozen=True, slots=True, kw_only=True)
class QTensor:
    """Codes and scales of one weight: w[n, k] ≈ codes[n, k] * scale[n // rows, k // group], unless the format has a
    codec."""

    codes: torch.Tensor  # fmt.dtype [N, K]
    scale: torch.Tensor  # float32 [N / rows, K / group], rounded up
    fmt: Format
    more: tuple[torch.Tensor, ...] = ()
    """Further arrays of a format with a codec."""

    @property
    def shape(self) -> torch.Size:
        return self.fmt.codec.shape(self.parts, self.fmt) if self.fmt.codec else self.codes.shape

    @property
    def parts(self) -> tuple[torch.Tensor, ...]:
        """The arrays as they travel (Format.parts), without a copy: codes as bytes."""
        return self.codes.view(torch.uint8), self.scale, *self.more

    @classmethod
    def of(cls, parts: Sequence[torch.Tensor], fmt: Format) -> "QTensor":
        """Invert `parts`, also without a copy: copy parts that must outlive a buffer of an object store."""
        codes, scale, *more = parts
        return cls(codes=codes.view(fmt.dtype), scale=scale, fmt=fmt, more=tuple(more))

    def to(self, device: torch.device | str, *, copy: bool = False) -> "QTensor":
        """Return this tensor on a device: itself if it is there, unless a copy is asked for."""
        return QTensor.of([part.to(device, copy=copy) for part in self.parts], self.fmt)

    def cut(self, rows: Range, columns: Range | None = None) -> "QTensor":
        """Return these rows and columns, all columns by default, without a copy.

        Raises:
            QuantizationError: there are none, or a border lies within a block that shares a scale.
        """
        if not 0 <= rows[0] < rows[1] <= self.shape[0]:
            raise QuantizationError(f"rows {rows[0]} to {rows[1]} of a weight that has {self.shape[0]}")
        places = self.fmt.cut(self.shape, rows, columns or (0, self.shape[1]))
        return QTensor.of([part[place] for part, place in zip(self.parts, places, strict=True)], self.fmt)


def shared(array: np.ndarray) -> torch.Tensor:
    """Return a tensor that shares the array's memory. If that is read-only, nothing may be written to the tensor."""
    return torch.from_numpy(array)


Codes = tuple[torch.Tensor, ...]
"""Codes of activations and the maxima of their groups, or the arrays of `Format.activations`: see `quantize_rows`."""
_MIDDLE = 128.0
_MIDDLE_TENSOR = torch.tensor(_MIDDLE)  # made once: every product of INT8 codes needs it
_ONE_APART = 1.5 * 2.0**23
_LEAST = torch.finfo(torch.float32).tiny


def quantize(w_NK: torch.Tensor, fmt: Format, *, finite: bool = False) -> QTensor:
    """Quantize a weight: codes = w / scale rounded to the grid, scale = max|w| / weight_max over a block.

    A block has as many rows and columns as the format defines. Blocks of zeros get scale 1, so that their codes are 0
    and not nan.

    Args:
        finite: do not look whether the weight is, so that nothing waits for a GPU. The codes are the same; the scale of
            a block that holds nan or inf is nan or inf.

    Raises:
        QuantizationError: the weight is not a matrix in full precision, is not finite, or has a width that is not a
            multiple of the group size.
    """
    _check(w_NK, fmt)
    if fmt.codec:
        if not finite and not torch.isfinite(w_NK).all():
            raise QuantizationError(f"{fmt.name}: weight has nan or inf")
        return QTensor.of(fmt.codec.encode(w_NK.detach().float(), fmt), fmt)
    if fused := _fused(w_NK, fmt, fmt.group):
        codes, scale = fused.codes_of_blocks(w_NK, fmt)
        if finite or torch.isfinite(scale).all():
            return QTensor(codes=codes, scale=scale, fmt=fmt)
    return quantize_by(w_NK, fmt, lambda x: nearest(x, fmt), finite=finite)


def quantize_by(
    w_NK: torch.Tensor,
    fmt: Format,
    rounding: Callable[[torch.Tensor], torch.Tensor],
    clip: float = 1.0,
    *,
    finite: bool = False,
) -> QTensor:
    """Quantize like `quantize` to a format without a codec, with another `rounding` of w / scale to codes (float32 to
    float32).

    Args:
        clip: share of max|w| that the largest code represents; larger values are clipped to that code.
    """
    assert not fmt.codec, "its arrays are its own"
    _check(w_NK, fmt)
    rows, columns = w_NK.shape
    group = fmt.group or columns
    w_NK = w_NK.detach().float()
    # [block rows, rows of a block, block columns, columns of a block]
    whole_NK = filled(w_NK, 0, -columns % group, 0, -rows % fmt.rows)
    blocks = whole_NK.unflatten(0, (-1, fmt.rows)).unflatten(2, (-1, group))
    # Two reads: absolute values would have to be written first, which takes longer.
    amax = torch.maximum(blocks.amax(dim=(1, 3), keepdim=True), blocks.amin(dim=(1, 3), keepdim=True).neg_())
    if not finite and not torch.isfinite(amax).all():
        bad = int((~torch.isfinite(w_NK)).any(dim=1).sum())
        raise QuantizationError(f"{fmt.name}: weight has nan or inf in {bad} of {rows} rows")
    # The divisor is a tensor on the device: by a number, CUDA multiplies with the reciprocal, and last bits differ.
    scale = amax * clip / amax.new_full((), fmt.weight_max)
    scale = torch.where(scale == 0, 1.0, scale)  # nan stays nan: integers could not show it
    ratios = blocks / scale
    # Elsewhere, a ratio exceeds the largest code by an error of rounding at most. Subnormal scales have few bits.
    if clip < 1 or finite or bool((scale < _LEAST).any()):
        ratios.clamp_(-fmt.weight_max, fmt.weight_max)
    codes = rounding(ratios)
    codes_NK = codes.flatten(2).flatten(0, 1)[:rows, :columns]
    return QTensor(codes=codes_NK.to(fmt.dtype).contiguous(), scale=scale[:, 0, :, 0].contiguous(), fmt=fmt)


def _check(w_NK: torch.Tensor, fmt: Format) -> None:
    if w_NK.ndim != 2 or 0 in w_NK.shape:
        raise QuantizationError(f"{fmt.name}: expected a weight [N, K], got shape {tuple(w_NK.shape)}")
    if not w_NK.dtype.is_floating_point or w_NK.dtype.itemsize == 1:
        raise QuantizationError(
            f"{fmt.name}: the weight holds codes already, of {w_NK.dtype}, whose scales are not known here; "
            "quantize the checkpoint in full precision (float32, bfloat16 or float16)"
        )
    if fmt.group and w_NK.shape[1] % fmt.group and fmt.rows == 1:
        raise QuantizationError(
            f"{fmt.name}: width {w_NK.shape[1]} is not a multiple of its group of {fmt.group} columns"
        )


def concatenate(qs: Sequence[QTensor]) -> QTensor:
    """Return one weight with the output rows of all, in this order. Exact: codes and scales do not change.

    Raises:
        QuantizationError: there is nothing to concatenate, formats or widths differ, or rows end within a block.
    """
    if not qs:
        raise QuantizationError("there is no weight to concatenate")
    fmt = qs[0].fmt
    if kinds := {(q.fmt, q.shape[1]) for q in qs} - {(fmt, qs[0].shape[1])}:
        other, width = next(iter(kinds))
        raise QuantizationError(
            f"weights of one format and width can be concatenated, not {fmt.name} to ±{fmt.weight_max}, width "
            f"{qs[0].shape[1]}, with {other.name} to ±{other.weight_max}, width {width}"
        )
    if ragged := [q.shape[0] for q in qs[:-1] if q.shape[0] % fmt.rows]:
        raise QuantizationError(f"{fmt.name}: {ragged[0]} rows end within a block of {fmt.rows}; nothing can follow")
    return QTensor.of([torch.cat(parts) for parts in zip(*(q.parts for q in qs), strict=True)], fmt)


def dequantize(q: QTensor) -> torch.Tensor:
    """Return the values of the codes, float32 [N, K]."""
    if q.fmt.codec:
        return q.fmt.codec.decode(q.parts, q.fmt)
    (rows, columns), scale = q.codes.shape, q.scale
    if q.fmt.rows > 1:
        scale = scale.repeat_interleave(q.fmt.rows, dim=0)[:rows]
    if q.fmt.group:
        scale = scale.repeat_interleave(q.fmt.group, dim=1)[:, :columns]
    return floats(q.codes) * scale


def quantize_rows(x_MK: torch.Tensor, fmt: Format) -> Codes:
    """Return dynamic codes of activations: (codes as float32 [M, K], maxima [M, groups]), by default a group per token;
    or the arrays of `fmt.activations`.

    x ≈ codes * maximum / activation_max. The range comes from the row alone, so a row's codes never depend on the
    batch. Groups of zeros stay zeros.
    """
    if fmt.activations and fmt.activations.codec:
        return fmt.activations.codec.encode(x_MK.reshape(-1, x_MK.shape[-1]), fmt.activations)
    columns = x_MK.shape[-1]
    group = fmt.activation_group or columns
    x_MGg = filled(x_MK, 0, -columns % group).unflatten(-1, (-1, group))
    amax_MG1 = row_maximum(x_MGg)
    # Integers are rounded with the offset that unsigned kernels add (fused, 128 + x * activation_max): near a tie the
    # sum decides, and emulation and kernel then agree on every code. The offset is even, so ties still go to even.
    # Values of a float type are denser near zero, where an offset would round them away.
    middle = 0.0 if fmt.dtype.is_floating_point else _MIDDLE
    shifted = torch.add(torch.full_like(amax_MG1, middle), x_MGg / amax_MG1, alpha=fmt.activation_max)
    codes = nearest(shifted, fmt).sub_(middle).flatten(-2)[..., :columns]
    return codes, amax_MG1[..., 0]


def row_codes(x_MK: torch.Tensor, fmt: Format, rows: int | None = None) -> Codes:
    """Return `quantize_rows` of any float type, with codes of the format's type; on CUDA in one pass over x.

    Args:
        rows: number of rows of the result, M or more. The others are quantized as rows of zeros.
    """
    rows = len(x_MK) if rows is None else rows
    columns, group = x_MK.shape[1], fmt.activation_group
    if (fused := _fused(x_MK, fmt, group)) and columns % (group or columns) == 0:
        return fused.codes_of_rows(x_MK, fmt, rows)
    codes, *scales = quantize_rows(filled(x_MK.float(), 0, 0, 0, rows - len(x_MK)), fmt)
    return codes.to(fmt.dtype), *scales


@functools.cache
def fused_kernels(device: torch.device, dtype: torch.dtype) -> Any:
    """Return the module quant/fused.py if it makes codes of this type on the device, else None."""
    if device.type != "cuda" or torch.version.hip:
        return None
    least = (8, 9) if dtype.is_floating_point else (8, 0)  # Triton has no E4M3 before, nor a maximum that keeps nan
    if torch.cuda.get_device_capability(device) < least:
        return None
    try:
        from qurl_ray.quant import fused
    except ImportError:
        return None
    return fused


def _fused(x: torch.Tensor, fmt: Format, group: int | None) -> Any:
    """Return quant/fused.py if it quantizes such values in groups of so many columns, or whole rows; else None."""
    fused = None if fmt.codec else fused_kernels(x.device, fmt.dtype)
    return fused if fused and (group or x.shape[1] <= fused.WIDEST) else None


def quantize_rows_int8(x_MK: torch.Tensor, fmt: Format) -> tuple[torch.Tensor, torch.Tensor]:
    """Compute `quantize_rows` of float32 for integer codes and one group per token, in half as many passes over x.
    Return (int8 [M, K], maxima [M, 1])."""
    amax_M1 = row_maximum(x_MK)
    shifted = x_MK / amax_M1
    torch.add(_MIDDLE_TENSOR, shifted, alpha=fmt.activation_max, out=shifted)
    # Where floats are one apart, addition rounds to nearest, ties to even, and the low byte is the code.
    return shifted.add_(_ONE_APART - _MIDDLE).view(torch.int32).to(torch.int8), amax_M1


def dequantize_rows(codes: Codes, fmt: Format) -> torch.Tensor:
    """Return float32 [M, K], the inverse of `quantize_rows`, or of `row_codes`, except for rounding."""
    if fmt.activations and fmt.activations.codec:
        return fmt.activations.codec.decode(codes, fmt.activations)
    codes_MK, amax_MG = codes
    columns = codes_MK.shape[-1]
    scale_MG = amax_MG * fmt.activation_step
    return floats(codes_MK) * scale_MG.repeat_interleave(fmt.activation_group or columns, dim=-1)[..., :columns]


def row_maximum(x_MK: torch.Tensor) -> torch.Tensor:
    """Return max|x| over the last axis, which is kept; the least normal number where all values are zero."""
    return x_MK.abs().amax(dim=-1, keepdim=True).clamp_(min=_LEAST)


def filled(x: torch.Tensor, *padding: int) -> torch.Tensor:
    """Return `x` padded with zeros; without a copy if there is nothing to add, where `pad` would copy."""
    return pad(x, padding) if any(padding) else x


def nearest(x: torch.Tensor, fmt: Format) -> torch.Tensor:
    """Return the code nearest to each x, ties to even, as float32. x must be in the range of the codes (int: any x).
    The result may reuse the memory of x."""
    return floats(x.to(fmt.dtype)) if fmt.dtype.is_floating_point else x.round_()
