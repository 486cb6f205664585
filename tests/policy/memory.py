"""What a computation needs of memory, in numbers (elements), without measuring a process."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class LargestTensor(TorchDispatchMode):
    """`with LargestTensor() as largest: ...`, then `largest.numbers`: of any tensor made inside, backward included."""

    numbers = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        out = function(*args, **(kwargs or {}))
        for leaf in tree_leaves(out):
            if isinstance(leaf, torch.Tensor):
                self.numbers = max(self.numbers, _numbers(leaf))
        return out


@contextmanager
def kept_for_backward() -> Iterator[dict[int, int]]:
    """Numbers of each storage that autograd keeps; what is computed again in the backward pass is not among them."""
    kept: dict[int, int] = {}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        kept[tensor.untyped_storage().data_ptr()] = _numbers(tensor)
        return tensor

    with saved_tensors_hooks(pack, lambda tensor: tensor):
        yield kept


def _numbers(tensor: torch.Tensor) -> int:
    """Of its storage: a view shares one, an expanded tensor has a small one."""
    return tensor.untyped_storage().nbytes() // tensor.element_size()
