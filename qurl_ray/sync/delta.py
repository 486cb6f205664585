"""What changed between two arrays of unsigned integers, in few bytes. Pure.

Few codes change from one version to the next, and those by one: a delta holds where (gaps between changed elements) and
by how much (differences modulo 2^bits, zigzagged so that small ones of either sign are small numbers). Both are written
as byte planes, all low bytes first, and entropy-coded by zlib with runs as its only matches: no larger than with its
slow levels, several times as fast, since there is nothing else to match. Each plane is a block with a code of its own:
one code for all would cost up to a quarter more.
"""

import zlib
from dataclasses import dataclass
from typing import Literal

import numpy as np

from qurl_ray.errors import SyncError

Encoding = Literal["codes", "float32", "bfloat16"]
"""Of a tensor's arrays: (codes uint8, bits of the scales uint32), (bits uint32,) or (bits uint16,)."""

_MANY = 1 << 15
"""Changes that are packed even if they are most of an array, as all scales of a linear may be: 4 ms of one core.
Packing more of them saves 0.1 Gb for a second of a core (float32 of which every element moved), less than networks do.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Delta:
    """Takes one array to the next. zlib's checksum covers the data; the rest must agree with them and with the base."""

    size: int
    """Elements of base and result."""
    itemsize: int
    """Bytes of an element: 1, 2 or 4."""
    count: int
    """Changed elements."""
    data: bytes
    """zlib of `count` gaps (uint32), then `count` differences, as planes: [4 + itemsize, count] bytes."""

    @property
    def nbytes(self) -> int:
        """Bytes of the data and the three numbers."""
        return len(self.data) + 12


@dataclass(frozen=True, slots=True, kw_only=True)
class Payload:
    """One tensor on the wire: all its arrays as unsigned integers, each whole or as a delta."""

    name: str
    encoding: Encoding
    parts: tuple[np.ndarray | Delta, ...]
    base_version: int | None = None
    """What the deltas are added to."""

    @property
    def arrays(self) -> tuple[np.ndarray, ...]:
        """All parts, of a payload that is whole."""
        return tuple(part for part in self.parts if isinstance(part, np.ndarray))

    @property
    def bytes(self) -> int:
        return sum(part.nbytes for part in self.parts)


def encode(base: np.ndarray, new: np.ndarray) -> Delta | None:
    """The delta from `base` to `new`: unsigned, contiguous, of any shape. None where `new` itself is no larger or would
    be there sooner (a quarter and more of a large one changed), and for another shape or type, or 2^32 elements."""
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


def decode(base: np.ndarray, delta: Delta) -> np.ndarray:
    """What `encode` was given as `new`: an array of its own, of the base's shape and type.

    Raises:
        SyncError: the delta is damaged, or not of such a base. (Another base of the same size is not seen here.)
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
    """Gaps uint32 [count] and zigzagged differences [count]; never more bytes than were announced."""
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
    """All first (low) bytes, all second ones, …"""
    return [plane.tobytes() for plane in values.view(np.uint8).reshape(-1, values.itemsize).T]


def _joined(planes: bytes, itemsize: int) -> np.ndarray:
    return np.frombuffer(planes, np.uint8).reshape(itemsize, -1).T.copy().view(f"u{itemsize}").reshape(-1)
