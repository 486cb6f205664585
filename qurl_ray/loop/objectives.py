"""From the algorithm section of the settings to the values that rl/ and learner/ take."""

import math

from qurl_ray.config import RunConfig
from qurl_ray.config.algorithm import ACR, MIS, PPO, TIS, AlgorithmConfig, Correction, Decoupled, Naive
from qurl_ray.learner.critic import Credit
from qurl_ray.learner.passes import Penalty
from qurl_ray.rl.corrections import CorrectionSettings
from qurl_ray.rl.objective import ObjectiveSettings


def objective_settings(config: RunConfig) -> ObjectiveSettings:
    """What the objective is."""
    algorithm = config.algorithm
    return ObjectiveSettings(
        # TBPO is GSPO with a dual clip: only their default bounds differ.
        form="gspo" if algorithm.objective == "tbpo" else algorithm.objective,
        correction=correction_settings(algorithm.correction),
        clip_low=algorithm.clip_low,
        clip_high=algorithm.clip_high,
        dual_clip=algorithm.dual_clip,
        loss_mean=algorithm.loss_mean,
        fixed_length=config.rollout.max_new_tokens,
        kl_coef=algorithm.kl_coef if algorithm.kl_in == "loss" else 0.0,
        kl_estimator=algorithm.kl_estimator,
        entropy_coef=algorithm.entropy_coef,
    )


def correction_settings(correction: Correction) -> CorrectionSettings:
    """What is done about the mismatch."""
    low, high = correction.reject_range()
    settings = {
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
    return CorrectionSettings(**settings)


def credit(algorithm: AlgorithmConfig) -> Credit | None:
    """How a value model gives credit; None for algorithms that have none."""
    if not isinstance(algorithm, PPO):
        return None
    return Credit(
        lr=algorithm.critic_lr,
        gamma=algorithm.gamma,
        lam=algorithm.gae_lambda,
        value_clip=algorithm.value_clip,
        coef=algorithm.critic_coef,
    )


def needs_value_model(algorithm: AlgorithmConfig) -> bool:
    """Whether the value model is a second one."""
    return isinstance(algorithm, PPO) and algorithm.critic == "separate"


def penalty(algorithm: AlgorithmConfig) -> Penalty | None:
    """The KL that is taken from rewards."""
    if not algorithm.kl_coef or algorithm.kl_in == "loss":
        return None
    comparison = {} if isinstance(algorithm, PPO) else {"advantage": algorithm.advantage}
    return Penalty(coef=algorithm.kl_coef, estimator=algorithm.kl_estimator, **comparison)
