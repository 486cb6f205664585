"""Spans: what each process of the run did, and when; a few spans per step, for timeline.jsonl.

A span is a plain record: lane (the row in which it is drawn), name, start (unix seconds), seconds, the current step,
and figures. Spans are recorded beside the work, which never reads them. Recording one takes microseconds. Spans reach
the driver with events that are sent anyway.
"""

import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from qurl_ray.types import Event

STEPS, ROLLOUTS, EVALUATION = "steps", "rollouts", "evaluation"
"""Lanes of the whole run; every learner rank and rollout worker has its own lane."""
ENVIRONMENTS = "environments"
"""Lane of the trajectories of several turns: intervals whose figures are numbers of them, by what they wait for."""
PHASES = ("rollout", "reward", "logprob", "update", "sync")
"""Phases of a step, in their order; `time/<phase>` is the seconds of one."""
_LIMIT = 4096
"""Largest number of spans kept between two calls of `events`; further ones are only counted."""


def rank_lane(rank: int) -> str:
    return f"rank {rank}"


def worker_lane(index: int) -> str:
    return f"worker {index}"


class Spans:
    """Spans of one process, recorded in one thread or event loop.

    Example:
        spans = Spans()
        with spans.during("worker 0", "generate", requests=64) as figures:
            figures["tokens"] = generate()
        events = spans.events()
    """

    def __init__(self) -> None:
        self.step = 0
        """Step of the spans that are recorded from now on."""
        self._ended: list[dict[str, Any]] = []
        self._left_out = 0

    @contextmanager
    def during(self, lane: str, name: str, **figures: float) -> Iterator[dict[str, float]]:
        """Record the block as a span, however the block ends. Yields the figures, so that the block may add some."""
        start, began = time.time(), time.perf_counter()
        try:
            yield figures
        finally:
            self.at(lane, name, start, time.perf_counter() - began, **figures)

    def at(self, lane: str, name: str, start: float, seconds: float, **figures: float) -> None:
        """Record a span that has ended; `start` is in unix seconds."""
        if len(self._ended) < _LIMIT:
            self._ended.append(_span(lane, name, start, seconds, self.step, figures))
        else:
            self._left_out += 1

    def past(self, lane: str, name: str, seconds: float, **figures: float) -> None:
        """Record a span that took `seconds` and has just ended."""
        self.at(lane, name, time.time() - seconds, seconds, **figures)

    def phases(self, lane: str, seconds: Mapping[str, float]) -> None:
        """Record consecutive phases, the last of which has just ended."""
        start = time.time() - sum(seconds.values())
        for name, took in seconds.items():
            self.at(lane, name, start, took)
            start += took

    def events(self) -> list[Event]:
        """Return the spans that have ended since the last call, as one event or none."""
        ended, self._ended = self._ended, []
        if self._left_out:
            ended.append(_span(STEPS, "spans left out", time.time(), 0.0, self.step, {"spans": self._left_out}))
            self._left_out = 0
        return [Event(kind="timeline", step=self.step, values={"spans": ended})] if ended else []


def _span(
    lane: str, name: str, start: float, seconds: float, step: int, figures: Mapping[str, float]
) -> dict[str, Any]:
    known = {"lane": lane, "name": name, "start": round(start, 6), "seconds": round(seconds, 6), "step": step}
    return {**known, **figures}
