"""Engine's side of a weight sync: turns payloads into the arrays that an engine loads.

Deltas are added to the arrays that the engine holds now, which the engine itself supplies: the receiver keeps no copy.
"""

import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

import numpy as np

from qurl_ray.errors import SyncError
from qurl_ray.types import Manifest, TensorRecord
from qurl_ray.weights.delta import Delta, Encoding, Payload, decode_delta

Arrays = tuple[np.ndarray, ...]
"""Arrays of one tensor as engines load them: (codes uint8 [N, K], scale float32 [N, groups]) or (values float32,)."""

_WIDTHS = {"codes": (1, 4), "float32": (4,), "bfloat16": (2,), "float16": (2,)}
"""Bytes per element on the wire, for each array of an encoding."""


def decode_buckets(
    buckets: Iterable[Sequence[Payload]], manifest: Manifest, resident: Callable[[str], Arrays]
) -> Iterator[Mapping[str, Arrays]]:
    """Yield the arrays of each bucket, decoded on demand. The engine detects missing tensors, and its fingerprints
    detect a wrong base.

    Args:
        resident: returns the arrays of a tensor that the engine holds now; called where a delta needs them.

    Raises:
        SyncError: a payload is damaged, unknown, sent twice, or a delta to a version other than the manifest's base.
    """
    records = {record.name: record for record in manifest.tensors}
    seen: set[str] = set()
    for bucket in buckets:
        buffers = {}
        for payload in bucket:
            try:
                if payload.name not in records or payload.name in seen:
                    raise SyncError("sent twice" if payload.name in seen else "the manifest does not list it")
                seen.add(payload.name)
                buffers[payload.name] = _arrays(payload, records[payload.name], manifest.base_version, resident)
            except SyncError as error:
                raise SyncError(f"version {manifest.version}: {payload.name}: {error}") from None
        yield buffers


def _arrays(
    payload: Payload, record: TensorRecord, base_version: int | None, resident: Callable[[str], Arrays]
) -> Arrays:
    """Decode one payload."""
    widths, parts, found = _WIDTHS.get(payload.encoding, ()), payload.parts, payload.arrays
    if (payload.encoding == "codes") != (record.format != "none") or len(parts) != len(widths):
        raise SyncError(f"unknown payload: {payload.encoding!r}, {len(parts)} arrays, for format {record.format!r}")
    if any(isinstance(part, Delta) for part in parts):
        if base_version is None or payload.base_version != base_version:
            raise SyncError(f"a delta to version {payload.base_version}, expected one to {base_version}")
        base = resident(payload.name)
        if len(base) != len(parts) or base[0].shape != record.shape:
            shapes = [part.shape for part in base]
            raise SyncError(f"a delta for {len(parts)} arrays, the first {record.shape}, but its base is {shapes}")
        found = tuple(_added(*one, payload.encoding) for one in zip(base, parts, widths, strict=True))
    for part, width in zip(found, widths, strict=True):
        if part.dtype != f"u{width}":
            raise SyncError(f"unknown payload: {part.dtype} in {payload.encoding}")
    if found[0].shape != record.shape:
        raise SyncError(f"shape {found[0].shape} was sent, expected {record.shape}")
    return tuple(_widened(part, payload.encoding) for part in found)


def _added(base: np.ndarray, part: np.ndarray | Delta, width: int, encoding: Encoding) -> np.ndarray:
    return decode_delta(_narrowed(base, width, encoding), part) if isinstance(part, Delta) else part


def _narrowed(array: np.ndarray, width: int, encoding: Encoding) -> np.ndarray:
    """Return an engine's array as the unsigned integers that travel: codes as they are, the bits of float32, of float16
    if it holds these values, or the upper halves of float32's if the lower halves are zero (bfloat16)."""
    if array.dtype != (np.uint8 if width == 1 else np.float32):
        raise SyncError(f"a delta of {width}-byte integers cannot be added to {array.dtype}")
    if width == 1:
        return array
    bits = np.ascontiguousarray(array).reshape(array.shape).view(np.uint32)
    if width == 4:
        return bits
    if encoding == "float16":
        with np.errstate(over="ignore"):
            rounded = array.astype(np.float16)
        if not np.array_equal(rounded, array, equal_nan=True):
            raise SyncError("a delta in float16 cannot be added to values that float16 does not hold")
        return rounded.view(np.uint16)
    if np.bitwise_or.reduce(bits, axis=None) & 0xFFFF:
        raise SyncError("a delta in bfloat16 cannot be added to values that bfloat16 does not hold")
    halves = bits.reshape(-1).view(np.uint16).reshape(*bits.shape, 2)  # also for an array without dimensions
    return np.ascontiguousarray(halves[..., int(sys.byteorder == "little")]).reshape(bits.shape)


def _widened(bits: np.ndarray, encoding: Encoding) -> np.ndarray:
    """Inverse of `_narrowed`: codes stay bytes, the rest becomes float32."""
    if bits.itemsize == 1:
        return bits
    if encoding == "float16":
        return bits.view(np.float16).astype(np.float32)
    if bits.itemsize == 2:
        bits = bits.astype(np.uint32)
        bits <<= 16
    return bits.view(np.float32)
