"""Judging behind a deadline that holds: in a process of its own, which is killed.

Time-outs made of signals or threads do not stop a reward function: signals reach only the main
thread, and a thread cannot be stopped. A process can.
"""

import json
import os
import pickle
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

from qurl_ray.errors import RewardError
from qurl_ray.rewards.judge import failure
from qurl_ray.types import Problem, Verdict

_CHUNK = 64  # answers sent at a time: enough to hide the round trip, few enough to send again after a kill
_START_S = 120.0  # importing a user's module on a busy machine may take a while
_END_S = 30.0  # for the kernel to take a killed process down
_TICK_S = 0.05  # how often a silent process is looked at: a forked copy can keep the socket open after its death
_MAX_REPLY_BYTES = 1 << 20

# -P and an explicit path: what the parent can import the child can, and nothing more.
_BOOT = (
    "import json, sys; settings = json.loads(sys.argv[1]); sys.path[:] = settings.pop('path');"
    "from qurl_ray.rewards.child import main; main(**settings)"
)


class _LateError(Exception):
    """No reply by the deadline."""


class _DeathError(Exception):
    """The process ended, or no longer speaks the protocol."""


class VerifierProcess:
    """Judges answers in a child process. Works from any thread, one call at a time.

    Example:
        with VerifierProcess("math_verify", timeout_s=5.0) as verifier:
            verdicts = verifier.judge_many([(answer, problem), ...])
    """

    def __init__(self, spec: str, timeout_s: float, *, memory_gb: float | None = None) -> None:
        """Starts nothing yet.

        Args:
            spec: what `resolve` takes; it is resolved in the child, never here.
            timeout_s: seconds for one answer, counted from the verdict before it.
            memory_gb: bound on the child's address space (Linux); absent is none.
        """
        self._spec = spec
        self._timeout_s = timeout_s
        self._memory_gb = memory_gb
        self._child: _Child | None = None

    def check(self) -> None:
        """Start the child and resolve the reward in it; RewardError if that fails."""
        self._running()

    def judge_many(self, items: Sequence[tuple[str, Problem]]) -> list[Verdict]:
        """One verdict per (answer, problem), in order.

        An answer at which the deadline passes gets status "timeout", one at which the child dies
        gets "error"; a new child takes the rest. RewardError if the reward cannot be resolved.
        """
        verdicts: list[Verdict] = []
        while len(verdicts) < len(items):
            verdicts += self._judge_some(items[len(verdicts) : len(verdicts) + _CHUNK])
        return verdicts

    def close(self) -> None:
        """End the child and all that it started. A later call starts a new one."""
        if self._child is not None:
            self._child.kill()
            self._child = None

    def __enter__(self) -> "VerifierProcess":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _judge_some(self, items: Sequence[tuple[str, Problem]]) -> list[Verdict]:
        """Verdicts of the first of `items`: all of them, or up to and with the one that cost the child its life."""
        child = self._running()
        verdicts: list[Verdict] = []
        try:
            child.send(items, timeout_s=self._timeout_s)
            for index in range(len(items)):
                verdicts.append(_verdict(child.receive(timeout_s=self._timeout_s), index))
        except _LateError:
            self.close()
            verdicts.append(failure("timeout", f"no verdict within {self._timeout_s:g} s; the process was killed"))
        except _DeathError:
            ending = child.ending()
            self.close()
            verdicts.append(failure("error", f"the process that judged the answer {ending}"))
        return verdicts

    def _running(self) -> "_Child":
        if self._child is not None and not self._child.alive():
            self.close()
        if self._child is None:
            self._child = _Child(_settings(self._spec, self._timeout_s, self._memory_gb))
            try:
                self._child.wait_until_ready(self._spec)
            except BaseException:
                self.close()
                raise
        return self._child


def _settings(spec: str, timeout_s: float, memory_gb: float | None) -> dict[str, Any]:
    """What the child is told at its start: its reward, its bounds, and where to import from.

    The working directory comes last, so that a user's own module is found and shadows nothing.
    """
    path = [entry or os.getcwd() for entry in sys.path]
    return {"spec": spec, "timeout_s": timeout_s, "memory_gb": memory_gb, "path": [*path, os.getcwd()]}


def _verdict(reply: Any, index: int) -> Verdict:
    try:
        answered, reward, status, detail = reply
    except (TypeError, ValueError):
        raise _DeathError from None
    if answered != index:
        raise _DeathError
    return Verdict(reward=reward, status=status, detail=detail)


class _Child:
    """The process and the socket to it."""

    def __init__(self, settings: dict[str, Any]) -> None:
        self._socket, theirs = socket.socketpair()
        self._buffer = b""
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-P", "-c", _BOOT, json.dumps({**settings, "fd": theirs.fileno()})],
                pass_fds=[theirs.fileno()],
                start_new_session=True,  # so that one signal reaches whatever the reward function starts
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                env={"OMP_NUM_THREADS": "1", **os.environ},
            )

    def wait_until_ready(self, spec: str) -> None:
        try:
            reply = self.receive(timeout_s=_START_S)
        except _LateError:
            raise RewardError(f"reward {spec!r}: importing it took longer than {_START_S:g} s") from None
        except _DeathError:
            raise RewardError(f"reward {spec!r}: the process that imports it {self.ending()}") from None
        if "error" in reply:
            raise RewardError(reply["error"])

    def alive(self) -> bool:
        return self._process.poll() is None

    def send(self, items: Sequence[tuple[str, Problem]], *, timeout_s: float) -> None:
        self._socket.settimeout(timeout_s)
        try:
            self._socket.sendall(pickle.dumps(list(items)))
        except TimeoutError:
            raise _LateError from None
        except OSError:
            raise _DeathError from None

    def receive(self, *, timeout_s: float) -> Any:
        """The next reply. JSON, since the process that runs reward functions is not to be trusted with pickles."""
        deadline = time.monotonic() + timeout_s
        while b"\n" not in self._buffer:
            self._buffer += self._receive_bytes(deadline)
            if len(self._buffer) > _MAX_REPLY_BYTES:
                raise _DeathError
        line, _, self._buffer = self._buffer.partition(b"\n")
        try:
            return json.loads(line)
        except ValueError:
            raise _DeathError from None

    def _receive_bytes(self, deadline: float) -> bytes:
        """Some bytes, or none after a tick of silence."""
        alive = self.alive()  # asked before reading, so that last words are heard
        remaining = deadline - time.monotonic()
        self._socket.settimeout(min(_TICK_S, max(remaining, 0.001)))
        try:
            data = self._socket.recv(1 << 16)
        except TimeoutError:
            if not alive:
                raise _DeathError from None
            if remaining <= 0:
                raise _LateError from None
            return b""
        except OSError:
            raise _DeathError from None
        if not data:
            raise _DeathError
        return data

    def ending(self) -> str:
        """How the process ended, as a predicate."""
        with suppress(subprocess.TimeoutExpired):
            code = self._process.wait(timeout=1.0)
            if code < 0:
                return f"was killed by signal {-code} ({signal.strsignal(-code)})"
            return f"ended with exit code {code}"
        return "broke the connection"

    def kill(self) -> None:
        # PermissionError is what macOS says of a group of which only zombies are left
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._socket.close()
        self._process.wait(timeout=_END_S)
