"""Answers that loop: what quantized rollouts end in when something is wrong."""

import numpy as np

_LONGEST_PERIOD = 8
_LEAST_REPEATS = 4
_LEAST_TOKENS = 16


def garbage_tokens(token_ids: np.ndarray) -> int:
    """How many tokens lie in a stretch that repeats itself.

    That is an n-gram, n <= 8, at least 4 times in a row and over at least 16 tokens. The "error tokens" of quantized
    rollouts (https://arxiv.org/abs/2604.07853) are described as repetitive or garbled; this counts repetitions.
    """
    garbage = np.zeros(len(token_ids), dtype=bool)
    for period in range(1, min(_LONGEST_PERIOD, len(token_ids) - 1) + 1):
        same = np.concatenate([[False], token_ids[period:] == token_ids[:-period], [False]])
        starts, ends = np.flatnonzero(~same[:-1] & same[1:]), np.flatnonzero(same[:-1] & ~same[1:])
        least = max(_LEAST_REPEATS * period, _LEAST_TOKENS) - period
        for start, end in zip(starts, ends, strict=True):
            if end - start >= least:
                garbage[start : end + period] = True
    return int(garbage.sum())
