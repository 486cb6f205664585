"""Advantages, whitening and the value loss against the definitions in plain Python."""

import statistics

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from qurl_ray.rl.reduce import moments
from qurl_ray.rl.value import gae, turn_gae, value_loss, whiten

numbers = st.floats(-3, 3, allow_nan=False, width=32)


def token_rewards(rewards_B: torch.Tensor, mask_BT: torch.Tensor) -> torch.Tensor:
    """Rewards that come with the last drawn token of each answer, [B, T]."""
    later_BT = mask_BT.flip(1).cumsum(1).flip(1)
    return torch.where(mask_BT & (later_BT == 1), rewards_B[:, None], 0.0)


@settings(max_examples=60, deadline=None)
@given(
    answers=st.lists(
        st.tuples(st.integers(0, 3), st.lists(numbers, min_size=0, max_size=5), numbers), min_size=1, max_size=4
    ),
    gamma=st.sampled_from([1.0, 0.9]),
    lam=st.sampled_from([0.0, 0.5, 1.0]),
)
def test_gae_is_the_sum_of_discounted_errors(answers, gamma, lam):
    width = max(start + len(values) for start, values, _ in answers) + 2
    values_BT = torch.full((len(answers), width), float("nan"), dtype=torch.float64)
    mask_BT = torch.zeros(len(answers), width, dtype=torch.bool)
    for row, (start, values, _) in enumerate(answers):
        values_BT[row, start : start + len(values)] = torch.tensor(values, dtype=torch.float64)
        mask_BT[row, start : start + len(values)] = True
    rewards_B = torch.tensor([reward for *_, reward in answers], dtype=torch.float64)
    advantages_BT, returns_BT = gae(token_rewards(rewards_B, mask_BT), values_BT, mask_BT, gamma=gamma, lam=lam)
    assert not advantages_BT[~mask_BT].any()
    assert not returns_BT[~mask_BT].any()
    for row, (start, values, reward) in enumerate(answers):
        n = len(values)
        after = [*values[1:], 0.0]
        delta = [(reward if t == n - 1 else 0.0) + gamma * after[t] - values[t] for t in range(n)]
        expected = [sum((gamma * lam) ** (k - t) * delta[k] for k in range(t, n)) for t in range(n)]
        assert advantages_BT[row, start : start + n].tolist() == pytest.approx(expected, abs=1e-12)
        assert returns_BT[row, start : start + n].tolist() == pytest.approx(
            [a + v for a, v in zip(expected, values, strict=True)], abs=1e-12
        )


@settings(max_examples=60, deadline=None)
@given(
    rows=st.lists(st.lists(st.tuples(st.booleans(), numbers), min_size=9, max_size=9), min_size=1, max_size=4),
    gamma=st.sampled_from([1.0, 0.9]),
    lam=st.sampled_from([0.0, 0.5, 1.0]),
)
def test_what_an_environment_says_takes_no_step(rows, gamma, lam):
    mask_BT = torch.tensor([[drawn for drawn, _ in row] for row in rows])
    values_BT = torch.tensor([[value if drawn else float("nan") for drawn, value in row] for row in rows])
    rewards_B = torch.arange(1.0, len(rows) + 1)
    rewards_BT = torch.where(mask_BT, token_rewards(rewards_B, mask_BT), 7.0)  # such as a KL of what others said
    found = gae(rewards_BT, values_BT, mask_BT, gamma=gamma, lam=lam)
    for row in range(len(rows)):
        alone = values_BT[row][mask_BT[row]][None]
        everything = torch.ones(alone.shape, dtype=torch.bool)
        rewards = token_rewards(rewards_B[row : row + 1], everything)
        for gapped_BT, expected in zip(found, gae(rewards, alone, everything, gamma=gamma, lam=lam), strict=True):
            torch.testing.assert_close(gapped_BT[row][mask_BT[row]], expected[0])
            assert not gapped_BT[row][~mask_BT[row]].any()


