"""What is learned from rollouts, and what is done about their mismatch with the learner."""

from typing import Annotated, Any, Literal

from pydantic import Field, field_validator, model_validator

from qurl_ray.config.section import Section, with_default_types
from qurl_ray.tables import ADVANTAGES, CORRECTIONS, OBJECTIVES

LossMean = Literal["token", "sequence", "fixed"]

# --- corrections ---------------------------------------------------------------------------------


class CorrectionBase(Section):
    """What every correction can do besides."""

    reject: Literal["none", "geometric", "k2", "k3"] = "none"
    """Drop whole answers: by the geometric mean of rho, or by the k2 or k3 estimate of KL(b‖p) per token."""
    reject_low: float | None = Field(None, gt=0)
    """With reject=geometric, the least mean that is kept; 0.999 if absent."""
    reject_high: float | None = Field(None, gt=0)
    """The largest value that is kept; if absent 1.001 for geometric, 0.01 for k2 and k3."""
    veto: float | None = Field(None, gt=0, lt=1)
    """Drop answers with any token whose rho is below this; 1e-4 is common."""
    ess_floor: float | None = Field(None, gt=0, lt=1)
    """Mix the weights with 1 in each step, just so far that their effective sample size is at least this share."""
    metrics_only: bool = False
    """Measure and log what the correction would do, and train as with `ignore`."""

    @model_validator(mode="after")
    def _rejection_fits(self) -> "CorrectionBase":
        if self.reject_low is not None and self.reject != "geometric":
            raise ValueError(f"reject_low is of reject=geometric, not of reject={self.reject}")
        if self.reject_high is not None and self.reject == "none":
            raise ValueError("reject_high needs reject=geometric, k2 or k3")
        low, high = self.reject_range()
        if low >= high:
            raise ValueError(f"reject_low={low} must be below reject_high={high}")
        return self

    def reject_range(self) -> tuple[float, float]:
        """(low, high) of the rejection's value, defaults filled in."""
        low, high = {"geometric": (0.999, 1.001)}.get(self.reject, (0.0, 0.01))
        return self.reject_low or low, self.reject_high or high


class _Truncated(CorrectionBase):
    is_cap: float = Field(2.0, ge=1)
    """C: importance weights proximal/behavior above this are truncated."""


class _ByUnit(CorrectionBase):
    unit: Literal["token", "sequence", "geometric"] = "token"
    """What is weighted: a token by rho, a whole answer by the product of its rho, or by their geometric mean."""


class _Unweighted(CorrectionBase):
    @model_validator(mode="after")
    def _nothing_to_weaken(self) -> "_Unweighted":
        if self.ess_floor is not None:
            raise ValueError("ess_floor weakens weights, which this correction has not")
        return self


class ACR(_Truncated):
    """QuRL's adaptive clipping range: truncated weights, and an upper clip bound that grows with rho/C."""

    type: Literal["acr"] = "acr"


class TIS(_Truncated, _ByUnit):
    """Truncated importance sampling (FlashRL)."""

    type: Literal["tis"] = "tis"


class MIS(_ByUnit):
    """Masked importance sampling (IcePop): weights outside a band become 0."""

    type: Literal["mis"] = "mis"
    low: float = Field(0.5, ge=0, lt=1)
    """The least weight that is kept."""
    high: float = Field(5.0, gt=1)
    """The largest weight that is kept."""


class Decoupled(CorrectionBase):
    """Decoupled PPO: importance weights without a cap."""

    type: Literal["decoupled"] = "decoupled"


class Naive(_Unweighted):
    """Naive importance sampling: the clipped ratio is theta/behavior, and nothing else is corrected."""

    type: Literal["naive"] = "naive"


class Ignore(_Unweighted):
    """No correction: the mismatch between engine and learner is left alone."""

    type: Literal["ignore"] = "ignore"


class Custom(CorrectionBase):
    """Weights that a function of yours gives: `algorithm.correction=my_package.my_module:function` is short for it."""

    type: Literal["custom"] = "custom"
    function: str
    """`package.module:function`, or an entry point of the group qurl_ray.corrections: (log_rho_BT, mask_BT) to the
    weight of each token [B, T], at least 0; 0 drops the token. log_rho is log(p/b), 0 where masked."""

    @field_validator("function")
    @classmethod
    def _is_known(cls, function: str) -> str:
        return CORRECTIONS.check(function)


