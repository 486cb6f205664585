"""Adapters by name beside the linears of one base model: each is for some of the rows of a pass.

A row gets the products of its own adapter alone, and they do not depend on other rows: an answer has the same bits as
from an engine that holds nothing but its adapter.
"""

from collections.abc import Callable, Mapping, Sequence

import torch

from qurl_ray.errors import EngineError
from qurl_ray.numerics.products import ADAPTER_FACTORS, bound
from qurl_ray.policy.adapters import SavedAdapter


class _Adapter:
    """One adapter, as functions by the names of their linears."""

    def __init__(self, parameters: Mapping[str, torch.Tensor], scaling: float, device: torch.device) -> None:
        first, second = (f".{factor}.weight" for factor in ADAPTER_FACTORS)
        linears = [name.removesuffix(first) for name in parameters if name.endswith(first)]

        def product(name: str) -> Callable[[torch.Tensor], torch.Tensor]:
            # Of a copy: tensors of a file may lie anywhere in memory, and the bits of a product depend on alignment.
            return bound(parameters[name].to(device, copy=True), None)

        self._scaling = scaling
        self._products = {linear: (product(linear + first), product(linear + second)) for linear in linears}

    def result(self, linear: str, x: torch.Tensor) -> torch.Tensor | None:
        """Return what is added to a linear's result; None if it has no adapter."""
        if (products := self._products.get(linear)) is None:
            return None
        first, second = products
        return second(first(x)).mul_(self._scaling)


class NamedAdapters:
    """The adapters of an engine, and those that the rows of the present pass have. "" stands for none."""

    def __init__(self) -> None:
        self._held: dict[str, _Adapter] = {}
        self._present: list[tuple[_Adapter, torch.Tensor | None]] = []
        """Adapters of the present pass with their rows; None for all rows."""

    def __contains__(self, name: str) -> bool:
        return not name or name in self._held

    def put(self, name: str, saved: SavedAdapter, parameters: Mapping[str, torch.Tensor], device: torch.device) -> None:
        """Hold an adapter, in the place of one of the same name.

        Args:
            parameters: its matrices, as this engine's weights are scaled (quant.equalize).
        """
        self._held[name] = _Adapter(parameters, saved.adapters.scaling, device)

    def drop(self, name: str) -> None:
        """Forget an adapter. No row may have it."""
        del self._held[name]

    def clear(self) -> None:
        """Forget all adapters: the base is another one."""
        self._held.clear()

    def choose(self, names: Sequence[str]) -> None:
        """Say which adapter each row of the next pass has.

        Raises:
            EngineError: there is none of that name.
        """
        self._present = []
        for name in dict.fromkeys(names):
            if name not in self:
                raise EngineError(f"the engine holds no adapter {name!r}")
            if name:
                rows = [row for row, other in enumerate(names) if other == name]
                every = len(rows) == len(names)
                self._present.append((self._held[name], None if every else torch.tensor(rows)))

    def add(self, linear: str, x: torch.Tensor, y: torch.Tensor) -> None:
        """Add the adapters' results to y [rows, …, N], the result of a linear for x [rows, …, K]."""
        for adapter, rows in self._present:
            part = adapter.result(linear, x if rows is None else x[rows])
            if part is not None:
                y.add_(part) if rows is None else y.index_add_(0, rows, part)
