"""Rewards to advantages."""

import numpy as np

EPS = 1e-6


def group_relative(rewards_PG: np.ndarray, *, divide_by_std: bool = True) -> np.ndarray:
    """A[p, g] = (r[p, g] - mean_g r[p]) / (std_g r[p] + 1e-6), unbiased std.

    GRPO (https://arxiv.org/abs/2402.03300); divide_by_std=False is Dr. GRPO (https://arxiv.org/abs/2503.20783).
    A group whose rewards are all equal gets exactly 0.

    Args:
        rewards_PG: float, [P, G] with G >= 2.

    Returns:
        float64 [P, G].
    """
    rewards_PG = np.asarray(rewards_PG, dtype=np.float64)
    equal_P1 = all_equal(rewards_PG)[:, None]
    centered_PG = np.where(equal_P1, 0.0, rewards_PG - rewards_PG.mean(axis=1, keepdims=True))
    if not divide_by_std:
        return centered_PG
    return centered_PG / (rewards_PG.std(axis=1, ddof=1, keepdims=True) + EPS)


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
