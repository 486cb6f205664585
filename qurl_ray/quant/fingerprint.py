"""64-bit fingerprints of tensors. A sync compares those of the sent tensors with those of the resident tensors.

    fingerprint(x) = sum_i word_i * r_i  (mod 2^64)

over the 8-byte words of x, with fixed odd pseudo-random r_i (a multilinear hash). A single changed word always changes
the sum, since an odd factor has no zero divisors; any other damage goes undetected with probability about 2^-63.

A library's hash such as xxhash is faster on a CPU (about 2 to 14 times), but it reads bytes in one order. This sum adds
up over shards, each with its offset, and a GPU computes it in parallel where the weights are.
"""

import functools
from collections.abc import Iterable, Sequence

import numpy as np
import torch
from torch.nn.functional import pad

from qurl_ray.numerics.splitmix import splitmix64, splitmix64_signed

_WORD = 8
_CHUNK = 1 << 26
"""Bytes at a time on a device, whose factors take as much memory."""
_MASK = (1 << 64) - 1


def fingerprint(*tensors: torch.Tensor, offset: int | Sequence[int] = 0) -> int:
    """Return the fingerprint of the tensors in this order, in [0, 2^64). It depends on bytes, not on shapes.

    The fingerprint of a whole is the sum, mod 2^64, of those of its shards: parts of consecutive elements, in row-major
    order, of any length.

    Args:
        offset: place of each tensor's first element in the whole tensor that it is a shard of, in elements; a single
            number holds for all tensors.

    Raises:
        ValueError: there are not as many offsets as tensors, or one is negative.
    """
    offsets = [offset] * len(tensors) if isinstance(offset, int) else list(offset)
    if len(offsets) != len(tensors) or min(offsets, default=0) < 0:
        raise ValueError(f"need an offset of at least 0 for each of {len(tensors)} tensors, got {offsets}")
    total = 0
    for place, (tensor, start) in enumerate(zip(tensors, offsets, strict=True)):
        data = tensor.detach().contiguous().reshape(-1).view(torch.uint8)
        sum_of_words = _sum_of_words if data.device.type == "cpu" else _sum_of_words_on_device
        total += sum_of_words(data, start * tensor.element_size()) * _factor(place)
    return total & _MASK


def total_fingerprint(fingerprints: Iterable[int]) -> str:
    """Return one fingerprint for many tensors, whatever their order, as 16 hexadecimal digits."""
    return f"{sum(fingerprints) & _MASK:016x}"


def _sum_of_words(bytes_n: torch.Tensor, start: int) -> int:
    """Return the sum of words times factors of uint8 [n], the first of which is at byte `start` of the whole."""
    data = bytes_n.numpy()
    first, inside = divmod(start, _WORD)
    if inside:  # the first word begins before the shard: its other bytes count as 0, and are in other shards
        data = np.concatenate([np.zeros(inside, dtype=np.uint8), data])
    count = len(data) // _WORD
    words, tail = data[: count * _WORD].view(np.uint64), data[count * _WORD :]
    if first:
        factors = _mix(np.arange(first, first + count, dtype=np.uint64))
    else:
        factors = _table(1 << max(0, count - 1).bit_length())[:count]
    return int(np.dot(words, factors)) + int.from_bytes(tail.tobytes(), "little") * _factor(first + count)


def _sum_of_words_on_device(bytes_n: torch.Tensor, start: int) -> int:
    """Do the same where the bytes are: only the sum leaves the device. torch has no unsigned integers of 64 bits; sums
    and products of signed ones are the same modulo 2^64."""
    first, inside = divmod(start, _WORD)
    total = torch.zeros((), dtype=torch.int64, device=bytes_n.device)
    for at in range(-inside, len(bytes_n), _CHUNK):
        missing = max(0, -at)
        chunk = bytes_n[at + missing : at + _CHUNK]
        words = pad(chunk, (missing, -(missing + len(chunk)) % _WORD)).clone().view(torch.int64)
        place = first + (at + inside) // _WORD
        counters = torch.arange(place, place + len(words), device=bytes_n.device)
        total += (words * (splitmix64_signed(counters) | 1)).sum()
    return int(total) & _MASK


@functools.lru_cache(maxsize=40)
def _table(size: int) -> np.ndarray:
    """Return r_0 … r_{size-1}."""
    return _mix(np.arange(size, dtype=np.uint64))


def _factor(index: int) -> int:
    """Return r_index."""
    return int(_mix(np.array([index], dtype=np.uint64))[0])


def _mix(x: np.ndarray) -> np.ndarray:
    """Return r_i of each counter i: splitmix64, made odd."""
    return splitmix64(x) | np.uint64(1)
