"""An environment that takes its time, for agents.py; it imports little, as each process of it does so."""

import random
import time

from qurl_ray.environments.protocol import Step
from qurl_ray.types import Problem


class Waits:
    """An environment that takes between none and `most_s` seconds for each turn."""

    def __init__(self, most_s: float) -> None:
        self._most_s = most_s

    def reset(self, problem: Problem) -> list[dict[str, str]]:
        self._random = random.Random(problem.uid)
        return []

    def step(self, answer: str) -> Step:
        time.sleep(self._random.random() * self._most_s)
        return Step(messages=[{"role": "user", "content": "Go on."}])
