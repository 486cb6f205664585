"""Judging with an enforced deadline, in a separate process that is killed when it is late.

Time-outs based on signals or threads do not stop a reward function: signals reach only the main
thread, and a thread cannot be stopped. A process can. Another process, the keeper, ensures that
nothing started by the judge outlives it.
"""

import json
import logging
import math
import os
import secrets
import signal
import socket
import subprocess
import sys
import time
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import suppress
from typing import Any, cast, get_args

from qurl_ray.errors import RewardError
from qurl_ray.rewards.child import THREADS_LEFT
from qurl_ray.rewards.given import carried, told
from qurl_ray.rewards.judge import failure
from qurl_ray.rewards.keeper import STOPPED, TOO_MUCH
from qurl_ray.types import Problem, Status, Verdict

MEMORY_GB = 4.0
_MOST_AT_ONCE = 64  # most answers that a child gets in one message
_WINDOW_S = 0.01  # a message holds as many answers as the child probably judges in this time
_START_S = 120.0  # importing a user's module on a busy machine may take a while
_END_S = 30.0  # time for the kernel to end killed processes
_WAKE_S = 0.2  # pause between two signals that wake a stopped warden
_MAX_REPLY_BYTES = 1 << 20
_STATUSES = get_args(Status)
_log = logging.getLogger(__name__)

# -P and an explicit path: the child can import exactly what the parent can import.
_BOOT = (
    "import json, sys; settings = json.load(sys.stdin); sys.path[:] = settings.pop('path');"
    "from qurl_ray.rewards.keeper import main; main(**settings)"
)


class _LateError(Exception):
    """No reply arrived by the deadline."""


class _DeathError(Exception):
    """The process ended, or broke the protocol. The message says how, as a predicate without subject."""


class _RetiredError(_DeathError):
    """The process ended because of threads that earlier answers left in it. Its verdicts on them are valid."""


class VerifierProcess:
    """Judges answers in a child process. It may be used from any thread, one call at a time.

    Example:
        with VerifierProcess("math_verify", timeout_s=5.0) as verifier:
            verdicts = verifier.judge_many([(answer, problem), ...])
    """

    def __init__(self, spec: str, timeout_s: float, *, memory_gb: float = MEMORY_GB) -> None:
        """Store the settings; no process is started yet.

        Args:
            spec: a reward, by name (qurl_ray.tables) or as `given` carries it; it is imported in the child, never in
                this process.
            timeout_s: seconds for one answer, counted from the previous verdict.
            memory_gb: limit for the child and all that it starts together, for memory and temporary files, in
                GiB; see docs/failure.md for the systems on which it is enforced.
        """
        self._spec = carried(spec)
        self._timeout_s = timeout_s
        self._memory_gb = memory_gb
        self._child: _Child | None = None
        self._warned = False
        self._window = 1
        """Number of answers sent to the child at once; few if judging is slow, since only one process gets each."""

    @property
    def running(self) -> bool:
        """True if a child is running."""
        return self._child is not None and self._child.alive()

    def check(self) -> None:
        """Start the child if none is running, and resolve the reward in it. Raise RewardError if that fails."""
        self._ready()

    def judge_many(self, items: Sequence[tuple[str, Problem]]) -> list[Verdict]:
        """Return one verdict per (answer, problem), in order; see `judging`. A new child replaces a killed one."""
        verdicts: list[Verdict] = []
        while len(verdicts) < len(items):
            verdicts += self.judging(items[len(verdicts) :])
        return verdicts

    def judging(self, items: Sequence[tuple[str, Problem]]) -> Iterator[Verdict]:
        """Yield verdicts on the first of `items` as they arrive. They end with the last item, with the item whose
        judging ended the child, or after an item that left running threads. An item that ended the child has status
        "timeout" if the deadline passed, else "error"; an item that left threads keeps its verdict. Raise RewardError
        if the reward cannot be resolved. A caller that stops before the end must call `settle`."""
        child = self._ready()
        start = judged = 0
        try:
            while start < len(items):
                began, window = time.monotonic(), items[start : start + self._window]
                child.ask(window, self._timeout_s)
                for _ in window:
                    verdict = child.verdict(self._timeout_s)
                    judged += 1
                    yield verdict
                start += len(window)
                each_s = (time.monotonic() - began) / len(window)
                self._window = max(1, min(_MOST_AT_ONCE, int(_WINDOW_S / each_s)))
        except _LateError:
            self.close()
            yield failure("timeout", f"no verdict within {self._timeout_s:g} s; the process was killed")
        except _RetiredError:
            self.close()
            if not judged:
                yield from self.judging(items)
        except _DeathError as death:
            self.close()
            yield failure("error", f"the process that judged the answer {death}")

    def settle(self) -> None:
        """Wait for the outstanding verdicts of the child and discard them."""
        try:
            while self._child and self._child.owes:
                self._child.verdict(self._timeout_s)
        except (_LateError, _DeathError):
            self.close()

    def close(self) -> None:
        """End the child and all that it started. A later call starts a new child."""
        child = self._child  # another thread may close, too
        if child is not None:
            child.end()
            if child.left_threads and not self._warned:
                self._warned = True
                _log.warning(
                    "reward %r leaves threads that run on, or many; its process is replaced after such answers",
                    told(self._spec),
                )
            self._child = None

    def __enter__(self) -> "VerifierProcess":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _ready(self) -> "_Child":
        if not self.running:
            self.close()
        if self._child is None:
            self._child = _Child(self._spec, self._memory_gb)
            try:
                self._child.wait_until_ready()
            except BaseException:
                self.close()
                raise
        return self._child


