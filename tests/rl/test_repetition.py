"""Garbage tokens against a search of every stretch."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from qurl_ray.rl.repetition import garbage_tokens


def by_search(tokens: list[int]) -> int:
    """Tokens in any stretch [i, j) of 16 or more that an n-gram, n <= 8, fills at least 4 times."""
    garbage: set[int] = set()
    for i in range(len(tokens)):
        for n in range(1, 9):
            j = i + n
            while j < len(tokens) and tokens[j] == tokens[j - n]:
                j += 1
            if j - i >= max(16, 4 * n):
                garbage |= set(range(i, j))
    return len(garbage)


pieces = st.one_of(
    st.lists(st.integers(0, 3), max_size=8),
    st.tuples(st.lists(st.integers(0, 2), min_size=1, max_size=9), st.integers(1, 7), st.integers(0, 8)).map(
        lambda x: (x[0] * (x[1] + 1))[: len(x[0]) * x[1] + x[2]]
    ),
)


@settings(max_examples=400, deadline=None)
@given(parts=st.lists(pieces, max_size=4))
def test_matches_a_search_of_every_stretch(parts):
    tokens = [token for part in parts for token in part]
    assert garbage_tokens([np.array(tokens, dtype=np.int32)]) == by_search(tokens)


@settings(max_examples=100, deadline=None)
@given(answers=st.lists(st.lists(pieces, max_size=4), max_size=5))
def test_answers_are_counted_by_themselves(answers):
    each = [[token for part in parts for token in part] for parts in answers]
    assert garbage_tokens([np.array(tokens, dtype=np.int32) for tokens in each]) == sum(map(by_search, each))


@pytest.mark.parametrize(
    ("tokens", "count"),
    [
        ([], 0),
        ([7], 0),
        ([7] * 15, 0),
        ([7] * 16, 16),
        ([1, 2] * 8, 16),
        ([1, 2] * 7, 0),
        ([1, 2, 3] * 5, 0),  # 15 tokens
        ([1, 2, 3] * 5 + [1], 16),
        ([1, 2, 3, 4, 5, 6, 7] * 4, 28),
        ([1, 2, 3, 4, 5, 6, 7] * 3 + [1, 2, 3, 4, 5, 6], 0),
        (list(range(8)) * 4, 32),
        (list(range(9)) * 9, 0),
        ([9, 8, 9] + [7] * 20 + [3, 4] * 10 + [1], 40),
        (list(range(100)), 0),
    ],
)
def test_examples(tokens, count):
    assert garbage_tokens([np.array(tokens, dtype=np.int32)]) == count