Correction = Annotated[ACR | TIS | MIS | Decoupled | Naive | Ignore | Custom, Field(discriminator="type")]

PRESETS: dict[str, Correction] = {
    "naive": Naive(),
    "ignore": Ignore(),
    "decoupled": Decoupled(),
    "flashrl": TIS(),
    "qurl": ACR(),
    "mis": MIS(),
    "icepop": MIS(),
    "sequence_tis": TIS(unit="sequence"),
    "sequence_mis": MIS(unit="sequence", high=2.0),
    "geometric": TIS(reject="geometric"),
    "k2": TIS(reject="k2"),
    "k3": TIS(reject="k3"),
    "veto": TIS(veto=1e-4),
    "ais": TIS(ess_floor=0.9),
    "monitor": ACR(metrics_only=True),
}
"""Corrections by the names that they have elsewhere, each a whole section: `algorithm.correction=flashrl`."""

# --- algorithms ----------------------------------------------------------------------------------

CLIP_BOUNDS = ("clip_low", "clip_high", "dual_clip")


class Algorithm(Section):
    correction: Correction = ACR()
    """A section, or one of the names qurl, flashrl, mis, icepop, sequence_tis, sequence_mis, geometric, k2, k3, veto,
    ais, decoupled, naive, ignore, monitor; or package.module:function."""
    objective: str = Field("ppo", description=f"The form that is maximised. {OBJECTIVES.help()}.")
    clip_low: float = Field(0.2, gt=0, le=1)
    """The ratio's lower bound is 1 - this; 3e-4 with gspo and tbpo, 1 (no bound) with cispo."""
    clip_high: float = Field(0.2, gt=0)
    """The ratio's upper bound is 1 + this; 4e-4 with gspo and tbpo, 4 with cispo."""
    dual_clip: float | None = Field(None, gt=1)
    """Bound c of -c*A for negative advantages; absent is unbounded, as published. 1.0007 with tbpo."""
    calibrate_every: int = Field(0, ge=0)
    """With correction=naive or a unified flow: set the clip bounds anew every so many steps, so that they cut as
    much as the nominal ones would cut of the exact ratio (calibrated clipping); 0 is off. In a unified flow that ratio
    takes two more passes, in full precision."""
    kl_coef: float = Field(0.0, ge=0)
    """Factor of a KL penalty against the policy that the run began with. Above 0, every rank holds that policy too."""
    kl_estimator: Literal["k1", "k2", "k3"] = "k3"
    """With d = log(policy/reference): d, d²/2, or exp(-d) - 1 + d."""
    kl_in: Literal["loss", "reward"] = "loss"
    """Add the penalty to the loss, or take it from the reward: from each token's where a value model gives credit, else
    from the answer's."""
    entropy_coef: float = Field(0.0, ge=0)
    """Factor of an entropy bonus."""
    updates_per_rollout: int = Field(4, ge=1)
    """Mini-batch updates made from the rollouts of one step. With 1, ACR equals TIS."""
    overlong_buffer: int = Field(0, ge=0)
    """Tokens before max_new_tokens over which a penalty falls from 0 to -1; 0 is off."""

    @model_validator(mode="before")
    @classmethod
    def _default_types(cls, settings: Any) -> Any:
        return with_default_types(settings)

    @field_validator("correction", mode="before")
    @classmethod
    def _by_name(cls, correction: Any) -> Any:
        if not isinstance(correction, str):
            return correction
        if correction in PRESETS:
            return PRESETS[correction]
        if ":" in correction or correction in CORRECTIONS.installed():
            return {"type": "custom", "function": correction}
        raise ValueError(f"no correction has this name; there are {', '.join(PRESETS)}, and package.module:function")

    @field_validator("objective")
    @classmethod
    def _objective_is_known(cls, objective: str) -> str:
        return OBJECTIVES.check(objective)

    @model_validator(mode="before")
    @classmethod
    def _bounds_of_the_objective(cls, settings: Any) -> Any:
        if not isinstance(settings, dict):
            return settings
        objective = settings.get("objective")
        entry = OBJECTIVES.entries.get(objective) if isinstance(objective, str) else None
        return {**entry.bounds, **settings} if entry else settings

    @model_validator(mode="after")
    def _parts_fit(self) -> "Algorithm":
        correction, objective = self.correction, self.objective
        entry = OBJECTIVES.entries.get(objective)
        if correction.type == "acr" and entry and not entry.clips_tokens and not correction.metrics_only:
            raise ValueError(
                f"correction acr widens the clip of single tokens, which objective {objective} has not; "
                "algorithm.correction=flashrl, or sequence_tis, goes with it"
            )
        if objective == "cispo" and self.dual_clip is not None:
            raise ValueError(
                "dual_clip bounds a ratio with a gradient, and cispo's is a constant: set dual_clip to null"
            )
        if objective == "tbpo" and self.dual_clip is None:
            raise ValueError("tbpo without dual_clip is gspo: leave it at 1.0007, or set objective to gspo")
        if self.calibrate_every and (correction.metrics_only or objective != "ppo"):
            raise ValueError("calibrate_every needs a correction, not just its metrics, and objective=ppo")
        return self


