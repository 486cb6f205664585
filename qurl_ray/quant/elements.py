"""Codes of 4 and 8 bits, and scales of 8, from and to the bytes that hold them.

| type | bits: sign, exponent, mantissa | values | in a byte |
|---|---|---|---|
| INT4 | an integer | −8 … 7, held as 0 … 15 | two: the first in the low half |
| E2M1 | 1, 2, 1 | ±0, 0.5, 1, 1.5, 2, 3, 4, 6 | two: the first in the low half |
| E4M3 | 1, 4, 3 | to ±448, no infinity | one |
| E8M0 | 0, 8, 0 | 2^(byte − 127); 255 is nan | one: a scale |

The three floats are those of OCP Microscaling Formats 1.0, section 5. Values are rounded to nearest, ties to even, and
those beyond the largest become the largest. Arrays of codes are uint8 [N, bytes].
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch

E4M3_MAX = 448

_E4M3 = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn).float()
_BYTES = torch.arange(256)
_HALF = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])
_TIES = (_HALF[1:] + _HALF[:-1]) / 2
_BORDERS = torch.where(torch.arange(1, 8) % 2 == 0, _TIES.nextafter(_HALF[:-1]), _TIES)
"""Largest value that is rounded to each of the first seven: a tie itself, unless the code above it is even."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Element:
    """A type of codes, of which a byte holds one or two."""

    largest: int
    in_byte: int
    codes: Callable[[torch.Tensor], torch.Tensor]
    """Function from values, float32 [N, K], to codes."""
    values: Callable[[torch.Tensor], torch.Tensor]
    """The way back, exactly."""


def floats(codes: torch.Tensor) -> torch.Tensor:
    """Return codes of any type as float32. For E4M3 on CPUs, torch takes four times as long as this table."""
    if codes.dtype != torch.float8_e4m3fn or codes.device.type != "cpu":
        return codes.float()
    return _E4M3.index_select(0, codes.contiguous().view(torch.uint8).int().view(-1)).view(codes.shape)


def _packed(codes_NK: torch.Tensor) -> torch.Tensor:
    return codes_NK[:, ::2] | codes_NK[:, 1::2] << 4


def _unpacked(values_of_nibbles: torch.Tensor) -> Callable[[torch.Tensor], torch.Tensor]:
    """Return the function from bytes to the values of both halves."""
    pairs = torch.stack([values_of_nibbles[_BYTES & 15], values_of_nibbles[_BYTES >> 4]], dim=1)

    def values(packed: torch.Tensor) -> torch.Tensor:
        return pairs.to(packed.device).index_select(0, packed.reshape(-1).int()).view(len(packed), 2 * packed.shape[1])

    return values


def _int4(x_NK: torch.Tensor) -> torch.Tensor:
    return _packed(x_NK.clamp(-8, 7).round_().add_(8).to(torch.uint8))


def _e2m1(x_NK: torch.Tensor) -> torch.Tensor:
    codes = torch.bucketize(x_NK.abs(), _BORDERS.to(x_NK.device), out_int32=True).to(torch.uint8)
    return _packed(codes | x_NK.signbit().to(torch.uint8) << 3)


def _e4m3(x: torch.Tensor) -> torch.Tensor:
    return x.clamp(-E4M3_MAX, E4M3_MAX).to(torch.float8_e4m3fn).view(torch.uint8)


INT4 = Element(largest=7, in_byte=2, codes=_int4, values=_unpacked(torch.arange(-8.0, 8)))
E2M1 = Element(largest=6, in_byte=2, codes=_e2m1, values=_unpacked(torch.cat([_HALF, -_HALF])))
E4M3 = Element(largest=E4M3_MAX, in_byte=1, codes=_e4m3, values=lambda codes: floats(codes.view(torch.float8_e4m3fn)))


def e8m0_scale(amax: torch.Tensor, largest: int) -> torch.Tensor:
    """Return 2^(floor(log2 amax) − floor(log2 largest)), the scale of a block (section 6.3 of the standard), uint8.

    Args:
        amax: largest magnitude in each block, float32. If it is nan or inf, the scale is nan.
        largest: largest value of the block's elements.
    """
    # The exponent's bits are floor(log2) + 127; they are 0 for zeros and subnormals, whose scale is the least anyway.
    exponents = (amax.contiguous().view(torch.int32) >> 23) - (largest.bit_length() - 1)
    return torch.where(amax.isfinite(), exponents.clamp_(min=0), 255).to(torch.uint8)


def e8m0_values(scales: torch.Tensor) -> torch.Tensor:
    """Return scales as float32."""
    return scales.view(torch.float8_e8m0fnu).float()
