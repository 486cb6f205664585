"""The one way in which a module gets another forward pass: on the instance, so that a backend's hooks, which gather a
sharded weight around each call, still run around it."""

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from types import MethodType
from typing import Any

from torch import nn

Forward = Callable[..., Any]
"""A function of (module, *inputs), as `forward` is in a class."""


def set_forward(module: nn.Module, forward: Forward) -> Callable[[], None]:
    """Have `module` compute with `forward`. Returns a function that undoes it."""
    before = vars(module).get("forward")  # set by a backend, or by this function
    bound: Any = MethodType(forward, module)
    module.forward = bound

    def undo() -> None:
        if before is None:
            del module.forward
        else:
            module.forward = before

    return undo


@contextmanager
def computing_with(forwards: Iterable[tuple[nn.Module, Forward]]) -> Iterator[None]:
    """Context in which each of these modules computes with its forward pass, and afterwards with the one before."""
    undone = [set_forward(module, forward) for module, forward in forwards]
    try:
        yield
    finally:
        for undo in reversed(undone):
            undo()
