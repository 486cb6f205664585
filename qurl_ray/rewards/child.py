"""Server of a reward function, below a keeper (sandbox.keeper), with a check of the threads that answers leave; it
loads neither torch nor ray."""

import threading
import time
from typing import Any

from qurl_ray.rewards.given import load
from qurl_ray.rewards.judge import judge
from qurl_ray.sandbox.keeper import ServerCall
from qurl_ray.types import Problem

_MOST_THREADS = 64  # left behind by answers; their stacks count as memory
_IDLE_S = 0.02  # pause without work, to measure the CPU time of other threads
_LOOKS = 3
_BUSY = 0.1  # share of a core
_LOOK_AGAIN_S = 1.0  # interval until threads that slept are checked again


def load_judge(spec: str) -> tuple[dict[str, Any], ServerCall]:
    """Resolve the reward. Return the function that judges an answer, which announces nothing before."""
    score = load(spec)
    threads = _ThreadsLeft()

    def call(answer: str, problem: dict[str, Any]) -> list[Any]:
        verdict = judge(score, answer, Problem(**problem))
        return [verdict.reward, verdict.status, verdict.detail, threads.slow_answers()]

    return {}, call


class _ThreadsLeft:
    """Check of Python threads left behind by answers, for example after a time-out. An idle thread pool is allowed."""

    def __init__(self) -> None:
        self._usual = self._most = threading.active_count()
        self._look_at = 0.0

    def slow_answers(self) -> bool:
        """True if there are too many threads beyond the usual number, or if they keep running between two answers."""
        alive = threading.active_count()
        if alive == self._usual or (alive <= self._most and time.monotonic() < self._look_at):
            return False
        self._most, self._look_at = alive, time.monotonic() + _LOOK_AGAIN_S
        return alive > self._usual + _MOST_THREADS or all(_others_run() for _ in range(_LOOKS))


def _others_run() -> bool:
    """True if other threads of this process use CPU time while this one sleeps."""
    began, before = time.monotonic(), time.process_time() - time.thread_time()
    time.sleep(_IDLE_S)
    return time.process_time() - time.thread_time() - before > _BUSY * (time.monotonic() - began)
