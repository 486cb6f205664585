"""Location of checkpoint tensors in vLLM's layers, which fuse tensors and shard them over ranks. No vLLM here.

A fused layer holds, on each rank, a shard of every tensor that it was fused from: q | k | v, gate | up. A sync sends
whole tensors, so a TensorShard describes the rows of a shard both in the tensor and in the layer.
"""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import TypeVar

import numpy as np
import torch

from qurl_ray.errors import QuantizationError, SyncError
from qurl_ray.quant.fingerprint import fingerprint
from qurl_ray.quant.formats import Format
from qurl_ray.quant.quantize import QTensor, concatenate


@dataclass(frozen=True, slots=True, kw_only=True)
class Partition:
    """One tensor's share of a fused layer on this rank: rows first … first+rows-1 of its `total` rows."""

    rows: int
    first: int
    total: int

    @classmethod
    def share(cls, rows: int, rank: int = 0, ranks: int = 1) -> "Partition":
        """Return the `rank`-th of `ranks` equal shares; there are more processes than `ranks` if some hold copies."""
        return cls(rows=rows, first=rank * rows, total=ranks * rows)


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorShard:
    """Shard of a checkpoint tensor: rows start … stop-1 and columns, which are at row `at` of the layer."""

    start: int
    stop: int
    at: int
    columns: tuple[int, int] | None = None
    """First column and last column + 1; None means all columns."""

    @property
    def rows(self) -> int:
        return self.stop - self.start


def local_shards(
    partitions: Sequence[Partition], index: int | None, columns: tuple[int, int] | None = None
) -> list[TensorShard]:
    """Return the shards of a checkpoint tensor on this rank: partition `index`, or all (None) if it was fused on disk.

    Partitions that are adjacent both in the tensor and in the layer form one shard.
    """
    shards: list[TensorShard] = []
    base = at = 0
    for i, partition in enumerate(partitions):
        if index in (None, i):
            start = base + partition.first
            shard = TensorShard(start=start, stop=start + partition.rows, at=at, columns=columns)
            if shards and shards[-1].stop == start and shards[-1].at + shards[-1].rows == at:
                shard = replace(shards.pop(), stop=shard.stop)
            shards.append(shard)
            base += partition.total
        at += partition.rows
    return shards


AnyTensor = TypeVar("AnyTensor", torch.Tensor, QTensor)
"""A tensor of values, or one of codes and scales."""


def cut(value: AnyTensor, shard: TensorShard) -> AnyTensor:
    """Return the shard of a tensor, or of codes and scales.

    Raises:
        QuantizationError: the border of the shard lies within a block that shares a scale.
    """
    if isinstance(value, torch.Tensor):
        part = value[shard.start : shard.stop]
        return part if shard.columns is None else part[:, slice(*shard.columns)]
    q = value.cut((shard.start, shard.stop), shard.columns)
    return QTensor.of([part.contiguous() for part in q.parts], value.fmt)


def fuse(parts: Sequence[QTensor]) -> list[QTensor]:
    """Return one tensor of all rows, or the parts as they are if a block of rows would cross a border."""
    if any(part.shape[0] % part.fmt.rows for part in parts[:-1]):
        return list(parts)
    return [concatenate(parts)]


def read(held: Sequence[QTensor], shard: TensorShard) -> tuple[torch.Tensor, ...]:
    """Return the parts of a shard, from the tensors that a layer holds; the inverse of `cut` and `fuse`."""
    at = 0
    for q in held:
        if at <= shard.at < at + q.shape[0]:
            return cut(q, TensorShard(start=shard.at - at, stop=shard.at - at + shard.rows, at=0)).parts
        at += q.shape[0]
    raise QuantizationError(f"rows {shard.at} … {shard.at + shard.rows - 1} are not in a layer of {at} rows")


