"""The process that judges. Only keeper.py starts it; it loads neither torch nor ray.

consumes:  JSON lines from the parent's socket, each [[mark, answer, problem], ...]; the next when all are judged
produces:  one JSON line per answer, [mark, reward, status, detail]; before the first of them {"ready": true} or
           {"error": message}
ends:      with the socket, or killed by the keeper

The marks are random, so that what an answer makes its reward write to the socket is no verdict, least of all another's.

A reward function can do anything here: print, fork, hang, crash.
"""

import json
import os
import socket

from qurl_ray.errors import RewardError
from qurl_ray.rewards.judge import judge
from qurl_ray.rewards.resolve import resolve
from qurl_ray.types import Problem


def serve(channel: socket.socket, spec: str) -> int:
    """Resolve the reward and judge with it until the parent closes the socket. Returns the exit code."""
    try:
        score = resolve(spec)
    except RewardError as error:
        _send(channel, {"error": str(error)})
        return 0
    _send(channel, {"ready": True})
    me = os.getpid()
    with channel.makefile("rb") as stream:
        for line in stream:
            for mark, answer, problem in json.loads(line):
                verdict = judge(score, answer, Problem(**problem))
                if os.getpid() != me:  # the reward function forked and returned twice; one of us may answer
                    os._exit(0)
                _send(channel, [mark, verdict.reward, verdict.status, verdict.detail])
    return 0


def _send(channel: socket.socket, reply: object) -> None:
    channel.sendall(json.dumps(reply).encode() + b"\n")