class _Child:
    """Warden process, and the socket to the judge below it."""

    def __init__(self, spec: str, memory_gb: float) -> None:
        self._name, self._memory_gb = told(spec), memory_gb
        self._socket, theirs = socket.socketpair()
        self._buffer = b""
        self._owed: deque[str] = deque()
        self._has_judged = False
        # The working directory comes last: a user's own module is found, but hides no other module.
        path = [*(entry or os.getcwd() for entry in sys.path), os.getcwd()]
        settings = {"spec": spec, "memory_gb": memory_gb, "path": path, "fd": theirs.fileno()}
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-P", "-c", _BOOT],
                pass_fds=[theirs.fileno()],
                start_new_session=True,  # so that Ctrl-C does not reach it
                stdin=subprocess.PIPE,  # a function may be larger than an argument
                stdout=subprocess.DEVNULL,
                env={"OMP_NUM_THREADS": "1", **os.environ},
            )
        assert self._process.stdin
        with suppress(BrokenPipeError), self._process.stdin as settings_of:  # the wait for it tells of its death
            settings_of.write(json.dumps(settings).encode())

    def wait_until_ready(self) -> None:
        try:
            reply = self._receive(time.monotonic() + _START_S)
        except _LateError:
            raise RewardError(f"reward {self._name!r}: importing it took longer than {_START_S:g} s") from None
        except _DeathError as death:
            raise RewardError(f"reward {self._name!r}: the process that imports it {death}") from None
        match reply:
            case {"ready": True}:
                return
            case {"error": str(message)}:
                raise RewardError(message)
        raise RewardError(f"reward {self._name!r}: the process that imports it wrote to the socket of its verdicts")

    def alive(self) -> bool:
        return self._process.poll() is None

    @property
    def left_threads(self) -> bool:
        """True if the process has ended because answers left threads in it."""
        return self._process.returncode == THREADS_LEFT

    @property
    def owes(self) -> int:
        """Number of outstanding verdicts."""
        return len(self._owed)

    def ask(self, items: Sequence[tuple[str, Problem]], timeout_s: float) -> None:
        """Send answers to judge. No verdict may be outstanding: a reward function can read everything on the socket."""
        marks = [secrets.token_hex(8) for _ in items]
        lines = [[mark, answer, _plain(problem)] for mark, (answer, problem) in zip(marks, items, strict=True)]
        self._owed.extend(marks)
        self._socket.settimeout(timeout_s)
        try:
            self._socket.sendall(json.dumps(lines).encode() + b"\n")
        except TimeoutError:
            raise _LateError from None
        except OSError:
            raise self._death() from None

    def verdict(self, timeout_s: float) -> Verdict:
        """Receive the next outstanding verdict."""
        reply = self._receive(time.monotonic() + timeout_s)
        verdict = _verdict(reply, self._owed.popleft())
        self._has_judged = True
        return verdict

    def end(self) -> None:
        """Close the socket: the keeper notices and kills all, then the warden ends. Kill the warden if it does not."""
        self._socket.close()
        deadline = time.monotonic() + _END_S
        while time.monotonic() < deadline:
            self._process.send_signal(signal.SIGCONT)  # a reward may have stopped it
            try:
                self._process.wait(timeout=_WAKE_S)
            except subprocess.TimeoutExpired:
                continue
            return
        self._process.kill()
        self._process.wait()

    def _receive(self, deadline: float) -> Any:
        """Receive the next reply. It is JSON: pickles from a process that runs reward functions are not safe."""
        while b"\n" not in self._buffer:
            self._socket.settimeout(max(deadline - time.monotonic(), 0.001))
            try:
                data = self._socket.recv(1 << 16)
            except TimeoutError:
                raise _LateError from None
            except OSError:
                data = b""
            if not data:  # no process has the other end: the keeper and all others have ended
                raise self._death()
            self._buffer += data
            if len(self._buffer) > _MAX_REPLY_BYTES:
                raise _DeathError("wrote to the socket of its verdicts")
        line, _, self._buffer = self._buffer.partition(b"\n")
        try:
            return json.loads(line)
        except (ValueError, RecursionError):
            raise _DeathError("wrote to the socket of its verdicts") from None

    def _death(self) -> _DeathError:
        """Return the error that describes how the process ended."""
        try:
            code = self._process.wait(timeout=1.0)
        except subprocess.TimeoutExpired:
            return _DeathError("broke the connection")
        if code == TOO_MUCH:
            return _DeathError(f"and what it started held more than {self._memory_gb:g} GiB, or too many processes")
        if code == STOPPED:
            return _DeathError("was killed, since the process that keeps it had been stopped by a signal")
        if code == THREADS_LEFT and self._has_judged:  # else a reward with this code is retried for ever
            return _RetiredError("ended because of threads that earlier answers left in it")
        if code < 0:
            return _DeathError(f"was killed by signal {-code} ({signal.strsignal(-code)})")
        return _DeathError(f"ended with exit code {code}")


def _plain(problem: Problem) -> dict[str, Any]:
    """Return the same as dataclasses.asdict, in a tenth of the time."""
    names = ("uid", "prompt", "answer", "meta", "messages", "held_out_set")
    return {name: getattr(problem, name) for name in names}


def _verdict(reply: Any, owed: str) -> Verdict:
    """Convert a reply to a verdict. Raise _DeathError if it is no verdict, or does not have the mark `owed`."""
    match reply:
        case [str(mark), float(reward), str(status), str(detail)] if (
            mark == owed and math.isfinite(reward) and status in _STATUSES
        ):
            return Verdict(reward=reward, status=cast(Status, status), detail=detail)
    raise _DeathError("wrote to the socket of its verdicts")
