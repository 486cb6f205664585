"""Advantages from rewards: the functions that `algorithm.advantage` names, and helpers to apply them to a step.

Each function compares the samples of a prompt. It takes the rewards and lengths (in tokens) of all answers of a step,
both [P, G], and returns the advantage of each sample, float64 [P, G]. NaN marks a missing sample, which is ignored.
"""

from collections.abc import Callable, Sequence

import numpy as np

from qurl_ray.errors import ExtensionError
from qurl_ray.extensions import call_extension, reference_of

EPS = 1e-6

AdvantageEstimator = Callable[[np.ndarray, np.ndarray], np.ndarray]
"""Function of (rewards_PG, lengths_PG) that returns advantages [P, G]."""


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

    REINFORCE++-baseline, https://arxiv.org/abs/2501.03262. A group whose rewards are all equal has 0 only before the
    second step: long correct answers shift the mean that is subtracted from all samples.
    """
    centered_PG = _centered(rewards_PG)
    lengths_PG = np.where(np.isnan(rewards_PG), 0, lengths_PG)
    tokens = lengths_PG.sum()
    mean = (centered_PG * lengths_PG).sum() / max(1, tokens)
    variance = ((centered_PG - mean) ** 2 * lengths_PG).sum() / max(1, tokens - 1)
    return (centered_PG - mean) / np.sqrt(variance + 1e-8)


def advantages(rewards_PG: np.ndarray, compare: AdvantageEstimator, lengths_PG: np.ndarray | None = None) -> np.ndarray:
    """Return the advantage of each sample over the others of its prompt, float64 [P, G]; 0 for missing samples.

    With the functions above, a group whose rewards are all equal gets exactly 0 (but see reinforce_baseline). So does a
    group of one sample, which cannot be compared with anything.

    Args:
        rewards_PG: rewards of a whole step; NaN marks a missing sample (see `padded`).
        compare: function that `algorithm.advantage` names.
        lengths_PG: tokens of each answer; if absent, all answers count as equally long.

    Raises:
        ExtensionError: `compare` raised, or returned another shape, or a value that is not finite.
    """
    rewards_PG = np.asarray(rewards_PG, dtype=np.float64)
    missing_PG = np.isnan(rewards_PG)
    lengths_PG = np.where(missing_PG, 0, 1 if lengths_PG is None else lengths_PG)
    result = call_extension("advantage", compare, rewards_PG, lengths_PG)
    if not isinstance(result, np.ndarray) or result.shape != rewards_PG.shape:
        shape = f"an array {list(result.shape)}" if isinstance(result, np.ndarray) else type(result).__name__
        expected = f"expected a numpy array {list(rewards_PG.shape)}, as the rewards: one row for each prompt"
        raise ExtensionError(f"advantage {reference_of(compare)} returned {shape}, {expected}")
    advantages_PG = np.where(missing_PG, 0.0, result.astype(np.float64))
    if not np.isfinite(advantages_PG).all():
        prompt, sample = np.argwhere(~np.isfinite(advantages_PG))[0]
        reason = "none of whose samples is missing"
        if missing_PG[prompt].any():
            gone = ", ".join(map(str, np.flatnonzero(missing_PG[prompt])))
            reason = (
                f"whose sample {gone} is missing: its reward is NaN and its length 0. np.nanmean and np.nanstd with "
                "axis=1, keepdims=True leave it out"
            )
        raise ExtensionError(
            f"advantage {reference_of(compare)} is not finite: {advantages_PG[prompt, sample]} for sample {sample} of "
            f"prompt {prompt}, {reason}"
        )
    return advantages_PG


def all_equal(rewards_PG: np.ndarray) -> np.ndarray:
    """bool [P]: True for groups without a signal, which DAPO's dynamic sampling drops. NaN marks a missing sample."""
    return ~(np.fmax.reduce(rewards_PG, axis=1) > np.fmin.reduce(rewards_PG, axis=1))


def padded(groups: Sequence[Sequence[float]]) -> np.ndarray:
    """Return groups of different sizes as float64 [P, G], padded with NaN to the size of the largest."""
    padded_PG = np.full((len(groups), max(map(len, groups))), np.nan)
    for row_G, group in zip(padded_PG, groups, strict=True):
        row_G[: len(group)] = group
    return padded_PG


def overlong_penalty(lengths_B: np.ndarray, *, max_length: int, buffer: int) -> np.ndarray:
    """DAPO's soft overlong penalty (https://arxiv.org/abs/2503.14476, eq. 13), float64 [B]:

        0                                     length <= max_length - buffer
        (max_length - buffer - length)/buffer up to max_length
        -1                                    beyond

    With buffer 0 there is no penalty.
    """
    if buffer == 0:
        return np.zeros(len(lengths_B))
    return np.clip((max_length - buffer - np.asarray(lengths_B, dtype=np.float64)) / buffer, -1.0, 0.0)


def _sizes(rewards_PG: np.ndarray) -> np.ndarray:
    """Number of samples of each group, [P, 1]."""
    return (~np.isnan(rewards_PG)).sum(axis=1, keepdims=True)


def _others(rewards_PG: np.ndarray) -> np.ndarray:
    """Number of samples of each group less one, but at least 1, [P, 1]."""
    return np.maximum(1, _sizes(rewards_PG) - 1)


def _centered(rewards_PG: np.ndarray) -> np.ndarray:
    """r - mean_g r, [P, G]; exactly 0 for missing samples and in groups whose rewards are all equal."""
    there_PG = ~np.isnan(rewards_PG)
    mean_P1 = np.where(there_PG, rewards_PG, 0.0).sum(axis=1, keepdims=True) / np.maximum(1, _sizes(rewards_PG))
    return np.where(there_PG & ~all_equal(rewards_PG)[:, None], rewards_PG - mean_P1, 0.0)
