"""A calculator for the tiny policy: `[37*48]` is answered with `1776=`, and anything else ends the trajectory."""

import operator
import re

from qurl_ray.environments.protocol import EnvironmentMessage, Step
from qurl_ray.types import Problem

CALL = re.compile(r"\[(\d+)([+*-])(\d+)\]")
_OPERATORS = {"+": operator.add, "-": operator.sub, "*": operator.mul}
_MOST_DIGITS = 9


class Calculator:
    """A turn within brackets is a call, and its result is the next turn's beginning; `task.reward` judges other turns.

    Args:
        works: False answers every call with `?=`, as a control: then only sums done in the head are right.
    """

    deterministic = True

    def __init__(self, *, works: bool = True) -> None:
        self._works = works

    def reset(self, problem: Problem) -> list[EnvironmentMessage]:
        return []

    def step(self, answer: str) -> Step:
        if not answer.startswith("["):
            return Step(done=True)
        call = CALL.fullmatch(answer)
        right = call is not None and self._works and max(len(call[1]), len(call[3])) <= _MOST_DIGITS
        said = f"{_OPERATORS[call[2]](int(call[1]), int(call[3]))}=" if call and right else "?="
        return Step(messages=[{"role": "tool", "content": said}], info={"calls": 1, "failed_calls": int(not right)})
