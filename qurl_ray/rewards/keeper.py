"""The process that keeps the one that judges: it starts it, bounds what it holds, and leaves nothing of it behind.

    parent ─ socket ─► keeper ─► judge (child.py) ─► whatever the reward function starts

waits for: the parent's end of the socket to close, the judge to die, or its processes to hold too much
ends:      as the judge did, or with TOO_MUCH, when all that the judge started is gone

No code of the user's runs here, so nothing that it does to its interpreter stops the clean-up. On Linux the keeper is
the subreaper of all below it: a process that left its session and whose parent has ended becomes a child of the keeper,
and "no children left" is the whole truth. Elsewhere, what leaves the judge's process group is not found.
"""

import ctypes
import os
import resource
import select
import signal
import socket
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import suppress
from typing import NoReturn

from qurl_ray.rewards.child import serve

TOO_MUCH = 97
"""Exit code: the judge's processes held more than they may."""
_TICK_MS = 100  # at most this long between two looks at what they hold
_PAUSE_S = 0.002  # for the kernel, between two rounds of killing
_MAX_PROCESSES = 512  # a reward that starts one for every answer and waits for none
_PR_SET_PDEATHSIG, _PR_SET_CHILD_SUBREAPER = 1, 36
_PAGE = resource.getpagesize()


def main(*, fd: int, spec: str, memory_gb: float) -> NoReturn:
    """Have a judge answer on the socket `fd` until one of both ends; then kill all that it started."""
    channel = socket.socket(fileno=fd)
    channel.set_inheritable(False)
    _discard_output()
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)
    limit = int(memory_gb * 2**30)
    # Files that are not taken away fill the disk in a long run, and where /tmp is memory, that.
    with tempfile.TemporaryDirectory(prefix="qurl-reward-", ignore_cleanup_errors=True) as scratch:
        judge = _fork(lambda: _judge(channel, spec, scratch, limit))
        try:
            code = _watch(channel, judge, scratch, limit)
        finally:
            _kill_all(judge)
    _end_with(code)


def _judge(channel: socket.socket, spec: str, scratch: str, limit: int) -> None:
    """What the judge does, in its own session."""
    os.setsid()
    _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    os.environ["TMPDIR"] = tempfile.tempdir = scratch
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))
    if sys.platform == "linux":  # private memory that can be written; address space that is only reserved costs nothing
        resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))
    serve(channel, spec)


def _watch(channel: socket.socket, judge: int, scratch: str, limit: int) -> int:
    """Wait for the end; the exit code that tells of it, negative for a signal."""
    poller = select.poll()
    poller.register(channel, 0)  # a hang-up is told unasked
    with suppress(AttributeError, OSError):  # where there is no pidfd, the judge's death shows at the next tick
        poller.register(os.pidfd_open(judge), select.POLLIN)
    while True:
        events = poller.poll(_TICK_MS)
        if any(fd == channel.fileno() for fd, _ in events):
            return 0
        if (code := _reap(judge)) is not None:
            return code
        processes = _descendants(os.getpid())
        if len(processes) > _MAX_PROCESSES or _holds_more(processes, scratch, limit):
            return TOO_MUCH


def _reap(judge: int) -> int | None:
    """Bury every child that has ended; the judge's exit code if it was among them."""
    code = None
    with suppress(ChildProcessError):
        while (found := os.waitpid(-1, os.WNOHANG))[0]:
            if found[0] == judge:
                code = os.waitstatus_to_exitcode(found[1])
    return code


def _kill_all(judge: int) -> None:
    """Kill until no child is left: those that fork in the meantime are found in the next round."""
    while True:
        with suppress(ProcessLookupError, PermissionError):  # the latter macOS says of a group of zombies
            os.killpg(judge, signal.SIGKILL)
        for process in _descendants(os.getpid()):
            with suppress(ProcessLookupError, PermissionError):
                os.kill(process, signal.SIGKILL)
        try:
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
        except ChildProcessError:
            return
        time.sleep(_PAUSE_S)


def _descendants(process: int) -> list[int]:
    """Ids of the processes below `process`; none where there is no /proc."""
    found, parents = [], [process]
    while parents:
        children = _children(parents.pop())
        found += children
        parents += children
    return found


def _children(process: int) -> list[int]:
    found: list[int] = []
    with suppress(OSError):
        for thread in os.listdir(f"/proc/{process}/task"):
            found += [int(child) for child in _read(f"/proc/{process}/task/{thread}/children").split()]
    return found


def _holds_more(processes: list[int], scratch: str, limit: int) -> bool:
    """Whether memory and temporary files together are more than `limit` bytes."""
    files = _file_bytes(scratch)
    if files + sum(_resident_bytes(process) for process in processes) <= limit:
        return False
    # Pages that forked processes share were counted once for each; the exact figure takes longer.
    return files + sum(_proportional_bytes(process) for process in processes) > limit


def _resident_bytes(process: int) -> int:
    fields = _read(f"/proc/{process}/statm").split()
    return int(fields[1]) * _PAGE if fields else 0


def _proportional_bytes(process: int) -> int:
    fields = _read(f"/proc/{process}/smaps_rollup").split()
    return int(fields[fields.index("Pss:") + 1]) * 1024 if "Pss:" in fields else _resident_bytes(process)


def _file_bytes(folder: str) -> int:
    """What the files below `folder` take on disk; sparse files little."""
    total, folders = 0, [folder]
    while folders:
        with suppress(OSError), os.scandir(folders.pop()) as entries:
            for entry in entries:
                with suppress(OSError):
                    total += entry.stat(follow_symlinks=False).st_blocks * 512
                    if entry.is_dir(follow_symlinks=False):
                        folders.append(entry.path)
    return total


def _read(path: str) -> str:
    """ "" for a process that is gone."""
    try:
        with open(path) as file:
            return file.read()
    except OSError:
        return ""


def _fork(action: Callable[[], None]) -> int:
    """Id of a new process that does `action` and nothing else of this one's work."""
    process = os.fork()
    if process == 0:
        code = 1
        try:
            action()
            code = 0
        finally:
            os._exit(code)
    return process


def _end_with(code: int) -> NoReturn:
    if code < 0:
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        with suppress(OSError):  # SIGKILL and SIGSTOP have no handlers to reset
            signal.signal(-code, signal.SIG_DFL)
        os.kill(os.getpid(), -code)
    os._exit(code)


def _discard_output() -> None:
    null = os.open(os.devnull, os.O_RDWR)
    for stream in (0, 1, 2):
        os.dup2(null, stream)


def _prctl(option: int, value: int) -> None:
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(option, ctypes.c_ulong(value), 0, 0, 0)
