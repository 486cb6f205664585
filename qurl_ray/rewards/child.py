"""Judge process, which runs the reward function. Only keeper.py starts it; it loads neither torch nor ray.

consumes:  JSON lines from the parent's socket, each [[mark, answer, problem], ...]; the next line when all are judged
produces:  one JSON line per answer, [mark, reward, status, detail]; before the first of them {"ready": true} or
           {"error": message}
ends:      when the socket closes; killed by the keeper; with THREADS_LEFT, when threads of earlier answers slow later
           ones

The marks are random. If an answer makes its reward function write to the socket, the text does not count as a verdict,
and certainly not as that of another answer.

A reward function can do anything here: print, fork, hang, crash.
"""

import json
import os
import socket
import threading
import time

from qurl_ray.errors import RewardError
from qurl_ray.rewards.given import load
from qurl_ray.rewards.judge import judge
from qurl_ray.types import Problem

THREADS_LEFT = 98
"""Exit code: threads that an answer left behind use CPU time, or are too many. All verdicts sent before are valid."""
_MOST_THREADS = 64  # left behind by answers; their stacks count as memory
_IDLE_S = 0.02  # pause without work, to measure the CPU time of other threads
_LOOKS = 3
_BUSY = 0.1  # share of a core
_LOOK_AGAIN_S = 1.0  # interval until threads that slept are checked again


def run_judge(channel: socket.socket, spec: str) -> int:
    """Resolve the reward and judge with it until the parent closes the socket. Return the exit code."""
    try:
        score = load(spec)
    except RewardError as error:
        _send(channel, {"error": str(error)})
        return 0
    _send(channel, {"ready": True})
    me, usual, threads = os.getpid(), threading.active_count(), _ThreadsLeft()
    with channel.makefile("rb") as stream:
        for line in stream:
            for mark, answer, problem in json.loads(line):
                verdict = judge(score, answer, Problem(**problem))
                if os.getpid() != me:  # the reward function forked and returned twice; only one process may answer
                    os._exit(0)
                _send(channel, [mark, verdict.reward, verdict.status, verdict.detail])
                if threading.active_count() > usual and threads.slow_answers(usual):
                    return THREADS_LEFT
    return 0


class _ThreadsLeft:
    """Check of Python threads left behind by answers, for example after a time-out. An idle thread pool is allowed."""

    def __init__(self) -> None:
        self._most = 0
        self._look_at = 0.0

    def slow_answers(self, usual: int) -> bool:
        """True if there are too many threads beyond the `usual` number, or if they keep running between two answers."""
        alive = threading.active_count()
        if alive <= self._most and time.monotonic() < self._look_at:
            return False
        self._most, self._look_at = alive, time.monotonic() + _LOOK_AGAIN_S
        return alive > usual + _MOST_THREADS or all(_others_run() for _ in range(_LOOKS))


def _others_run() -> bool:
    """True if other threads of this process use CPU time while this one sleeps."""
    began, before = time.monotonic(), time.process_time() - time.thread_time()
    time.sleep(_IDLE_S)
    return time.process_time() - time.thread_time() - before > _BUSY * (time.monotonic() - began)


def _send(channel: socket.socket, reply: object) -> None:
    channel.sendall(json.dumps(reply).encode() + b"\n")
