"""splitmix64: statistically independent 64-bit values from counters, for sampling and for fingerprints."""

import numpy as np
import torch

_GOLDEN = 0x9E3779B97F4A7C15


def splitmix64(x: np.ndarray) -> np.ndarray:
    """Return splitmix64 of each uint64 counter (Steele, Lea, Flood 2014, https://doi.org/10.1145/2660193.2660195)."""
    x = (x + np.uint64(1)) * np.uint64(_GOLDEN)
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


def splitmix64_signed(x: torch.Tensor) -> torch.Tensor:
    """Return the same bits of int64 counters, on their device. A new tensor."""
    x = (x + 1) * _signed(_GOLDEN)
    for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
        x = (x ^ _shifted(x, shift)) * _signed(factor)
    return x ^ _shifted(x, 31)


def _shifted(x: torch.Tensor, bits: int) -> torch.Tensor:
    """Shift right as unsigned integers are shifted."""
    return (x >> bits) & ((1 << (64 - bits)) - 1)


def _signed(value: int) -> int:
    """Return the signed integer of the same 64 bits."""
    return value - (1 << 64) if value >> 63 else value
