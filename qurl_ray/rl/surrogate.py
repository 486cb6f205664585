"""Clipped forms of the policy gradient, per token: the functions that `algorithm.objective` names.

A form takes log(theta/p), or log(theta/b) with naive importance sampling, the advantages, the mask and the bounds. It
returns the surrogate to be maximised, either as a Surrogate or only as its value [B, T]: see `surrogate_of`.
"""

from dataclasses import dataclass
from typing import Protocol

import torch

from qurl_ray.errors import ExtensionError
from qurl_ray.extensions import call_extension, reference_of
from qurl_ray.rl.ratios import sequence_mean


@dataclass(frozen=True, slots=True, kw_only=True)
class Bounds:
    """Clip bounds of a ratio."""

    lower: float
    """Lower bound, 1 - clip_low."""
    upper_BT: torch.Tensor
    """Upper bound, 1 + clip_high times ACR's widening."""
    dual: float | None
    """c: for A < 0 the surrogate is at least c·A; None for no such bound."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Surrogate:
    """Surrogate of each token, [B, T], before the weight is applied."""

    value_BT: torch.Tensor
    """Value to be maximised."""
    ratio_BT: torch.Tensor
    """Ratio that is clipped, without gradient."""
    bounded_BT: torch.Tensor
    """bool: True where dual clip applies."""
    slope_BT: torch.Tensor
    """|d value / d log theta|, without gradient."""


class Form(Protocol):
    """A clipped form of the policy gradient."""

    def __call__(
        self, log_ratio_BT: torch.Tensor, adv_BT: torch.Tensor, mask_BT: torch.Tensor, bounds: Bounds
    ) -> Surrogate | torch.Tensor:
        """Return the surrogate of each token.

        Args:
            log_ratio_BT: [B, T] with gradient, 0 where masked.
            adv_BT: [B, T], 0 where masked.
            mask_BT: bool [B, T], True on sampled tokens. A row is one whole answer, or a row of a trajectory of several
                (environment.rewritten_history=new_row).
        """
        ...


def ppo(log_ratio_BT: torch.Tensor, adv_BT: torch.Tensor, mask_BT: torch.Tensor, bounds: Bounds) -> Surrogate:
    """min(R A, clip(R) A) of each token's ratio R: https://arxiv.org/abs/1707.06347"""
    ratio_BT = log_ratio_BT.exp()
    value_BT = torch.minimum(ratio_BT * adv_BT, _clipped(ratio_BT, bounds) * adv_BT)
    bounded_BT = torch.zeros_like(mask_BT)
    if bounds.dual is not None:
        floor_BT = bounds.dual * adv_BT
        bounded_BT = (adv_BT < 0) & (value_BT < floor_BT)
        value_BT = torch.where(bounded_BT, floor_BT, value_BT)
    cut_BT = ((adv_BT > 0) & (ratio_BT > bounds.upper_BT)) | ((adv_BT < 0) & (ratio_BT < bounds.lower)) | bounded_BT
    slope_BT = torch.where(cut_BT, 0.0, (ratio_BT * adv_BT).abs()).detach()
    return Surrogate(value_BT=value_BT, ratio_BT=ratio_BT.detach(), bounded_BT=bounded_BT, slope_BT=slope_BT)


def gspo(log_ratio_BT: torch.Tensor, adv_BT: torch.Tensor, mask_BT: torch.Tensor, bounds: Bounds) -> Surrogate:
    """ppo with one ratio per answer, R = exp(mean_t log ratio): GSPO-token, https://arxiv.org/abs/2507.18071

    Every token has the value of the mean, but its gradient flows through its own log-prob, with its own weight and
    advantage. If all tokens of a sequence have the same weight and advantage, this is the gradient of the mean. The
    paper has advantages per token for rollouts of several turns (section 4.3): the ratio is still that of the whole
    answer, and the sign of a token's own advantage says which bound, or dual clip, applies to it.
    """
    log_mean_BT = sequence_mean(log_ratio_BT, mask_BT).detach()[:, None]
    return ppo(log_mean_BT + (log_ratio_BT - log_ratio_BT.detach()), adv_BT, mask_BT, bounds)


def cispo(log_ratio_BT: torch.Tensor, adv_BT: torch.Tensor, mask_BT: torch.Tensor, bounds: Bounds) -> Surrogate:
    """sg(clip(R)) · A · log theta: https://arxiv.org/abs/2506.13585"""
    ratio_BT = log_ratio_BT.exp()
    constant_BT = _clipped(ratio_BT, bounds).detach() * adv_BT
    return Surrogate(
        # log(theta/p) in place of log theta: the same gradient, and a value that starts at 0.
        value_BT=constant_BT * log_ratio_BT,
        ratio_BT=ratio_BT.detach(),
        bounded_BT=torch.zeros_like(mask_BT),
        slope_BT=constant_BT.abs(),
    )


def surrogate_of(
    form: Form, log_ratio_BT: torch.Tensor, adv_BT: torch.Tensor, mask_BT: torch.Tensor, bounds: Bounds
) -> Surrogate:
    """Return the form's Surrogate. If the form returns only its value, the ratio is R = exp(log ratio), the slope is
    computed by autograd, and no token counts as bounded by dual clip.

    Raises:
        ExtensionError: a form from outside the package raised, or returned something else.
    """
    result = call_extension("objective", form, log_ratio_BT, adv_BT, mask_BT, bounds)
    if isinstance(result, Surrogate):
        return result
    if not isinstance(result, torch.Tensor) or result.shape != log_ratio_BT.shape:
        shape = f"a tensor {list(result.shape)}" if isinstance(result, torch.Tensor) else type(result).__name__
        expected = f"expected a Surrogate or a tensor {list(log_ratio_BT.shape)}"
        raise ExtensionError(f"objective {reference_of(form)} returned {shape}, {expected}")
    with torch.enable_grad():
        leaf_BT = log_ratio_BT.detach().requires_grad_()
        again = call_extension("objective", form, leaf_BT, adv_BT, mask_BT, bounds)
        slope_BT = torch.autograd.grad(again.sum(), leaf_BT)[0] if again.requires_grad else torch.zeros_like(result)
    return Surrogate(
        value_BT=result,
        ratio_BT=log_ratio_BT.detach().exp(),
        bounded_BT=torch.zeros_like(mask_BT),
        slope_BT=slope_BT.abs(),
    )


def _clipped(ratio_BT: torch.Tensor, bounds: Bounds) -> torch.Tensor:
    return ratio_BT.clamp(min=bounds.lower).minimum(bounds.upper_BT)
