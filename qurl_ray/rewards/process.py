"""Judging with an enforced deadline, in a separate process that is killed when it is late.

Time-outs based on signals or threads do not stop a reward function: signals reach only the main
thread, and a thread cannot be stopped. A process can.
"""

import logging
import math
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, cast, get_args

from qurl_ray.errors import RewardError
from qurl_ray.rewards.given import carried, told
from qurl_ray.rewards.judge import failure
from qurl_ray.sandbox.process import MEMORY_GB, DeathError, SandboxedProcess
from qurl_ray.types import Problem, Status, Verdict

_MOST_AT_ONCE = 64  # most answers that the process gets in one message
_WINDOW_S = 0.01  # a message holds as many answers as are probably judged in this time
_STATUSES = get_args(Status)
_FIELDS = ("uid", "prompt", "answer", "meta", "messages", "chat_template_args", "held_out_set")  # of a Problem
_log = logging.getLogger(__name__)


class VerifierProcess(SandboxedProcess):
    """Judges answers in a process of its own. It may be used from any thread, one call at a time.

    Example:
        with VerifierProcess("math_verify", timeout_s=5.0) as verifier:
            verdicts = verifier.judge_many([(answer, problem), ...])
    """

    def __init__(self, spec: str, timeout_s: float, *, memory_gb: float = MEMORY_GB, log: Path | None = None) -> None:
        """Store the settings; no process is started yet.

        Args:
            spec: a reward, by name (qurl_ray.tables) or as `given` carries it; it is imported in the process, never in
                this one.
            timeout_s: seconds for one answer, counted from the previous verdict.
            memory_gb, log: see sandbox.process.
        """
        spec = carried(spec)
        self._name = told(spec)
        super().__init__(
            "qurl_ray.rewards.child:load_judge",
            spec,
            title=f"reward {self._name!r}",
            error=RewardError,
            memory_gb=memory_gb,
            log=log,
        )
        self._timeout_s = timeout_s
        self._warned = False
        self._window = 1
        """Number of answers sent at once; few if judging is slow, since only one process gets each."""

    def judge_many(self, items: Sequence[tuple[str, Problem]]) -> list[Verdict]:
        """Return one verdict per (answer, problem), in order; see `judging`. A new process replaces a killed one."""
        verdicts: list[Verdict] = []
        while len(verdicts) < len(items):
            verdicts += self.judging(items[len(verdicts) :])
        return verdicts

    def judging(self, items: Sequence[tuple[str, Problem]]) -> Iterator[Verdict]:
        """Yield verdicts on the first of `items` as they arrive. They end with the last item, with the item whose
        judging ended the process, or with an item that left running threads. An item that ended the process has status
        "timeout" if the deadline passed, else "error"; an item that left threads keeps its verdict. Raise RewardError
        if the reward cannot be resolved. A caller that stops before the end must call `settle`."""
        self.check()
        start = 0
        try:
            while start < len(items):
                began, window = time.monotonic(), items[start : start + self._window]
                # dataclasses.asdict takes ten times as long.
                self.ask(
                    [(answer, {name: getattr(problem, name) for name in _FIELDS}) for answer, problem in window],
                    self._timeout_s,
                )
                for _ in window:
                    verdict, leaves_threads = _verdict(self.result(self._timeout_s))
                    yield verdict
                    if leaves_threads:
                        self._replace()
                        return
                start += len(window)
                each_s = (time.monotonic() - began) / len(window)
                self._window = max(1, min(_MOST_AT_ONCE, int(_WINDOW_S / each_s)))
        except TimeoutError:
            self.close()
            yield failure("timeout", f"no verdict within {self._timeout_s:g} s; the process was killed")
        except DeathError as death:
            self.close()
            yield failure("error", f"the process that judged the answer {death}")

    def settle(self) -> None:
        """Wait for the outstanding verdicts and discard them."""
        try:
            while self.owes:
                self.result(self._timeout_s)
        except (TimeoutError, DeathError):
            self.close()

    def _replace(self) -> None:
        """End a process in which answers left threads. Warn once."""
        self.close()
        if not self._warned:
            self._warned = True
            _log.warning(
                "reward %r leaves threads that run on, or many; its process is replaced after such answers", self._name
            )


def _verdict(result: list[Any]) -> tuple[Verdict, bool]:
    """Convert a result to a verdict, and whether answers left threads. Raise DeathError if it is no such result."""
    match result:
        case [float(reward), str(status), str(detail), bool(threads)] if math.isfinite(reward) and status in _STATUSES:
            return Verdict(reward=reward, status=cast(Status, status), detail=detail), threads
    raise DeathError
