"""Ratios of probabilities, their means over sequences, and estimates of KL divergence from them."""

from typing import Literal

import torch

MAX_LOG_RATIO = 20.0
"""Bound on |log(p/q)| of a token, and on its sum over a sequence, in nats: e^20 is 4.9e8."""

Estimator = Literal["k1", "k2", "k3"]
Sums = dict[str, torch.Tensor]
"""Partial metrics: sums over tokens or sequences, and maxima under keys that begin with "max_"."""


def log_ratio(numerator_BT: torch.Tensor, denominator_BT: torch.Tensor, mask_BT: torch.Tensor) -> torch.Tensor:
    """log(numerator/denominator) in float32 or better, bounded by ±20, and 0 where masked.

    The mask is applied before any exp: where(mask, f(nan), 0) is finite, but its gradient is 0 * nan.
    """
    ratio_BT = torch.where(mask_BT, at_least_float32(numerator_BT) - at_least_float32(denominator_BT), 0.0)
    return ratio_BT.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)


def at_least_float32(x: torch.Tensor) -> torch.Tensor:
    """Return float64 tensors unchanged, and all others as float32."""
    return x if x.dtype == torch.float64 else x.float()


def sequence_mean(values_BT: torch.Tensor, mask_BT: torch.Tensor) -> torch.Tensor:
    """Mean over each sequence's tokens, [B]; 0 for a sequence without tokens."""
    return torch.where(mask_BT, values_BT, 0.0).sum(dim=1) / mask_BT.sum(dim=1).clamp(min=1)


def kl_estimate(log_ratio_BT: torch.Tensor, estimator: Estimator) -> torch.Tensor:
    """Estimate KL(x‖y) from a token drawn from x, given d = log(x/y). http://joschu.net/blog/kl-approx.html

        k1 = d                    unbiased, may be negative
        k2 = d²/2                 biased, low variance; its gradient with respect to x is that of KL(x‖y)
        k3 = exp(-d) - 1 + d      unbiased, never negative; its gradient is not that of KL(x‖y)

    As a loss, k1's gradient has mean zero, so it does not constrain the policy.
    """
    if estimator == "k1":
        return log_ratio_BT
    if estimator == "k2":
        return log_ratio_BT.square() / 2
    return torch.exp(-log_ratio_BT) - 1 + log_ratio_BT