def test_without_discount_the_return_is_the_reward():
    mask_BT = torch.tensor([[False, True, True, True]])
    advantages_BT, returns_BT = gae(
        token_rewards(torch.tensor([2.0]), mask_BT), torch.tensor([[9.0, 0.5, -1.0, 3.0]]), mask_BT, gamma=1.0, lam=1.0
    )
    assert returns_BT.tolist() == [[0.0, 2.0, 2.0, 2.0]]
    assert advantages_BT.tolist() == [[0.0, 1.5, 3.0, -1.0]]


# --- steps of turns ---------------------------------------------------------------------------------------------

turn = st.lists(st.tuples(numbers, numbers), min_size=1, max_size=4)
"""A turn: (reward, value) of each token."""
answer = st.tuples(st.integers(0, 3), st.lists(st.tuples(turn, st.integers(0, 2)), max_size=4))
"""(length of the prompt, turns and the number of tokens that an environment says after each). With 0, only the starts
tell two turns apart."""


@settings(max_examples=100, deadline=None)
@given(
    answers=st.lists(answer, min_size=1, max_size=3),
    gamma=st.sampled_from([1.0, 0.9]),
    lam=st.sampled_from([0.0, 0.5, 1.0]),
)
def test_gae_over_turns_is_the_sum_of_discounted_errors_of_turns(answers, gamma, lam):
    width = max(start + sum(len(tokens) + said for tokens, said in turns) for start, turns in answers) + 1
    nan = torch.full((len(answers), width), float("nan"), dtype=torch.float64)
    values_BT, rewards_BT = nan.clone(), nan.clone()
    mask_BT, starts_BT = torch.zeros(2, *nan.shape, dtype=torch.bool)
    expected_BT, returns_BT = torch.zeros(2, *nan.shape, dtype=torch.float64)
    for row, (start, turns) in enumerate(answers):
        places, at = [], start
        for tokens, said in turns:
            places.append(range(at, at + len(tokens)))
            starts_BT[row, at] = True
            for place, (reward, value) in zip(places[-1], tokens, strict=True):
                mask_BT[row, place], rewards_BT[row, place], values_BT[row, place] = True, reward, value
            at += len(tokens) + said
        after = ahead = 0.0
        for (tokens, _), span in reversed(list(zip(turns, places, strict=True))):
            value = tokens[0][1]
            ahead = sum(reward for reward, _ in tokens) + gamma * after - value + gamma * lam * ahead
            after = value
            expected_BT[row, list(span)] = ahead
            returns_BT[row, span[0]] = ahead + value
    found = turn_gae(rewards_BT, values_BT, mask_BT, starts_BT, gamma=gamma, lam=lam)
    torch.testing.assert_close(found[0], expected_BT, rtol=1e-10, atol=1e-12)
    torch.testing.assert_close(found[1], returns_BT, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize(("gamma", "lam"), [(1.0, 1.0), (0.99, 0.9)])
def test_with_one_token_a_turn_steps_of_turns_are_steps_of_tokens(gamma, lam, dtype):
    generator = torch.Generator().manual_seed(1)
    rewards_BT, values_BT = torch.randn(2, 3, 300, generator=generator, dtype=dtype)
    mask_BT = torch.rand(3, 300, generator=generator) < 0.7
    by_token = gae(rewards_BT, values_BT, mask_BT, gamma=gamma, lam=lam)
    by_turn = turn_gae(rewards_BT, values_BT, mask_BT, mask_BT, gamma=gamma, lam=lam)
    for one, other in zip(by_token, by_turn, strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize("shape", [(0, 0), (0, 4), (2, 0), (2, 4)])
def test_no_turns_give_no_advantages(shape):
    mask, values = torch.zeros(shape, dtype=torch.bool), torch.full(shape, float("nan"))
    for found in turn_gae(values, values, mask, mask, gamma=1.0, lam=0.95):
        assert found.shape == shape
        assert not found.any()


def test_whitening_uses_the_moments_of_all_ranks():
    parts = [torch.tensor([[1.0, 2.0, 4.0]]), torch.tensor([[8.0, 100.0, 100.0]])]
    masks = [torch.tensor([[True, True, True]]), torch.tensor([[True, False, False]])]
    total = sum(moments(values, mask) for values, mask in zip(parts, masks, strict=True))
    mean, std = statistics.fmean([1, 2, 4, 8]), statistics.stdev([1, 2, 4, 8])
    assert whiten(parts[0], masks[0], total)[0].tolist() == pytest.approx([(x - mean) / std for x in (1, 2, 4)])
    assert whiten(parts[1], masks[1], total)[0].tolist() == pytest.approx([(8 - mean) / std, 0, 0])


def test_one_token_or_none_is_finite():
    for mask in ([[True, False]], [[False, False]]):
        mask_BT = torch.tensor(mask)
        total = moments(torch.tensor([[3.0, 1.0]]), mask_BT)
        assert not whiten(torch.tensor([[3.0, 1.0]]), mask_BT, total).any()


def test_the_value_loss_takes_the_worse_of_clipped_and_free():
    values = torch.tensor([[1.0, 1.0, 0.1, 7.0]], requires_grad=True)
    old = torch.tensor([[0.0, 0.0, 0.0, 0.0]])
    returns = torch.tensor([[2.0, 0.5, 0.0, 0.0]])
    mask = torch.tensor([[True, True, True, False]])
    loss, sums = value_loss(values, old, returns, mask, tokens=4, clip=0.5)
    # token 0: clipped value 0.5 is further from 2 than 1 is; token 1: 0.5 is exact, so the free error counts
    assert loss.item() == pytest.approx(0.5 * (1.5**2 + 0.5**2 + 0.1**2) / 4)
    loss.backward()
    assert values.grad[0].tolist() == pytest.approx([0.0, 0.5 / 4, 0.1 / 4, 0.0])
    assert sums["value_clipped"] == 1
    assert sums["value_error"].item() == pytest.approx(2.0**2 + 0.5**2)


def test_without_a_clip_it_is_half_the_squared_error():
    values = torch.tensor([[1.0, 3.0]])
    loss, _ = value_loss(values, values, torch.tensor([[0.0, 1.0]]), torch.tensor([[True, True]]), tokens=2, clip=None)
    assert loss.item() == pytest.approx(0.5 * (1 + 4) / 2)


# --- long answers: the sum is made block by block of 256 tokens --------------------------------------------------


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-10), (torch.float32, 1e-4)])
@pytest.mark.parametrize(("gamma", "lam"), [(1.0, 0.0), (1.0, 0.95), (0.95, 1.0), (1.0, 1.0), (0.99, 0.9)])
@pytest.mark.parametrize("width", [1, 255, 256, 257, 512, 1000])
def test_gae_of_long_answers_is_the_loop_from_the_end(width, gamma, lam, dtype, tolerance):
    generator = torch.Generator().manual_seed(width)
    values = torch.randn(3, width, generator=generator, dtype=dtype)
    rewards = torch.tensor([1.0, -0.5, 0.3], dtype=dtype)
    mask = torch.ones(3, width, dtype=torch.bool)
    mask[1, : width // 3] = False
    mask[2, width // 2 :] = False
    advantages_BT, returns_BT = gae(token_rewards(rewards, mask), values, mask, gamma=gamma, lam=lam)
    assert advantages_BT.dtype == returns_BT.dtype == dtype
    expected = torch.zeros(3, width, dtype=torch.float64)
    for row in range(3):
        after, ahead, reward = 0.0, 0.0, rewards[row].item()
        for t in reversed(mask[row].nonzero().flatten().tolist()):
            value = values[row, t].item()
            ahead = reward + gamma * after - value + gamma * lam * ahead
            expected[row, t], after, reward = ahead, value, 0.0
    torch.testing.assert_close(advantages_BT.double(), expected, rtol=tolerance, atol=tolerance)
    returns = torch.where(mask, expected + values.double(), 0.0)
    torch.testing.assert_close(returns_BT.double(), returns, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("shape", [(0, 0), (0, 4), (2, 0), (2, 4)])
def test_no_tokens_give_no_advantages(shape):
    mask, values = torch.zeros(shape, dtype=torch.bool), torch.full(shape, float("nan"))
    for found in gae(token_rewards(torch.ones(shape[0]), mask), values, mask, gamma=1.0, lam=0.95):
        assert found.shape == shape
        assert not found.any()
