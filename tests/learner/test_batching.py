"""Plans: every sample exactly once, budgets kept, ranks in step."""

import pickle
from dataclasses import asdict, fields, replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from qurl_ray.learner.batching import micro_batches, plan, to_tensors
from qurl_ray.types import Trajectory, TurnCredit


def trajectory(
    uid: str, answer: int, prompt: int = 3, advantage: float = 1.0, mask: list[bool] | None = None
) -> Trajectory:
    return Trajectory(
        uid=uid,
        prompt_ids=np.arange(1, prompt + 1, dtype=np.int32),
        token_ids=np.full(answer, 9, dtype=np.int32),
        logprobs=np.full(answer, -0.5, dtype=np.float32),
        reward=1.0,
        advantage=advantage,
        versions=np.ones(answer, dtype=np.int32),
        mask=None if mask is None else np.array(mask, dtype=bool),
    )


groups_of = st.lists(st.lists(st.integers(1, 30), min_size=2, max_size=4), min_size=1, max_size=9)


def tokens_computed(samples, packed: bool) -> int:
    lengths = [s.length for s in samples]
    return sum(lengths) if packed else len(lengths) * max(lengths)


@pytest.mark.parametrize("packed", [False, True], ids=["padded", "packed"])
@settings(max_examples=100, deadline=None)
@given(lengths=groups_of, updates=st.integers(1, 5), ranks=st.integers(1, 4), budget=st.integers(10, 100))
def test_every_sample_is_learned_from_once_and_ranks_stay_in_step(packed, lengths, updates, ranks, budget):
    groups = [[trajectory(f"{p}/{g}", n) for g, n in enumerate(group)] for p, group in enumerate(lengths)]
    by_rank = plan(groups, updates=updates, ranks=ranks, token_budget=budget, seed=1, packed=packed)
    assert len({len(mini_batches) for mini_batches in by_rank}) == 1
    seen = []
    for update in zip(*by_rank, strict=True):
        assert len({len(mini_batch.micro_batches) for mini_batch in update}) == 1
        samples = [s for mini_batch in update for micro in mini_batch.micro_batches for s in micro]
        seen += [s.uid for s in samples]
        for mini_batch in update:
            assert mini_batch.denominators.tokens == sum(len(s.token_ids) for s in samples)
            assert mini_batch.denominators.sequences == len(samples)
            for micro in mini_batch.micro_batches:
                assert len(micro) <= 1 or tokens_computed(micro, packed) <= budget
        # whole groups: a prompt's samples are updated on together
        for p in {s.uid.split("/")[0] for s in samples}:
            assert sum(s.uid.split("/")[0] == p for s in samples) == len(lengths[int(p)])
    assert sorted(seen) == sorted(s.uid for group in groups for s in group)


@settings(max_examples=100, deadline=None)
@given(lengths=st.lists(st.integers(1, 40), min_size=1, max_size=40), budget=st.integers(4, 100))
def test_packing_fills_micro_batches_to_more_than_half(lengths, budget):
    """First fit opens a batch only for what no other has room for, so two that are half empty cannot exist."""
    packed = micro_batches([trajectory(f"{i}", n) for i, n in enumerate(lengths)], budget, packed=True)
    half_empty = [batch for batch in packed if 2 * tokens_computed(batch, packed=True) <= budget]
    assert len(half_empty) <= 1


def with_turns(sample: Trajectory, count: int, *, compared: bool = False) -> Trajectory:
    """The sample in at most `count` turns, each of which ends where the next one begins."""
    ends = np.unique(np.linspace(1, len(sample.token_ids), count).astype(np.int32))
    rewards = np.arange(len(ends)) / 4
    advantages = 1 - rewards if compared else None
    return replace(sample, turns=TurnCredit(ends=ends, rewards=rewards, advantages=advantages))


def with_routes(sample: Trajectory) -> Trajectory:
    """The sample with two experts for each of its tokens in each of three layers."""
    routes = np.random.default_rng(sample.length).integers(0, 9, (sample.length - 1, 3, 2)).astype(np.uint8)
    return replace(sample, routes=routes)


