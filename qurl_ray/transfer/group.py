"""Groups of processes that receive the broadcasts of their first one, by NCCL between GPUs and by gloo between CPUs.

They are groups of their own: neither the learner's nor an engine's, which have their own worlds.
"""

import threading
from collections.abc import Callable
from concurrent.futures import Future
from datetime import timedelta
from typing import Any

import torch
from torch import distributed

from qurl_ray.errors import DeadlineExceeded, SyncError

Meeting = tuple[str, int, int, float]
"""(host, port, number of processes, seconds that any step may take) of a group that processes join."""


def lead(host: str, size: int, timeout_s: float) -> tuple[Any, Meeting]:
    """Open a group of `size` processes on this host. Return the store with which its first process joins, and the
    meeting for the others.

    Raises:
        SyncError: the host has no such address, or no port.
    """
    limit = timedelta(seconds=timeout_s)
    try:
        store = distributed.TCPStore(host, 0, is_master=True, wait_for_workers=False, timeout=limit)
    except RuntimeError as error:
        raise SyncError(f"no group for weights can be opened at {host}: {error}") from error
    return store, (host, store.port, size, timeout_s)


def join(meeting: Meeting, rank: int, device: torch.device, store: Any = None) -> Any:
    """Return the group, once all have joined.

    Args:
        store: of the first process, rank 0.

    Raises:
        SyncError: some have not.
    """
    host, port, size, timeout_s = meeting
    limit = timedelta(seconds=timeout_s)
    try:
        store = distributed.PrefixStore("weights", store or distributed.TCPStore(host, port, timeout=limit))
        if device.type == "cuda":
            return distributed.ProcessGroupNCCL(store, rank, size, distributed.ProcessGroupNCCL.Options())
        return distributed.ProcessGroupGloo(store, rank, size, limit)
    except RuntimeError as error:
        raise SyncError(f"no group of {size} processes for weights at {host}:{port}: {error}") from error


def broadcast(group: Any, memory: torch.Tensor) -> None:
    """Send the first process's bytes to all others, or receive them. Returns when they are there.

    Raises:
        SyncError: a process is gone, or late.
    """
    options = distributed.BroadcastOptions()
    options.rootRank = 0
    try:
        group.broadcast([memory], options).wait()
        if memory.is_cuda:
            torch.cuda.current_stream(memory.device).synchronize()
    except RuntimeError as error:
        raise SyncError(f"the broadcast of weights failed: {error}") from error


def within(timeout_s: float, device: torch.device, task: str, work: Callable[[], None]) -> None:
    """Do the work in a thread that can be abandoned: a collective whose other side is gone may not return.

    Args:
        task: name of the work, for the error.

    Raises:
        DeadlineExceeded: it took longer.
    """
    done: Future[None] = Future()

    def run() -> None:
        try:
            if device.type == "cuda":
                torch.cuda.set_device(device)  # a setting per thread
            work()
            done.set_result(None)
        except BaseException as error:
            done.set_exception(error)

    threading.Thread(target=run, name="broadcast", daemon=True).start()
    try:
        done.result(timeout_s)
    except TimeoutError:
        raise DeadlineExceeded(f"waited {timeout_s:g} s for {task}") from None
