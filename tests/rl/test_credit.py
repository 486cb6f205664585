"""Credit of turns against plain loops: returns, groups of the same turn number, and who is left out."""

import statistics
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from qurl_ray.rl.advantages import advantages, dr_grpo, grpo, padded, reinforce_baseline, rloo
from qurl_ray.rl.credit import (
    compare_turns,
    credited,
    returns_of,
    returns_of_rows,
    rewards_of_row,
    turn_returns,
    without_signal,
)
from qurl_ray.types import Trajectory, TurnCredit

EVERY = (grpo, dr_grpo, rloo, reinforce_baseline)
Parts = list[tuple[float, int, int]]
"""Turns of a sample: the reward, the tokens, and those that an environment says before it."""
turns = st.tuples(st.sampled_from([0.0, 0.5, 1.0, -1.0]), st.integers(1, 4), st.integers(0, 2))
samples = st.lists(turns, min_size=1, max_size=4)
steps = st.lists(st.lists(samples, min_size=1, max_size=5), min_size=1, max_size=4)


def sample(parts: Parts) -> Trajectory:
    mask = [drawn for _, tokens, said in parts for drawn in [False] * said + [True] * tokens]
    ends = np.cumsum([said + tokens for _, tokens, said in parts], dtype=np.int32)
    return Trajectory(
        uid="u",
        prompt_ids=np.arange(3, dtype=np.int32),
        token_ids=np.zeros(len(mask), np.int32),
        logprobs=np.zeros(len(mask), np.float32),
        versions=np.zeros(len(mask), np.int32),
        mask=np.array(mask),
        reward=sum(reward for reward, *_ in parts),
        advantage=0.0,
        turns=TurnCredit(ends=ends, rewards=np.array([reward for reward, *_ in parts])),
    )


def expected_returns(parts: Parts, mode: str) -> list[float]:
    total, count = sum(reward for reward, *_ in parts), len(parts)
    if mode == "spread":
        return [sum([total / count] * (count - k)) for k in range(count)]
    return [sum(reward for reward, *_ in parts[k:]) for k in range(count)]


def by_loops(step: list[list[Parts]], compare, mode: str) -> list[list[list[float]]]:
    """Advantages by group, sample and turn, from the definitions."""
    found = [[[0.0] * len(parts) for parts in group] for group in step]
    rows = []  # the turns of one number in a group: (group, sample, number, centred return, tokens)
    for p, group in enumerate(step):
        for k in range(max(map(len, group))):
            there = [g for g, parts in enumerate(group) if len(parts) > k]
            values = [expected_returns(group[g], mode)[k] for g in there]
            if len(there) < 2:
                continue
            equal = max(values) - min(values) < 1e-12
            centred = [0.0 if equal else value - statistics.fmean(values) for value in values]
            if compare is grpo:
                centred = [x / (statistics.stdev(values) + 1e-6) for x in centred]
            if compare is rloo:
                centred = [x * len(there) / (len(there) - 1) for x in centred]
            rows += [(p, g, k, x, group[g][k][1]) for g, x in zip(there, centred, strict=True)]
    mean, deviation = 0.0, 1.0
    if compare is reinforce_baseline and rows:
        tokens = [x for *_, x, count in rows for _ in range(count)]
        mean = statistics.fmean(tokens)
        deviation = (sum((x - mean) ** 2 for x in tokens) / max(1, len(tokens) - 1) + 1e-8) ** 0.5
    for p, g, k, x, _ in rows:
        found[p][g][k] = (x - mean) / deviation
    return found


def found_in(step: list[list[Parts]], compare, mode) -> list[list[list[float]]]:
    worths = [[returns_of(sample(parts), mode) for parts in group] for group in step]
    return [[one.tolist() for one in group] for group in compare_turns(worths, compare, mode)]


@settings(max_examples=200, deadline=None)
@given(step=steps, compare=st.sampled_from(EVERY), mode=st.sampled_from(["turn", "spread"]))
def test_a_turn_is_compared_with_those_of_its_number(step, compare, mode):
    for group, expected in zip(found_in(step, compare, mode), by_loops(step, compare, mode), strict=True):
        for one, by_hand in zip(group, expected, strict=True):
            assert one == pytest.approx(by_hand, rel=1e-6, abs=1e-8)


@settings(max_examples=200, deadline=None)
@given(step=steps, compare=st.sampled_from(EVERY), bare=st.booleans())
def test_credit_of_trajectories_is_that_of_whole_answers_to_the_bit(step, compare, bare):
    """The same call of the same function as before there were turns, with an environment and without."""
    expected_PG = advantages(
        padded([[sum(reward for reward, *_ in parts) for parts in group] for group in step]),
        compare,
        padded([[sum(tokens for _, tokens, _ in parts) for parts in group] for group in step]),
    )
    made = [[replace(sample(parts), **({"turns": None} if bare else {})) for parts in group] for group in step]
    worths = [[returns_of(one, "trajectory") for one in group] for group in made]
    for p, group in enumerate(compare_turns(worths, compare, "trajectory")):
        assert [one.tolist() for one in group] == [[value] for value in expected_PG[p, : len(group)].tolist()]


