"""Quantize and dequantize: two pure functions around a value object.

Rounding is to nearest (ties to even). The learner's master weights stay in float32, so nothing is lost between two
quantizations, and no calibration is needed: scales come from the values at hand.
"""

from dataclasses import dataclass

import torch

from qurl_ray.errors import QuantizationError
from qurl_ray.quant.formats import Format


@dataclass(frozen=True, slots=True, kw_only=True)
class QTensor:
    """Codes and scales of one weight: w[n, k] ≈ codes[n, k] * scale[n, k // (K / groups)]."""

    codes: torch.Tensor  # int8 [N, K]
    scale: torch.Tensor  # float32 [N, groups]
    fmt: Format


def quantize(w_NK: torch.Tensor, fmt: Format) -> QTensor:
    """codes = round(w / scale), scale = max|w| / weight_max over a row, or over a group of its columns.

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
    codes = (w_NGg / scale_NG1).round_().clamp_(-fmt.weight_max, fmt.weight_max)
    return QTensor(codes=codes.to(torch.int8).reshape(rows, columns), scale=scale_NG1.squeeze(2), fmt=fmt)


def dequantize(q: QTensor) -> torch.Tensor:
    """float32 [N, K]."""
    rows, columns = q.codes.shape
    groups = q.scale.shape[1]
    w_NGg = q.codes.float().reshape(rows, groups, columns // groups) * q.scale[:, :, None]
    return w_NGg.reshape(rows, columns)


def quantize_rows(x_MK: torch.Tensor, max_code: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Dynamic per-token codes of activations: (codes as float32 [M, K], row maxima [M, 1]).

    x ≈ codes * row maximum / max_code. The range comes from the row alone, so a row's codes never depend on the
    batch. Rows of zeros get maximum 1.
    """
    amax_M1 = row_maximum(x_MK)
    # Rounded with the offset that unsigned kernels add (fused, 128 + x * max_code): near a tie the sum decides, and
    # emulation and kernel then agree on every code. The offset is even, so ties still go to even.
    offset = torch.full_like(amax_M1, 128.0)
    return torch.add(offset, x_MK / amax_M1, alpha=max_code).round_().sub_(128.0), amax_M1


def row_maximum(x_MK: torch.Tensor) -> torch.Tensor:
    """max|x| of each row, 1 for rows of zeros: [M, 1]."""
    amax_M1 = x_MK.abs().amax(dim=-1, keepdim=True)
    return torch.where(amax_M1 > 0, amax_M1, 1.0)
