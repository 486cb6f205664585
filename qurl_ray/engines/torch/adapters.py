"""Adapters beside the linears of a model, in the decoder: its own for all rows of a pass, those by name for some.

A row gets the products of its own adapter alone, and they do not depend on other rows: an answer has the same bits as
from an engine that holds nothing but its adapter.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cache
from typing import Any

import torch
from torch import nn

from qurl_ray.errors import EngineError
from qurl_ray.numerics.products import ADAPTER_FACTORS, bound

_TRIED_ROWS = (*range(1, 18), 31, 64, 65, 128)
"""Numbers of rows for which products are compared: an expert may have any."""


@cache
def _same_together(inputs: int, ranks: tuple[int, ...], device: torch.device, dtype: torch.dtype, threads: int) -> bool:
    """Return True if one product with several matrices [rank, inputs] has the bits of a product with each, for all
    numbers of rows that are tried. Shapes and torch's `threads` decide, not values: libraries choose kernels by them.
    """
    random = torch.Generator().manual_seed(0)
    matrices = [torch.randn(rank, inputs, generator=random).to(device, dtype) for rank in ranks]
    together, single = bound(torch.cat(matrices), None), [bound(matrix, None) for matrix in matrices]
    for count in _TRIED_ROWS:
        rows = torch.randn(count, inputs, generator=random).to(device, dtype)
        if not all(map(torch.equal, together(rows).split(ranks, dim=-1), (product(rows) for product in single))):
            return False
    return True


class Adapter:
    """One adapter, as functions by the names of their linears.

    Args:
        matrices: A and B of each linear. Copies are made: tensors of a file may lie anywhere in memory, and the bits of
            a product depend on alignment.
    """

    def __init__(self, matrices: Mapping[str, tuple[torch.Tensor, torch.Tensor]], scaling: float) -> None:
        self._scaling = scaling
        self._first = {linear: first.clone() for linear, (first, _) in matrices.items()}
        self._second = {linear: bound(second.clone(), None) for linear, (_, second) in matrices.items()}
        self._low: dict[tuple[str, ...], Callable[[torch.Tensor], list[torch.Tensor]]] = {}
        """Functions that compute (α/r) · A x of several linears; made when they are first needed."""

    @classmethod
    def saved(cls, parameters: Mapping[str, torch.Tensor], scaling: float, device: torch.device) -> "Adapter":
        """Return an adapter from its parameters by name."""
        first, second = (f".{factor}.weight" for factor in ADAPTER_FACTORS)
        linears = [name.removesuffix(first) for name in parameters if name.endswith(first)]
        matrices = {
            linear: (parameters[linear + first].to(device), parameters[linear + second].to(device))
            for linear in linears
        }
        return cls(matrices, scaling)

    @classmethod
    def of_model(cls, model: nn.Module) -> "Adapter | None":
        """Return the adapter whose matrices are parameters of a model; None if it has none."""
        matrices, scaling = {}, 1.0
        for name, linear in model.named_modules():
            if hasattr(linear, "lora_A"):
                factors: Any = linear
                matrices[name] = (factors.lora_A.weight, factors.lora_B.weight)
                scaling = factors.lora_B.scaling
        return cls(matrices, scaling) if matrices else None

    def results(self, linears: tuple[str, ...], x: torch.Tensor) -> Iterator[tuple[int, torch.Tensor]]:
        """Yield what is added to the results of linears that all read x, with the place of each; nothing for those
        without an adapter."""
        if linears not in self._low:
            self._low[linears] = self._lows([linear for linear in linears if linear in self._first], x)
        low = iter(self._low[linears](x))
        for place, linear in enumerate(linears):
            if linear in self._second:
                yield place, self._second[linear](next(low))

    def _lows(self, linears: Sequence[str], x: torch.Tensor) -> Callable[[torch.Tensor], list[torch.Tensor]]:
        """Return a function that computes (α/r) · A x for each of these linears. It is one product where that has the
        bits of the single ones: a small product takes as long as three."""
        matrices = [self._first[linear] for linear in linears]
        single = [bound(matrix, None) for matrix in matrices]
        scaling = self._scaling
        if len(single) > 1:
            together, ranks = bound(torch.cat(matrices), None), [len(matrix) for matrix in matrices]
            if _same_together(x.shape[-1], tuple(ranks), x.device, x.dtype, torch.get_num_threads()):
                return lambda x: [part.contiguous() for part in together(x).mul_(scaling).split(ranks, dim=-1)]
        return lambda x: [product(x).mul_(scaling) for product in single]


class RowAdapters:
    """The adapters of an engine, and those that the rows of the present pass have: the model's own, if it has one, and
    for each row one by name; "" stands for none."""

    def __init__(self) -> None:
        self._own: list[tuple[Adapter, torch.Tensor | None]] = []
        self._named: dict[str, Adapter] = {}
        self._present: list[tuple[Adapter, torch.Tensor | None]] = []
        """Adapters of the present pass with their rows; None for all rows."""

    def __contains__(self, name: str) -> bool:
        return not name or name in self._named

    def __len__(self) -> int:
        return len(self._named)

    def begin(self, model: nn.Module) -> None:
        """Take the adapter of a model that was loaded, and forget those by name: the base is another one."""
        own = Adapter.of_model(model)
        self._own = [(own, None)] if own else []
        self._named, self._present = {}, self._own

    def put(self, name: str, adapter: Adapter) -> None:
        """Hold an adapter, in the place of one of the same name."""
        self._named[name] = adapter

    def drop(self, name: str) -> None:
        """Forget an adapter. No row may have it."""
        del self._named[name]

    def choose(self, names: Sequence[str]) -> None:
        """Say which adapter each row of the next pass has.

        Raises:
            EngineError: there is none of that name.
        """
        self._present = list(self._own)
        for name in dict.fromkeys(names):
            if name not in self:
                raise EngineError(f"the engine holds no adapter {name!r}")
            if name:
                rows = [row for row, other in enumerate(names) if other == name]
                every = len(rows) == len(names)
                self._present.append((self._named[name], None if every else torch.tensor(rows)))

    def add(self, linears: tuple[str, ...], x: torch.Tensor, results: Sequence[torch.Tensor]) -> None:
        """Add the adapters' part to the results [rows, …, N] of linears that all read x [rows, …, K]."""
        for adapter, rows in self._present:
            for place, part in adapter.results(linears, x if rows is None else x[rows]):
                results[place].add_(part) if rows is None else results[place].index_add_(0, rows, part)
