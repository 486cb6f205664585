"""Rewards of the chaos runs; imported by name in the processes that judge."""

import os
import time
import zlib

_SHARE = 0.05


def parity(answer, problem):
    """Something that a policy with random weights can get more and less of."""
    return float(len(answer) % 2)


def vicious(answer, problem):
    """`parity`, but for one answer in twenty the process hangs or dies, half and half.

    Never for the right answer, which a run judges before it starts.
    """
    draw = zlib.crc32(f"{problem.uid} {answer}".encode()) / 2**32
    if answer != problem.answer and draw < _SHARE:
        if draw < _SHARE / 2:
            time.sleep(600)
        os._exit(3)
    return parity(answer, problem)
