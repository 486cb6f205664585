"""Answers that loop: what quantized rollouts end in when something is wrong."""

from collections.abc import Sequence

import numpy as np

_LONGEST_PERIOD = 8
_LEAST_REPEATS = 4
_LEAST_TOKENS = 16


def garbage_tokens(answers: Sequence[np.ndarray]) -> int:
    """How many tokens of these answers [length] lie in a stretch that repeats itself.

    That is an n-gram, n <= 8, at least 4 times in a row and over at least 16 tokens. The "error tokens" of quantized
    rollouts (https://arxiv.org/abs/2604.07853) are described as repetitive or garbled; this counts repetitions.
    """
    if not answers:
        return 0
    # All in one row: a step has thousands of answers, and numpy's calls would take longer than what they compute.
    tokens = np.concatenate(answers)
    owner = np.repeat(np.arange(len(answers)), [len(answer) for answer in answers])
    begins_less_ends = np.zeros(len(tokens) + 1, dtype=np.int64)
    for period in range(1, min(_LONGEST_PERIOD, len(tokens) - 1) + 1):
        same = (tokens[period:] == tokens[:-period]) & (owner[period:] == owner[:-period])
        turns = np.diff(same.astype(np.int8), prepend=0, append=0)
        starts, ends = np.flatnonzero(turns == 1), np.flatnonzero(turns == -1)
        long = ends - starts >= max(_LEAST_REPEATS * period, _LEAST_TOKENS) - period
        begins_less_ends[starts[long]] += 1  # no place occurs twice among the starts, nor among the ends
        begins_less_ends[ends[long] + period] -= 1
    return int((begins_less_ends.cumsum() > 0).sum())
