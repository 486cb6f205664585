"""Rewards of the chaos runs. The processes that judge import them by name."""

import os
import time
import zlib

_SHARE = 0.05


def parity(answer, problem):
    """Return 1.0 for an answer of odd length, else 0.0. A policy with random weights can get more or less of it."""
    return float(len(answer) % 2)


def vicious(answer, problem):
    """Return `parity`, but hang for one answer in forty, and end the process for another one in forty.

    The right answer, which a run judges before it starts, is always judged.
    """
    draw = zlib.crc32(f"{problem.uid} {answer}".encode()) / 2**32
    if answer != problem.answer and draw < _SHARE:
        if draw < _SHARE / 2:
            time.sleep(600)
        os._exit(3)
    return parity(answer, problem)
