"""Rewards for the tests of whole runs; imported by name in the judging process."""

import time


def length(answer, problem):
    """Something that a policy with random weights can get more and less of."""
    return float(len(answer) % 2)


def constant(answer, problem):
    return 0.5


def sometimes_nan(answer, problem):
    return float("nan") if answer.startswith(("1", "2", "3")) and answer != problem.answer else float(len(answer) % 2)


def nan(answer, problem):
    return float("nan")


def raises(answer, problem):
    raise ZeroDivisionError("on purpose")


def hangs(answer, problem):
    time.sleep(600)


def ones(answer, problem):
    """Something that a policy with random weights learns in a few steps, and in parts."""
    return answer.count("1") / 6


class NoTransport:
    """No reward: a transport that no rank can make."""

    sends_changes = False

    def __init__(self, link):
        raise ZeroDivisionError("on purpose")

    announce = send = verify = abort = receive = staticmethod(lambda *_: None)
