"""Processes that supervise a server of user code: they start it, limit its memory, and remove what it leaves behind.

    parent ─ socket ─► warden ─► keeper ─► server ─► processes that the user's code starts

server     a function of this package, (socket, spec) -> exit code, which calls the user's code
keeper     waits for the parent's end of the socket to close, the warden or the server to die, or the server's processes
           to hold too much memory; then kills all that the server started, and ends with the server's exit code or
           with TOO_MUCH
warden     waits for the keeper to end or to be stopped; then kills all that is left, and ends with the keeper's exit
           code or with STOPPED

No user code runs in these two processes, so it cannot prevent the clean-up by breaking its interpreter. If one of the
two is killed or stopped, the other cleans up. On Linux both are subreapers: a process that left its session and
whose parent has ended becomes a child of the keeper, or of the warden if the keeper is dead. "No children left" then
means that no process is left. On other systems, processes that leave the server's process group are not found, and
neither are those that a killed keeper leaves.
"""

import ctypes
import importlib
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
from functools import partial
from typing import NoReturn

from qurl_ray.sandbox import cgroup
from qurl_ray.sandbox.held import SHM, Holdings, descendants
from qurl_ray.sandbox.inotify import NewFiles

TOO_MUCH = 97
"""Exit code: the server's processes exceeded their memory limit, or were too many."""
STOPPED = 96
"""Exit code: the keeper was stopped by a signal."""
_TICK_MS = 100  # longest time between two checks of the memory
_REST = 4  # pause after a check caused by a new file, in durations of that check: other programs may create many files
_PAUSE_S = 0.002  # time for the kernel between two rounds of killing
_MAX_PROCESSES = 512  # limit for code that starts a process at every call and never waits for them
_PR_SET_PDEATHSIG, _PR_SET_CHILD_SUBREAPER = 1, 36


def main(*, fd: int, server: str, spec: str, memory_gb: float) -> NoReturn:
    """Run the warden: start a keeper, whose server, `module:function`, answers on the socket `fd`; when it ends, kill
    all that is left."""
    channel = socket.socket(fileno=fd)
    channel.set_inheritable(False)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)
    # Files that are not removed would fill the disk in a long run, or the memory if /tmp is in memory.
    sandbox = _Sandbox(int(memory_gb * 2**30))
    module, _, name = server.partition(":")
    serve = partial(getattr(importlib.import_module(module), name), channel, spec)
    warden = os.getpid()
    keeper = _fork(lambda: _keep(warden, channel, serve, sandbox))
    status = os.waitpid(keeper, os.WUNTRACED)[1]
    stopped = os.WIFSTOPPED(status)
    if stopped:
        os.kill(keeper, signal.SIGKILL)
    sandbox.clear(keeper)
    _end_with(STOPPED if stopped else os.waitstatus_to_exitcode(status))


class _Sandbox:
    """Limits for the server and all that it starts, and a record of what to remove after them."""

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.scratch = tempfile.mkdtemp(prefix="qurl-sandbox-")
        self._holdings = Holdings(self.scratch)
        self._group = cgroup.make_group(limit)

    def enter(self) -> None:
        """Apply the limits to this process and to all that it will start."""
        os.environ["TMPDIR"] = tempfile.tempdir = self.scratch
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        resource.setrlimit(resource.RLIMIT_FSIZE, (self.limit, self.limit))
        if sys.platform == "linux":  # limits private writable memory; reserved address space does not count
            resource.setrlimit(resource.RLIMIT_DATA, (self.limit, self.limit))
        if self._group is not None:
            cgroup.join_group(self._group)

    def is_full(self) -> bool:
        """True if the processes below this one are too many, or hold too much memory."""
        processes = descendants(os.getpid())
        return len(processes) > _MAX_PROCESSES or self._holdings.exceed(processes, self.limit)

    def was_full(self) -> bool:
        """True if the kernel has killed a process because of the memory limit."""
        return self._group is not None and cgroup.was_full(self._group)

    def clear(self, leader: int) -> None:
        """Kill all processes below this one and the process group of `leader`; then delete the files that they left."""
        self._holdings.look(descendants(os.getpid()))
        _kill_all(leader)
        self._holdings.give_back()
        if self._group is not None:
            cgroup.remove_group(self._group)


def _keep(warden: int, channel: socket.socket, serve: Callable[[], int], sandbox: _Sandbox) -> int:
    """Run the keeper: start the server and watch it. Return the exit code."""
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)
    server = _fork(lambda: _serve(serve, sandbox))
    try:
        return _watch(warden, channel, server, sandbox)
    finally:
        sandbox.clear(server)


def _serve(serve: Callable[[], int], sandbox: _Sandbox) -> int:
    """Run the server in its own session, under the limits. Return its exit code."""
    os.setsid()
    _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    sandbox.enter()
    return serve()


def _watch(warden: int, channel: socket.socket, server: int, sandbox: _Sandbox) -> int:
    """Wait for a reason to end. Return the exit code that describes the reason, negative for a signal."""
    poller = select.poll()
    poller.register(channel, 0)  # a hang-up is reported without a request
    new_files = NewFiles(SHM)
    if new_files.fd is not None:
        poller.register(new_files.fd, select.POLLIN)
    with suppress(AttributeError, OSError):  # without pidfd, a death is noticed at the next tick
        poller.register(os.pidfd_open(server), select.POLLIN)
        poller.register(os.pidfd_open(warden), select.POLLIN)
    while True:
        ready = [fd for fd, _ in poller.poll(_TICK_MS)]
        if channel.fileno() in ready or os.getppid() != warden:
            return 0
        if (code := _reap(server)) is not None:
            return TOO_MUCH if sandbox.was_full() else code
        began = time.monotonic()
        new_files.read()
        if sandbox.is_full():
            return TOO_MUCH
        if new_files.fd in ready:
            time.sleep(min(_REST * (time.monotonic() - began), _TICK_MS / 1000))


def _reap(server: int) -> int | None:
    """Reap every child that has ended. Return the server's exit code if it was among them."""
    code = None
    with suppress(ChildProcessError):
        while (found := os.waitpid(-1, os.WNOHANG))[0]:
            if found[0] == server:
                code = os.waitstatus_to_exitcode(found[1])
    return code


def _kill_all(leader: int) -> None:
    """Kill until no child is left. Processes that are forked in the meantime are found in the next round."""
    while True:
        with suppress(ProcessLookupError, PermissionError):  # macOS raises the latter for a group of zombies
            os.killpg(leader, signal.SIGKILL)
        for process in descendants(os.getpid()):
            with suppress(ProcessLookupError, PermissionError):
                os.kill(process, signal.SIGKILL)
        try:
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
        except ChildProcessError:
            return
        time.sleep(_PAUSE_S)


def _fork(action: Callable[[], int]) -> int:
    """Fork a process that only runs `action` and ends with its result. Return the id of the process."""
    process = os.fork()
    if process == 0:
        code = 1
        try:
            code = action()
        finally:
            _end_with(code)
    return process


def _end_with(code: int) -> NoReturn:
    if code < 0:
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        with suppress(OSError):  # SIGKILL and SIGSTOP have no handlers to reset
            signal.signal(-code, signal.SIG_DFL)
        os.kill(os.getpid(), -code)
    os._exit(code)


def _prctl(option: int, value: int) -> None:
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(option, ctypes.c_ulong(value), 0, 0, 0)
