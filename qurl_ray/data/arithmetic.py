"""Sums, differences and products: all possible problems of two operands, or a sample of longer ones, shuffled, then
split in two."""

from collections.abc import Sequence
from itertools import accumulate
from typing import overload

import numpy as np

from qurl_ray.config.task import ArithmeticTask
from qurl_ray.data.split import Split
from qurl_ray.errors import DataError
from qurl_ray.types import Problem

_OPERATORS = {"+": int.__add__, "-": int.__sub__, "*": int.__mul__}
_MOST = 1_000_000  # problems of two operands that are kept; larger sets are sampled uniformly
_MOST_LONG = 20_000  # of more operands


class ArithmeticProblems(Sequence[Problem]):
    """Problems stored as numbers (8 bytes each) and converted to text on access."""

    def __init__(self, rows: np.ndarray, task: ArithmeticTask, *, prefix: str) -> None:
        """Take `rows`, int64 [problems, 2 × terms - 1]: indices of the operators, then the operands."""
        self._rows, self._prefix = rows, prefix
        self._operators, self._digits, self._worked = _operators(task.operators), task.digits, task.worked

    def __len__(self) -> int:
        return len(self._rows)

    @overload
    def __getitem__(self, index: int) -> Problem: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[Problem]: ...
    def __getitem__(self, index: int | slice) -> Problem | Sequence[Problem]:
        if isinstance(index, slice):
            return [self[position] for position in range(len(self))[index]]
        position = range(len(self))[index]
        row = self._rows[position].tolist()
        symbols = [self._operators[code] for code in row[: len(row) // 2]]
        first, *others = row[len(row) // 2 :]
        steps = zip(symbols, others, strict=True)
        results = list(accumulate(steps, lambda value, step: _OPERATORS[step[0]](value, step[1]), initial=first))[1:]
        parts = [part for pair in zip(symbols, others, strict=True) for part in (pair[0], self._text(pair[1]))]
        return Problem(
            uid=f"{self._prefix}-{position}",
            prompt=f"{self._text(first)}{''.join(parts)}=",
            answer=self._text(results[-1]),
            meta={"worked": " ".join(map(self._text, results))} if self._worked else {},
        )

    def _text(self, value: int) -> str:
        return f"{value:0{self._digits}d}"


def arithmetic_split(task: ArithmeticTask) -> Split:
    """Split the shuffled problems: the first `held_out_share` is held out, the rest is for training.

    Raises:
        DataError: unknown operator, empty range of operands, or fewer than two problems.
    """
    operators = _operators(task.operators)
    if task.min_operand > task.max_operand:
        raise DataError(f"task.min_operand ({task.min_operand}) exceeds task.max_operand ({task.max_operand})")
    if task.max_operand >= 2**62 // task.terms:
        raise DataError(f"task.max_operand is {task.max_operand}; operands must be below 2**62 / task.terms")
    rng = np.random.default_rng(task.seed % 2**64)
    if task.terms == 2:
        rows = _draw_pairs(len(operators), task.min_operand, task.max_operand, rng)
    else:
        # uniform draws, without repeats
        indices = rng.integers(len(operators), size=(_MOST_LONG, task.terms - 1))
        operands = rng.integers(task.min_operand, task.max_operand, size=(_MOST_LONG, task.terms), endpoint=True)
        rows = rng.permutation(np.unique(np.concatenate([indices, operands], axis=1), axis=0))
    if len(rows) < 2:
        raise DataError("the arithmetic task has one problem only, so none can be held out; raise task.max_operand")
    cut = min(max(round(len(rows) * task.held_out_share), 1), len(rows) - 1)
    return Split(
        train=ArithmeticProblems(rows[cut:], task, prefix="train"),
        held_out=ArithmeticProblems(rows[:cut], task, prefix="held_out"),
    )


def _operators(text: str) -> str:
    unknown = sorted(set(text) - set(_OPERATORS))
    if unknown or not text:
        raise DataError(f"task.operators is {text!r}; it takes one or more of {' '.join(_OPERATORS)}")
    return "".join(dict.fromkeys(text))


def _draw_pairs(operators: int, low: int, high: int, rng: np.random.Generator) -> np.ndarray:
    """Return distinct rows in random order, int64 [problems, 3]: all possible rows, or a uniform sample of _MOST."""
    span = high - low + 1
    total = operators * span * span
    if total <= 4 * _MOST:
        indices, operands = np.divmod(rng.permutation(total)[:_MOST], span * span)
        return np.stack([indices, low + operands // span, low + operands % span], axis=1)
    # Too many to enumerate. Of 2 * _MOST draws from at least 4 * _MOST, about 1.57 * _MOST are distinct.
    left, right = (rng.integers(low, high, size=2 * _MOST, endpoint=True) for _ in range(2))
    rows = np.stack([rng.integers(operators, size=2 * _MOST), left, right], axis=1)
    return rng.permutation(np.unique(rows, axis=0))[:_MOST]
