"""Corrections for tokens that the quantized engine b drew and the policy p learns from: weights, rejection, vetoes.

rho_t = p/b of a token. All values computed here are constants under autograd.

    raw weight        token: rho_t    sequence: prod_t rho_t    geometric: exp(mean_t log rho_t)    none: 1
    truncation        w = min(raw, C)                            FlashRL's TIS; C = inf is decoupled PPO
    band              w = raw inside [low, high], else 0         MIS, IcePop
    adaptive clip     the upper clip bound times max(1, rho/C)   ACR, https://arxiv.org/abs/2602.13953
    strength λ        1-λ + λ·w where w > 0; ACR's factor too    AIS (https://arxiv.org/abs/2605.13907), see `strength`

Whole sequences get weight 0 by these rules. Each row of a trajectory of several is a sequence here:

    geometric         exp(mean_t log rho_t) outside [low, high]
    k2, k3            mean_t ½ log² rho_t, or mean_t (rho_t - 1 - log rho_t), above a bound
    veto              any rho_t below a bound: p would very rarely have drawn this token

A token with weight 0 still counts in the loss's denominator. Rejection therefore makes an update smaller; it does not
increase the contribution of the other tokens.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import torch

from qurl_ray.errors import ExtensionError
from qurl_ray.extensions import call_extension, reference_of
from qurl_ray.rl.ratios import MAX_LOG_RATIO, Sums, kl_estimate, sequence_mean

Weigh = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
"""Function of (log_rho_BT, mask_BT) that returns token weights [B, T], at least 0. A row is one whole answer."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CorrectionSettings:
    """Settings of the correction for the mismatch between b and p, as plain values."""

    ratio: Literal["proximal", "behavior"] = "proximal"
    """Denominator of the ratio R that is clipped: theta/p, or theta/b (naive importance sampling)."""
    weight: Literal["none", "token", "sequence", "geometric"] = "none"
    weigh: Weigh | None = None
    """User's own weight function, used instead of `weight`, `cap` and `band`."""
    cap: float = float("inf")
    """C, the largest weight under truncation."""
    band: tuple[float, float] | None = None
    adaptive_clip: bool = False
    reject: Literal["none", "geometric", "k2", "k3"] = "none"
    reject_low: float = 0.0
    reject_high: float = float("inf")
    veto: float = 0.0
    ess_floor: float | None = None
    """Lower limit of the kept tokens' effective sample size, as a share; weights move towards 1 until it is met."""
    metrics_only: bool = False
    """True if the objective only measures the correction and does not apply it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Corrected:
    """Weights and widening of the clip bound for the objective, constants [B, T]."""

    weight_BT: torch.Tensor
    widening_BT: torch.Tensor
    """Factor by which the upper clip bound is multiplied."""
    sums: Sums


@torch.no_grad()
def correct(
    log_rho_BT: torch.Tensor, mask_BT: torch.Tensor, settings: CorrectionSettings, strength: float = 1.0
) -> Corrected:
    """Compute the weights and the widening of the clip bounds for a micro-batch of whole sequences.

    Args:
        log_rho_BT: log(p/b), bounded, 0 where masked (rl.ratios.log_ratio).
        strength: λ, the share of the correction that is applied.

    Raises:
        ExtensionError: settings.weigh raised, or returned another shape, or weights that are negative or not finite.
    """
    raw_BT = _raw_weights(log_rho_BT, mask_BT, settings)
    ones_BT = torch.ones_like(raw_BT)
    if settings.weigh:
        weight_BT = _weighed(settings.weigh, log_rho_BT, mask_BT)
    elif settings.weight == "none":
        weight_BT = ones_BT
    else:
        weight_BT = raw_BT.clamp(max=settings.cap)
        if settings.band:
            low, high = settings.band
            weight_BT = torch.where((raw_BT < low) | (raw_BT > high), 0.0, weight_BT)
    vetoed_B = (mask_BT & (log_rho_BT.exp() < settings.veto)).any(dim=1)
    rejected_B = _divergent(log_rho_BT, mask_BT, settings) | vetoed_B
    dropped_BT = (weight_BT == 0) | rejected_B[:, None]
    sums = {
        "truncated": ((raw_BT > settings.cap) & mask_BT).sum(),
        "dropped": (dropped_BT & mask_BT).sum(),
        "rejected_sequences": rejected_B.sum(),
        "vetoed_sequences": vetoed_B.sum(),
    }
    widening_BT = (raw_BT / settings.cap).clamp(min=1.0) if settings.adaptive_clip else ones_BT
    if strength != 1:
        weight_BT, widening_BT = ones_BT.lerp(weight_BT, strength), ones_BT.lerp(widening_BT, strength)
    weight_BT = torch.where(dropped_BT, 0.0, weight_BT)
    chosen_N = weight_BT[mask_BT].double()
    sums |= {"weight": chosen_N.sum(), "weight_squared": chosen_N.square().sum()}
    return Corrected(weight_BT=weight_BT, widening_BT=widening_BT, sums=sums)


def strength(total: torch.Tensor, floor: float) -> float:
    """Largest λ in [0, 1] with (Σv)² / (n Σv²) >= floor, where v = 1-λ + λ·w are the weights of the n kept tokens.

    The published rule mixes the corrected and the uncorrected gradient by λ. It sets λ in each batch from the effective
    sample size and other figures. Its exact form is not public; this floor is our interpretation.

    With m and q the means of w and w², and t = λ/(1-λ), equality holds if (m²-fq) t² + 2m(1-f) t + (1-f) = 0.

    Args:
        total: count, Σw and Σw² of the tokens with w > 0 in a whole step (rl.reduce.moments), float64.
        floor: f, below 1.
    """
    count, first, second = total.tolist()
    if not count:
        return 1.0
    m, q, rest = first / count, second / count, 1 - floor
    a = m * m - floor * q
    if a >= 0:  # the full correction has enough effective samples
        return 1.0
    t = (-m * rest - (m * m * rest * rest - a * rest) ** 0.5) / a
    return t / (1 + t)


def _raw_weights(log_rho_BT: torch.Tensor, mask_BT: torch.Tensor, settings: CorrectionSettings) -> torch.Tensor:
    """Raw weights [B, T]: one per sequence, repeated at its tokens, or one per token (also with weight "none")."""
    if settings.weight == "sequence":
        log_B = log_rho_BT.sum(dim=1).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
    elif settings.weight == "geometric":
        log_B = sequence_mean(log_rho_BT, mask_BT)
    else:
        return log_rho_BT.exp()
    return log_B.exp()[:, None].expand_as(log_rho_BT)


def _weighed(weigh: Weigh, log_rho_BT: torch.Tensor, mask_BT: torch.Tensor) -> torch.Tensor:
    weight_BT = call_extension("correction", weigh, log_rho_BT.clone(), mask_BT)  # it may change its argument in place
    if not isinstance(weight_BT, torch.Tensor) or weight_BT.shape != log_rho_BT.shape:
        shape = f"a tensor {list(weight_BT.shape)}" if isinstance(weight_BT, torch.Tensor) else type(weight_BT).__name__
        expected = f"expected a tensor {list(log_rho_BT.shape)}"
        raise ExtensionError(f"correction {reference_of(weigh)} returned {shape}, {expected}")
    weight_BT = torch.where(mask_BT, weight_BT.to(log_rho_BT.dtype), 0.0)
    if not (weight_BT.isfinite() & (weight_BT >= 0)).all():
        raise ExtensionError(f"correction {reference_of(weigh)} returned weights that are negative or not finite")
    return weight_BT


def _divergent(log_rho_BT: torch.Tensor, mask_BT: torch.Tensor, settings: CorrectionSettings) -> torch.Tensor:
    """bool [B]: True for sequences that the rejection rule drops."""
    if settings.reject == "none":
        return torch.zeros(len(mask_BT), dtype=torch.bool, device=mask_BT.device)
    if settings.reject == "geometric":
        value_B = sequence_mean(log_rho_BT, mask_BT).exp()
    else:
        value_B = sequence_mean(kl_estimate(-log_rho_BT, settings.reject), mask_BT)
    return mask_BT.any(dim=1) & ((value_B < settings.reject_low) | (value_B > settings.reject_high))
