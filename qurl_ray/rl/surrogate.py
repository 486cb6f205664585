"""The clipped forms of the policy gradient, token by token."""

from dataclasses import dataclass
from typing import Literal

import torch

from qurl_ray.rl.ratios import sequence_mean

Form = Literal["ppo", "gspo", "cispo"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Surrogate:
    """Per token [B, T], before the weight."""

    value_BT: torch.Tensor
    """To be maximised."""
    ratio_BT: torch.Tensor
    """What is clipped."""
    lower: float
    upper_BT: torch.Tensor
    bounded_BT: torch.Tensor
    """bool: where dual clip holds."""
    slope_BT: torch.Tensor
    """|d value / d log theta|, without gradient."""


def surrogate(
    log_ratio_BT: torch.Tensor,
    adv_BT: torch.Tensor,
    mask_BT: torch.Tensor,
    widening_BT: torch.Tensor,
    *,
    form: Form,
    clip_low: float,
    clip_high: float,
    dual_clip: float | None,
) -> Surrogate:
    """The form's value of each token, see rl.objective; `widening_BT` multiplies the upper clip bound."""
    if form == "gspo":
        # The mean's value, but each token's own log-prob carries its gradient, with that token's weight and advantage
        # (GSPO-token). Where a sequence has one weight and one advantage, this is the gradient of the mean.
        log_mean_BT = sequence_mean(log_ratio_BT, mask_BT).detach()[:, None]
        log_ratio_BT = log_mean_BT + (log_ratio_BT - log_ratio_BT.detach())
    ratio_BT = log_ratio_BT.exp()
    lower, upper_BT = 1 - clip_low, (1 + clip_high) * widening_BT
    clipped_BT = ratio_BT.clamp(min=lower).minimum(upper_BT)
    bounded_BT = torch.zeros_like(mask_BT)
    if form == "cispo":
        constant_BT = clipped_BT.detach() * adv_BT
        # log(theta/p) for log theta: the same gradient, and a value that starts at 0.
        value_BT, slope_BT = constant_BT * log_ratio_BT, constant_BT.abs()
    else:
        value_BT = torch.minimum(ratio_BT * adv_BT, clipped_BT * adv_BT)
        if dual_clip is not None:
            floor_BT = dual_clip * adv_BT
            bounded_BT = (adv_BT < 0) & (value_BT < floor_BT)
            value_BT = torch.where(bounded_BT, floor_BT, value_BT)
        cut_BT = ((adv_BT > 0) & (ratio_BT > upper_BT)) | ((adv_BT < 0) & (ratio_BT < lower)) | bounded_BT
        slope_BT = torch.where(cut_BT, 0.0, (ratio_BT * adv_BT).abs()).detach()
    return Surrogate(
        value_BT=value_BT,
        ratio_BT=ratio_BT.detach(),
        lower=lower,
        upper_BT=upper_BT,
        bounded_BT=bounded_BT,
        slope_BT=slope_BT,
    )
