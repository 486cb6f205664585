"""Memory that a process shares with others of its machine: of the host, and of a GPU that they share.

vLLM's own messages copy their contents several times, at 0.1 to 0.3 GB/s in all. So they carry names and places only.
"""

import math
import mmap
import os
import pickle
from collections.abc import Iterable

import numpy as np
import torch
from torch.multiprocessing import reductions

Address = tuple[int, int, int]
"""(process, its file descriptor, bytes) of a buffer, as other processes open it."""
Placed = tuple[str, tuple[int, ...], int]
"""(dtype's name, shape, offset in bytes) of an array or tensor in a buffer."""

_ALIGN = 64
_DEVICE = 6
"""Position of the device among the arguments of torch's rebuild_cuda_tensor."""


def aligned(size: int) -> int:
    """Return the bytes that an array of `size` bytes takes in a buffer."""
    return -(-size // _ALIGN) * _ALIGN


class SharedBuffer:
    """Buffer of one owner, who writes; it grows with its contents. Its memory is anonymous, so it is released when
    the owner ends, however it ends, and is not limited by the size of /dev/shm. Linux only."""

    def __init__(self) -> None:
        self._descriptor: int | None = None
        self._memory = np.empty(0, np.uint8)

    @property
    def address(self) -> Address:
        """Address of the arrays that were written last. It changes when the buffer grows."""
        assert self._descriptor is not None, "written"
        return os.getpid(), self._descriptor, len(self._memory)

    def reserve(self, size: int) -> np.ndarray:
        """Return the buffer's bytes, uint8, at least `size` of them. Their former contents may be lost."""
        if size > len(self._memory) or self._descriptor is None:
            self.close()
            self._descriptor = os.memfd_create("qurl-weights")
            os.ftruncate(self._descriptor, max(size, _ALIGN))
            self._memory = _mapped(self._descriptor, max(size, _ALIGN))
        return self._memory

    def write(self, arrays: Iterable[np.ndarray]) -> list[Placed]:
        """Write these arrays over the former ones, and return their places."""
        arrays, placed, end = list(arrays), [], 0
        for array in arrays:
            placed.append((array.dtype.name, array.shape, end))
            end += aligned(array.nbytes)
        memory = self.reserve(end)
        for array, (_, _, start) in zip(arrays, placed, strict=True):
            np.copyto(memory[start : start + array.nbytes].view(array.dtype).reshape(array.shape), array)
        return placed

    def close(self) -> None:
        """Release the memory. It lives on in processes that still read it."""
        if self._descriptor is not None:
            os.close(self._descriptor)
        self._descriptor, self._memory = None, np.empty(0, np.uint8)


def opened(address: Address) -> np.ndarray:
    """Return the bytes of another process's buffer, uint8. They are valid until that process writes again."""
    process, number, size = address
    descriptor = os.open(f"/proc/{process}/fd/{number}", os.O_RDWR)
    try:
        return _mapped(descriptor, size)
    finally:
        os.close(descriptor)


def tensor_at(memory: torch.Tensor, placed: Placed) -> torch.Tensor:
    """Return a tensor in a buffer's bytes (uint8), without a copy."""
    name, shape, start = placed
    dtype = getattr(torch, name)
    return memory[start : start + dtype.itemsize * math.prod(shape)].view(dtype).view(*shape)


def uuid_of(device: torch.device) -> str:
    """Return the identity of a GPU, by which processes that see different GPUs can name it."""
    return str(torch.cuda.get_device_properties(device).uuid)


def gpu_handle(memory: torch.Tensor) -> bytes:
    """Return a handle with which another process opens memory of a GPU. Keep the memory until that process is done."""
    _, arguments = reductions.reduce_tensor(memory)
    return pickle.dumps(arguments)


def opened_on_gpu(handle: bytes, device: torch.device) -> torch.Tensor:
    """Return the memory that a handle of another process, on the same GPU, stands for."""
    arguments = list(pickle.loads(handle))
    arguments[_DEVICE] = device.index  # processes may number their GPUs differently
    return reductions.rebuild_cuda_tensor(*arguments)


def _mapped(descriptor: int, size: int) -> np.ndarray:
    return np.frombuffer(mmap.mmap(descriptor, size, flags=mmap.MAP_SHARED | mmap.MAP_POPULATE), np.uint8)
