"""Ratios of probabilities, their means over sequences, and estimates of KL divergences made of them."""

from typing import Literal

import torch

MAX_LOG_RATIO = 20.0
"""Bound on |log(p/q)| of a token, and on the sum over a sequence: e^20 is 4.9e8."""

Estimator = Literal["k1", "k2", "k3"]
Sums = dict[str, torch.Tensor]
"""Metrics on their way: sums over tokens or sequences, and maxima under keys that begin with "max_"."""


def log_ratio(numerator_BT: torch.Tensor, denominator_BT: torch.Tensor, mask_BT: torch.Tensor) -> torch.Tensor:
    """log(numerator/denominator) in float32 or better, bounded by ±20, and 0 where masked.

    The mask comes before any exp: where(mask, f(nan), 0) is finite, but its gradient is 0 * nan.
    """
    ratio_BT = torch.where(mask_BT, at_least_float32(numerator_BT) - at_least_float32(denominator_BT), 0.0)
    return ratio_BT.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)


def at_least_float32(x: torch.Tensor) -> torch.Tensor:
    """float64 stays what it is; all else becomes float32."""
    return x if x.dtype == torch.float64 else x.float()


def sequence_mean(values_BT: torch.Tensor, mask_BT: torch.Tensor) -> torch.Tensor:
    """[B]: mean over each sequence's tokens; 0 for a sequence without any."""
    return torch.where(mask_BT, values_BT, 0.0).sum(dim=1) / mask_BT.sum(dim=1).clamp(min=1)


def kl_estimate(log_ratio_BT: torch.Tensor, estimator: Estimator) -> torch.Tensor:
    """Of KL(x‖y) from a token that was drawn from x, given d = log(x/y). http://joschu.net/blog/kl-approx.html

        k1 = d                    unbiased, may be negative
        k2 = d²/2                 biased, low variance; its gradient with respect to x is that of KL(x‖y)
        k3 = exp(-d) - 1 + d      unbiased, never negative; its gradient is not that of KL(x‖y)

    As a loss, k1's gradient has mean zero: it constrains nothing.
    """
    if estimator == "k1":
        return log_ratio_BT
    if estimator == "k2":
        return log_ratio_BT.square() / 2
    return torch.exp(-log_ratio_BT) - 1 + log_ratio_BT
