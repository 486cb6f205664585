"""Rewards to advantages."""

from collections.abc import Sequence
from typing import Literal

import numpy as np

EPS = 1e-6

Kind = Literal["grpo", "dr_grpo", "rloo", "reinforce_baseline"]


def advantages(rewards_PG: np.ndarray, kind: Kind, lengths_PG: np.ndarray | None = None) -> np.ndarray:
    """What each sample is worth compared with the others of its prompt, float64 [P, G].

        grpo                  (r - mean_g r) / (std_g r + 1e-6), unbiased std      https://arxiv.org/abs/2402.03300
        dr_grpo               r - mean_g r                                         https://arxiv.org/abs/2503.20783
        rloo                  r - mean of the G-1 others                           https://arxiv.org/abs/2402.14740
        reinforce_baseline    x = r - mean_g r, then (x - mean x) / sqrt(var x + 1e-8), both over all tokens of the
                              step, unbiased (REINFORCE++-baseline)                https://arxiv.org/abs/2501.03262

    A group whose rewards are all equal gets exactly 0, and so does a group of one: it has nothing to be compared with.
    NaN is no sample: it counts nowhere and gets 0 (see `padded`).
    With reinforce_baseline that holds of x alone: long right answers shift the mean that is subtracted from all.

    Args:
        rewards_PG: float, [P, G]; those of a whole step, for reinforce_baseline.
        lengths_PG: tokens of each answer, for reinforce_baseline; all alike if absent.
    """
    rewards_PG = np.asarray(rewards_PG, dtype=np.float64)
    there_PG = ~np.isnan(rewards_PG)
    size_P1 = there_PG.sum(axis=1, keepdims=True)
    mean_P1 = np.where(there_PG, rewards_PG, 0.0).sum(axis=1, keepdims=True) / np.maximum(1, size_P1)
    centered_PG = np.where(there_PG & ~all_equal(rewards_PG)[:, None], rewards_PG - mean_P1, 0.0)
    others_P1 = np.maximum(1, size_P1 - 1)
    if kind == "grpo":
        return centered_PG / (np.sqrt((centered_PG**2).sum(axis=1, keepdims=True) / others_P1) + EPS)
    if kind == "rloo":
        return centered_PG * (size_P1 / others_P1)
    if kind == "reinforce_baseline":
        lengths_PG = there_PG if lengths_PG is None else np.where(there_PG, lengths_PG, 0)
        tokens = lengths_PG.sum()
        mean = (centered_PG * lengths_PG).sum() / max(1, tokens)
        variance = ((centered_PG - mean) ** 2 * lengths_PG).sum() / max(1, tokens - 1)
        return np.where(there_PG, (centered_PG - mean) / np.sqrt(variance + 1e-8), 0.0)
    return centered_PG


def all_equal(rewards_PG: np.ndarray) -> np.ndarray:
    """bool [P]: groups that carry no signal. DAPO's dynamic sampling drops these. NaN is no sample."""
    return ~(np.fmax.reduce(rewards_PG, axis=1) > np.fmin.reduce(rewards_PG, axis=1))


def padded(groups: Sequence[Sequence[float]]) -> np.ndarray:
    """Groups of different sizes as float64 [P, G], NaN where a group is shorter than the longest."""
    padded_PG = np.full((len(groups), max(map(len, groups))), np.nan)
    for row_G, group in zip(padded_PG, groups, strict=True):
        row_G[: len(group)] = group
    return padded_PG


def overlong_penalty(lengths_B: np.ndarray, *, max_length: int, buffer: int) -> np.ndarray:
    """DAPO's soft overlong penalty (https://arxiv.org/abs/2503.14476, eq. 13), float64 [B]:

        0                                     length <= max_length - buffer
        (max_length - buffer - length)/buffer up to max_length
        -1                                    beyond

    buffer 0 is no penalty.
    """
    if buffer == 0:
        return np.zeros(len(lengths_B))
    return np.clip((max_length - buffer - np.asarray(lengths_B, dtype=np.float64)) / buffer, -1.0, 0.0)
