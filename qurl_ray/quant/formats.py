"""The quantization formats, as data. A quantizer reads their fields; no code branches on a name."""

from dataclasses import dataclass, replace

import torch

from qurl_ray.errors import QuantizationError


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
