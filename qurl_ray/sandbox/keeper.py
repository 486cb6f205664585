"""Process that supervises a server of user code: it starts the server, limits its memory, and removes what it leaves.

    parent ─ socket ─► keeper ─► server ─► processes that the user's code starts

server     resolves the user's code with a function of this package (`StartServer`), then answers the parent's calls
keeper     waits for the parent's end of the socket to close, the server to end, or the server's processes to hold too
           much memory; then kills all that the server started, and ends with the server's exit code or with TOO_MUCH

The server gets a JSON line for some calls, [[mark, *arguments], ...], and the next line when all are answered. It sends
{"ready": what it announces} or {"error": message}; then a JSON line for each call, [mark, *result]. Marks are random:
what user code writes to the socket does not count as a result, and certainly not as that of another call.

User code can print, fork, hang or crash. None of it runs in the keeper, so it cannot prevent the clean-up by breaking
its interpreter, and a parent that is killed leaves nothing, either. On Linux, a process that left its session and whose
parent has ended becomes a child of the keeper; on other systems, processes that leave the server's group stay. If the
keeper is killed, the server dies as well, but processes that the server started stay.
"""

import importlib
import json
import os
import resource
import select
import signal
import socket
import sys
import tempfile
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any, NoReturn

from qurl_ray.errors import QurlError
from qurl_ray.sandbox.descendants import (
    adopt_orphans,
    descendants,
    folder_bytes,
    hold_more,
    kill_descendants,
    prctl,
)

TOO_MUCH = 97
"""Exit code: the server's processes exceeded their memory limit, or were too many."""
_TICK_MS = 100  # interval between two checks of the memory
_MAX_PROCESSES = 512  # limit for code that starts a process at every call and never waits for them
_PR_SET_PDEATHSIG = 1

ServerCall = Callable[..., Sequence[Any]]
"""Function that answers a call of the parent, with plain JSON values."""
StartServer = Callable[[str], tuple[dict[str, Any], ServerCall]]
"""Function that resolves user code from its description. It returns what the server announces, and its calls' function.
A QurlError means that the code cannot be used."""


def main(*, fd: int, start: str, spec: str, memory_gb: float) -> NoReturn:
    """Run the keeper of a server that answers on the socket `fd`.

    Args:
        start: name of the server's `StartServer`, `module:function`.
        spec: description of the user's code.
    """
    channel = socket.socket(fileno=fd)
    channel.set_inheritable(False)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    adopt_orphans()
    limit = int(memory_gb * 2**30)
    # Temporary files that are not removed would fill the disk in a long run, or the memory if /tmp is in memory.
    with tempfile.TemporaryDirectory(prefix="qurl-sandbox-", ignore_cleanup_errors=True) as scratch:
        server = os.fork()
        if server == 0:
            _run_server(channel, start, spec, scratch, limit)
        try:
            code = _watch(channel, server, scratch, limit)
        finally:
            with suppress(ProcessLookupError, PermissionError):  # macOS raises the latter for a group of zombies
                os.killpg(server, signal.SIGKILL)
            kill_descendants()
    if code < 0:  # end by the same signal as the server
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        with suppress(OSError):  # SIGKILL has no handler to reset
            signal.signal(-code, signal.SIG_DFL)
        os.kill(os.getpid(), -code)
    os._exit(code)


def _watch(channel: socket.socket, server: int, scratch: str, limit: int) -> int:
    """Wait for a reason to end. Return the exit code that describes the reason, negative for a signal."""
    poller = select.poll()
    poller.register(channel, 0)  # a hang-up is reported without a request
    with suppress(AttributeError, OSError):  # without pidfd, a death is noticed at the next tick
        poller.register(os.pidfd_open(server), select.POLLIN)
    while True:
        if channel.fileno() in [fd for fd, _ in poller.poll(_TICK_MS)]:
            return 0
        if (code := _reap(server)) is not None:
            return code
        processes = descendants(os.getpid())
        if len(processes) > _MAX_PROCESSES or hold_more(processes, limit - folder_bytes(scratch)):
            return TOO_MUCH


def _reap(server: int) -> int | None:
    """Reap every child that has ended. Return the server's exit code if it was among them."""
    code = None
    with suppress(ChildProcessError):
        while (ended := os.waitpid(-1, os.WNOHANG))[0]:
            if ended[0] == server:
                code = os.waitstatus_to_exitcode(ended[1])
    return code


def _run_server(channel: socket.socket, start: str, spec: str, scratch: str, limit: int) -> NoReturn:
    """Serve in a session of its own, under limits that apply to all processes that the user's code starts."""
    code = 1
    try:
        os.setsid()
        prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        os.environ["TMPDIR"] = tempfile.tempdir = scratch
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))
        if sys.platform == "linux":  # limits private writable memory; reserved address space does not count
            resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))
        module, _, name = start.partition(":")
        _serve(channel, getattr(importlib.import_module(module), name), spec)
        code = 0
    finally:
        os._exit(code)


def _serve(channel: socket.socket, start: StartServer, spec: str) -> None:
    """Answer calls until the parent closes the socket."""
    try:
        announced, call = start(spec)
    except QurlError as error:
        _send(channel, {"error": str(error)})
        return
    _send(channel, {"ready": announced})
    me = os.getpid()
    with channel.makefile("rb") as stream:
        for line in stream:
            for mark, *arguments in json.loads(line):
                result = call(*arguments)
                if os.getpid() != me:  # the user's code forked and returned twice; only one process may answer
                    os._exit(0)
                _send(channel, [mark, *result])


def _send(channel: socket.socket, reply: object) -> None:
    channel.sendall(json.dumps(reply).encode() + b"\n")
