"""Judging with an enforced deadline, in a separate process that is killed when it is late.

Time-outs based on signals or threads do not stop a reward function: signals reach only the main
thread, and a thread cannot be stopped. A process can. Another process, the keeper, ensures that
nothing started by the judge outlives it.
"""

import logging
import math
import secrets
import time
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, cast, get_args

from qurl_ray.errors import RewardError
from qurl_ray.rewards.child import THREADS_LEFT
from qurl_ray.rewards.given import carried, told
from qurl_ray.rewards.judge import failure
from qurl_ray.sandbox.process import MEMORY_GB, DeathError, LateError, SandboxedProcess
from qurl_ray.types import Problem, Status, Verdict

_MOST_AT_ONCE = 64  # most answers that a child gets in one message
_WINDOW_S = 0.01  # a message holds as many answers as the child probably judges in this time
_STATUSES = get_args(Status)
_log = logging.getLogger(__name__)


class _RetiredError(DeathError):
    """The process ended because of threads that earlier answers left in it. Its verdicts on them are valid."""


class VerifierProcess:
    """Judges answers in a child process. It may be used from any thread, one call at a time.

    Example:
        with VerifierProcess("math_verify", timeout_s=5.0) as verifier:
            verdicts = verifier.judge_many([(answer, problem), ...])
    """

    def __init__(self, spec: str, timeout_s: float, *, memory_gb: float = MEMORY_GB, log: Path | None = None) -> None:
        """Store the settings; no process is started yet.

        Args:
            spec: a reward, by name (qurl_ray.tables) or as `given` carries it; it is imported in the child, never in
                this process.
            timeout_s: seconds for one answer, counted from the previous verdict.
            memory_gb, log: see sandbox.process.
        """
        self._spec = carried(spec)
        self._timeout_s = timeout_s
        self._memory_gb, self._log = memory_gb, log
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
        except LateError:
            self.close()
            yield failure("timeout", f"no verdict within {self._timeout_s:g} s; the process was killed")
        except _RetiredError:
            self.close()
            if not judged:
                yield from self.judging(items)
        except DeathError as death:
            self.close()
            yield failure("error", f"the process that judged the answer {death}")

    def settle(self) -> None:
        """Wait for the outstanding verdicts of the child and discard them."""
        try:
            while self._child and self._child.owes:
                self._child.verdict(self._timeout_s)
        except (LateError, DeathError):
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
            self._child = _Child(self._spec, self._memory_gb, self._log)
            try:
                self._child.wait_until_ready(f"reward {told(self._spec)!r}", RewardError)
            except BaseException:
                self.close()
                raise
        return self._child


class _Child(SandboxedProcess):
    """The judge's process, with the verdicts that it owes."""

    def __init__(self, spec: str, memory_gb: float, log: Path | None) -> None:
        super().__init__("qurl_ray.rewards.child:run_judge", spec, memory_gb, log)
        self._owed: deque[str] = deque()
        self._has_judged = False

    @property
    def left_threads(self) -> bool:
        """True if the process has ended because answers left threads in it."""
        return self.code == THREADS_LEFT

    @property
    def owes(self) -> int:
        """Number of outstanding verdicts."""
        return len(self._owed)

    def ask(self, items: Sequence[tuple[str, Problem]], timeout_s: float) -> None:
        """Send answers to judge. No verdict may be outstanding: a reward function can read everything on the socket."""
        marks = [secrets.token_hex(8) for _ in items]
        self._owed.extend(marks)
        lines = [[mark, answer, _plain(problem)] for mark, (answer, problem) in zip(marks, items, strict=True)]
        with self._retiring():
            self.send(lines, timeout_s)

    def verdict(self, timeout_s: float) -> Verdict:
        """Receive the next outstanding verdict."""
        with self._retiring():
            reply = self.receive(timeout_s)
        verdict = _verdict(reply, self._owed.popleft())
        self._has_judged = True
        return verdict

    @contextmanager
    def _retiring(self) -> Iterator[None]:
        try:
            yield
        except DeathError as death:
            if death.code == THREADS_LEFT and self._has_judged:  # else a reward with this code is retried for ever
                raise _RetiredError("ended because of threads that earlier answers left in it", death.code) from None
            raise


def _plain(problem: Problem) -> dict[str, Any]:
    """Return the same as dataclasses.asdict, in a tenth of the time."""
    names = ("uid", "prompt", "answer", "meta", "messages", "chat_template_args", "held_out_set")
    return {name: getattr(problem, name) for name in names}


def _verdict(reply: Any, owed: str) -> Verdict:
    """Convert a reply to a verdict. Raise DeathError if it is no verdict, or does not have the mark `owed`."""
    match reply:
        case [str(mark), float(reward), str(status), str(detail)] if (
            mark == owed and math.isfinite(reward) and status in _STATUSES
        ):
            return Verdict(reward=reward, status=cast(Status, status), detail=detail)
    raise DeathError
