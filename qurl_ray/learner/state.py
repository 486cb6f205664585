"""The state of a learner on disk, in a form that any number of ranks can load, with any backend that uses it.

rank-<i>-of-<n>.safetensors    the part of rank i of n: some rows of every parameter, and of every state that the
                               optimizer has of it ("<parameter>:<state>"). The rows of all files, one after the other,
                               are the whole tensor. A state without rows, such as a number of steps, is in every file.
"""

import re
from collections.abc import Mapping
from pathlib import Path

import torch
from safetensors import safe_open
from safetensors.torch import save_file

from qurl_ray.errors import CheckpointError

_FILE = re.compile(r"rank-(\d+)-of-(\d+)\.safetensors")


def own_rows(rows: int, rank: int, ranks: int) -> tuple[int, int]:
    """Return the first row that a rank owns, and the one after its last, as torch.chunk divides a tensor."""
    each = -(-rows // ranks)
    return min(rank * each, rows), min((rank + 1) * each, rows)


def save_rows(folder: Path, tensors: Mapping[str, torch.Tensor], *, rank: int = 0, ranks: int = 1) -> None:
    """Write the rows that a rank holds to its file."""
    save_file(
        {name: tensor.detach().contiguous() for name, tensor in tensors.items()},
        folder / f"rank-{rank}-of-{ranks}.safetensors",
    )


class SavedState:
    """The state that the ranks of a learner have written with `save_rows`.

    Raises:
        CheckpointError: the files of some ranks are missing, or there are none.
    """

    def __init__(self, folder: Path) -> None:
        matches = {path: match for path in sorted(folder.iterdir()) if (match := _FILE.fullmatch(path.name))}
        counts = {int(match[2]) for match in matches.values()}
        files = {int(match[1]): path for path, match in matches.items()}
        if len(counts) != 1 or sorted(files) != list(range(*counts)):
            held = ", ".join(path.name for path in matches) or "nothing of this version"
            raise CheckpointError(
                f"{folder} does not hold what all ranks of a learner saved, but {held}; start again with --fresh"
            )
        self._files = [safe_open(files[rank], framework="pt") for rank in range(len(files))]
        self._names = frozenset(self._files[0].keys())

    def states(self, name: str) -> list[str]:
        """Return the names of the states that the optimizer had of a parameter; none before its first step."""
        return sorted(key.removeprefix(f"{name}:") for key in self._names if key.startswith(f"{name}:"))

    def rows(self, key: str, first: int = 0, end: int | None = None) -> torch.Tensor:
        """Return these rows of a tensor; all of a tensor that has none.

        Raises:
            CheckpointError: nothing of this name was saved.
        """
        if key not in self._names:
            raise CheckpointError(f"the saved state has no {key}")
        parts = [file.get_slice(key) for file in self._files]
        if not parts[0].get_shape():
            return self._files[0].get_tensor(key)
        pieces, at = [], 0
        for part in parts:
            rows = part.get_shape()[0]
            start, stop = max(first - at, 0), rows if end is None else min(end - at, rows)
            if start < stop:
                pieces.append(part[start:stop])
            at += rows
        return torch.cat(pieces) if pieces else parts[0][:0]