@settings(max_examples=50, deadline=None)
@given(lengths=groups_of, updates=st.integers(1, 3), ranks=st.integers(1, 4), turns=st.sampled_from(["none", "some"]))
def test_a_share_arrives_as_it_was_sent(lengths, updates, ranks, turns):
    groups = [
        [
            trajectory(f"{p}/{g}", n, prompt=p + 1, mask=[t % 3 > 0 for t in range(n)] if g % 2 else None)
            for g, n in enumerate(group)
        ]
        for p, group in enumerate(lengths)
    ]
    if turns == "some":
        groups = [
            [with_turns(s, p + g, compared=g % 3 > 1) if g else s for g, s in enumerate(group)]
            for p, group in enumerate(groups)
        ]
    groups = [[with_routes(s) if (p + g) % 3 else s for g, s in enumerate(group)] for p, group in enumerate(groups)]
    for share in plan(groups, updates=updates, ranks=ranks, token_budget=40, seed=1):
        arrived = pickle.loads(pickle.dumps(share, protocol=5))
        assert [m.denominators for m in arrived] == [m.denominators for m in share]
        for batch, same in zip(
            [b for m in share for b in m.micro_batches], [b for m in arrived for b in m.micro_batches], strict=True
        ):
            for sample, twin in zip(batch, same, strict=True):
                same_fields(twin, sample)


def same_fields(found: object, expected: object) -> None:
    for field in fields(expected):
        value, twin = getattr(expected, field.name), getattr(found, field.name)
        assert type(twin) is type(value)
        if isinstance(value, TurnCredit):
            same_fields(twin, value)
        else:
            np.testing.assert_array_equal(twin, value, strict=True)


def test_a_share_without_turns_has_nothing_of_them():
    (share,) = plan([[trajectory("a", 4), trajectory("b", 2)]], updates=1, ranks=1, token_budget=99, seed=0)
    _, sent = share[0].__reduce__()
    assert len(sent) == 7
    assert sent[-1] is None
    assert {len(row) for row in sent[-2]} == {9}


def test_turns_say_where_rewards_come_and_where_turns_start():
    """An environment says the third and fourth of a's tokens. b's turns are adjacent; c has no turns, d no tokens."""
    a = replace(
        trajectory("a", 6, mask=[True, True, False, False, True, True]),
        turns=TurnCredit(
            ends=np.array([2, 6], np.int32), rewards=np.array([0.5, 2.0]), advantages=np.array([3.0, 4.0])
        ),
    )
    b = replace(
        trajectory("b", 3, prompt=2),
        turns=TurnCredit(
            ends=np.array([1, 2, 3], np.int32),
            rewards=np.array([1.0, 0.0, -1.0]),
            advantages=np.array([-1.0, 0.0, 1.0]),
        ),
    )
    batch = to_tensors([a, b])
    assert batch.starts_BT.long().tolist() == [[0, 0, 0, 1, 0, 0, 0, 1, 0], [0, 0, 1, 1, 1, 0, 0, 0, 0]]
    assert batch.rewards_BT.tolist() == [[0, 0, 0, 0, 0.5, 0, 0, 0, 2], [0, 0, 1, 0, -1, 0, 0, 0, 0]]
    assert batch.advantages.tolist() == [[0, 0, 0, 3, 3, 0, 0, 4, 4], [0, 0, -1, 0, 1, 0, 0, 0, 0]]
    uncompared = [replace(s, turns=replace(s.turns, advantages=None)) for s in (a, b)]
    assert to_tensors(uncompared).advantages.tolist() == [1.0, 1.0]
    (share,) = plan([[a, b, trajectory("c", 2)]], updates=1, ranks=1, token_budget=99, seed=0)
    assert asdict(share[0].denominators) == {"tokens": 9, "sequences": 3, "turns": 6}
    c, d = trajectory("c", 2, mask=[True, False]), trajectory("d", 0)
    batch = to_tensors([c, d])
    assert batch.starts_BT.long().tolist() == [[0, 0, 0, 1, 0], [0] * 5]
    assert batch.rewards_BT.tolist() == [[0, 0, 0, 1, 0], [0] * 5]


