"""Conversion of any outcome of a reward function to a verdict that the learner can use."""

import math
import numbers
from collections.abc import Callable

import numpy as np

from qurl_ray.extensions import described, printable
from qurl_ray.types import Problem, Status, Verdict

Score = Callable[[str, Problem], float]

LARGEST = 1e12
"""Largest size of a reward. The square of a difference of two must fit in float32, or advantages become NaN."""
_DETAIL_CHARS = 1000


def judge(score: Score, answer: str, problem: Problem) -> Verdict:
    """Judge one answer with `score`. After any failure the reward is 0, and the detail describes the failure.

    An exception gives status "error". NaN, infinity, a size beyond LARGEST, or a value that is not a number gives
    "invalid".
    """
    try:
        value = score(answer, problem)
    except (Exception, SystemExit) as error:  # user code: any failure is a verdict and must not end the run
        return failure("error", described(error))
    if not isinstance(value, (numbers.Real, np.bool_)):
        return failure("invalid", f"the reward function returned {type(value).__name__}, expected a number")
    try:
        reward = float(value)
    except OverflowError:  # an integer beyond float64
        reward = math.inf
    except Exception as error:  # a user's own number type
        return failure("error", described(error))
    if not abs(reward) <= LARGEST:  # also nan
        return failure("invalid", f"the reward function returned {reward}, expected a finite number up to {LARGEST:g}")
    return Verdict(reward=reward)


def failure(status: Status, detail: str) -> Verdict:
    """Return a verdict with reward 0. The detail may quote an answer: it is cut at 1000 characters and safe to
    print."""
    return Verdict(reward=0.0, status=status, detail=printable(detail, _DETAIL_CHARS))
