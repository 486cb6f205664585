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
    found: list[TensorShard] = []
    base = at = 0
    for i, partition in enumerate(partitions):
        if index in (None, i):
            start = base + partition.first
            shard = TensorShard(start=start, stop=start + partition.rows, at=at, columns=columns)
            if found and found[-1].stop == start and found[-1].at + found[-1].rows == at:
                shard = replace(found.pop(), stop=shard.stop)
            found.append(shard)
            base += partition.total
        at += partition.rows
    return found


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
    rows, columns = _scale_cut(value.shape, shard, value.fmt)
    first, last = shard.columns or (0, value.shape[1])
    return QTensor(
        codes=value.codes[shard.start : shard.stop, first:last].contiguous(),
        scale=value.scale[rows, columns].contiguous(),
        fmt=value.fmt,
    )


def fuse(parts: Sequence[QTensor]) -> list[QTensor]:
    """Return one tensor of all rows, or the parts as they are if a block of rows would cross a border."""
    if any(len(part.codes) % part.fmt.rows for part in parts[:-1]):
        return list(parts)
    return [concatenate(parts)]


def read(held: Sequence[QTensor], shard: TensorShard) -> tuple[torch.Tensor, torch.Tensor]:
    """Return codes and scales of a shard, from the tensors that a layer holds; the inverse of `cut` and `fuse`."""
    at = 0
    for q in held:
        if at <= shard.at < at + len(q.codes):
            local = TensorShard(start=shard.at - at, stop=shard.at - at + shard.rows, at=0)
            found = cut(q, local)
            return found.codes, found.scale
        at += len(q.codes)
    raise QuantizationError(f"rows {shard.at} … {shard.at + shard.rows - 1} are not in a layer of {at} rows")


def join_shards(
    name: str, shape: tuple[int, ...], fmt: Format | None, found: Sequence[tuple[TensorShard, tuple[np.ndarray, ...]]]
) -> tuple[np.ndarray, ...]:
    """Return the whole tensor, from the shards of all ranks. If ranks hold copies, these must be equal.

    Raises:
        SyncError: shards are missing, or copies differ.
    """
    whole = [np.zeros(size, part.dtype) for size, part in zip(_sizes(shape, fmt), found[0][1], strict=True)]
    filled = [np.zeros(part.shape, bool) for part in whole]
    for shard, parts in found:
        for target, done, place, part in zip(whole, filled, _places(shape, shard, fmt), parts, strict=True):
            if not np.array_equal(target[place][done[place]], part.reshape(target[place].shape)[done[place]]):
                raise SyncError(f"{name}: ranks hold different copies of rows {shard.start} … {shard.stop - 1}")
            target[place] = part.reshape(target[place].shape)
            done[place] = True
    if not all(done.all() for done in filled):
        raise SyncError(f"{name}: no rank holds some of its rows or columns")
    return (whole[0].reshape(shape), *whole[1:])


Piece = tuple[int, int, int, int, int, int]
"""(array, first row, last row + 1, first column, last column + 1, share of the fingerprint) of what a rank holds of a
tensor's codes and scales (arrays 0 and 1), or values."""


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
    """Return the rows and columns of each array of a tensor: codes and scales, or values. A vector has one column."""
    rows, columns = shape[0], math.prod(shape[1:])
    return [(rows, columns)] + ([(-(-rows // fmt.rows), -(-columns // (fmt.group or columns)))] if fmt else [])


def _places(shape: tuple[int, ...], shard: TensorShard, fmt: Format | None) -> list[tuple[slice, slice]]:
    """Return the rows and columns of each of these arrays that belong to a shard."""
    columns = slice(*(shard.columns or (0, math.prod(shape[1:]))))
    return [(slice(shard.start, shard.stop), columns)] + ([_scale_cut(shape, shard, fmt)] if fmt else [])


def _scale_cut(shape: Sequence[int], shard: TensorShard, fmt: Format) -> tuple[slice, slice]:
    """Return the rows and columns of the scales that belong to a shard."""
    rows = _blocks(shard.start, shard.stop, shape[0], fmt.rows, fmt.name, "rows")
    if fmt.group is None:
        return rows, slice(0, 1)
    return rows, _blocks(*(shard.columns or (0, shape[1])), shape[1], fmt.group, fmt.name, "columns")


def _blocks(start: int, stop: int, total: int, block: int, name: str, axis: str) -> slice:
    if start % block or (stop % block and stop != total):
        raise QuantizationError(
            f"{name}: {axis} {start} … {stop - 1} of {total} cut through blocks of {block}, which share a scale: "
            "lower tensor_parallel, or take a format with smaller blocks"
        )
    return slice(start // block, -(-stop // block))
