"""Loss of the policy: a clipped surrogate of the policy gradient, corrected for rollouts drawn by another policy.

Policies: `behavior` b is the engine that drew the tokens, `prox` p the full-precision weights before the step, `theta`
the weights being trained. rho = p/b is a constant; R = theta/p carries the gradient; A is the advantage. Per token, the
objective to maximise is

    ppo      w · min(R A, clip(R, 1-εl, (1+εh)·v) A)       https://arxiv.org/abs/1707.06347
    gspo     the same with R = exp(mean_t log(theta/p))    GSPO-token, https://arxiv.org/abs/2507.18071
    cispo    w · sg(clip(R, 1-εl, 1+εh)) · A · log theta   https://arxiv.org/abs/2506.13585

εl < εh is DAPO's clip-higher. For A < 0, dual clip bounds a surrogate from below by c·A. With dual clip, gspo is TBPO
(https://arxiv.org/abs/2604.07853): of the answers with A < 0, only those with a ratio in [1-εl, c] have a gradient.

The weight w and the factor v, which widens the upper bound, come from rl.corrections:

    ignore   w = 1               v = 1
    tis      w = min(rho, C)     v = 1                     FlashRL
    acr      w = min(rho, C)     v = max(1, rho/C)         QuRL, https://arxiv.org/abs/2602.13953

ACR's upper bound is (1+εh)/r with r = b / max(b, p/C) = min(1, C/rho): if truncation has reduced a token's weight, its
ratio may move further. For rho <= C, for A < 0, and at R = 1, ACR and TIS are the same bit for bit.

Optional terms of the loss are + β · KL(theta‖reference) and - η · entropy. Both are averaged like the surrogate.
"""

from dataclasses import dataclass, field
from typing import Literal

import torch

from qurl_ray.rl.corrections import CorrectionSettings, correct
from qurl_ray.rl.diagnostics import mismatch_sums, update_sums
from qurl_ray.rl.ratios import Estimator, Sums, at_least_float32, kl_estimate, log_ratio
from qurl_ray.rl.surrogate import Bounds, Form, Surrogate, ppo, surrogate_of


@dataclass(frozen=True, slots=True, kw_only=True)
class ObjectiveSettings:
    """Settings of the objective, as plain values."""

    form: Form = ppo
    correction: CorrectionSettings = field(default_factory=CorrectionSettings)
    clip_low: float
    clip_high: float
    dual_clip: float | None = None
    """c: for A < 0 the surrogate is at least c·A, before the weight is applied."""
    loss_mean: Literal["token", "sequence", "fixed"] = "token"
    fixed_length: int = 1
    """Length in tokens by which loss_mean "fixed" divides."""
    kl_coef: float = 0.0
    kl_estimator: Estimator = "k3"
    entropy_coef: float = 0.0
    router_balance_coef: float = 0.0
    """Factors of the losses of routers, which the learner adds (learner.routers)."""
    router_z_coef: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Denominators:
    """Numbers of tokens, sequences and turns of the whole update: all micro-batches of all ranks. A trajectory of
    several rows is one sequence."""

    tokens: int
    sequences: int
    turns: int = 0
    """Number of turns, for a value model that has a value for each; an answer without an environment is one."""


