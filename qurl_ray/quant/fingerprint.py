"""64-bit fingerprints of tensors. A sync compares those of the sent tensors with those of the resident tensors.

    fingerprint(x) = sum_i word_i * r_i  (mod 2^64)

over the 8-byte words of x, with fixed odd pseudo-random r_i (a multilinear hash). A single changed word always changes
the sum, since an odd factor has no zero divisors; any other damage goes undetected with probability about 2^-63. Sums
of disjoint parts add up to the sum of the whole, if each part is given its offset.
"""

import functools

import numpy as np
import torch

_GOLDEN = 0x9E3779B97F4A7C15
_MASK = (1 << 64) - 1


def fingerprint(*tensors: torch.Tensor) -> int:
    """Return the fingerprint of the tensors in this order, in [0, 2^64). It depends on bytes, not on shapes."""
    total = 0
    for place, tensor in enumerate(tensors):
        data = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy()
        whole = len(data) // 8 * 8
        words = data[:whole].view(np.uint64)
        tail = int.from_bytes(data[whole:].tobytes(), "little")
        part = int(np.dot(words, _factors(len(words)))) + tail * _factor(len(words))
        total += part * _factor(place)
    return total & _MASK


def _factors(count: int) -> np.ndarray:
    """Return r_0 … r_{count-1}: uint64, odd."""
    return _table(1 << max(0, count - 1).bit_length())[:count]


@functools.lru_cache(maxsize=40)
def _table(size: int) -> np.ndarray:
    return _mix(np.arange(size, dtype=np.uint64))


def _factor(index: int) -> int:
    return int(_mix(np.array([index], dtype=np.uint64))[0])


def _mix(x: np.ndarray) -> np.ndarray:
    """Return splitmix64 of each counter, made odd."""
    return splitmix64(x) | np.uint64(1)


def splitmix64(x: np.ndarray) -> np.ndarray:
    """splitmix64 of each uint64 counter (Steele, Lea, Flood 2014): statistically independent 64-bit values."""
    x = (x + np.uint64(1)) * np.uint64(_GOLDEN)
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))