@settings(max_examples=100, deadline=None)
@given(
    ends=st.lists(st.lists(st.sampled_from([0.0, 0.3, 1.0]), min_size=2, max_size=5), min_size=1, max_size=4),
    count=st.integers(1, 4),
)
def test_a_reward_at_the_end_of_equally_many_turns_is_shared_by_all_of_them(ends, count):
    step = [[[(0.0, 2, 1)] * (count - 1) + [(reward, 3, 0)] for reward in group] for group in ends]
    whole = found_in(step, dr_grpo, "trajectory")
    assert found_in(step, dr_grpo, "turn") == [[one * count for one in group] for group in whole]


def test_by_hand():
    """Returns of the first turn 1, 1, 0: mean 2/3. Of the second 1 and 0: mean 1/2. One sample has a third turn."""
    step = [[[(0.0, 2, 0), (1.0, 3, 1)], [(1.0, 1, 0)], [(0.0, 1, 0), (-0.5, 1, 0), (0.5, 1, 0)]]]
    first, second, third = found_in(step, dr_grpo, "turn")[0]
    assert first == pytest.approx([1 / 3, 1 / 2])
    assert second == pytest.approx([1 / 3])
    assert third == pytest.approx([-2 / 3, -1 / 2, 0.0])
    assert expected_returns(step[0][2], "spread") == [0.0, 0.0, 0.0]
    assert turn_returns(0.9, TurnCredit(ends=np.array([1, 2, 3]), rewards=np.zeros(3)), "spread") == pytest.approx(
        [0.9, 0.6, 0.3]
    )


def test_a_penalty_counts_at_the_last_turn_and_is_spread_with_the_reward():
    one = sample([(1.0, 2, 0), (0.0, 3, 1)])
    assert returns_of_rows([rewards_of_row(one, cost=0.25)], "turn") == ([0.75, -0.25], [2, 3])
    assert returns_of_rows([rewards_of_row(one, cost=0.25)], "spread") == ([0.75, 0.375], [2, 3])
    assert returns_of_rows([rewards_of_row(one, cost=0.25)], "trajectory") == ([0.75], [5])
    np.testing.assert_array_equal(one.turns.rewards, [1.0, 0.0])


def test_a_function_of_the_users_gets_rows_of_turns_that_can_be_compared():
    seen = []

    def compare(rewards_PG, lengths_PG):
        seen.append((rewards_PG.tolist(), lengths_PG.tolist()))
        return np.where(np.isnan(rewards_PG), np.nan, 7.0)

    step = [[[(1.0, 2, 0), (0.0, 3, 0)], [(0.5, 4, 0)]], [[(0.0, 1, 0)], [(1.0, 1, 0), (1.0, 2, 0)], [(0.0, 1, 0)]]]
    found = found_in(step, compare, "turn")
    assert found == [[[7.0, 0.0], [7.0]], [[7.0], [7.0, 0.0], [7.0]]]
    ((rewards, lengths),) = seen
    assert str(rewards) == "[[1.0, 0.5, nan], [0.0, 2.0, 0.0]]"
    assert lengths == [[2, 4, 0], [1, 1, 1]]
    seen.clear()
    assert found_in([[[(1.0, 2, 0)]]], compare, "turn") == [[[0.0]]]
    assert not seen


@settings(max_examples=200, deadline=None)
@given(group=st.lists(samples, min_size=1, max_size=4), missing=st.integers(0, 2))
def test_a_group_has_a_signal_if_a_turn_number_has_different_returns(group, missing):
    returns = [expected_returns(parts, "turn") for parts in group]
    expected = all(
        len({values[k] for values in returns if len(values) > k}) == 1 for k in range(max(map(len, returns)))
    )
    assert without_signal([returns + [[]] * missing]).tolist() == [expected]
    differ = any(any(one) for one in found_in([group], dr_grpo, "turn")[0])
    assert differ == (not expected)


def test_groups_that_differ_in_their_turns_alone_have_a_signal():
    assert without_signal([[[1.0, 0.0], [1.0, 1.0]], [[1.0], [1.0, 0.5]], [[0.5], [1.0]], [[], []]]).tolist() == [
        False,
        True,
        False,
        True,
    ]


@settings(max_examples=50, deadline=None)
@given(parts=samples)
def test_turns_know_their_tokens(parts):
    one = sample(parts)
    assert one.turn_lengths.tolist() == [tokens for _, tokens, _ in parts]
    assert one.drawn_ends[-1] == one.drawn
    whole = replace(one, turns=None)
    assert whole.turn_lengths.tolist() == [one.drawn]
    adjacent = sample([(reward, tokens, 0) for reward, tokens, _ in parts])
    assert replace(adjacent, mask=None).turn_lengths.tolist() == one.turn_lengths.tolist()


def test_advantages_of_turns_are_kept_with_them_and_others_with_the_sample():
    one = sample([(1.0, 2, 0), (0.0, 3, 1)])
    by_turn = credited(one, np.array([0.5, -0.5]), "turn")
    assert by_turn.advantage == 0.0
    np.testing.assert_array_equal(by_turn.turns.advantages, [0.5, -0.5])
    whole = credited(one, np.array([0.5]), "trajectory")
    assert whole.advantage == 0.5
    assert whole.turns.advantages is None
