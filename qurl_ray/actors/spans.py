"""What a process of the run did when: a few spans per step, for timeline.jsonl.

A span is a plain record: lane (the row it is drawn in), name, start (unix seconds), seconds, the step under way, and
figures. They are taken beside the work and never read by it. A span costs microseconds, and reaches the driver with
events that go there anyway.
"""

import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from qurl_ray.types import Event

STEPS, ROLLOUTS, EVALUATION = "steps", "rollouts", "evaluation"
"""Lanes of the run as a whole; every learner rank and rollout worker has one of its own."""
_LIMIT = 4096
"""Spans between two calls of `events`; what is beyond is counted only."""


def rank_lane(rank: int) -> str:
    return f"rank {rank}"


def worker_lane(index: int) -> str:
    return f"worker {index}"


class Spans:
    """Of one process, in one thread or event loop.

    Example:
        spans = Spans()
        with spans.during("worker 0", "generate", requests=64) as figures:
            figures["tokens"] = generate()
        events = spans.events()
    """

    def __init__(self) -> None:
        self.step = 0
        """That spans belong to from now on."""
        self._ended: list[dict[str, Any]] = []
        self._left_out = 0

    @contextmanager
    def during(self, lane: str, name: str, **figures: float) -> Iterator[dict[str, float]]:
        """The block, however it ends. Yields the figures, so that it may add some."""
        start, began = time.time(), time.perf_counter()
        try:
            yield figures
        finally:
            self._add(lane, name, start, time.perf_counter() - began, figures)

    def past(self, lane: str, name: str, seconds: float, **figures: float) -> None:
        """What has just ended and took so long."""
        self._add(lane, name, time.time() - seconds, seconds, figures)

    def phases(self, lane: str, seconds: Mapping[str, float]) -> None:
        """Phases that came one after the other; the last has just ended."""
        start = time.time() - sum(seconds.values())
        for name, took in seconds.items():
            self._add(lane, name, start, took, {})
            start += took

    def events(self) -> list[Event]:
        """What has ended since the last call, as one event or none."""
        ended, self._ended = self._ended, []
        if self._left_out:
            ended.append(_span(STEPS, "spans left out", time.time(), 0.0, self.step, {"spans": self._left_out}))
            self._left_out = 0
        return [Event(kind="timeline", step=self.step, values={"spans": ended})] if ended else []

    def _add(self, lane: str, name: str, start: float, seconds: float, figures: Mapping[str, float]) -> None:
        if len(self._ended) < _LIMIT:
            self._ended.append(_span(lane, name, start, seconds, self.step, figures))
        else:
            self._left_out += 1


def _span(
    lane: str, name: str, start: float, seconds: float, step: int, figures: Mapping[str, float]
) -> dict[str, Any]:
    known = {"lane": lane, "name": name, "start": round(start, 6), "seconds": round(seconds, 6), "step": step}
    return {**known, **figures}
