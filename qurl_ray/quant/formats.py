"""The quantization formats, as data. A quantizer reads their fields; no code branches on a name.

A format owns its bytes: `parts` are the arrays that a weight is made of, wherever it is held or travels, and `cut` is
where a shard of the weight lies in each. Nothing outside quant/ assumes a byte per code, or one level of scales.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Protocol

import numpy as np
import torch

from qurl_ray.errors import QuantizationError

Range = tuple[int, int]
"""First and last + 1."""


@dataclass(frozen=True, slots=True)
class FormatPart:
    """One of the arrays of a quantized weight, as it travels: codes as bytes, because numpy has no 8-bit float."""

    dtype: np.dtype
    shape: tuple[int, ...]


class Codec(Protocol):
    """The arrays of a format that are not a byte per code and a float32 scale per block. All have the weight's rows, or
    blocks of them, as their first axis."""

    def encode(self, w_NK: torch.Tensor, fmt: "Format") -> tuple[torch.Tensor, ...]:
        """Return the arrays of a weight, float32 [N, K], of the types and shapes of `parts`. The first are its codes,
        the second their scales."""

    def decode(self, parts: Sequence[torch.Tensor], fmt: "Format") -> torch.Tensor:
        """Return the values of the arrays, float32 [N, K]."""

    def shape(self, parts: Sequence[torch.Tensor], fmt: "Format") -> torch.Size:
        """Return the shape of the weight, [N, K]."""

    def parts(self, shape: Sequence[int], fmt: "Format") -> tuple[FormatPart, ...]:
        """See Format.parts."""

    def cut(self, shape: Sequence[int], rows: Range, columns: Range, fmt: "Format") -> tuple[tuple[slice, slice], ...]:
        """See Format.cut."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Format:
    """A symmetric grid for weights and, if it has one, for activations.

    Example:
        Format(name="int8", dtype=torch.int8, weight_max=127, activation_max=127, group=None)
    """

    name: str
    dtype: torch.dtype
    """Type of the codes, one byte each. Integer codes are evenly spaced; codes of a float type are its values."""
    weight_max: int
    """Largest weight code; codes lie in [-weight_max, weight_max]."""
    activation_max: int | None
    """Largest activation code; None leaves activations in full precision."""
    group: int | None
    """Number of columns that share a weight scale; None means all columns."""
    rows: int = 1
    """Number of output channels that share a weight scale. If above 1, the last block of either kind may be smaller."""
    activation_group: int | None = None
    """Number of columns that share an activation scale; None means one scale per token."""

    codec: Codec | None = None
    """Arrays of its own; None means a byte per code, and a float32 scale per block of `rows` × `group` codes."""

    def parts(self, shape: Sequence[int]) -> tuple[FormatPart, ...]:
        """Return the arrays of a weight of this shape, [N, K]."""
        if self.codec:
            return self.codec.parts(shape, self)
        rows, columns = shape
        scales = -(-rows // self.rows), -(-columns // (self.group or columns))
        return FormatPart(np.dtype(np.uint8), (rows, columns)), FormatPart(np.dtype(np.float32), scales)

    def cut(self, shape: Sequence[int], rows: Range, columns: Range) -> tuple[tuple[slice, slice], ...]:
        """Return the rows and columns of each array that belong to these rows and columns of the weight.

        Raises:
            QuantizationError: a border lies within a block that shares a scale.
        """
        if self.codec:
            return self.codec.cut(shape, rows, columns, self)
        scales = self._blocks(rows, shape[0], self.rows, "rows"), slice(0, 1)
        if self.group:
            scales = scales[0], self._blocks(columns, shape[1], self.group, "columns")
        return (slice(*rows), slice(*columns)), scales

    def check_width(self, name: str, width: int) -> None:
        """Raise QuantizationError if groups of columns do not divide a weight of this name and number of columns."""
        if self.group and width % self.group and self.rows == 1:
            raise QuantizationError(f"{self.name}: {name} has width {width}, no multiple of the group of {self.group}")

    def _blocks(self, part: Range, total: int, block: int, axis: str) -> slice:
        start, stop = part
        if start % block or (stop % block and stop != total):
            raise QuantizationError(
                f"{self.name}: {axis} {start} … {stop - 1} of {total} cut through blocks of {block}, which share a "
                "scale: lower tensor_parallel, or take a format with smaller blocks"
            )
        return slice(start // block, -(-stop // block))

    @property
    def activation_step(self) -> float:
        """Distance between neighbouring activation codes, if the largest activation is 1."""
        assert self.activation_max, "a format that leaves activations in full precision"
        return 1 / self.activation_max


FORMATS = {
    "int8": Format(name="int8", dtype=torch.int8, weight_max=127, activation_max=127, group=None),
    # E4M3. On CPUs there is no kernel for it (quant/kernels.py): the engine announces emulation.
    "fp8": Format(name="fp8", dtype=torch.float8_e4m3fn, weight_max=448, activation_max=448, group=None),
    # Blocks of 128 × 128 weights, groups of 128 activations (Jet-RL, https://arxiv.org/abs/2601.14243).
    "fp8_block": Format(
        name="fp8_block",
        dtype=torch.float8_e4m3fn,
        weight_max=448,
        activation_max=448,
        group=128,
        rows=128,
        activation_group=128,
    ),
    # Coarse, weight-only, emulated everywhere.
    "int4": Format(name="int4", dtype=torch.int8, weight_max=7, activation_max=None, group=128),
}


def get_format(name: str, weight_max: int | None = None) -> Format:
    """Return the format of this name, with its weight codes bounded by `weight_max` if that is smaller.

    Raises:
        QuantizationError: there is no such format.
    """
    if name not in FORMATS:
        raise QuantizationError(f"unknown format {name!r}; known: {', '.join(FORMATS)}")
    fmt = FORMATS[name]
    return fmt if weight_max is None else replace(fmt, weight_max=min(weight_max, fmt.weight_max))
