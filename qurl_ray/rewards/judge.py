"""Conversion of any outcome of a reward function to a verdict that the learner can use."""

import math
import numbers
from collections.abc import Callable

import numpy as np

from qurl_ray.types import Problem, Status, Verdict

Score = Callable[[str, Problem], float]

LARGEST = 1e12
"""Largest size of a reward. The square of a difference of two must fit in float32, or advantages become NaN."""
_DETAIL_CHARS = 300


def judge(score: Score, answer: str, problem: Problem) -> Verdict:
    """Judge one answer with `score`. After any failure the reward is 0, and the detail describes the failure.

    An exception gives status "error". NaN, infinity, a size beyond LARGEST, or a value that is not a number gives
    "invalid".
    """
    try:
        value = score(answer, problem)
    except (Exception, SystemExit) as error:  # user code: any failure is a verdict and must not end the run
        return failure("error", f"{type(error).__name__}: {message_of(error)}")
    if not isinstance(value, (numbers.Real, np.bool_)):
        return failure("invalid", f"the reward function returned {type(value).__name__}, expected a number")
    try:
        reward = float(value)
    except OverflowError:  # an integer beyond float64
        reward = math.inf
    except Exception as error:  # a user's own number type
        return failure("error", f"{type(error).__name__}: {message_of(error)}")
    if not abs(reward) <= LARGEST:  # also nan
        return failure("invalid", f"the reward function returned {reward}, expected a finite number up to {LARGEST:g}")
    return Verdict(reward=reward)


def failure(status: Status, detail: str) -> Verdict:
    """Return a verdict with reward 0. The detail may quote an answer: it is cut at 300 characters and safe to print."""
    return Verdict(reward=0.0, status=status, detail=printable(detail))


def printable(detail: str) -> str:
    """Return the first 300 characters of a text, safe to print."""
    return "".join(char if char.isprintable() else "·" for char in detail[:_DETAIL_CHARS])


def message_of(error: BaseException) -> str:
    """Return the message of an error that user code raised."""
    try:
        return str(error)
    except Exception as broken:  # a user's exception class may fail to print itself
        return f"(no message: {type(broken).__name__})"
