"""The quantization formats, as data. A quantizer reads their fields; no code branches on a name.

A format owns its bytes: `parts` are the arrays that a weight is made of, wherever it is held or travels, and `cut` is
where a shard of the weight lies in each. Nothing outside quant/ assumes a byte per code, or one level of scales.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal, Protocol

import numpy as np
import torch

from qurl_ray.errors import QuantizationError
from qurl_ray.quant.elements import E2M1, E4M3, E4M3_MAX, INT4, Element, e8m0_scale, e8m0_values

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

    def alike(self, weights: Sequence[Sequence[torch.Tensor]]) -> list[tuple[torch.Tensor, ...]]:
        """See Format.alike. Only formats with a scale of the whole tensor need it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Format:
    """A symmetric grid for weights and, if it has one, for activations.

    Example:
        Format(name="int8", dtype=torch.int8, weight_max=127, activation_max=127, group=None)
    """

    name: str
    dtype: torch.dtype
    """Type of the codes, one byte each; uint8 where a byte holds two. Integer codes are evenly spaced; codes of a float
    type are its values."""
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
    activations: "Format | None" = None
    """Format of activations whose arrays are its own, a row for each token; None means codes of `dtype` and maxima."""

    codec: Codec | None = None
    """Arrays of its own; None means a byte per code, and a float32 scale per block of `rows` × `group` codes."""
    whole: bool = False
    """True if a scale belongs to the whole tensor, so that no part of one gets its codes by itself."""

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

    def alike(self, weights: Sequence[Sequence[torch.Tensor]]) -> list[tuple[torch.Tensor, ...]]:
        """Return the arrays of weights with one scale of the whole tensor for all, where the format has such scales.
        Values stay the same, but those of blocks that are minute beside the largest may be rounded."""
        return self.codec.alike(weights) if self.codec and self.whole else [tuple(parts) for parts in weights]

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


