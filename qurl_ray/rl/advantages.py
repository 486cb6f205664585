"""Rewards to advantages."""

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
    With reinforce_baseline that holds of x alone: long right answers shift the mean that is subtracted from all.

    Args:
        rewards_PG: float, [P, G]; those of a whole step, for reinforce_baseline.
        lengths_PG: tokens of each answer, for reinforce_baseline; all alike if absent.
    """
    rewards_PG = np.asarray(rewards_PG, dtype=np.float64)
    groups, size = rewards_PG.shape
    if size < 2 or not groups:
        return np.zeros_like(rewards_PG)
    equal_P1 = all_equal(rewards_PG)[:, None]
    centered_PG = np.where(equal_P1, 0.0, rewards_PG - rewards_PG.mean(axis=1, keepdims=True))
    if kind == "grpo":
        return centered_PG / (rewards_PG.std(axis=1, ddof=1, keepdims=True) + EPS)
    if kind == "rloo":
        return centered_PG * (size / (size - 1))
    if kind == "reinforce_baseline":
        lengths_PG = np.ones_like(rewards_PG) if lengths_PG is None else lengths_PG
        tokens = lengths_PG.sum()
        mean = (centered_PG * lengths_PG).sum() / max(1, tokens)
        variance = ((centered_PG - mean) ** 2 * lengths_PG).sum() / max(1, tokens - 1)
        return (centered_PG - mean) / np.sqrt(variance + 1e-8)
    return centered_PG


def all_equal(rewards_PG: np.ndarray) -> np.ndarray:
    """bool [P]: groups that carry no signal. DAPO's dynamic sampling drops these."""
    return rewards_PG.max(axis=1) == rewards_PG.min(axis=1)


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
