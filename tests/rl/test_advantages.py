"""Advantages against hand-made numbers and statistics' definitions."""

import statistics

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from qurl_ray.rl.advantages import (
    advantages,
    all_equal,
    dr_grpo,
    grpo,
    overlong_penalty,
    padded,
    reinforce_baseline,
    rloo,
)
from qurl_ray.tables import ADVANTAGES

EVERY = (grpo, dr_grpo, rloo, reinforce_baseline)

groups = st.lists(st.lists(st.sampled_from([0.0, 0.5, 1.0, -1.0]), min_size=4, max_size=4), min_size=1, max_size=6)


@settings(max_examples=100, deadline=None)
@given(rewards=groups, divide=st.booleans())
def test_matches_the_definition(rewards, divide):
    found = advantages(np.array(rewards), grpo if divide else dr_grpo)
    for row, group in zip(found, rewards, strict=True):
        spread = statistics.stdev(group) + 1e-6 if divide else 1.0
        mean = statistics.fmean(group)
        expected = [0.0 if len(set(group)) == 1 else (r - mean) / spread for r in group]
        assert row.tolist() == pytest.approx(expected)


def test_one_right_of_four():
    # mean 1/4, unbiased variance (3·1/16 + 9/16)/3 = 1/4
    assert advantages(np.array([[1.0, 0, 0, 0]]), grpo)[0].tolist() == pytest.approx([1.5, -0.5, -0.5, -0.5], rel=1e-5)


def test_equal_rewards_give_exactly_zero_even_where_the_mean_rounds():
    assert (advantages(np.full((1, 3), 0.1), grpo) == 0).all()
    assert all_equal(np.array([[0.1, 0.1, 0.1], [0.1, 0.1, 0.2]])).tolist() == [True, False]


def test_overlong_penalty_falls_linearly_over_the_buffer():
    lengths = np.array([1, 80, 90, 100, 120])
    assert overlong_penalty(lengths, max_length=100, buffer=20).tolist() == [0, 0, -0.5, -1, -1]
    assert overlong_penalty(lengths, max_length=100, buffer=0).tolist() == [0] * 5


def test_every_advantage_that_settings_name_is_tested_here():
    assert {ADVANTAGES.load(name) for name in ADVANTAGES.entries} == set(EVERY)


@pytest.mark.parametrize(
    ("made", "message"),
    [
        (np.zeros((1, 3)), r"returned an array \[1, 3\], expected a numpy array \[1, 2\]"),
        (torch.zeros(1, 2), r"returned Tensor, expected a numpy array \[1, 2\]"),
        ([[0.0, 1.0]], r"returned list, expected a numpy array \[1, 2\]"),
        (np.full((1, 2), np.inf), "not finite: inf for sample 0 of prompt 0, none of whose samples is missing"),
    ],
)
def test_what_a_function_from_outside_returns_is_checked(made, message):
    with pytest.raises(ValueError, match=message):
        advantages(np.array([[0.0, 1.0]]), lambda rewards, lengths: made)


# --- the kinds that compare otherwise ---------------------------------------------------------------------------


@settings(max_examples=100, deadline=None)
@given(rewards=groups)
def test_rloo_compares_with_the_mean_of_the_others(rewards):
    for row, group in zip(advantages(np.array(rewards), rloo), rewards, strict=True):
        expected = [r - statistics.fmean(group[:g] + group[g + 1 :]) for g, r in enumerate(group)]
        assert row.tolist() == pytest.approx(expected, abs=1e-12)


