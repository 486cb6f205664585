"""Processes below this one: their ids, their memory, and their end. Without /proc (not Linux), none is found."""

import ctypes
import os
import re
import resource
import signal
import sys
import time
from collections.abc import Collection, Sequence
from contextlib import suppress

_PAGE_BYTES = resource.getpagesize()
_PAUSE_S = 0.002  # time for the kernel between two rounds of killing
_PR_SET_CHILD_SUBREAPER = 36


def adopt_orphans() -> None:
    """Let processes below this one whose parent ends become children of this process (a subreaper, Linux). Otherwise a
    process that has left its session could not be found."""
    prctl(_PR_SET_CHILD_SUBREAPER, 1)


def descendants(process: int) -> list[int]:
    """Return the ids of all processes below `process`."""
    below, parents = [], [process]
    while parents:
        children: list[int] = []
        parent = parents.pop()
        with suppress(OSError):
            for thread in os.listdir(f"/proc/{parent}/task"):
                children += map(int, _read(f"/proc/{parent}/task/{thread}/children").split())
        below += children
        parents += children
    return below


def kill_descendants(keep: Collection[int] = ()) -> None:
    """Kill all processes below this one, except `keep`. Processes that are forked in the meantime are killed in the
    next round."""
    while left := set(descendants(os.getpid())).difference(keep):
        for process in left:
            with suppress(ProcessLookupError, PermissionError):
                os.kill(process, signal.SIGKILL)
            with suppress(ChildProcessError):  # it is not a child of this process yet
                os.waitpid(process, os.WNOHANG)
        time.sleep(_PAUSE_S)


def hold_more(processes: Sequence[int], limit: int) -> bool:
    """True if the processes hold more than `limit` bytes of memory together. Pages that they share count once."""
    if sum(map(_resident_bytes, processes)) <= limit:
        return False
    return sum(map(_proportional_bytes, processes)) > limit  # this takes longer


def folder_bytes(folder: str) -> int:
    """Return the room that the files below `folder` take on the disk. Sparse files take little."""
    total = 0
    for place, _, names in os.walk(folder):
        for name in names:
            with suppress(OSError):
                total += os.lstat(os.path.join(place, name)).st_blocks * 512
    return total


def prctl(option: int, value: int) -> None:
    """Set an attribute of this process (prctl(2)). Do nothing on systems other than Linux."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(option, ctypes.c_ulong(value), 0, 0, 0)


def _resident_bytes(process: int) -> int:
    fields = _read(f"/proc/{process}/statm").split()
    return int(fields[1]) * _PAGE_BYTES if fields else 0


def _proportional_bytes(process: int) -> int:
    """Resident bytes of `process`, with its part of the pages that it shares."""
    kilobytes = re.search(r"^Pss:\s*(\d+)", _read(f"/proc/{process}/smaps_rollup"), re.MULTILINE)
    return int(kilobytes[1]) * 1024 if kilobytes else _resident_bytes(process)


def _read(path: str) -> str:
    """Return the text of a file below /proc, or "" if its process is gone."""
    try:
        with open(path, errors="replace") as file:
            return file.read()
    except OSError:
        return ""