class _Grouped(Algorithm):
    advantage: str = Field("grpo", description=f"What a sample is compared with. {ADVANTAGES.help()}.")
    max_refill_rounds: int = Field(10, ge=1)
    """With dynamic_sampling, generation rounds per step at most; a step that is still short then trains on what it has,
    and says so."""

    @field_validator("advantage")
    @classmethod
    def _advantage_is_known(cls, advantage: str) -> str:
        return ADVANTAGES.check(advantage)


class DAPO(_Grouped):
    """DAPO: clip-higher, dynamic sampling, token mean over the global batch, soft overlong penalty."""

    type: Literal["dapo"] = "dapo"
    clip_high: float = Field(0.28, gt=0)
    """The ratio's upper bound is 1 + this; 4e-4 with gspo and tbpo, 4 with cispo."""
    loss_mean: LossMean = "token"
    """Mean over all tokens, over each answer's and then over answers, or over answers times max_new_tokens."""
    dynamic_sampling: bool = True
    """Drop groups whose answers were all judged alike and draw new prompts in their place."""


class GRPO(_Grouped):
    """GRPO: symmetric clip, mean per sequence, every group kept."""

    type: Literal["grpo"] = "grpo"
    loss_mean: LossMean = "sequence"
    """Mean over all tokens, over each answer's and then over answers, or over answers times max_new_tokens."""
    dynamic_sampling: bool = False
    """Drop groups whose answers were all judged alike and draw new prompts in their place."""


class PPO(Algorithm):
    """PPO with a value model: advantages per token, so that one sample per prompt is enough."""

    type: Literal["ppo"] = "ppo"
    advantage: Literal["gae"] = "gae"
    """Generalised advantage estimation from the value model, whitened over all tokens of the step."""
    loss_mean: LossMean = "token"
    """Mean over all tokens, over each answer's and then over answers, or over answers times max_new_tokens."""
    dynamic_sampling: Literal[False] = False
    """Not for PPO: there are no groups to compare."""
    max_refill_rounds: Literal[1] = 1
    """See dynamic_sampling."""
    gamma: float = Field(1.0, gt=0, le=1)
    """Discount per token."""
    gae_lambda: float = Field(1.0, ge=0, le=1)
    """Of generalised advantage estimation; 1 is the return minus the value."""
    critic: Literal["separate", "shared"] = "separate"
    """The value model: a second model, or a second head on the policy. Either begins with a head of zeros."""
    critic_lr: float = Field(1e-5, gt=0)
    """Learning rate of a separate value model, which begins as a copy of the policy. It warms up and falls as
    `learner.lr` does."""
    critic_coef: float = Field(0.1, gt=0)
    """Factor of a shared value model's loss in the policy's."""
    value_clip: float | None = Field(0.5, gt=0)
    """How far a value may move from that before the step; absent is unbounded."""


AlgorithmConfig = Annotated[DAPO | GRPO | PPO, Field(discriminator="type")]
