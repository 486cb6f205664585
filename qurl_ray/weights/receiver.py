"""Engine's side of a weight sync: turns payloads into the arrays that an engine loads.

Deltas are added to the arrays that the engine holds now, which the engine itself supplies: the receiver keeps no copy.
"""

import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

import numpy as np

from qurl_ray.errors import SyncError
from qurl_ray.quant.formats import FormatPart, get_format
from qurl_ray.types import Manifest, TensorRecord
from qurl_ray.weights.delta import Delta, Encoding, Payload, decode_delta

Arrays = tuple[np.ndarray, ...]
"""Arrays of one tensor as engines load them: the parts of its format (quant.formats), or (values float32,)."""


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
    wanted, parts, arrays = _wanted(record, payload.encoding), payload.parts, payload.arrays
    if len(parts) != len(wanted):
        raise SyncError(f"unknown payload: {payload.encoding!r}, {len(parts)} arrays, for format {record.format!r}")
    if any(isinstance(part, Delta) for part in parts):
        if base_version is None or payload.base_version != base_version:
            raise SyncError(f"a delta to version {payload.base_version}, expected one to {base_version}")
        base = resident(payload.name)
        if len(base) != len(parts) or base[0].shape != wanted[0].shape:
            shapes = [part.shape for part in base]
            raise SyncError(f"a delta for {len(parts)} arrays, the first {wanted[0].shape}, but its base is {shapes}")
        arrays = tuple(
            decode_delta(_narrowed(held, want, payload.encoding), part) if isinstance(part, Delta) else part
            for held, part, want in zip(base, parts, wanted, strict=True)
        )
    for array, want in zip(arrays, wanted, strict=True):
        if array.dtype != f"u{want.dtype.itemsize}":
            raise SyncError(f"unknown payload: {array.dtype} in {payload.encoding}")
        if array.shape != want.shape:
            raise SyncError(f"shape {array.shape} was sent, expected {want.shape}")
    return tuple(_widened(array, want, payload.encoding) for array, want in zip(arrays, wanted, strict=True))


def _wanted(record: TensorRecord, encoding: Encoding) -> tuple[FormatPart, ...]:
    """Return the arrays of a tensor on the wire: the parts of its format, or one of bfloat16's bits or floats."""
    if (encoding == "codes") != (record.format != "none"):
        return ()
    if encoding == "codes":
        return get_format(record.format).parts(record.shape)
    types = {"float32": np.float32, "bfloat16": np.uint16, "float16": np.float16}
    return (FormatPart(np.dtype(types[encoding]), record.shape),) if encoding in types else ()


def _narrowed(array: np.ndarray, want: FormatPart, encoding: Encoding) -> np.ndarray:
    """Return an engine's array as the unsigned integers that travel: parts of a format as they are, the bits of
    float32, of float16 if it holds these values, or the upper halves of float32's if the lower halves are zero
    (bfloat16)."""
    if array.dtype != (want.dtype if encoding == "codes" else np.float32):
        raise SyncError(f"a delta of {want.dtype.itemsize}-byte integers cannot be added to {array.dtype}")
    bits = np.ascontiguousarray(array).reshape(array.shape).view(f"u{array.itemsize}")
    if encoding in ("codes", "float32"):
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


def _widened(bits: np.ndarray, want: FormatPart, encoding: Encoding) -> np.ndarray:
    """Inverse of `_narrowed`: parts of a format get its types, the rest becomes float32."""
    if encoding == "bfloat16":
        bits = bits.astype(np.uint32)
        bits <<= 16
        return bits.view(np.float32)
    values = bits.view(want.dtype)
    return values.astype(np.float32) if encoding == "float16" else values
