"""Location of checkpoint tensors in vLLM's layers, which fuse tensors and shard them over ranks. No vLLM here.

A fused layer holds, on each rank, a shard of every tensor that it was fused from: q | k | v, gate | up. A sync sends
whole tensors, so a Piece describes the rows of a shard both in the tensor and in the layer.
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
class Section:
    """One tensor's share of a fused layer on this rank: rows first … first+rows-1 of its `total` rows."""

    rows: int
    first: int
    total: int

    @classmethod
    def share(cls, rows: int, rank: int = 0, ranks: int = 1) -> "Section":
        """Return the `rank`-th of `ranks` equal shares; there are more processes than `ranks` if some hold copies."""
        return cls(rows=rows, first=rank * rows, total=ranks * rows)


@dataclass(frozen=True, slots=True, kw_only=True)
class Piece:
    """Shard of a checkpoint tensor: rows start … stop-1 and columns, which are at row `at` of the layer."""

    start: int
    stop: int
    at: int
    columns: tuple[int, int] | None = None
    """First column and last column + 1; None means all columns."""

    @property
    def rows(self) -> int:
        return self.stop - self.start


def pieces(sections: Sequence[Section], index: int | None, columns: tuple[int, int] | None = None) -> list[Piece]:
    """Return the shards of a checkpoint tensor on this rank: section `index`, or all (None) if it was fused on disk.

    Sections that are adjacent both in the tensor and in the layer form one shard.
    """
    found: list[Piece] = []
    base = at = 0
    for i, section in enumerate(sections):
        if index in (None, i):
            start = base + section.first
            piece = Piece(start=start, stop=start + section.rows, at=at, columns=columns)
            if found and found[-1].stop == start and found[-1].at + found[-1].rows == at:
                piece = replace(found.pop(), stop=piece.stop)
            found.append(piece)
            base += section.total
        at += section.rows
    return found


Rows = TypeVar("Rows", torch.Tensor, QTensor)


def cut(value: Rows, piece: Piece) -> Rows:
    """Return the shard of a tensor, or of codes and scales.

    Raises:
        QuantizationError: the border of the shard lies within a block that shares a scale.
    """
    if isinstance(value, torch.Tensor):
        part = value[piece.start : piece.stop]
        return part if piece.columns is None else part[:, slice(*piece.columns)]
    rows, columns = _scale_cut(value.shape, piece, value.fmt)
    first, last = piece.columns or (0, value.shape[1])
    return QTensor(
        codes=value.codes[piece.start : piece.stop, first:last].contiguous(),
        scale=value.scale[rows, columns].contiguous(),
        fmt=value.fmt,
    )


def fuse(parts: Sequence[QTensor]) -> list[QTensor]:
    """Return one tensor of all rows, or the parts as they are if a block of rows would cross a border."""
    if any(len(part.codes) % part.fmt.rows for part in parts[:-1]):
        return list(parts)
    return [concatenate(parts)]


def read(held: Sequence[QTensor], piece: Piece) -> tuple[torch.Tensor, torch.Tensor]:
    """Return codes and scales of a shard, from the tensors that a layer holds; the inverse of `cut` and `fuse`."""
    at = 0
    for q in held:
        if at <= piece.at < at + len(q.codes):
            local = Piece(start=piece.at - at, stop=piece.at - at + piece.rows, at=0)
            found = cut(q, local)
            return found.codes, found.scale
        at += len(q.codes)
    raise QuantizationError(f"rows {piece.at} … {piece.at + piece.rows - 1} are not in a layer of {at} rows")


def assemble(
    name: str, shape: tuple[int, ...], fmt: Format | None, found: Sequence[tuple[Piece, tuple[np.ndarray, ...]]]
) -> tuple[np.ndarray, ...]:
    """Return the whole tensor, from the shards of all ranks. If ranks hold copies, these must be equal.

    Raises:
        SyncError: shards are missing, or copies differ.
    """
    scale_shape = (-(-shape[0] // fmt.rows), -(-shape[1] // (fmt.group or shape[1]))) if fmt else ()
    whole = [np.zeros(shape, found[0][1][0].dtype)] + ([np.zeros(scale_shape, np.float32)] if fmt else [])
    filled = [np.zeros(part.shape, bool) for part in whole]
    for piece, parts in found:
        columns = slice(*piece.columns) if piece.columns else slice(None)
        places = [(slice(piece.start, piece.stop), columns)[: len(shape)]]
        places += [_scale_cut(shape, piece, fmt)] if fmt else []
        for target, done, place, part in zip(whole, filled, places, parts, strict=True):
            if not np.array_equal(target[place][done[place]], part[done[place]]):
                raise SyncError(f"{name}: ranks hold different copies of rows {piece.start} … {piece.stop - 1}")
            target[place] = part
            done[place] = True
    if not all(done.all() for done in filled):
        raise SyncError(f"{name}: no rank holds some of its rows or columns")
    return tuple(whole)


def _scale_cut(shape: Sequence[int], piece: Piece, fmt: Format) -> tuple[slice, slice]:
    """Return the rows and columns of the scales that belong to a shard."""
    rows = _blocks(piece.start, piece.stop, shape[0], fmt.rows, fmt.name, "rows")
    if fmt.group is None:
        return rows, slice(None)
    return rows, _blocks(*(piece.columns or (0, shape[1])), shape[1], fmt.group, fmt.name, "columns")


def _blocks(start: int, stop: int, total: int, block: int, name: str, axis: str) -> slice:
    if start % block or (stop % block and stop != total):
        raise QuantizationError(
            f"{name}: {axis} {start} … {stop - 1} of {total} cut through blocks of {block}, which share a scale: "
            "lower tensor_parallel, or take a format with smaller blocks"
        )
    return slice(start // block, -(-stop // block))