def objective(
    logprobs_BT: torch.Tensor,
    prox_BT: torch.Tensor,
    behavior_BT: torch.Tensor,
    advantages: torch.Tensor,
    mask_BT: torch.Tensor,
    denominators: Denominators,
    settings: ObjectiveSettings,
    *,
    reference_BT: torch.Tensor | None = None,
    entropy_BT: torch.Tensor | None = None,
    strength: float = 1.0,
    drawn_B: torch.Tensor | None = None,
) -> tuple[torch.Tensor, Sums]:
    """Return the loss to minimise, summed over this micro-batch and divided by the global denominator, and metric sums.

    With correction.metrics_only, the loss has no correction, but the sums describe the correction.

    token mean:     -sum_it f_it / tokens                          DAPO
    sequence mean:  -sum_i (sum_t f_it / |o_i|) / sequences        GRPO
    fixed:          -sum_it f_it / (sequences · fixed_length)      Dr. GRPO

    The losses of micro-batches and ranks therefore add up to the loss of the whole batch. |o_i| is the number of tokens
    of the whole answer: where it has several rows, each row has a part of its mean, and all of them the weight of one
    sequence. Ratios and weights of sequences (gspo, rl.corrections) are those of each row.

    Args:
        logprobs_BT: log theta of the sampled tokens, with gradient; prox_BT and behavior_BT likewise for p and b.
        advantages: one per sequence, [B], or per token, [B, T].
        mask_BT: bool, True on sampled tokens. Positions where it is False may hold any value, even nan. A sampled
            token's log-prob must be finite under theta or p, and under b or p, since -inf - -inf is nan.
        reference_BT: log-probs under the reference policy; needed for a KL loss.
        entropy_BT: entropy of theta's distribution at each token, in nats; with gradient if it is part of the loss.
        strength: λ of rl.corrections.
        drawn_B: int64, |o_i| of each row's answer; None if each is one row.
    """
    if (settings.kl_coef and reference_BT is None) or (settings.entropy_coef and entropy_BT is None):
        raise ValueError("a KL loss needs reference_BT, an entropy bonus entropy_BT")
    prox_BT, behavior_BT, advantages = prox_BT.detach(), behavior_BT.detach(), advantages.detach()
    log_rho_BT = log_ratio(prox_BT, behavior_BT, mask_BT)
    corrected = correct(log_rho_BT, mask_BT, settings.correction, strength)
    applies = not settings.correction.metrics_only
    old_BT = behavior_BT if applies and settings.correction.ratio == "behavior" else prox_BT
    log_ratio_BT = log_ratio(logprobs_BT, old_BT, mask_BT)
    adv_BT = torch.where(mask_BT, per_token(advantages, log_ratio_BT), 0.0)

    def clipped(widening_BT: torch.Tensor) -> tuple[Surrogate, Bounds]:
        upper_BT = (1 + settings.clip_high) * widening_BT
        bounds = Bounds(lower=1 - settings.clip_low, upper_BT=upper_BT, dual=settings.dual_clip)
        return surrogate_of(settings.form, log_ratio_BT, adv_BT, mask_BT, bounds), bounds

    term, bounds = clipped(corrected.widening_BT)
    if applies:
        values_BT = corrected.weight_BT * term.value_BT
    else:
        values_BT = clipped(torch.ones_like(adv_BT))[0].value_BT
    loss = -mean(values_BT, mask_BT, denominators, settings, drawn_B)
    sums = mismatch_sums(prox_BT, behavior_BT, log_rho_BT, mask_BT) | corrected.sums
    moved_BT = log_ratio(logprobs_BT.detach(), prox_BT, mask_BT)
    sums |= update_sums(moved_BT, adv_BT, mask_BT, corrected.weight_BT, term, bounds, settings.clip_high)
    if reference_BT is not None:
        kl_BT = kl_estimate(log_ratio(logprobs_BT, reference_BT.detach(), mask_BT), settings.kl_estimator)
        if settings.kl_coef:
            loss = loss + settings.kl_coef * mean(kl_BT, mask_BT, denominators, settings, drawn_B)
        sums["kl_reference"] = torch.where(mask_BT, kl_BT.detach(), 0.0).double().sum()
    if entropy_BT is not None:
        if settings.entropy_coef:
            loss = loss - settings.entropy_coef * mean(entropy_BT, mask_BT, denominators, settings, drawn_B)
        sums["entropy"] = torch.where(mask_BT, entropy_BT.detach(), 0.0).double().sum()
    return loss, sums


def per_token(advantages: torch.Tensor, like_BT: torch.Tensor) -> torch.Tensor:
    """Expand advantages [B] or [B, T] to [B, T], in the dtype of `like_BT`."""
    by_token = advantages if advantages.ndim == 2 else advantages[:, None]
    return by_token.to(like_BT.dtype).expand_as(like_BT)


def mean(
    values_BT: torch.Tensor,
    mask_BT: torch.Tensor,
    denominators: Denominators,
    settings: ObjectiveSettings,
    drawn_B: torch.Tensor | None = None,
) -> torch.Tensor:
    """Contribution of this micro-batch to the mean over the update; see `objective`."""
    values_BT = torch.where(mask_BT, at_least_float32(values_BT), 0.0)
    if settings.loss_mean == "token":
        return values_BT.sum() / max(1, denominators.tokens)
    if settings.loss_mean == "fixed":
        return values_BT.sum() / (denominators.sequences * settings.fixed_length)
    # A row is never split between micro-batches; the length of an answer of several rows comes with them.
    lengths_B = mask_BT.sum(dim=1) if drawn_B is None else drawn_B
    return (values_BT.sum(dim=1) / lengths_B.clamp(min=1)).sum() / denominators.sequences
