"""Advantages against hand-made numbers and statistics' definitions."""

import statistics

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from qurl_ray.rl.advantages import advantages, all_equal, overlong_penalty

groups = st.lists(st.lists(st.sampled_from([0.0, 0.5, 1.0, -1.0]), min_size=4, max_size=4), min_size=1, max_size=6)


@settings(max_examples=100, deadline=None)
@given(rewards=groups, divide=st.booleans())
def test_matches_the_definition(rewards, divide):
    found = advantages(np.array(rewards), "grpo" if divide else "dr_grpo")
    for row, group in zip(found, rewards, strict=True):
        spread = statistics.stdev(group) + 1e-6 if divide else 1.0
        mean = statistics.fmean(group)
        expected = [0.0 if len(set(group)) == 1 else (r - mean) / spread for r in group]
        assert row.tolist() == pytest.approx(expected)


def test_one_right_of_four():
    # mean 1/4, unbiased variance (3·1/16 + 9/16)/3 = 1/4
    assert advantages(np.array([[1.0, 0, 0, 0]]), "grpo")[0].tolist() == pytest.approx(
        [1.5, -0.5, -0.5, -0.5], rel=1e-5
    )


def test_equal_rewards_give_exactly_zero_even_where_the_mean_rounds():
    assert (advantages(np.full((1, 3), 0.1), "grpo") == 0).all()
    assert all_equal(np.array([[0.1, 0.1, 0.1], [0.1, 0.1, 0.2]])).tolist() == [True, False]


def test_overlong_penalty_falls_linearly_over_the_buffer():
    lengths = np.array([1, 80, 90, 100, 120])
    assert overlong_penalty(lengths, max_length=100, buffer=20).tolist() == [0, 0, -0.5, -1, -1]
    assert overlong_penalty(lengths, max_length=100, buffer=0).tolist() == [0] * 5
