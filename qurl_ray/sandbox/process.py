"""A process that runs a user's code: calls over a socket, with deadlines, and an end that is certain."""

import json
import os
import secrets
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections import deque
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, BinaryIO, Self

from qurl_ray.errors import QurlError
from qurl_ray.extensions import TRACEBACKS
from qurl_ray.sandbox.keeper import TOO_MUCH

MEMORY_GB = 4.0
_START_S = 120.0  # importing a user's module on a busy machine may take a while
_END_S = 30.0  # time for the kernel to end killed processes
_MAX_REPLY_BYTES = 1 << 20
_MAX_LOG_BYTES = 64 << 20  # beyond it, a log begins again

# -u: the log has what was printed before the process is killed. -P and an explicit path: the child can import exactly
# what the parent can import.
_BOOT = (
    "import json, sys; settings = json.load(sys.stdin); sys.path[:] = settings.pop('path');"
    "from qurl_ray.sandbox.keeper import main; main(**settings)"
)
_BROKE_PROTOCOL = "wrote to the socket of its replies"


class DeathError(Exception):
    """The process ended, or broke the protocol. The message says how, as a predicate without subject."""

    def __init__(self, predicate: str = _BROKE_PROTOCOL) -> None:
        super().__init__(predicate)


class SandboxedProcess:
    """Keeper process and the socket to the server below it (sandbox.keeper). It starts when it is needed, and again
    after it has ended. Threads may share it if they call one at a time.

    Args:
        start: function of this package that resolves the user's code (keeper.StartServer), `module:function`.
        spec: description of the user's code, passed on as it is.
        title: name of the user's code in errors: "reward 'exact'".
        error: type of the error if the code cannot be resolved.
        memory_gb: limit for the server and all that it starts together, for memory and temporary files, in GiB; see
            docs/failure.md for the systems on which it is enforced.
        log: file for all that is printed there; None drops it.
    """

    def __init__(
        self, start: str, spec: str, *, title: str, error: type[QurlError], memory_gb: float, log: Path | None
    ) -> None:
        self._start, self._spec, self._title, self._error = start, spec, title, error
        self._memory_gb, self._log = memory_gb, log
        self._keeper: subprocess.Popen | None = None
        self.announced: dict[str, Any] = {}
        """Fields that the server sent when it had resolved the user's code."""

    @property
    def running(self) -> bool:
        """True if the process is running."""
        return self._keeper is not None and self._keeper.poll() is None

    @property
    def owes(self) -> int:
        """Number of outstanding results."""
        return len(self._owed) if self._keeper else 0

    def check(self) -> None:
        """Start the process if none is running, and resolve the user's code in it. Raise an error, of the type that was
        chosen, if that fails."""
        if self.running:
            return
        self.close()
        self._launch()
        try:
            self.announced = self._announcement()
        except BaseException:
            self.close()
            raise

    def ask(self, calls: Sequence[Sequence[Any]], timeout_s: float) -> None:
        """Send calls, each with its arguments. No result may be outstanding: user code can read all on the socket.

        Raises:
            TimeoutError: the server has not read them in time.
            DeathError: it has ended.
        """
        marks = [secrets.token_hex(8) for _ in calls]
        self._owed.extend(marks)
        line = json.dumps([[mark, *arguments] for mark, arguments in zip(marks, calls, strict=True)]) + "\n"
        with suppress(OSError):
            if self._log and self._log.stat().st_size > _MAX_LOG_BYTES:
                os.truncate(self._log, 0)
        self._socket.settimeout(timeout_s)
        try:
            self._socket.sendall(line.encode())
        except TimeoutError:
            raise
        except OSError:
            raise self._death() from None

    def result(self, timeout_s: float) -> list[Any]:
        """Return the result of the first call that has none yet.

        Raises:
            TimeoutError: none came in time.
            DeathError: the process has ended, or sent something else.
        """
        match self._receive(timeout_s):
            case [mark, *result] if mark == self._owed.popleft():
                return result
        raise DeathError

    def close(self) -> None:
        """End the process and all that it started. A later call starts another one."""
        keeper, self._keeper = self._keeper, None  # another thread may close, too
        if keeper is None:
            return
        self._socket.close()  # the keeper notices, and kills all
        keeper.send_signal(signal.SIGCONT)  # the user's code may have stopped it
        try:
            keeper.wait(_END_S)
        except subprocess.TimeoutExpired:
            keeper.kill()
            keeper.wait()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _launch(self) -> None:
        self._socket, theirs = socket.socketpair()
        self._buffer = b""
        self._owed: deque[str] = deque()
        # The working directory comes last: a user's own module is found, but hides no other module.
        path = [*(entry or os.getcwd() for entry in sys.path), os.getcwd()]
        settings = {"start": self._start, "spec": self._spec, "memory_gb": self._memory_gb, "path": path}
        settings["fd"] = theirs.fileno()
        with theirs, _open_log(self._log) as output:
            self._keeper = subprocess.Popen(
                [sys.executable, "-u", "-P", "-c", _BOOT],
                pass_fds=[theirs.fileno()],
                start_new_session=True,  # so that Ctrl-C does not reach it
                stdin=subprocess.PIPE,  # a function may be larger than an argument
                stdout=output,
                stderr=output,
                env={"OMP_NUM_THREADS": "1", TRACEBACKS: tempfile.gettempdir(), **os.environ},
            )
        assert self._keeper.stdin
        with suppress(BrokenPipeError), self._keeper.stdin as stdin:  # the wait for it tells of its death
            stdin.write(json.dumps(settings).encode())

    def _announcement(self) -> dict[str, Any]:
        try:
            reply = self._receive(_START_S)
        except TimeoutError:
            raise self._error(f"{self._title}: importing it took longer than {_START_S:g} s") from None
        except DeathError as death:
            raise self._error(f"{self._title}: the process that imports it {death}") from None
        match reply:
            case {"ready": dict(announced)}:
                return announced
            case {"error": str(message)}:
                raise self._error(message.encode(errors="backslashreplace").decode())  # a lone surrogate is no text
        raise self._error(f"{self._title}: the process that imports it {_BROKE_PROTOCOL}")

    def _receive(self, timeout_s: float) -> Any:
        """Receive the next line. It is JSON: pickles from a process that runs a user's code are not safe."""
        deadline = time.monotonic() + timeout_s
        while b"\n" not in self._buffer:
            self._socket.settimeout(max(deadline - time.monotonic(), 0.001))
            try:
                data = self._socket.recv(1 << 16)
            except TimeoutError:
                raise
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

    def _death(self) -> DeathError:
        """Return the error that describes how the process ended."""
        try:
            code = self._keeper.wait(timeout=1.0) if self._keeper else 0
        except subprocess.TimeoutExpired:
            return DeathError("broke the connection")
        if code == TOO_MUCH:
            predicate = f"and what it started held more than {self._memory_gb:g} GiB, or too many processes"
        elif code < 0:
            predicate = f"was killed by signal {-code} ({signal.strsignal(-code)})"
        else:
            predicate = f"ended with exit code {code}"
        printed = self._log is not None and self._log.is_file() and self._log.stat().st_size > 0
        return DeathError(predicate + (f"; it printed into {self._log}" if printed else ""))


def _open_log(log: Path | None) -> BinaryIO:
    """Open the log, or the null device if there is none, or it cannot be written."""
    with suppress(OSError):
        if log:
            log.parent.mkdir(parents=True, exist_ok=True)
            return log.open("ab")
    return open(os.devnull, "ab")
