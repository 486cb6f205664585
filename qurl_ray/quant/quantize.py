"""Quantize and dequantize: two pure functions around a value object.

Rounding is to nearest (ties to even). The learner's master weights stay in float32, so nothing is lost between two
quantizations, and no calibration is needed: scales come from the values at hand.
"""

from dataclasses import dataclass

import numpy as np
import torch

from qurl_ray.errors import QuantizationError
from qurl_ray.quant.formats import Format


@dataclass(frozen=True, slots=True, kw_only=True)
class QTensor:
    """Codes and scales of one weight: w[n, k] ≈ codes[n, k] * scale[n, k // (K / groups)]."""

    codes: torch.Tensor  # fmt.dtype [N, K]
    scale: torch.Tensor  # float32 [N, groups]
    fmt: Format

    @property
    def shape(self) -> torch.Size:
        return self.codes.shape

    def cpu(self) -> "QTensor":
        """The same, wherever it was computed."""
        return QTensor(codes=self.codes.cpu(), scale=self.scale.cpu(), fmt=self.fmt)

    def to_numpy(self) -> tuple[np.ndarray, np.ndarray]:
        """(codes, scale) as they travel, without a copy: codes as bytes, because numpy has no 8-bit float."""
        return self.codes.view(torch.uint8).numpy(), self.scale.numpy()

    @classmethod
    def from_numpy(cls, codes: np.ndarray, scale: np.ndarray, fmt: Format) -> "QTensor":
        """The inverse; it copies, as buffers from an object store are read-only."""
        return cls(codes=torch.tensor(codes).view(fmt.dtype), scale=torch.tensor(scale), fmt=fmt)


def quantize(w_NK: torch.Tensor, fmt: Format) -> QTensor:
    """codes = w / scale rounded to the grid, scale = max|w| / weight_max over a row, or over a group of its columns.

    Rows (groups) of zeros get scale 1, so that their codes are 0 and not nan.

    Raises:
        QuantizationError: not a matrix, not finite, or a width that the group size does not divide.
    """
    if w_NK.ndim != 2:
        raise QuantizationError(f"{fmt.name}: expected a weight [N, K], got shape {tuple(w_NK.shape)}")
    rows, columns = w_NK.shape
    group = fmt.group or columns
    if columns % group:
        raise QuantizationError(f"{fmt.name}: width {columns} is not a multiple of its group of {group} columns")
    w_NGg = w_NK.detach().float().reshape(rows, columns // group, group)
    amax_NG1 = w_NGg.abs().amax(dim=2, keepdim=True)
    if not torch.isfinite(amax_NG1).all():
        bad = int((~torch.isfinite(amax_NG1)).any(dim=1).sum())
        raise QuantizationError(f"{fmt.name}: weight has nan or inf in {bad} of {rows} rows")
    scale_NG1 = torch.where(amax_NG1 > 0, amax_NG1 / fmt.weight_max, 1.0)
    codes = _rounded((w_NGg / scale_NG1).clamp_(-fmt.weight_max, fmt.weight_max), fmt)
    return QTensor(codes=codes.to(fmt.dtype).reshape(rows, columns), scale=scale_NG1.squeeze(2), fmt=fmt)


def dequantize(q: QTensor) -> torch.Tensor:
    """float32 [N, K]."""
    rows, columns = q.codes.shape
    groups = q.scale.shape[1]
    w_NGg = q.codes.float().reshape(rows, groups, columns // groups) * q.scale[:, :, None]
    return w_NGg.reshape(rows, columns)


def quantize_rows(x_MK: torch.Tensor, fmt: Format) -> tuple[torch.Tensor, torch.Tensor]:
    """Dynamic per-token codes of activations: (codes as float32 [M, K], row maxima [M, 1]).

    x ≈ codes * row maximum / activation_max. The range comes from the row alone, so a row's codes never depend on the
    batch. Rows of zeros get maximum 1.
    """
    amax_M1 = row_maximum(x_MK)
    # Integers are rounded with the offset that unsigned kernels add (fused, 128 + x * activation_max): near a tie the
    # sum decides, and emulation and kernel then agree on every code. The offset is even, so ties still go to even.
    # Values of a float type lie closer near zero, where an offset would swallow them.
    middle = 0.0 if fmt.dtype.is_floating_point else 128.0
    shifted = torch.add(torch.full_like(amax_M1, middle), x_MK / amax_M1, alpha=fmt.activation_max)
    return _rounded(shifted, fmt).sub_(middle), amax_M1


def row_maximum(x_MK: torch.Tensor) -> torch.Tensor:
    """max|x| of each row, 1 for rows of zeros: [M, 1]."""
    amax_M1 = x_MK.abs().amax(dim=-1, keepdim=True)
    return torch.where(amax_M1 > 0, amax_M1, 1.0)


def _rounded(x: torch.Tensor, fmt: Format) -> torch.Tensor:
    """The code nearest to each x, ties to even, as float32; x within the range of the codes (int: unlimited)."""
    return x.to(fmt.dtype).float() if fmt.dtype.is_floating_point else x.round()
