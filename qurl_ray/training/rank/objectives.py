"""Conversion of the algorithm section of the settings to the values that rl/ and learner/ take."""

import math
from dataclasses import replace
from typing import Any

from qurl_ray.config import RunConfig
from qurl_ray.config.algorithm import ACR, MIS, PPO, TIS, AlgorithmConfig, Correction, Custom, Decoupled, Naive
from qurl_ray.learner.critic import Credit
from qurl_ray.learner.passes import Penalty
from qurl_ray.rl.corrections import CorrectionSettings
from qurl_ray.rl.objective import ObjectiveSettings
from qurl_ray.tables import ADVANTAGES, CORRECTIONS, OBJECTIVES


def objective_settings(config: RunConfig) -> ObjectiveSettings:
    """Settings of the objective."""
    algorithm = config.algorithm
    return ObjectiveSettings(
        form=OBJECTIVES.load(algorithm.objective),
        correction=correction_settings(algorithm.correction),
        clip_low=algorithm.clip_low,
        clip_high=algorithm.clip_high,
        dual_clip=algorithm.dual_clip,
        loss_mean=algorithm.loss_mean,
        fixed_length=config.rollout.max_new_tokens,
        kl_coef=algorithm.kl_coef if algorithm.kl_in == "loss" else 0.0,
        kl_estimator=algorithm.kl_estimator,
        entropy_coef=algorithm.entropy_coef,
        router_balance_coef=algorithm.router_balance_coef,
        router_z_coef=algorithm.router_z_coef,
    )


def correction_settings(correction: Correction) -> CorrectionSettings:
    """Settings of the correction of the mismatch."""
    low, high = correction.reject_range()
    settings: dict[str, Any] = {
        "reject": correction.reject,
        "reject_low": low,
        "reject_high": high,
        "veto": correction.veto or 0.0,
        "ess_floor": correction.ess_floor,
        "metrics_only": correction.metrics_only,
    }
    match correction:
        case ACR():
            settings |= {"weight": "token", "cap": correction.is_cap, "adaptive_clip": True}
        case TIS():
            settings |= {"weight": correction.unit, "cap": correction.is_cap}
        case MIS():
            settings |= {"weight": correction.unit, "band": (correction.low, correction.high)}
        case Decoupled():
            settings |= {"weight": "token", "cap": math.inf}
        case Naive():
            settings |= {"ratio": "behavior"}
        case Custom():
            settings |= {"weigh": CORRECTIONS.load(correction.function)}
    return CorrectionSettings(**settings)


def tightened(settings: ObjectiveSettings) -> ObjectiveSettings:
    """Stricter settings for a step whose mismatch, or whose movement, is too large.

    - Every correction becomes masked importance sampling: weights rho, of tokens or of the unit that the correction
      weighs, count inside a band and are 0 outside. This replaces truncation, adaptive clips, no correction, and mere
      metrics. Kept tokens have their exact weights, so their part of the gradient is unbiased. The rest, where a weight
      would be large or is least certain, is left out. An ess_floor still mixes weights with 1.
    - The band is [0.5, C], with C between 2 and 5; an existing band becomes half as wide, in logarithms. So does the
      band of rejection by the geometric mean; bounds of k2 and k3 are halved.
    - Answers with any rho below 1e-4 are dropped, or below the square root of an existing veto.
    - All clip bounds are half as far from 1: the policy moves less in a step.
    """
    correction = settings.correction
    if correction.band:
        band = correction.band[0] ** 0.5, correction.band[1] ** 0.5
    else:
        band = 0.5, min(max(correction.cap, 2.0), 5.0)
    rejects: dict[str, Any] = {"reject_high": correction.reject_high / 2}
    if correction.reject == "geometric":
        rejects = {"reject_low": correction.reject_low**0.5, "reject_high": correction.reject_high**0.5}
    stricter = replace(
        correction,
        ratio="proximal",
        weight="token" if correction.weight == "none" else correction.weight,
        weigh=None,
        cap=math.inf,
        band=band,
        adaptive_clip=False,
        veto=correction.veto**0.5 or 1e-4,
        metrics_only=False,
        **rejects,
    )
    dual_clip = settings.dual_clip and 1 + (settings.dual_clip - 1) / 2
    return replace(
        settings,
        correction=stricter,
        clip_low=settings.clip_low / 2,
        clip_high=settings.clip_high / 2,
        dual_clip=dual_clip,
    )


def credit(algorithm: AlgorithmConfig) -> Credit | None:
    """Settings of credit by a value model; None for algorithms that have none."""
    if not isinstance(algorithm, PPO):
        return None
    return Credit(
        lr=algorithm.critic_lr,
        gamma=algorithm.gamma,
        lam=algorithm.gae_lambda,
        value_clip=algorithm.value_clip,
        coef=algorithm.critic_coef,
        by_turn=algorithm.turn_credit == "turn",
    )


def needs_value_model(algorithm: AlgorithmConfig) -> bool:
    """True if the algorithm has a separate value model."""
    return isinstance(algorithm, PPO) and algorithm.critic == "separate"


def penalty(algorithm: AlgorithmConfig) -> Penalty | None:
    """KL penalty that is subtracted from rewards; None if there is none."""
    if not algorithm.kl_coef or algorithm.kl_in == "loss":
        return None
    by_token = Penalty(coef=algorithm.kl_coef, estimator=algorithm.kl_estimator)
    if isinstance(algorithm, PPO):
        return by_token
    return replace(by_token, compare=ADVANTAGES.load(algorithm.advantage), mode=algorithm.turn_credit)
