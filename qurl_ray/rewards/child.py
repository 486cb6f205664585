"""The process that judges. Only process.py starts it; it loads neither torch nor ray.

consumes:  pickled lists of (answer, problem) from the parent's socket
produces:  one JSON line per answer, [index in its list, reward, status, detail]; before the first
           of them {"ready": true} or {"error": message}
ends:      killed by the parent at a deadline, or by itself, with all it started, once the parent is gone

A reward function can do anything here: print, fork, hang, crash. Its output is discarded, its own
children stay in this process's session, which is killed whole.
"""

import json
import os
import pickle
import queue
import resource
import signal
import socket
import sys
import threading
from typing import NoReturn

from qurl_ray.errors import RewardError
from qurl_ray.rewards.judge import Score, judge
from qurl_ray.rewards.resolve import resolve

_GRACE_S = 10.0


def main(*, fd: int, spec: str, timeout_s: float, memory_gb: float | None) -> None:
    """Judge until the parent closes the socket `fd`."""
    channel = socket.socket(fileno=fd)
    channel.set_inheritable(False)
    _discard_output()
    _limit_memory(memory_gb)
    try:
        score = resolve(spec)
    except RewardError as error:
        _send(channel, {"error": str(error)})
        return
    inbox: queue.SimpleQueue = queue.SimpleQueue()
    threading.Thread(target=_receive, args=(channel, inbox), daemon=True).start()
    _send(channel, {"ready": True})
    _judge_forever(channel, inbox, score, timeout_s)


def _judge_forever(channel: socket.socket, inbox: queue.SimpleQueue, score: Score, timeout_s: float) -> NoReturn:
    me = os.getpid()
    while True:
        for index, (answer, problem) in enumerate(inbox.get()):
            _arm(timeout_s + _GRACE_S)
            verdict = judge(score, answer, problem)
            if os.getpid() != me:  # the reward function forked and returned twice; one of us may answer
                os._exit(0)
            _arm(0.0)
            _send(channel, [index, verdict.reward, verdict.status, verdict.detail])


def _receive(channel: socket.socket, inbox: queue.SimpleQueue) -> None:
    """Runs beside the judging, so that the parent's end is noticed while a reward function hangs."""
    with channel.makefile("rb") as stream:
        while True:
            try:
                inbox.put(pickle.load(stream))
            except (EOFError, OSError, pickle.UnpicklingError):
                os.killpg(os.getpgrp(), signal.SIGKILL)


def _arm(seconds: float) -> None:
    """Let the kernel end this process after so long; 0 disarms.

    For a reward function that holds the interpreter lock (a regular expression gone exponential)
    after the parent has died: no Python code, the thread above included, would run again.
    """
    signal.setitimer(signal.ITIMER_REAL, seconds)


def _send(channel: socket.socket, reply: object) -> None:
    channel.sendall(json.dumps(reply).encode() + b"\n")


def _discard_output() -> None:
    null = os.open(os.devnull, os.O_RDWR)
    for stream in (0, 1, 2):
        os.dup2(null, stream)


def _limit_memory(memory_gb: float | None) -> None:
    if memory_gb is not None and sys.platform == "linux":
        size = int(memory_gb * 2**30)
        resource.setrlimit(resource.RLIMIT_AS, (size, size))
