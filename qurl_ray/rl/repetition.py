"""Detection of answers that repeat themselves, a typical failure of quantized rollouts."""

from collections.abc import Sequence

import numpy as np

_LONGEST_PERIOD = 8
_LEAST_REPEATS = 4
_LEAST_TOKENS = 16
_AT_ONCE = 256  # answers: enough that the overhead of numpy calls is small, few enough for the cache


def garbage_tokens(answers: Sequence[np.ndarray]) -> int:
    """Number of tokens of these answers (each [length]) that lie in a repetition.

    A repetition is an n-gram, n <= 8, that occurs at least 4 times in a row and covers at least 16 tokens. The "error
    tokens" of quantized rollouts (https://arxiv.org/abs/2604.07853) are described as repetitive or garbled; this
    function counts only repetitions.
    """
    garbage = 0
    for start in range(0, len(answers), _AT_ONCE):
        chunk = answers[start : start + _AT_ONCE]
        tokens = np.concatenate(chunk)
        owner = np.repeat(np.arange(len(chunk), dtype=np.int32), [len(answer) for answer in chunk])
        begins_less_ends = np.zeros(len(tokens) + 1, dtype=np.int32)
        for period in range(1, min(_LONGEST_PERIOD, len(tokens) - 1) + 1):
            same = np.zeros(len(tokens) - period + 2, dtype=bool)  # False at both ends
            same[1:-1] = (tokens[period:] == tokens[:-period]) & (owner[period:] == owner[:-period])
            starts, ends = np.flatnonzero(same[1:] != same[:-1]).reshape(-1, 2).T
            long = ends - starts >= max(_LEAST_REPEATS * period, _LEAST_TOKENS) - period
            begins_less_ends[starts[long]] += 1  # no position occurs twice among the starts, nor among the ends
            begins_less_ends[ends[long] + period] -= 1
        garbage += int((begins_less_ends.cumsum() > 0).sum())
    return garbage