@settings(max_examples=50, deadline=None)
@given(masks=st.lists(st.lists(st.booleans(), max_size=9), min_size=1, max_size=5))
def test_the_reward_of_one_turn_comes_with_its_last_drawn_token(masks):
    batch = to_tensors([replace(trajectory(f"{i}", len(m), mask=m), reward=0.1 * (i + 1)) for i, m in enumerate(masks)])
    for row, found in enumerate(batch.rewards_BT):
        drawn = [t for t, here in enumerate(batch.mask_BT[row].tolist()) if here]
        expected = np.zeros(len(found), dtype=np.float32)
        expected[drawn[-1:]] = np.float32(0.1 * (row + 1))
        assert found.tolist() == expected.tolist()
        assert batch.starts_BT[row].nonzero().flatten().tolist() == drawn[:1]


def test_tokens_of_an_environment_are_no_part_of_a_loss():
    sample = trajectory("a", 5, mask=[True, True, False, False, True])
    batch = to_tensors([sample])
    assert batch.mask_BT.long().tolist() == [[0, 0, 0, 1, 1, 0, 0, 1]]
    assert batch.behavior_BT.tolist() == [[0, 0, 0, -0.5, -0.5, 0, 0, -0.5]]
    assert batch.lengths_B.tolist() == [sample.length] == [8]
    (share,) = plan([[sample, trajectory("b", 2)]], updates=1, ranks=1, token_budget=99, seed=0)
    assert share[0].denominators.tokens == sample.drawn + 2 == 5


def test_packing_puts_short_answers_beside_a_long_one():
    samples = [trajectory(f"{i}", n - 3) for i, n in enumerate((50, 40, 10, 10, 10, 60, 120))]  # 3 of the prompt
    lengths = lambda packed: [[s.length for s in b] for b in micro_batches(samples, 100, packed=packed)]  # noqa: E731
    assert lengths(True) == [[120], [60, 40], [50, 10, 10, 10]]
    assert lengths(False) == [[120], [60], [50, 40], [10, 10, 10]]


def test_ranks_get_about_as_many_tokens():
    groups = [[trajectory(f"{p}/{g}", n) for g, n in enumerate((5, 60, 7, 30))] for p in range(16)]
    by_rank = plan(groups, updates=1, ranks=4, token_budget=1000, seed=0)
    loads = [sum(s.length for mb in rank for micro in mb.micro_batches for s in micro) for rank in by_rank]
    assert max(loads) - min(loads) <= 63


def test_another_seed_shuffles_differently():
    groups = [[trajectory(f"{p}/{g}", 5) for g in range(2)] for p in range(12)]
    first = lambda seed: plan(groups, updates=3, ranks=1, token_budget=99, seed=seed)[0][0]  # noqa: E731
    assert first(0) == first(0)
    assert [m[0].uid for m in first(0).micro_batches] != [m[0].uid for m in first(1).micro_batches]


def test_tensors_hold_prompt_then_answer_then_padding():
    batch = to_tensors([trajectory("a", 2), trajectory("b", 4, prompt=1, advantage=-2.0)])
    assert batch.token_ids_BT.tolist() == [[1, 2, 3, 9, 9], [1, 9, 9, 9, 9]]
    assert batch.mask_BT.long().tolist() == [[0, 0, 0, 1, 1], [0, 1, 1, 1, 1]]
    assert batch.behavior_BT[0].tolist() == [0, 0, 0, -0.5, -0.5]
    assert batch.advantages.tolist() == [1.0, -2.0]
    assert batch.lengths_B.tolist() == [5, 5]
    assert to_tensors([trajectory("a", 2), trajectory("b", 7)]).lengths_B.tolist() == [5, 10]
    assert to_tensors([]).lengths_B.shape == (0,)
    assert to_tensors([]).token_ids_BT.shape == (0, 1)
    ended = replace(trajectory("a", 2), token_ids=np.array([9, 0], dtype=np.int32))  # by a token with padding's id
    assert to_tensors([ended, trajectory("b", 4)]).mask_BT[0].long().tolist() == [0, 0, 0, 1, 1, 0, 0]
