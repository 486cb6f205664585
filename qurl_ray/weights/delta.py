"""Compressed difference between two arrays of unsigned integers. Pure.

Few codes change from one version to the next, and those by one. A delta holds the positions (gaps between changed
elements) and the differences (modulo 2^bits, zigzag-coded so that small ones of either sign are small numbers). Both
are written as byte planes, all low bytes first, and entropy-coded by zlib with runs as its only matches. The result is
no larger than with zlib's slow levels, and coding is several times as fast, since there is nothing else to match. Each
plane is a block with its own code: one code for all planes would cost up to a quarter more.
"""

import zlib
from dataclasses import dataclass
from typing import Literal

import numpy as np

from qurl_ray.errors import SyncError

Encoding = Literal["codes", "float32", "bfloat16", "float16"]
"""Encoding of a tensor's arrays as unsigned integers: the bits of its format's parts, or of floats of 32 or 16 bits."""

_MANY = 1 << 15
"""Number of changes that are packed even if they are most of an array, as all scales of a linear may be: 4 ms of one
core. Packing more of them saves 0.1 Gb per second of a core (float32, every element changed), less than networks carry
in that time."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Delta:
    """Difference that turns one array into the next. zlib's checksum covers the data; the other fields must agree with
    the data and with the base."""

    size: int
    """Number of elements of base and result."""
    itemsize: int
    """Bytes per element: 1, 2 or 4."""
    count: int
    """Number of changed elements."""
    data: bytes
    """zlib data of `count` gaps (uint32), then `count` differences, as byte planes: [4 + itemsize, count] bytes."""

    @property
    def nbytes(self) -> int:
        """Bytes of the data and of the three numbers."""
        return len(self.data) + 12


@dataclass(frozen=True, slots=True, kw_only=True)
class Payload:
    """One tensor on the wire: all its arrays as unsigned integers, each whole or as a delta."""

    name: str
    encoding: Encoding
    parts: tuple[np.ndarray | Delta, ...]
    base_version: int | None = None
    """Version to which the deltas are added; None if there are none."""

    @property
    def arrays(self) -> tuple[np.ndarray, ...]:
        """Parts that are whole arrays: all parts of a payload without deltas."""
        return tuple(part for part in self.parts if isinstance(part, np.ndarray))

    @property
    def bytes(self) -> int:
        return sum(part.nbytes for part in self.parts)


def encode_delta(base: np.ndarray, new: np.ndarray) -> Delta | None:
    """Return the delta from `base` to `new`: unsigned, contiguous, of any shape. Return None where `new` itself is no
    larger or would arrive sooner (more than a quarter of a large array changed), and also if shapes or types differ or
    `new` has 2^32 elements or more."""
    if base.shape != new.shape or base.dtype != new.dtype or new.size >= 2**32:
        return None
    base, flat = base.reshape(-1), new.reshape(-1)
    at = np.flatnonzero(base != flat)
    if len(at) > max(_MANY, new.size // 4):
        return None
    gaps = np.diff(at, prepend=-1).astype(np.uint32)
    steps = (flat[at] - base[at]).view(f"i{new.itemsize}")
    zigzag = (steps << 1) ^ (steps >> (8 * new.itemsize - 1))
    packer = zlib.compressobj(1, strategy=zlib.Z_RLE)
    planes = [*_planes(gaps), *_planes(zigzag)]
    data = b"".join(packer.compress(plane) + packer.flush(zlib.Z_BLOCK) for plane in planes) + packer.flush()
    delta = Delta(size=new.size, itemsize=new.itemsize, count=len(at), data=data)
    return delta if delta.nbytes < new.nbytes else None


def decode_delta(base: np.ndarray, delta: Delta) -> np.ndarray:
    """Return the array that `encode_delta` got as `new`: a new array of the base's shape and type.

    Raises:
        SyncError: the delta is damaged or does not fit the base. (A wrong base of the same size is not detected here.)
    """
    if (base.size, base.itemsize) != (delta.size, delta.itemsize):
        raise SyncError(
            f"a delta of {delta.size} elements of {delta.itemsize} bytes, "
            f"but its base has {base.size} of {base.itemsize} bytes"
        )
    gaps, zigzag = _unpacked(delta)
    at = np.cumsum(gaps, dtype=np.int64) - 1
    if delta.count and (gaps.min() == 0 or at[-1] >= delta.size):
        raise SyncError(f"a damaged delta: it changes elements outside the {delta.size} of its base")
    new = base.copy(order="C")
    new.reshape(-1)[at] += (zigzag >> 1) ^ -(zigzag & 1)
    return new


def _unpacked(delta: Delta) -> tuple[np.ndarray, np.ndarray]:
    """Return gaps uint32 [count] and zigzag-coded differences [count]. Never unpack more bytes than were announced."""
    if not 0 <= delta.count <= delta.size:
        raise SyncError(f"a damaged delta: it changes {delta.count} of {delta.size} elements")
    expected = delta.count * (4 + delta.itemsize)
    unpacker = zlib.decompressobj()
    try:
        planes = unpacker.decompress(delta.data, expected + 1)
    except zlib.error as error:
        raise SyncError(f"a damaged delta: {error}") from None
    if not unpacker.eof or unpacker.unused_data or len(planes) != expected:
        raise SyncError(f"a truncated delta: {len(planes)} of {expected} bytes in {len(delta.data)}")
    split = 4 * delta.count
    return _joined(planes[:split], 4), _joined(planes[split:], delta.itemsize)


def _planes(values: np.ndarray) -> list[bytes]:
    """Return the byte planes of the values: all first (low) bytes, all second ones, …"""
    return [plane.tobytes() for plane in values.view(np.uint8).reshape(-1, values.itemsize).T]


def _joined(planes: bytes, itemsize: int) -> np.ndarray:
    return np.frombuffer(planes, np.uint8).reshape(itemsize, -1).T.copy().view(f"u{itemsize}").reshape(-1)
