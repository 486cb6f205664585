"""Judging behind a deadline that holds: in a process of its own, which is killed.

Time-outs made of signals or threads do not stop a reward function: signals reach only the main
thread, and a thread cannot be stopped. A process can. Another process, the keeper, sees to it that
nothing that it started outlives it.
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
from typing import Any, cast, get_args

from qurl_ray.errors import RewardError
from qurl_ray.rewards.child import THREADS_LEFT
from qurl_ray.rewards.judge import failure
from qurl_ray.rewards.keeper import STOPPED, TOO_MUCH
from qurl_ray.types import Problem, Status, Verdict

MEMORY_GB = 4.0
_MOST_AT_ONCE = 64  # answers that a child gets in one message
_WINDOW_S = 0.01  # as many as it probably judges in this time
_START_S = 120.0  # importing a user's module on a busy machine may take a while
_END_S = 30.0  # for the kernel to take killed processes down
_WAKE_S = 0.2  # between two signals that wake a warden, if it was stopped
_MAX_REPLY_BYTES = 1 << 20
_STATUSES = get_args(Status)
_log = logging.getLogger(__name__)

# -P and an explicit path: what the parent can import the child can, and nothing more.
_BOOT = (
    "import json, sys; settings = json.loads(sys.argv[1]); sys.path[:] = settings.pop('path');"
    "from qurl_ray.rewards.keeper import main; main(**settings)"
)


class _LateError(Exception):
    """No reply by the deadline."""


class _DeathError(Exception):
    """The process ended, or no longer speaks the protocol; the message says how, as a predicate."""


class _RetiredError(_DeathError):
    """The process ended because of threads that earlier answers left in it; it judged them well."""


class VerifierProcess:
    """Judges answers in a child process. Works from any thread, one call at a time.

    Example:
        with VerifierProcess("math_verify", timeout_s=5.0) as verifier:
            verdicts = verifier.judge_many([(answer, problem), ...])
    """

    def __init__(self, spec: str, timeout_s: float, *, memory_gb: float = MEMORY_GB) -> None:
        """Starts nothing yet.

        Args:
            spec: name of a reward (qurl_ray.tables); it is imported in the child, never here.
            timeout_s: seconds for one answer, counted from the verdict before it.
            memory_gb: what the child and all that it starts may hold together, in memory and in temporary files;
                see docs/failure.md for where this holds.
        """
        self._spec = spec
        self._timeout_s = timeout_s
        self._memory_gb = memory_gb
        self._child: _Child | None = None
        self._warned = False
        self._window = 1
        """Answers that the child gets at once: few of those that take long, since each goes to one process only."""

    @property
    def running(self) -> bool:
        """Whether a child is ready for the next answer."""
        return self._child is not None and self._child.alive()

    def check(self) -> None:
        """Start the child, if none is running, and resolve the reward in it; RewardError if that fails."""
        self._ready()

    def judge_many(self, items: Sequence[tuple[str, Problem]]) -> list[Verdict]:
        """One verdict per (answer, problem), in order; see `judging`. A new child takes what a killed one left."""
        verdicts: list[Verdict] = []
        while len(verdicts) < len(items):
            verdicts += self.judging(items[len(verdicts) :])
        return verdicts

    def judging(self, items: Sequence[tuple[str, Problem]]) -> Iterator[Verdict]:
        """Verdicts of the first of `items`, as they come: of all, up to and with the one that cost the child its life,
        or up to one whose threads run on. A life costs "timeout" at the deadline, else "error"; threads cost nothing.
        RewardError if the reward cannot be resolved. Whoever wants no more of them calls `settle`."""
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
        """Wait for the verdicts that the child still owes."""
        try:
            while self._child and self._child.owes:
                self._child.verdict(self._timeout_s)
        except (_LateError, _DeathError):
            self.close()

    def close(self) -> None:
        """End the child and all that it started. A later call starts a new one."""
        child = self._child  # another thread may close, too
        if child is not None:
            child.end()
            if child.left_threads and not self._warned:
                self._warned = True
                _log.warning(
                    "reward %r leaves threads that run on, or many; its process is replaced after such answers",
                    self._spec,
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
    """The warden's process, and the socket to the judge below it."""

    def __init__(self, spec: str, memory_gb: float) -> None:
        self._spec, self._memory_gb = spec, memory_gb
        self._socket, theirs = socket.socketpair()
        self._buffer = b""
        self._owed: deque[str] = deque()
        self._has_judged = False
        # The working directory comes last, so that a user's own module is found and shadows nothing.
        path = [*(entry or os.getcwd() for entry in sys.path), os.getcwd()]
        settings = {"spec": spec, "memory_gb": memory_gb, "path": path, "fd": theirs.fileno()}
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-P", "-c", _BOOT, json.dumps(settings)],
                pass_fds=[theirs.fileno()],
                start_new_session=True,  # Ctrl-C is not for it
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                env={"OMP_NUM_THREADS": "1", **os.environ},
            )

    def wait_until_ready(self) -> None:
        try:
            reply = self._receive(time.monotonic() + _START_S)
        except _LateError:
            raise RewardError(f"reward {self._spec!r}: importing it took longer than {_START_S:g} s") from None
        except _DeathError as death:
            raise RewardError(f"reward {self._spec!r}: the process that imports it {death}") from None
        match reply:
            case {"ready": True}:
                return
            case {"error": str(message)}:
                raise RewardError(message)
        raise RewardError(f"reward {self._spec!r}: the process that imports it wrote to the socket of its verdicts")

    def alive(self) -> bool:
        return self._process.poll() is None

    @property
    def left_threads(self) -> bool:
        """True if the process has ended because of threads that answers left in it."""
        return self._process.returncode == THREADS_LEFT

    @property
    def owes(self) -> int:
        """Verdicts that are still to come."""
        return len(self._owed)

    def ask(self, items: Sequence[tuple[str, Problem]], timeout_s: float) -> None:
        """Nothing may be owed: what an answer's judging could read from the socket is no secret to it."""
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
        """The next one that is owed."""
        reply = self._receive(time.monotonic() + timeout_s)
        verdict = _verdict(reply, self._owed.popleft())
        self._has_judged = True
        return verdict

    def end(self) -> None:
        """Close the socket: the keeper notices and kills all, then the warden ends. It is killed if it does not."""
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
        """The next reply. JSON, since the process that runs reward functions is not to be trusted with pickles."""
        while b"\n" not in self._buffer:
            self._socket.settimeout(max(deadline - time.monotonic(), 0.001))
            try:
                data = self._socket.recv(1 << 16)
            except TimeoutError:
                raise _LateError from None
            except OSError:
                data = b""
            if not data:  # no process has the other end: the keeper has gone, and with it all the others
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
        """The error that tells how the process ended."""
        try:
            code = self._process.wait(timeout=1.0)
        except subprocess.TimeoutExpired:
            return _DeathError("broke the connection")
        if code == TOO_MUCH:
            return _DeathError(f"and what it started held more than {self._memory_gb:g} GB, or too many processes")
        if code == STOPPED:
            return _DeathError("was killed, since the process that keeps it had been stopped by a signal")
        if code == THREADS_LEFT and self._has_judged:  # or a reward that ends with this code would be asked for ever
            return _RetiredError("ended because of threads that earlier answers left in it")
        if code < 0:
            return _DeathError(f"was killed by signal {-code} ({signal.strsignal(-code)})")
        return _DeathError(f"ended with exit code {code}")


def _plain(problem: Problem) -> dict[str, Any]:
    """As dataclasses.asdict has it, in a tenth of the time."""
    return {"uid": problem.uid, "prompt": problem.prompt, "answer": problem.answer, "meta": problem.meta}


def _verdict(reply: Any, owed: str) -> Verdict:
    """The reply as a verdict, if it is one, and bears the mark of the one that is owed."""
    match reply:
        case [str(mark), float(reward), str(status), str(detail)] if (
            mark == owed and math.isfinite(reward) and status in _STATUSES
        ):
            return Verdict(reward=reward, status=cast(Status, status), detail=detail)
    raise _DeathError("wrote to the socket of its verdicts")