@settings(max_examples=100, deadline=None)
@given(rewards=groups, data=st.data())
def test_reinforce_baseline_whitens_over_tokens(rewards, data):
    """Each answer's reward less its group's mean, written at each of its tokens, then whitened over all of these."""
    lengths = [[data.draw(st.integers(1, 9)) for _ in group] for group in rewards]
    tokens = [
        (p, g, 0.0 if len(set(group)) == 1 else r - statistics.fmean(group))
        for p, group in enumerate(rewards)
        for g, r in enumerate(group)
        for _ in range(lengths[p][g])
    ]
    mean, variance = statistics.fmean(x for *_, x in tokens), statistics.variance(x for *_, x in tokens)
    found = advantages(np.array(rewards), reinforce_baseline, np.array(lengths))
    for p, g, x in tokens:
        assert found[p, g] == pytest.approx((x - mean) / (variance + 1e-8) ** 0.5, rel=1e-6, abs=1e-9)


@pytest.mark.parametrize("compare", EVERY)
def test_groups_without_a_comparison_get_exactly_0(compare):
    lengths = np.ones((3, 1), dtype=int)
    assert (advantages(np.array([[1.0], [0.0], [5.0]]), compare, lengths) == 0).all()
    assert (advantages(np.full((2, 3), 0.1), compare, np.array([[1, 2, 3], [4, 5, 6]])) == 0).all()
    assert advantages(np.zeros((0, 4)), compare, np.zeros((0, 4), dtype=int)).shape == (0, 4)
    one = advantages(np.array([[0.0, 1.0, 1.0]]), compare, np.array([[5, 5, 5]]))[0]
    assert one[0] < 0 < one[1] == one[2]
    assert one.sum() == pytest.approx(0, abs=1e-12)
    assert one.dtype == np.float64


@settings(max_examples=100, deadline=None)
@given(
    rewards=st.lists(st.lists(st.sampled_from([0.0, 0.5, 1.0]), max_size=5), min_size=1, max_size=6).filter(any),
    compare=st.sampled_from(EVERY),
    data=st.data(),
)
def test_groups_of_different_sizes_are_compared_each_as_if_alone(rewards, compare, data):
    """What is missing is NaN, wherever it stands in its row."""
    lengths = [[data.draw(st.integers(1, 9)) for _ in group] for group in rewards]
    found = advantages(padded(rewards), compare, padded(lengths))
    assert found.shape == (len(rewards), max(map(len, rewards)))
    assert all((row[len(group) :] == 0).all() for row, group in zip(found, rewards, strict=True))
    if compare is reinforce_baseline:  # sees all tokens of a step: the flat definition
        flat = [
            0.0 if len(set(group)) == 1 else r - statistics.fmean(group)
            for group, sizes in zip(rewards, lengths, strict=True)
            for r, size in zip(group, sizes, strict=True)
            for _ in range(size)
        ]
        mean = statistics.fmean(flat)
        variance = sum((x - mean) ** 2 for x in flat) / max(1, len(flat) - 1)
        expected = (flat[0] - mean) / (variance + 1e-8) ** 0.5
        first = next(p for p, group in enumerate(rewards) if group)
        assert found[first, 0] == pytest.approx(expected, rel=1e-6, abs=1e-9)
    else:
        for row, group in zip(found, rewards, strict=True):
            if group:
                assert row[: len(group)].tolist() == pytest.approx(advantages(np.array([group]), compare)[0].tolist())
    shuffled = data.draw(st.permutations(range(found.shape[1])))
    again = advantages(padded(rewards)[:, shuffled], compare, padded(lengths)[:, shuffled])
    assert np.allclose(again, found[:, shuffled], rtol=1e-9, atol=1e-12)


def test_groups_without_any_sample_are_uniform():
    assert all_equal(padded([[], [1.0], [0.0, 1.0]])).tolist() == [True, True, False]


@pytest.mark.parametrize("compare", [grpo, dr_grpo, rloo])
def test_a_group_does_not_see_the_others(compare):
    rewards = np.array([[0.0, 1.0, 0.5], [0.3, 0.3, 0.3], [9.0, -9.0, 1.0]])
    alone = [advantages(rewards[p : p + 1], compare)[0].tolist() for p in range(3)]
    assert advantages(rewards, compare).tolist() == alone
