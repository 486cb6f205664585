"""The clipped policy objective and its corrections for rollouts drawn by another (quantized) policy.

Policies: `behavior` b is the engine that drew the tokens, `prox` p the full-precision weights before the step, `theta`
the weights being trained. rho = p/b is a constant; R = theta/p carries the gradient; C is the cap on rho.

    ignore   min(R A, clip(R, 1-εl, 1+εh) A)
    tis      min(rho, C) · min(R A, clip(R, 1-εl, 1+εh) A)                    FlashRL
    acr      min(rho, C) · min(R A, clip(R, 1-εl, (1+εh)·max(1, rho/C)) A)    QuRL, https://arxiv.org/abs/2602.13953

ACR's upper bound is (1+εh)/r with r = b / max(b, p/C) = min(1, C/rho): where truncation has weakened a token's weight,
its ratio may move further. Where rho <= C, for A < 0, and at R = 1, ACR and TIS are the same bit for bit.
"""

from dataclasses import dataclass
from typing import Literal

import torch

MAX_LOG_RATIO = 20.0

Sums = dict[str, torch.Tensor]
"""Metrics on their way: sums over tokens, and maxima under keys that begin with "max_"."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ObjectiveSettings:
    """What the objective is, as values."""

    correction: Literal["acr", "tis", "ignore"]
    is_cap: float
    clip_low: float
    clip_high: float
    dual_clip: float | None
    loss_mean: Literal["token", "sequence"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Denominators:
    """Counts over the whole update: all micro-batches of all ranks."""

    tokens: int
    sequences: int


def log_ratio(numerator_BT: torch.Tensor, denominator_BT: torch.Tensor, mask_BT: torch.Tensor) -> torch.Tensor:
    """log(numerator/denominator) in float32 or better, bounded by ±20, and 0 where masked.

    The mask comes before any exp: where(mask, f(nan), 0) is finite, but its gradient is 0 * nan.
    """
    ratio_BT = torch.where(mask_BT, _at_least_float32(numerator_BT) - _at_least_float32(denominator_BT), 0.0)
    return ratio_BT.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)


def objective(
    logprobs_BT: torch.Tensor,
    prox_BT: torch.Tensor,
    behavior_BT: torch.Tensor,
    advantages: torch.Tensor,
    mask_BT: torch.Tensor,
    denominators: Denominators,
    settings: ObjectiveSettings,
) -> tuple[torch.Tensor, Sums]:
    """The loss to minimise, summed over this micro-batch and divided by the global denominator, and metric sums.

    token mean:     -sum_it f_it / tokens          (DAPO)
    sequence mean:  -sum_i (sum_t f_it / |o_i|) / sequences   (GRPO)

    so the losses of micro-batches, and of ranks, add up to the loss of the whole batch.

    Args:
        logprobs_BT: log theta of the sampled tokens, with gradient; prox_BT and behavior_BT likewise for p and b.
        advantages: one per sequence, [B], or per token, [B, T].
        mask_BT: bool, True on sampled tokens. Masked positions may hold anything, nan included.
    """
    log_rho_BT = log_ratio(prox_BT.detach(), behavior_BT.detach(), mask_BT)
    rho_BT = log_rho_BT.exp()
    ratio_BT = log_ratio(logprobs_BT, prox_BT.detach(), mask_BT).exp()
    adv_BT = advantages if advantages.ndim == 2 else advantages[:, None]
    adv_BT = adv_BT.to(ratio_BT.dtype).expand_as(ratio_BT)

    upper_BT = torch.full_like(ratio_BT, 1 + settings.clip_high)
    if settings.correction == "acr":
        upper_BT = upper_BT * (rho_BT / settings.is_cap).clamp(min=1.0)
    clipped_BT = ratio_BT.clamp(min=1 - settings.clip_low).minimum(upper_BT)
    surrogate_BT = torch.minimum(ratio_BT * adv_BT, clipped_BT * adv_BT)
    bounded_BT = torch.zeros_like(mask_BT)
    if settings.dual_clip is not None:
        floor_BT = settings.dual_clip * adv_BT
        bounded_BT = (adv_BT < 0) & (surrogate_BT < floor_BT)
        surrogate_BT = torch.where(bounded_BT, floor_BT, surrogate_BT)
    weight_BT = torch.ones_like(rho_BT) if settings.correction == "ignore" else rho_BT.clamp(max=settings.is_cap)
    loss = -_weighted_sum(weight_BT * surrogate_BT, mask_BT, denominators, settings.loss_mean)

    with torch.no_grad():
        counted = {
            "clipped_upper": (adv_BT > 0) & (ratio_BT > upper_BT),
            "clipped_lower": (adv_BT < 0) & (ratio_BT < 1 - settings.clip_low),
            "dual_clipped": bounded_BT,
            "truncated": rho_BT > settings.is_cap,
            # tokens whose gradient TIS would have clipped away and ACR lets through
            "acr_active": (adv_BT > 0) & (ratio_BT > 1 + settings.clip_high) & (ratio_BT <= upper_BT),
        }
        sums = {name: (hit & mask_BT).sum() for name, hit in counted.items()}
        sums |= mismatch_sums(log_rho_BT, mask_BT)
    return loss, sums


def mismatch_sums(log_rho_BT: torch.Tensor, mask_BT: torch.Tensor) -> Sums:
    """What the health metrics of b against p are made of; `log_rho_BT` is 0 where masked."""
    rho_BT = log_rho_BT.double().exp()
    return {
        "tokens": mask_BT.sum(),
        "rho": (rho_BT * mask_BT).sum(),
        "rho_squared": (rho_BT.square() * mask_BT).sum(),
        # k3 estimate of KL(b||p): the samples are from b
        "kl": ((rho_BT - 1 - log_rho_BT) * mask_BT).sum(),
        "abs_log_rho": (log_rho_BT.abs() * mask_BT).sum(),
        "max_rho": torch.where(mask_BT, rho_BT, 0.0).max() if rho_BT.numel() else torch.tensor(0.0),
    }


def _weighted_sum(
    values_BT: torch.Tensor, mask_BT: torch.Tensor, denominators: Denominators, mean: str
) -> torch.Tensor:
    values_BT = torch.where(mask_BT, values_BT, 0.0)
    if mean == "token":
        return values_BT.sum() / denominators.tokens
    lengths_B = mask_BT.sum(dim=1).clamp(min=1)  # a sequence never straddles micro-batches, so its length is here
    return (values_BT.sum(dim=1) / lengths_B).sum() / denominators.sequences


def _at_least_float32(x: torch.Tensor) -> torch.Tensor:
    return x if x.dtype == torch.float64 else x.float()
