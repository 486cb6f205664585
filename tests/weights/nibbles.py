"""A format from outside the package: two codes in a byte, and two levels of scales."""

import numpy as np
import torch

from qurl_ray.errors import QuantizationError
from qurl_ray.quant.formats import FORMATS, Format, FormatPart

BYTE, FLOAT = np.dtype(np.uint8), np.dtype(np.float32)


class Nibbles:
    """Codes of 4 bits, a scale of 8 bits for each 16 of them, and a float32 for each row."""

    def encode(self, w_NK, fmt):
        groups = w_NK.unflatten(1, (-1, 16))
        amax_NG = groups.abs().amax(dim=2)
        outer = (amax_NG.amax(dim=1, keepdim=True) / (7 * 255)).clamp_(min=1e-30)
        scale = (amax_NG / (7 * outer)).ceil().clamp_(1, 255)
        codes = (groups / (scale * outer).unsqueeze(2)).round().clamp_(-7, 7).add_(8).flatten(1).to(torch.uint8)
        return codes[:, ::2] | codes[:, 1::2] << 4, scale.to(torch.uint8), outer

    def decode(self, parts, fmt):
        packed, scale, outer = parts
        codes = torch.stack([packed & 15, packed >> 4], dim=2).flatten(1).float() - 8
        return codes * (scale.float() * outer).repeat_interleave(16, dim=1)

    def shape(self, parts, fmt):
        return torch.Size((parts[0].shape[0], 2 * parts[0].shape[1]))

    def parts(self, shape, fmt):
        rows, columns = shape
        return (
            FormatPart(BYTE, (rows, columns // 2)),
            FormatPart(BYTE, (rows, columns // 16)),
            FormatPart(FLOAT, (rows, 1)),
        )

    def cut(self, shape, rows, columns, fmt):
        if columns[0] % 16 or columns[1] % 16:
            raise QuantizationError("columns cut through groups of 16")
        halves, groups = (slice(columns[0] // n, columns[1] // n) for n in (2, 16))
        return (slice(*rows), halves), (slice(*rows), groups), (slice(*rows), slice(0, 1))


NIBBLES = Format(name="nibbles", dtype=torch.uint8, weight_max=7, activation_max=None, group=16, codec=Nibbles())


def register() -> None:
    FORMATS["nibbles"] = NIBBLES
