"""A reward function that takes its time."""

import time


def slow(answer, problem):
    time.sleep(0.3)
    return float(answer == problem.answer)