def join_shards(
    name: str, shape: tuple[int, ...], fmt: Format | None, shards: Sequence[tuple[TensorShard, tuple[np.ndarray, ...]]]
) -> tuple[np.ndarray, ...]:
    """Return the whole tensor, from the shards of all ranks. If ranks hold copies, these must be equal.

    Raises:
        SyncError: shards are missing, or copies differ.
    """
    whole = [np.zeros(size, part.dtype) for size, part in zip(_sizes(shape, fmt), shards[0][1], strict=True)]
    filled = [np.zeros(part.shape, bool) for part in whole]
    for shard, parts in shards:
        for target, done, place, part in zip(whole, filled, _places(shape, shard, fmt), parts, strict=True):
            if not np.array_equal(target[place][done[place]], part.reshape(target[place].shape)[done[place]]):
                raise SyncError(f"{name}: ranks hold different copies of rows {shard.start} … {shard.stop - 1}")
            target[place] = part.reshape(target[place].shape)
            done[place] = True
    if not all(done.all() for done in filled):
        raise SyncError(f"{name}: no rank holds some of its rows or columns")
    return tuple(whole) if fmt else (whole[0].reshape(shape),)


Piece = tuple[int, int, int, int, int, int]
"""(array, first row, last row + 1, first column, last column + 1, share of the fingerprint) of what a rank holds of a
tensor's parts, or values."""


def fingerprint_pieces(
    tensors: Sequence[torch.Tensor], shape: tuple[int, ...], shard: TensorShard, fmt: Format | None
) -> list[Piece]:
    """Return the shares of a tensor's fingerprint that a shard makes up: codes and scales, or values."""
    pieces = []
    for array, tensor in enumerate(tensors):
        rows, columns = _places(shape, shard, fmt)[array]
        width = _sizes(shape, fmt)[array][1]
        part = tensor.reshape(rows.stop - rows.start, columns.stop - columns.start)
        if part.shape[1] < width:  # columns of other ranks as zeros, which add nothing
            part = torch.zeros((len(part), width), dtype=part.dtype, device=part.device)
            part[:, columns] = tensor
        before = [part.new_empty(0)] * array
        share = fingerprint(*before, part, offset=rows.start * width)
        pieces.append((array, rows.start, rows.stop, columns.start, columns.stop, share))
    return pieces


def join_fingerprints(name: str, shape: tuple[int, ...], fmt: Format | None, pieces: Iterable[Piece]) -> int:
    """Return a tensor's fingerprint, from the pieces of all ranks. If ranks hold copies, these must be equal.

    Raises:
        SyncError: pieces are missing, or copies differ.
    """
    shares: dict[tuple[int, ...], int] = {}
    for *place, share in pieces:
        if shares.setdefault(tuple(place), share) != share:
            raise SyncError(f"{name}: ranks hold different copies of rows {place[1]} … {place[2] - 1}")
    held = [0 for _ in _sizes(shape, fmt)]
    for array, first, stop, left, right in shares:
        held[array] += (stop - first) * (right - left)
    if held != [rows * columns for rows, columns in _sizes(shape, fmt)]:
        raise SyncError(f"{name}: no rank holds some of its rows or columns")
    return sum(shares.values()) % 2**64


def _sizes(shape: tuple[int, ...], fmt: Format | None) -> list[tuple[int, int]]:
    """Return the rows and columns of each array of a tensor: the parts of its format, or values. A vector has one
    column."""
    if fmt is None:
        return [(shape[0], math.prod(shape[1:]))]
    return [(part.shape[0], math.prod(part.shape[1:])) for part in fmt.parts(shape)]


def _places(shape: tuple[int, ...], shard: TensorShard, fmt: Format | None) -> Sequence[tuple[slice, slice]]:
    """Return the rows and columns of each of these arrays that belong to a shard."""
    rows, columns = (shard.start, shard.stop), shard.columns or (0, math.prod(shape[1:]))
    return [(slice(*rows), slice(*columns))] if fmt is None else fmt.cut(shape, rows, columns)
