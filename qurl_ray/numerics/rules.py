"""Rules under which a row of a float32 product does not depend on the other rows. Pure functions.

A matrix product selects its kernel, and with it the order of its sums, by the shape of the call. Which shapes share an
order depends on the processor and on the library, so it is measured (numerics.selfcheck) and not assumed. A rule
defines how to call a product so that every row has the same bits in every call.
"""

from collections.abc import Callable, Iterable, Sequence, Set
from dataclasses import dataclass
from typing import Literal

import torch

MatmulLibrary = Literal["mkl", "onednn"]
"""Library that computes a float32 product of a CPU: torch's default, or oneDNN."""

ROWS = (*range(1, 10), 12, 15, 16, 17, 24, 31, 32, 33, 48, 64, 65, 100, 129, 192, 256)
"""Row counts at which a rule is measured."""
MORE_ROWS = (*range(1, 73), 80, 96, 100, 112, 127, 128, 129, 144, 160, 192, 255, 256)
"""Row counts at which a rule with a multiple is measured; ROWS has too few multiples."""
WHOLE = 288  # rows of the product that all others are compared with
MOST_ROWS = 32  # a rule that requires more is useless: it would add rows to a decode step of that size
_MULTIPLES = (1, 2, 4, 8, 16)
_OFFSET = 7  # first row of every second comparison: place and alignment of a row must not matter


@dataclass(frozen=True, slots=True, kw_only=True)
class Rule:
    """How to call a product so that a row's result depends on that row alone.

    Example:
        Rule(kernel="onednn", rows=2)
    """

    kernel: MatmulLibrary
    rows: int = 1
    """Least number of rows of a call; rows of zeros are added to shorter calls."""
    multiple: int = 1
    """The number of rows of a call must be a multiple of this."""
    outputs: int = 0
    """Least width of the result; rows of zeros are added to narrower weights."""
    batch: int = 1
    """Least number of products in a call that computes several at once."""

    def padded(self, rows: int) -> int:
        """Number of rows of the call that computes `rows` rows."""
        return -(-max(rows, self.rows) // self.multiple) * self.multiple

    def __str__(self) -> str:
        parts = [f"{self.kernel}, at least {self.rows} row{'s' * (self.rows > 1)}"]
        parts += [f"a multiple of {self.multiple}"] * (self.multiple > 1)
        parts += [f"at least {self.outputs} outputs"] * (self.outputs > 0)
        parts += [f"at least {self.batch} products at once"] * (self.batch > 1)
        return ", ".join(parts)


Compute = Callable[[torch.Tensor], torch.Tensor]
"""Product with its other factor bound: a function from rows [..., M, K] to [..., M, N]."""


def find_rows(
    computes: Iterable[tuple[Compute, torch.Tensor]], *, at_most: int = MOST_ROWS, threads: Sequence[int] = (1,)
) -> tuple[int, int] | None:
    """Return (least rows, multiple) with which all products give each row the same bits, at all thread counts.

    Args:
        computes: (product, its rows [..., WHOLE, K]); there is no rule if its whole result depends on threads.
        at_most: give up as soon as more rows than this are needed.
        threads: thread counts, set with torch.set_num_threads while measuring; the old count is restored.

    Returns:
        None if there is no such rule.
    """
    before, computes = torch.get_num_threads(), list(computes)
    try:
        least = _find_rows(computes, ROWS, at_most, threads)
        return _find_rows(computes, MORE_ROWS, at_most, threads) if least and least[1] > 1 else least
    finally:
        torch.set_num_threads(before)


def _find_rows(
    computes: Sequence[tuple[Compute, torch.Tensor]], counts: Sequence[int], at_most: int, threads: Sequence[int]
) -> tuple[int, int] | None:
    least: tuple[int, int] | None = (1, 1)
    broken: set[int] = set()
    for compute, x in computes:
        torch.set_num_threads(threads[0])
        whole = compute(x)
        for thread_count in threads:
            torch.set_num_threads(thread_count)
            if not torch.equal(compute(x), whole):
                return None
            for index, rows in enumerate(counts):
                start = _OFFSET * (index % 2)
                stop = start + rows
                if rows in broken or torch.equal(compute(x[..., start:stop, :]), whole[..., start:stop, :]):
                    continue
                broken.add(rows)
                least = least_rows(broken, counts, at_most=at_most)
                if not least:
                    return None
    return least


def least_rows(broken: Set[int], counts: Sequence[int], *, at_most: int = MOST_ROWS) -> tuple[int, int] | None:
    """Return the least (rows, multiple) such that no measured count that satisfies both is broken; None if none."""
    candidates = []
    for multiple in _MULTIPLES:
        fitting = [rows for rows in counts if rows % multiple == 0]
        after_last = max((index + 1 for index, rows in enumerate(fitting) if rows in broken), default=0)
        candidates += [(rows, multiple) for rows in fitting[after_last : after_last + 1] if rows <= at_most]
    return min(candidates, default=None)


@dataclass(frozen=True, slots=True, kw_only=True)
class Product:
    """A product of a model: `count` times [M, inner] · [outputs, inner]ᵀ."""

    inner: int
    outputs: int
    count: int = 1


def extra_cost(products: Iterable[tuple[Product, Rule | None]], *, rows: int) -> float:
    """Multiplications that the rules add to a call with `rows` rows, as a share of all that the model needs."""
    needed = added = 0
    for product, rule in products:
        once = product.count * product.inner * product.outputs * rows
        needed += once
        if rule:
            padded = rule.padded(rows) * max(product.outputs, rule.outputs)
            added += product.count * product.inner * padded - once
    return added / needed if needed else 0.0
