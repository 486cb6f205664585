"""Activation functions in which each element of the result depends on one element of the input alone.

torch computes an elementwise function in shares, one per thread, and each share in vectors. The remainder at the end of
a share is computed by another implementation of the exponential, whose last bit may differ. Here shares end where
vectors end, so that there is no remainder.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.autograd.function import once_differentiable
from torch.nn import functional
from torch.nn.functional import pad

VECTOR = 32  # floats that torch's elementwise functions take at a time, at most (two AVX-512 registers)
_ONE_SHARE = 16384  # so many elements torch never divides into shares


@dataclass(frozen=True, slots=True, kw_only=True)
class _Function:
    """Elementwise function of torch, and how torch divides it into shares."""

    anywhere: Callable[[torch.Tensor], torch.Tensor]
    into: Callable[..., torch.Tensor]
    """Function of (x, out=result)."""
    backward: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
    """Function of (gradient of the result, x) that returns the gradient of x."""
    shares: Callable[[int, int], int]
    """Function of (number of elements, threads) that returns the number of shares."""


def shares_of_silu(elements: int, threads: int) -> int:
    """Number of equal shares, as in torch's TensorIterator: at least at::internal::GRAIN_SIZE elements each."""
    return min(threads, -(-elements // 32768))


def shares_of_gelu(elements: int, threads: int) -> int:
    """Number of shares, as in torch's GeluKernel, which has its own grain size."""
    return threads if elements > _ONE_SHARE else 1


_SILU_FUNCTION = _Function(
    anywhere=functional.silu,
    into=torch.ops.aten.silu.out,
    backward=torch.ops.aten.silu_backward,
    shares=shares_of_silu,
)
_GELU_FUNCTIONS = {
    kind: _Function(
        anywhere=partial(functional.gelu, approximate=kind),
        into=partial(torch.ops.aten.gelu.out, approximate=kind),
        backward=partial(torch.ops.aten.gelu_backward, approximate=kind),
        shares=shares_of_gelu,
    )
    for kind in ("none", "tanh")
}


_SIGMOID_FUNCTION = _Function(
    anywhere=torch.sigmoid,
    into=torch.ops.aten.sigmoid.out,
    backward=lambda dy, x: torch.ops.aten.sigmoid_backward(dy, torch.sigmoid(x)),
    shares=shares_of_silu,
)


def sigmoid(x: torch.Tensor) -> torch.Tensor:
    """Return 1 / (1 + exp(-x))."""
    return _apply(x, _SIGMOID_FUNCTION)


def silu(x: torch.Tensor) -> torch.Tensor:
    """Return x · sigmoid(x)."""
    return _apply(x, _SILU_FUNCTION)


def gelu(x: torch.Tensor, approximate: str = "none") -> torch.Tensor:
    """Return torch's gelu, exact or with approximate="tanh"."""
    return _apply(x.contiguous(), _GELU_FUNCTIONS[approximate])  # for others, torch computes the exact gelu differently


def _apply(x: torch.Tensor, function: _Function) -> torch.Tensor:
    if x.device.type != "cpu":
        return function.anywhere(x)
    if torch.is_grad_enabled() and x.requires_grad:
        return _Elementwise.apply(x, function)
    return _in_whole_vectors(x, function)


class _Elementwise(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, function: _Function) -> torch.Tensor:
        ctx.save_for_backward(x)
        ctx.function = function
        return _in_whole_vectors(x, function)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: torch.Tensor) -> tuple[torch.Tensor, None]:
        return ctx.function.backward(dy, ctx.saved_tensors[0]), None


def _in_whole_vectors(x: torch.Tensor, function: _Function) -> torch.Tensor:
    """Return function(x), computed first for rows that form whole vectors on every thread, then for the other rows."""
    width, threads = x.shape[-1], torch.get_num_threads()
    if width % VECTOR:
        return _in_whole_vectors(pad(x, (0, -width % VECTOR)), function)[..., :width]
    out = x.new_empty(x.shape)
    rows, results = x.reshape(-1, width), out.view(-1, width)
    while len(rows):
        whole = whole_rows(len(rows), width, lambda elements: function.shares(elements, threads))
        if whole:
            function.into(rows[:whole], out=results[:whole])
        else:
            whole = 1
            for part, result in zip(rows[0].split(_ONE_SHARE), results[0].split(_ONE_SHARE), strict=True):
                function.into(part, out=result)
        rows, results = rows[whole:], results[whole:]
    return out


def whole_rows(rows: int, width: int, shares: Callable[[int], int]) -> int:
    """Largest number of rows, up to `rows`, that torch divides at the ends of vectors; 0 if there is none.

    Args:
        width: elements of a row, a multiple of VECTOR.
        shares: function of a number of elements that returns the number of equal shares, rounded up, that torch makes.
    """
    for count in range(rows, 0, -1):
        if (count * width // VECTOR) % shares(count * width) == 0:
            return count
    return 0


class SiLU(nn.Module):
    """`silu`, as a module."""

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        return silu(input)


class GELU(nn.Module):
    """`gelu`, as a module."""

    def __init__(self, approximate: str) -> None:
        super().__init__()
        self._approximate = approximate

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        return gelu(input, self._approximate)


MODULES: dict[str, Callable[[], nn.Module]] = {
    "silu": SiLU,
    "swish": SiLU,
    "gelu": partial(GELU, "none"),
    "gelu_pytorch_tanh": partial(GELU, "tanh"),
}
"""Modules by the name of the activation in a transformers config."""
