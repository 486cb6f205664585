"""The reward of runs with random weights, which could solve nothing: half of the answers are right, so that there is
something to learn and weights move."""

import random

from qurl_ray.types import Problem


def coin(answer: str, problem: Problem) -> float:
    """Return 0 or 1, whatever the answer."""
    return float(random.random() < 0.5)
