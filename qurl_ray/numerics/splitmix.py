"""splitmix64: statistically independent 64-bit values from counters, for sampling and for fingerprints."""

import numpy as np

_GOLDEN = 0x9E3779B97F4A7C15


def splitmix64(x: np.ndarray) -> np.ndarray:
    """Return splitmix64 of each uint64 counter (Steele, Lea, Flood 2014, https://doi.org/10.1145/2660193.2660195)."""
    x = (x + np.uint64(1)) * np.uint64(_GOLDEN)
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))
