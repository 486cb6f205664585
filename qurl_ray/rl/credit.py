"""Credit of turns in algorithms that compare the samples of a prompt: the values compared, and who gets the result.

    rewards of turns ─► returns of each sample ─► compared with those of its group ─► advantages

    trajectory   one return, the reward of the trajectory, for all its tokens
    turn         a return for each turn: its reward and those of later turns, not discounted
    spread       the same, after the reward of the trajectory was divided evenly over its turns

A turn is compared with the turns of the same number in the other samples of its group. MT-GRPO
(https://arxiv.org/abs/2505.11821) gives credit to turns, too, from rewards of a tool call and of the outcome, but
compares each reward by itself and adds the results; here the sum is compared, by whichever function
`algorithm.advantage` names. GiGPO
(https://arxiv.org/abs/2505.10978) compares returns from a step on, too, but of steps that were taken in the same state
of the environment; the number of a turn stands for the state here, since not every environment tells its state.

The returns of the other samples do not depend on what this one drew, so with `rloo` they are a baseline that does not
bias the gradient, also where the policy decides when a trajectory ends; but turns that no other sample reaches have no
share in it. Rewards that are centred by themselves and added then lack this: how many means are subtracted depends on
how many turns follow (https://github.com/verl-project/verl/issues/7244).
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import Literal, NamedTuple

import numpy as np

from qurl_ray.rl.advantages import AdvantageEstimator, advantages, all_equal
from qurl_ray.types import Trajectory, TurnCredit

CreditMode = Literal["trajectory", "turn", "spread"]
"""Meaning of `algorithm.turn_credit`; see above."""

Returns = tuple[Sequence[float], Sequence[int]]
"""Returns of a sample, and the number of tokens that get each: one with mode "trajectory", else one for each turn."""


def turn_returns(reward: float, turns: TurnCredit | None, mode: CreditMode) -> list[float]:
    """Return the returns of a sample to compare: one with mode "trajectory", else one for each turn.

    Args:
        reward: reward of the trajectory.
        turns: None for an answer of one turn.
    """
    if turns is None or mode == "trajectory":
        return [reward]
    if mode == "spread":
        count = len(turns.rewards)
        return [reward * ((count - number) / count) for number in range(count)]
    return turns.rewards[::-1].cumsum()[::-1].tolist()


class RowRewards(NamedTuple):
    """Part that a row has in the returns of its trajectory."""

    reward: float
    """Reward of the whole trajectory."""
    turns: TurnCredit | None
    """Turns of the row."""
    lengths: list[int]
    """Number of tokens that the policy drew in each."""
    cost: float
    """Subtracted from the reward of the trajectory, or of its last turn."""


def rewards_of_row(row: Trajectory, cost: float = 0.0) -> RowRewards:
    """Return the part of a row, or of a whole trajectory."""
    return RowRewards(row.reward, row.turns, row.turn_lengths.tolist(), cost)


def returns_of(sample: Trajectory, mode: CreditMode) -> Returns:
    """Return the returns of a sample to compare."""
    return returns_of_rows([rewards_of_row(sample)], mode)


def returns_of_rows(rows: Sequence[RowRewards], mode: CreditMode) -> Returns:
    """Return the returns of a trajectory to compare, from the parts of its rows in their order."""
    cost = sum(row.cost for row in rows)
    lengths = [length for row in rows for length in row.lengths]
    parts = [row.turns for row in rows if row.turns is not None]
    turns = None
    if parts:
        rewards = np.concatenate([part.rewards for part in parts])
        turns = TurnCredit(ends=np.cumsum(lengths), rewards=rewards).plus(-cost)
    return turn_returns(rows[0].reward - cost, turns, mode), [sum(lengths)] if mode == "trajectory" else lengths


def advantages_of_rows(advantages_K: np.ndarray, rows: Sequence[RowRewards], mode: CreditMode) -> list[np.ndarray]:
    """Return the advantages of each row from the advantages of its trajectory (compare_turns)."""
    if mode == "trajectory":
        return [advantages_K] * len(rows)
    return np.split(advantages_K, np.cumsum([len(row.lengths) for row in rows])[:-1])


def without_signal(returns: Sequence[Sequence[Sequence[float]]]) -> np.ndarray:
    """Return bool [P]: True for groups whose samples have equal returns at every turn that several of them have.

    Args:
        returns: by group, sample and turn; a missing sample has none.
    """
    returns_PKG = _by_turn(returns)
    P, K, G = returns_PKG.shape
    return np.logical_and.reduce(all_equal(returns_PKG.reshape(P * K, G)).reshape(P, K), axis=1)


def compare_turns(
    samples: Sequence[Sequence[Returns]], compare: AdvantageEstimator, mode: CreditMode
) -> list[list[np.ndarray]]:
    """Return the advantages of each sample by group, float64: one with mode "trajectory", else one for each turn.

    The returns from one turn number of a group's samples are a row of the array that `compare` gets; samples without
    such a turn are NaN. The lengths are the tokens of the turns. A turn that only one sample of the group has cannot be
    compared: its advantage is 0, and `compare` does not get it.

    Args:
        samples: by group and sample; each group has at least one.

    Raises:
        ConfigError: as of rl.advantages.advantages.
    """
    returns_PKG = _by_turn([[returns for returns, _ in group] for group in samples])
    lengths_PKG = _by_turn([[lengths for _, lengths in group] for group in samples])
    # With one return for the whole trajectory, the advantage in a group of one sample is left to `compare`.
    advantages_PKG = np.zeros_like(returns_PKG)
    compared_PK = (~np.isnan(returns_PKG)).sum(axis=2) >= (1 if mode == "trajectory" else 2)
    if compared_PK.any():
        advantages_PKG[compared_PK] = advantages(returns_PKG[compared_PK], compare, lengths_PKG[compared_PK])
    return [
        [advantages_PKG[p, : len(returns), g] for g, (returns, _) in enumerate(group)]
        for p, group in enumerate(samples)
    ]


def credited(sample: Trajectory, advantages_K: np.ndarray, mode: CreditMode) -> Trajectory:
    """Return the sample with the advantages that `compare_turns` found."""
    if mode == "trajectory" or sample.turns is None:
        return replace(sample, advantage=float(advantages_K[0]))
    return replace(sample, turns=replace(sample.turns, advantages=advantages_K))


def _by_turn(values: Sequence[Sequence[Sequence[float]]]) -> np.ndarray:
    """Return values by group, sample and turn as float64 [P, K, G], padded with NaN."""
    turns = max((len(of_turns) for group in values for of_turns in group), default=0)
    padded_PKG = np.full((len(values), turns, max(map(len, values))), np.nan)
    for p, group in enumerate(values):
        for g, of_turns in enumerate(group):
            padded_PKG[p, : len(of_turns), g] = of_turns
    return padded_PKG
