"""Stands in for CUDA under vLLM's weight transfer engines, so that the rest of them runs on a CPU: gloo for NCCL, a
mapped file for a GPU's shared memory. A plugin of vLLM, which loads it in all its processes (`installed`).

A file `damage-<rank>` in $QURL_TEST_DAMAGE has that rank's next arrival damaged, once; ranks are those of the transfer,
whose sender is 0.
"""

import os
import sys
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch import distributed


def installed(folder: Path) -> None:
    """Have vLLM find this in all processes that this one starts, and patch this one. Damage files go into `folder`."""
    info = folder / "cpu_collectives-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: cpu-collectives\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[vllm.general_plugins]\ncpu = tests.sync.cpu_collectives:register\n")
    sys.path.append(str(folder))  # spawned processes get it
    os.environ["QURL_TEST_DAMAGE"] = str(folder)
    register()


def register() -> None:
    from vllm.distributed.weight_transfer import ipc_engine, nccl_common, packed_tensor

    stream = SimpleNamespace(synchronize=lambda: None)
    torch.accelerator.current_device_index = lambda: 0
    torch.accelerator.device_index = lambda _: nullcontext()
    torch.accelerator.synchronize = lambda: None
    torch.cuda.current_stream = lambda *_, **__: stream
    torch.cuda.ipc_collect = lambda: None
    torch.cuda.get_device_properties = lambda _: SimpleNamespace(uuid="GPU-0")
    nccl_common.stateless_init_process_group = Gloo
    packed_tensor._get_streams = lambda _, count: (stream,) * count
    packed_tensor.torch = _Torch()
    packed_tensor.reduce_tensor = ipc_engine.reduce_tensor = _handle
    torch.multiprocessing.reductions.rebuild_cuda_tensor = _opened


class Gloo:
    """What vLLM's engines use of PyNcclCommunicator."""

    device = torch.device("cpu")

    def __init__(self, host: str, port: int, rank: int, world_size: int, device: Any) -> None:
        from vllm.distributed.utils import stateless_init_torch_distributed_process_group

        self._rank = rank
        self._group = stateless_init_torch_distributed_process_group(host, port, rank, world_size, "gloo")

    def broadcast(self, tensor: torch.Tensor, src: int, stream: object = None) -> None:
        options = distributed.BroadcastOptions()
        options.rootRank = src
        self._group.broadcast([tensor.view(torch.uint8)], options).wait()
        if self._rank != src:
            _maybe_damaged(tensor, self._rank)

    def destroy(self) -> None:
        self._group.shutdown()


class _Torch:
    """torch, whose GPU is a file."""

    def __getattr__(self, name: str) -> Any:
        return getattr(torch, name)

    def empty(self, *shape: Any, device: Any = "cpu", **kwargs: Any) -> torch.Tensor:
        if device != "cuda":
            return torch.empty(*shape, device=device, **kwargs)
        path = Path(os.environ["QURL_TEST_DAMAGE"]) / "gpu"
        path.unlink(missing_ok=True)
        memory = torch.from_file(str(path), shared=True, size=shape[0], dtype=kwargs["dtype"])
        memory.path = path
        return memory


def _handle(memory: torch.Tensor) -> tuple[Callable, tuple]:
    return _opened, (str(memory.path), len(memory), 2, 3, 4, 5, 0)


def _opened(path: str, size: int, *_: object) -> torch.Tensor:
    memory = torch.from_file(path, shared=True, size=size, dtype=torch.uint8)
    _maybe_damaged(memory, 1)
    return memory


def _maybe_damaged(tensor: torch.Tensor, rank: int) -> None:
    flag = Path(os.environ["QURL_TEST_DAMAGE"]) / f"damage-{rank}"
    if flag.exists() and tensor.dtype != torch.int32:  # indices are refused, and that ends a run
        flag.unlink()
        first = tensor.view(torch.uint8)[:2].view(torch.bfloat16)  # or half of a float32
        first.copy_(torch.where(first == 0, 3.0, -first))
