"""Location of checkpoint tensors in vLLM's layers, which fuse tensors and shard them over ranks. No vLLM here.

A fused layer holds, on each rank, a shard of every tensor that it was fused from: q | k | v, gate | up. A sync sends
whole tensors, so a TensorShard describes the rows of a shard both in the tensor and in the layer.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TypeVar

import numpy as np
import torch

from qurl_ray.errors import QuantizationError, SyncError
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
    scale_shape = (-(-shape[0] // fmt.rows), -(-shape[1] // (fmt.group or shape[1]))) if fmt else ()
    whole = [np.zeros(shape, found[0][1][0].dtype)] + ([np.zeros(scale_shape, np.float32)] if fmt else [])
    filled = [np.zeros(part.shape, bool) for part in whole]
    for shard, parts in found:
        columns = slice(*shard.columns) if shard.columns else slice(None)
        places = [(slice(shard.start, shard.stop), columns)[: len(shape)]]
        places += [_scale_cut(shape, shard, fmt)] if fmt else []
        for target, done, place, part in zip(whole, filled, places, parts, strict=True):
            if not np.array_equal(target[place][done[place]], part[done[place]]):
                raise SyncError(f"{name}: ranks hold different copies of rows {shard.start} … {shard.stop - 1}")
            target[place] = part
            done[place] = True
    if not all(done.all() for done in filled):
        raise SyncError(f"{name}: no rank holds some of its rows or columns")
    return tuple(whole)


def _scale_cut(shape: Sequence[int], shard: TensorShard, fmt: Format) -> tuple[slice, slice]:
    """Return the rows and columns of the scales that belong to a shard."""
    rows = _blocks(shard.start, shard.stop, shape[0], fmt.rows, fmt.name, "rows")
    if fmt.group is None:
        return rows, slice(None)
    return rows, _blocks(*(shard.columns or (0, shape[1])), shape[1], fmt.group, fmt.name, "columns")


def _blocks(start: int, stop: int, total: int, block: int, name: str, axis: str) -> slice:
    if start % block or (stop % block and stop != total):
        raise QuantizationError(
            f"{name}: {axis} {start} … {stop - 1} of {total} cut through blocks of {block}, which share a scale: "
            "lower tensor_parallel, or take a format with smaller blocks"
        )
    return slice(start // block, -(-stop // block))
