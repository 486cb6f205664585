"""Environments that misbehave when the answer says so, and count their turns otherwise."""

import asyncio
import math
import os
import signal
import subprocess
import sys
import time

from qurl_ray.environments.protocol import Step, Traits

NOT_AN_ENVIRONMENT = 3


class Counts:
    """Says how many turns there were, and what it was told; ends on "end"."""

    deterministic = True

    def __init__(self, pause_s: float = 0.0) -> None:
        self.turns, self.pause_s = 0, pause_s

    def reset(self, problem):
        self.problem = problem
        return []

    def step(self, answer):
        time.sleep(self.pause_s)
        self.turns += 1
        if answer == "end":
            return Step(reward=float(self.turns), done=True)
        said = [{"role": "user", "content": f"{self.turns}: {answer}"}]
        return Step(messages=said, info={"calls": 1, "failed_calls": 0})


class FailsToReset(Counts):
    """Knows no problem."""

    def reset(self, problem):
        raise LookupError("no such problem")


class ReturnsDict(Counts):
    """Its turns are mappings instead of steps."""

    def step(self, answer):
        return {"reward": 1.0, "done": True}


class Pays(Counts):
    """Half a point for each turn."""

    def step(self, answer):
        return Step(messages=[{"role": "user", "content": "1"}], reward=0.5)


class Weighs(Counts):
    """Pays for each turn by the length of its text."""

    def step(self, answer):
        return Step(messages=[{"role": "user", "content": "1"}], reward=len(answer) % 3 / 2)


class Awaits(Counts):
    """Its methods are coroutines."""

    async def reset(self, problem):
        await asyncio.sleep(0)
        return super().reset(problem)

    async def step(self, answer):
        await asyncio.sleep(0.001)
        return super().step(answer)


class Misbehaves(Counts):
    """Does what the answer says. It does not say that it is deterministic."""

    deterministic = False

    def step(self, answer):
        said = [{"role": "user", "content": "ok"}]
        match answer:
            case "hang":
                signal.signal(signal.SIGTERM, signal.SIG_IGN)
                time.sleep(600)
            case "exit":
                os._exit(3)
            case "fork":
                if os.fork() == 0:
                    time.sleep(600)
                subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"], start_new_session=True)
            case "twice":
                os.fork()
            case "flood":
                return Step(messages=[{"role": "user", "content": "x" * (3 << 20)}])
            case "memory":
                bytearray(8 << 30)
            case "write":
                for fd in range(3, 2000):  # one of them is the socket
                    try:
                        os.write(fd, b'["0", "ok", {}]\n')
                    except OSError:
                        continue
            case "raise":
                raise KeyError("no such move")
            case "quit":
                sys.exit(1)
            case "nothing":
                return None
            case "nan":
                return Step(messages=said, reward=math.nan)
            case "text":
                return Step(messages="ok")
            case "number":
                return Step(messages=[{"role": "user", "content": 3}])
            case "role":
                return Step(messages=[{"content": "ok"}])
            case "surrogate":
                return Step(messages=[{"role": "user", "content": "\udc80"}])
            case "list":
                return Step(messages=said, info=[1])
            case "info":
                return Step(messages=said, info={"a": object()})
        return super().step(answer)


class SharesAndMisbehaves(Misbehaves):
    deterministic = True


class Sometimes(Counts):
    """Deterministic if the parameters say so."""

    def __init__(self, sure=False):
        super().__init__()

    @classmethod
    def traits(cls, sure=False):
        if not isinstance(sure, bool):
            raise ValueError(sure)
        return Traits(deterministic=sure)
