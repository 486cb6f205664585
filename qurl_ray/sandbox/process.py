"""A process that runs a user's code: JSON lines over a socket, with deadlines, and an end that is certain."""

import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

from qurl_ray.errors import QurlError
from qurl_ray.extensions import TRACEBACKS
from qurl_ray.sandbox.keeper import STOPPED, TOO_MUCH

MEMORY_GB = 4.0
_START_S = 120.0  # importing a user's module on a busy machine may take a while
_END_S = 30.0  # time for the kernel to end killed processes
_WAKE_S = 0.2  # pause between two signals that wake a stopped warden
_MAX_REPLY_BYTES = 1 << 20
_MAX_LOG_BYTES = 64 << 20  # beyond it, a log begins again

# -u: the log has what was printed before the process is killed. -P and an explicit path: the child can import exactly
# what the parent can import.
_BOOT = (
    "import json, sys; settings = json.load(sys.stdin); sys.path[:] = settings.pop('path');"
    "from qurl_ray.sandbox.keeper import main; main(**settings)"
)
_BROKE_PROTOCOL = "wrote to the socket of its replies"


class LateError(Exception):
    """No reply arrived by the deadline."""


class DeathError(Exception):
    """The process ended, or broke the protocol. The message says how, as a predicate without subject.

    Args:
        code: exit code, negative for a signal; None if the process broke the protocol.
    """

    def __init__(self, predicate: str = _BROKE_PROTOCOL, code: int | None = None) -> None:
        super().__init__(predicate)
        self.code = code


class SandboxedProcess:
    """Warden process, and the socket to the server below it (sandbox.keeper).

    The server sends {"ready": true} or {"error": message} when it has imported the user's code, then JSON lines.

    Args:
        server: function of this package that serves, `module:function`.
        spec: what it serves, passed on as it is.
        memory_gb: limit for the server and all that it starts together, for memory and temporary files, in GiB; see
            docs/failure.md for the systems on which it is enforced.
        log: file for all that is printed there; None drops it.
    """

    def __init__(self, server: str, spec: str, memory_gb: float, log: Path | None = None) -> None:
        self._memory_gb = memory_gb
        self.log = log
        self._socket, theirs = socket.socketpair()
        self._buffer = b""
        # The working directory comes last: a user's own module is found, but hides no other module.
        path = [*(entry or os.getcwd() for entry in sys.path), os.getcwd()]
        settings = {"server": server, "spec": spec, "memory_gb": memory_gb, "path": path, "fd": theirs.fileno()}
        with theirs, _opened(log) as output:
            self._process = subprocess.Popen(
                [sys.executable, "-u", "-P", "-c", _BOOT],
                pass_fds=[theirs.fileno()],
                start_new_session=True,  # so that Ctrl-C does not reach it
                stdin=subprocess.PIPE,  # a function may be larger than an argument
                stdout=output,
                stderr=output,
                env={"OMP_NUM_THREADS": "1", TRACEBACKS: tempfile.gettempdir(), **os.environ},
            )
        assert self._process.stdin
        with suppress(BrokenPipeError), self._process.stdin as settings_of:  # the wait for it tells of its death
            settings_of.write(json.dumps(settings).encode())

    def wait_until_ready(self, what: str, error: type[QurlError]) -> dict[str, Any]:
        """Return the server's first line when it has imported the user's code. Raise `error`, about `what`, if it
        cannot be imported."""
        try:
            reply = self.receive(_START_S)
        except LateError:
            raise error(f"{what}: importing it took longer than {_START_S:g} s") from None
        except DeathError as death:
            raise error(f"{what}: the process that imports it {death}") from None
        match reply:
            case {"ready": True}:
                return reply
            case {"error": str(message)}:
                raise error(message.encode(errors="backslashreplace").decode())  # half of a surrogate pair is no text
        raise error(f"{what}: the process that imports it {_BROKE_PROTOCOL}")

    def alive(self) -> bool:
        return self._process.poll() is None

    @property
    def code(self) -> int | None:
        """Exit code, once the process has ended."""
        return self._process.returncode

    def send(self, line: object, timeout_s: float) -> None:
        """Send one line, as JSON.

        Raises:
            LateError: the server has not read it in time.
            DeathError: it has ended.
        """
        self._socket.settimeout(timeout_s)
        if self.log:
            with suppress(OSError):
                if self.log.stat().st_size > _MAX_LOG_BYTES:
                    os.truncate(self.log, 0)
        try:
            self._socket.sendall(json.dumps(line).encode() + b"\n")
        except TimeoutError:
            raise LateError from None
        except OSError:
            raise self._death() from None

    def receive(self, timeout_s: float) -> Any:
        """Receive the next line. It is JSON: pickles from a process that runs a user's code are not safe.

        Raises:
            LateError: none came in time.
            DeathError: the process has ended, or sent something else.
        """
        deadline = time.monotonic() + timeout_s
        while b"\n" not in self._buffer:
            self._socket.settimeout(max(deadline - time.monotonic(), 0.001))
            try:
                data = self._socket.recv(1 << 16)
            except TimeoutError:
                raise LateError from None
            except OSError:
                data = b""
            if not data:  # no process has the other end: the keeper and all others have ended
                raise self._death()
            self._buffer += data
            if len(self._buffer) > _MAX_REPLY_BYTES:
                raise DeathError
        line, _, self._buffer = self._buffer.partition(b"\n")
        try:
            return json.loads(line)
        except (ValueError, RecursionError):
            raise DeathError from None

    def end(self) -> None:
        """Close the socket: the keeper notices and kills all, then the warden ends. Kill the warden if it does not."""
        self._socket.close()
        deadline = time.monotonic() + _END_S
        while time.monotonic() < deadline:
            self._process.send_signal(signal.SIGCONT)  # the user's code may have stopped it
            try:
                self._process.wait(timeout=_WAKE_S)
            except subprocess.TimeoutExpired:
                continue
            return
        self._process.kill()
        self._process.wait()

    def _death(self) -> DeathError:
        """Return the error that describes how the process ended."""
        try:
            code = self._process.wait(timeout=1.0)
        except subprocess.TimeoutExpired:
            return DeathError("broke the connection")
        return DeathError(self._how(code) + (f"; it printed into {self.log}" if self._printed() else ""), code)

    def _printed(self) -> bool:
        return self.log is not None and self.log.is_file() and self.log.stat().st_size > 0

    def _how(self, code: int) -> str:
        if code == TOO_MUCH:
            return f"and what it started held more than {self._memory_gb:g} GiB, or too many processes"
        if code == STOPPED:
            return "was killed, since the process that keeps it had been stopped by a signal"
        if code < 0:
            return f"was killed by signal {-code} ({signal.strsignal(-code)})"
        return f"ended with exit code {code}"


@contextmanager
def _opened(log: Path | None) -> Iterator[int]:
    """Yield a file descriptor to print to: of the log, or of nothing if there is none, or it cannot be written."""
    with ExitStack() as stack:
        output = subprocess.DEVNULL
        if log:
            with suppress(OSError):
                log.parent.mkdir(parents=True, exist_ok=True)
                output = stack.enter_context(log.open("ab")).fileno()
        yield output