@dataclass(frozen=True, slots=True, kw_only=True)
class Blocks:
    """Codec of blocks: `group` columns of one row share a scale, w[n, k] ≈ code[n, k] · step[n, k // group].

    | scale | step of a block with largest magnitude a | arrays |
    |---|---|---|
    | float32 | a / weight_max | codes, steps |
    | e8m0 | 2^(floor(log2 a) − floor(log2 weight_max)) | codes, exponents |
    | e4m3 | E4M3(a / weight_max / outer) · outer | codes, E4M3, outer [N, 1] |

    A code is w / step, rounded to nearest; with E8M0, the largest may exceed weight_max, and become it. Blocks that are
    too small for a step are zeros. `outer` belongs to the tensor (Format.whole), though each row has it, so that
    tensors can be fused; or else to the row. For the largest magnitude A in it, it is
    2^(floor(log2 A) + 1 − floor(log2(448 · weight_max))), so that no scale exceeds 448. NVIDIA's is A / (448 ·
    weight_max). A power of two rounds no step, and can be exchanged for another one without changing a step.
    """

    element: Element
    scale: Literal["float32", "e8m0", "e4m3"]

    def encode(self, w_NK: torch.Tensor, fmt: Format) -> tuple[torch.Tensor, ...]:
        w_NGg = w_NK.unflatten(1, (-1, fmt.group or 1))
        amax_NG = w_NGg.abs().amax(dim=2)
        scales = self._scales(amax_NG, fmt)
        step_NG = self._steps(scales)
        ratios = w_NGg / torch.where(step_NG == 0, torch.inf, step_NG).unsqueeze(2)
        return self.element.codes(ratios.clamp_(-fmt.weight_max, fmt.weight_max).flatten(1)), *scales

    def decode(self, parts: Sequence[torch.Tensor], fmt: Format) -> torch.Tensor:
        codes, *scales = parts
        values_NGg = self.element.values(codes).unflatten(1, (-1, fmt.group or 1))
        return values_NGg.mul_(self._steps(scales).unsqueeze(2)).flatten(1)

    def shape(self, parts: Sequence[torch.Tensor], fmt: Format) -> torch.Size:
        rows, width = parts[0].shape
        return torch.Size((rows, self.element.in_byte * width))

    def parts(self, shape: Sequence[int], fmt: Format) -> tuple[FormatPart, ...]:
        (rows, columns), byte, single = shape, np.dtype(np.uint8), np.dtype(np.float32)
        codes = FormatPart(byte, (rows, columns // self.element.in_byte))
        scales = FormatPart(single if self.scale == "float32" else byte, (rows, columns // (fmt.group or 1)))
        return (codes, scales, FormatPart(single, (rows, 1))) if self.scale == "e4m3" else (codes, scales)

    def cut(self, shape: Sequence[int], rows: Range, columns: Range, fmt: Format) -> tuple[tuple[slice, slice], ...]:
        blocks = fmt._blocks(columns, shape[1], fmt.group or 1, "columns")
        codes = slice(columns[0] // self.element.in_byte, columns[1] // self.element.in_byte)
        places = (slice(*rows), codes), (slice(*rows), blocks), (slice(*rows), slice(0, 1))
        return places if self.scale == "e4m3" else places[:2]

    def alike(self, weights: Sequence[Sequence[torch.Tensor]]) -> list[tuple[torch.Tensor, ...]]:
        # The largest: no step can exceed 448. Steps below 2^-6 of it are subnormal in E4M3, with fewer bits.
        outer = torch.stack([outer_N1.amax() for _, _, outer_N1 in weights]).amax()
        return [
            (codes, E4M3.codes(E4M3.values(scales) * (outer_N1 / outer)), outer.expand(outer_N1.shape).contiguous())
            for codes, scales, outer_N1 in weights
        ]

    def _scales(self, amax_NG: torch.Tensor, fmt: Format) -> tuple[torch.Tensor, ...]:
        if self.scale == "e8m0":
            return (e8m0_scale(amax_NG, fmt.weight_max),)
        # Divisors are tensors on the device: by a number, CUDA multiplies with the reciprocal, and last bits differ.
        step_NG = amax_NG / amax_NG.new_full((), fmt.weight_max)
        if self.scale == "float32":
            return (torch.where(step_NG == 0, 1.0, step_NG),)
        amax_N1 = amax_NG.max().expand(len(amax_NG), 1) if fmt.whole else amax_NG.amax(dim=1, keepdim=True)
        outer_N1 = e8m0_values(e8m0_scale(amax_N1, E4M3_MAX * fmt.weight_max // 2))
        return E4M3.codes(step_NG / outer_N1), outer_N1

    def _steps(self, scales: Sequence[torch.Tensor]) -> torch.Tensor:
        if self.scale == "float32":
            return scales[0]
        return e8m0_values(scales[0]) if self.scale == "e8m0" else E4M3.values(scales[0]) * scales[1]


def _in_blocks(name: str, element: Element, *, group: int, scale: Literal["float32", "e8m0", "e4m3"]) -> Format:
    return Format(
        name=name,
        dtype=torch.uint8 if element.in_byte == 2 else torch.float8_e4m3fn,
        weight_max=element.largest,
        activation_max=None,
        group=group,
        codec=Blocks(element=element, scale=scale),
        whole=scale == "e4m3",
    )


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
    # Those below are emulated everywhere, and weight-only but for nvfp4_w4a4.
    "int4": _in_blocks("int4", INT4, group=128, scale="float32"),
    # An E4M3 scale per 16 codes, below a float32 (Pretraining LLMs with NVFP4, https://arxiv.org/abs/2509.25149).
    "nvfp4": _in_blocks("nvfp4", E2M1, group=16, scale="e4m3"),
    # OCP Microscaling Formats 1.0.
    "mxfp4": _in_blocks("mxfp4", E2M1, group=32, scale="e8m0"),
    "mxfp8": _in_blocks("mxfp8", E4M3, group=32, scale="e8m0"),
}
_NVFP4 = FORMATS["nvfp4"]
FORMATS["nvfp4_w4a4"] = replace(
    _NVFP4,
    name="nvfp4_w4a4",
    activation_max=_NVFP4.weight_max,
    activation_group=_NVFP4.group,
    activations=replace(_NVFP4, whole=False),
)


def get_format(name: str, weight_max: int | None = None) -> Format:
    """Return the format of this name, with its weight codes bounded by `weight_max` if that is smaller.

    Raises:
        QuantizationError: there is no such format.
    """
    if name not in FORMATS:
        raise QuantizationError(f"unknown format {name!r}; known: {', '.join(FORMATS)}")
    fmt = FORMATS[name]
    return fmt if weight_max is None else replace(fmt, weight_max=min(weight_max, fmt.weight_max))
