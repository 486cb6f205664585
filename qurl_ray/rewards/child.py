"""The process that judges. Only keeper.py starts it; it loads neither torch nor ray.

consumes:  JSON lines from the parent's socket, each [[mark, answer, problem], ...]; the next when all are judged
produces:  one JSON line per answer, [mark, reward, status, detail]; before the first of them {"ready": true} or
           {"error": message}
ends:      with the socket; killed by the keeper; with THREADS_LEFT, when threads of earlier answers slow later ones

The marks are random, so that what an answer makes its reward write to the socket is no verdict, least of all another's.

A reward function can do anything here: print, fork, hang, crash.
"""

import json
import os
import socket
import threading
import time

from qurl_ray.errors import RewardError
from qurl_ray.rewards.judge import judge
from qurl_ray.tables import REWARDS
from qurl_ray.types import Problem

THREADS_LEFT = 98
"""Exit code: threads that an answer left behind take CPU time, or are too many. Verdicts up to then are good."""
_MOST_THREADS = 64  # left behind; their stacks count as memory
_IDLE_S = 0.02  # without work, to see whether threads take CPU time
_LOOKS = 3
_BUSY = 0.1  # of a core
_LOOK_AGAIN_S = 1.0  # at threads that slept


def serve(channel: socket.socket, spec: str) -> int:
    """Resolve the reward and judge with it until the parent closes the socket. Returns the exit code."""
    try:
        score = REWARDS.load(spec)
    except RewardError as error:
        _send(channel, {"error": str(error)})
        return 0
    _send(channel, {"ready": True})
    me, usual, threads = os.getpid(), threading.active_count(), _ThreadsLeft()
    with channel.makefile("rb") as stream:
        for line in stream:
            for mark, answer, problem in json.loads(line):
                verdict = judge(score, answer, Problem(**problem))
                if os.getpid() != me:  # the reward function forked and returned twice; one of us may answer
                    os._exit(0)
                _send(channel, [mark, verdict.reward, verdict.status, verdict.detail])
                if threading.active_count() > usual and threads.slow_answers(usual):
                    return THREADS_LEFT
    return 0


class _ThreadsLeft:
    """Python threads that answers leave behind, such as those that a time-out has given up. An idle pool is allowed."""

    def __init__(self) -> None:
        self._most = 0
        self._look_at = 0.0

    def slow_answers(self, usual: int) -> bool:
        """True if the threads beyond the `usual` number are too many, or run on between two answers."""
        alive = threading.active_count()
        if alive <= self._most and time.monotonic() < self._look_at:
            return False
        self._most, self._look_at = alive, time.monotonic() + _LOOK_AGAIN_S
        return alive > usual + _MOST_THREADS or all(_others_run() for _ in range(_LOOKS))


def _others_run() -> bool:
    """True if other threads of this process take CPU time while this one sleeps."""
    began, before = time.monotonic(), time.process_time() - time.thread_time()
    time.sleep(_IDLE_S)
    return time.process_time() - time.thread_time() - before > _BUSY * (time.monotonic() - began)


def _send(channel: socket.socket, reply: object) -> None:
    channel.sendall(json.dumps(reply).encode() + b"\n")
