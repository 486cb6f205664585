"""Rewards to advantages: the functions that `algorithm.advantage` names, and what a step does with them.

Each compares the samples of a prompt: rewards and lengths (tokens of each answer), both [P, G] of a whole step, to what
each sample is worth, float64 [P, G]. NaN is no sample: it counts nowhere.
"""

from collections.abc import Callable, Sequence

import numpy as np

EPS = 1e-6

Comparison = Callable[[np.ndarray, np.ndarray], np.ndarray]
"""(rewards_PG, lengths_PG) to advantages [P, G]."""


def grpo(rewards_PG: np.ndarray, lengths_PG: np.ndarray) -> np.ndarray:
    """(r - mean_g r) / (std_g r + 1e-6), unbiased std: https://arxiv.org/abs/2402.03300"""
    centered_PG = _centered(rewards_PG)
    return centered_PG / (np.sqrt((centered_PG**2).sum(axis=1, keepdims=True) / _others(rewards_PG)) + EPS)


def dr_grpo(rewards_PG: np.ndarray, lengths_PG: np.ndarray) -> np.ndarray:
    """r - mean_g r: https://arxiv.org/abs/2503.20783"""
    return _centered(rewards_PG)


def rloo(rewards_PG: np.ndarray, lengths_PG: np.ndarray) -> np.ndarray:
    """r - mean of the G-1 others: https://arxiv.org/abs/2402.14740"""
    return _centered(rewards_PG) * (_sizes(rewards_PG) / _others(rewards_PG))


def reinforce_baseline(rewards_PG: np.ndarray, lengths_PG: np.ndarray) -> np.ndarray:
    """x = r - mean_g r, then (x - mean x) / sqrt(var x + 1e-8), both over all tokens of the step, unbiased.

    REINFORCE++-baseline, https://arxiv.org/abs/2501.03262. A group whose rewards are all equal has 0 before the second
    step alone: long right answers shift the mean that is subtracted from all.
    """
    centered_PG = _centered(rewards_PG)
    lengths_PG = np.where(np.isnan(rewards_PG), 0, lengths_PG)
    tokens = lengths_PG.sum()
    mean = (centered_PG * lengths_PG).sum() / max(1, tokens)
    variance = ((centered_PG - mean) ** 2 * lengths_PG).sum() / max(1, tokens - 1)
    return (centered_PG - mean) / np.sqrt(variance + 1e-8)


def advantages(rewards_PG: np.ndarray, compare: Comparison, lengths_PG: np.ndarray | None = None) -> np.ndarray:
    """What each sample is worth compared with the others of its prompt, float64 [P, G]; 0 where there is none.

    With the functions above, a group whose rewards are all equal gets exactly 0 (but see reinforce_baseline), and so
    does a group of one: it has nothing to be compared with.

    Args:
        rewards_PG: of a whole step; NaN is no sample (see `padded`).
        lengths_PG: tokens of each answer; all alike if absent.

    Raises:
        ValueError: `compare` returned another shape, or a value that is not finite.
    """
    rewards_PG = np.asarray(rewards_PG, dtype=np.float64)
    missing_PG = np.isnan(rewards_PG)
    lengths_PG = np.where(missing_PG, 0, 1 if lengths_PG is None else lengths_PG)
    found_PG = np.asarray(compare(rewards_PG, lengths_PG), dtype=np.float64)
    if found_PG.shape != rewards_PG.shape:
        raise ValueError(f"it returned the shape {list(found_PG.shape)}, expected that of rewards_PG")
    found_PG = np.where(missing_PG, 0.0, found_PG)
    if not np.isfinite(found_PG).all():
        raise ValueError("it returned values that are not finite")
    return found_PG


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


def _sizes(rewards_PG: np.ndarray) -> np.ndarray:
    """Samples of each group, [P, 1]."""
    return (~np.isnan(rewards_PG)).sum(axis=1, keepdims=True)


def _others(rewards_PG: np.ndarray) -> np.ndarray:
    """Samples of each group but one, at least 1, [P, 1]."""
    return np.maximum(1, _sizes(rewards_PG) - 1)


def _centered(rewards_PG: np.ndarray) -> np.ndarray:
    """r - mean_g r, exactly 0 in groups whose rewards are all equal and where there is no sample, [P, G]."""
    there_PG = ~np.isnan(rewards_PG)
    mean_P1 = np.where(there_PG, rewards_PG, 0.0).sum(axis=1, keepdims=True) / np.maximum(1, _sizes(rewards_PG))
    return np.where(there_PG & ~all_equal(rewards_PG)[:, None], rewards_PG - mean_P1, 0.0)
