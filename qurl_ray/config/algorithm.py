"""Settings of learning from rollouts, and of corrections for their mismatch with the learner."""

from typing import Annotated, Any, Literal

from pydantic import Field, field_validator, model_validator

from qurl_ray.config.section import Section, with_default_types
from qurl_ray.tables import ADVANTAGES, CORRECTIONS, OBJECTIVES

LossMean = Literal["token", "sequence", "fixed"]
"""Averages of the loss; the help is at the fields `loss_mean`."""

# --- corrections ---------------------------------------------------------------------------------


class CorrectionBase(Section):
    """Settings of all corrections."""

    reject: Literal["none", "geometric", "k2", "k3"] = "none"
    """Rule that drops whole answers: `none` drops none; `geometric` drops those whose geometric mean of rho is below
    `reject_low` or above `reject_high`; `k2` and `k3` drop those whose k2 or k3 estimate of KL(b‖p) per token is above
    `reject_high`."""
    reject_low: float | None = Field(None, gt=0)
    """Smallest geometric mean of rho that is kept, with reject=geometric; null means 0.999."""
    reject_high: float | None = Field(None, gt=0)
    """Largest value that is kept: of the geometric mean of rho, or of the estimated KL in nats per token. null means
    1.001 for geometric, and 0.01 for k2 and k3."""
    veto: float | None = Field(None, gt=0, lt=1)
    """Lower bound on rho: an answer with any token below it is dropped. null drops none; 1e-4 is common."""
    ess_floor: float | None = Field(None, gt=0, lt=1)
    """Smallest effective sample size of a step's weights, as a share of the tokens that are kept: weights are mixed
    with 1 just enough to reach it. null does not mix; types naive and ignore have no weights to mix."""
    metrics_only: bool = False
    """Measure and log what the correction would do, and train as with type `ignore`."""

    @model_validator(mode="after")
    def _rejection_fits(self) -> "CorrectionBase":
        if self.reject_low is not None and self.reject != "geometric":
            raise ValueError(
                f"reject_low has no effect with reject={self.reject}, which has no lower bound; remove it or choose "
                "geometric"
            )
        if self.reject_high is not None and self.reject == "none":
            raise ValueError(
                "reject_high has no effect with reject=none, which drops no answer; remove it or choose geometric, k2 "
                "or k3"
            )
        low, high = self.reject_range()
        if low >= high:
            raise ValueError(f"reject_low={low} must be below reject_high={high}")
        return self

    def reject_range(self) -> tuple[float, float]:
        """Return (low, high) of the rejection's value, defaults filled in."""
        low, high = {"geometric": (0.999, 1.001)}.get(self.reject, (0.0, 0.01))
        return self.reject_low or low, self.reject_high or high


class _Truncated(CorrectionBase):
    is_cap: float = Field(2.0, ge=1)
    """Cap C of importance weights (proximal over behavior): larger ones are truncated to it."""


class _ByUnit(CorrectionBase):
    unit: Literal["token", "sequence", "geometric"] = "token"
    """Unit that gets one weight: `token` weights each token by its rho; `sequence` weights a whole answer by the
    product of its tokens' rho; `geometric` weights a whole answer by their geometric mean."""


class _Unweighted(CorrectionBase):
    @model_validator(mode="after")
    def _nothing_to_weaken(self) -> "_Unweighted":
        if self.ess_floor is not None:
            raise ValueError(
                "ess_floor has no effect with the corrections naive and ignore, which use no weights; remove it or "
                "choose tis or acr"
            )
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
    """Smallest weight that is kept; smaller ones become 0."""
    high: float = Field(5.0, gt=1)
    """Largest weight that is kept; larger ones become 0."""


class Decoupled(CorrectionBase):
    """Decoupled PPO: importance weights without a cap."""

    type: Literal["decoupled"] = "decoupled"


class Naive(_Unweighted):
    """Naive importance sampling: the clipped ratio is theta/behavior, and nothing else is corrected."""

    type: Literal["naive"] = "naive"


class Ignore(_Unweighted):
    """No correction: the mismatch between engine and learner is left as it is."""

    type: Literal["ignore"] = "ignore"


class Custom(CorrectionBase):
    """Weights from a function of your own: `algorithm.correction=my_package.my_module:function` is short for it."""

    type: Literal["custom"] = "custom"
    function: str
    """Function that returns the weights: `package.module:function`, or an entry point of the group
    qurl_ray.corrections. It takes (log_rho_BT, mask_BT) and returns the weight of each token [B, T], at least 0; 0
    drops the token. log_rho is log(p/b), 0 where masked."""

    @field_validator("function")
    @classmethod
    def _is_known(cls, function: str) -> str:
        return CORRECTIONS.check(function)


Correction = Annotated[ACR | TIS | MIS | Decoupled | Naive | Ignore | Custom, Field(discriminator="type")]

PRESETS: dict[str, Correction] = {
    "naive": Naive(),
    "ignore": Ignore(),
    "decoupled": Decoupled(),
    "tis": TIS(),
    "flashrl": TIS(),
    "acr": ACR(),
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
"""Corrections by their types and their published names, each a whole section: `algorithm.correction=flashrl`."""

# --- algorithms ----------------------------------------------------------------------------------

CLIP_BOUNDS = ("clip_low", "clip_high", "dual_clip")
"""Settings whose defaults depend on the objective."""


class Algorithm(Section):
    """Settings of all algorithms."""

    correction: Correction = ACR()
    """Correction for the mismatch between engine and learner: a section whose `type` is acr, tis, mis, decoupled,
    naive, ignore or custom, or one of the names acr (or qurl), tis (or flashrl), mis, icepop, sequence_tis,
    sequence_mis, geometric, k2, k3, veto, ais, decoupled, naive, ignore, monitor (docs/concepts.md), or
    package.module:function. Below, rho = p/b is the probability of a token under the learner before the step (p,
    proximal) over that under the engine (b, behavior)."""
    objective: str = Field("ppo", description=f"Form of the objective: {OBJECTIVES.help()}.")
    clip_low: float = Field(0.2, gt=0, le=1)
    """Distance of the ratio's lower clip bound from 1: the bound is 1 - clip_low. The default is 3e-4 with objectives
    gspo and tbpo, and 1 (no bound) with cispo."""
    clip_high: float = Field(0.2, gt=0)
    """Distance of the ratio's upper clip bound from 1: the bound is 1 + clip_high. The default is 4e-4 with objectives
    gspo and tbpo, and 4 with cispo."""
    dual_clip: float | None = Field(None, gt=1)
    """Bound c of the dual clip: for a negative advantage A, the surrogate is at least c·A. null sets no bound, as
    published; the default is 1.0007 with objective tbpo."""
    calibrate_every: int = Field(0, ge=0)
    """Number of steps between two calibrations of the clip bounds, so that they cut as much as the nominal ones would
    cut of the exact ratio (calibrated clipping); 0 is off. It needs correction=naive or a unified flow, in which the
    exact ratio takes two more passes, in full precision."""
    kl_coef: float = Field(0.0, ge=0)
    """Factor of a KL penalty against the policy at the start of the run; 0 is off. Above 0, every rank holds that
    policy too."""
    kl_estimator: Literal["k1", "k2", "k3"] = "k3"
    """Estimator of the penalty's KL at a token, with d = log(policy/reference): `k1` is d; `k2` is d²/2; `k3` is
    exp(-d) - 1 + d."""
    kl_in: Literal["loss", "reward"] = "loss"
    """Where the KL penalty is applied: `loss` adds it to the loss; `reward` subtracts it from the reward, of each token
    with PPO, else of the whole answer, with turn_credit=turn of its last turn."""
    entropy_coef: float = Field(0.0, ge=0)
    """Factor of an entropy bonus; 0 is off."""
    router_balance_coef: float = Field(0.0, ge=0)
    """With a mixture of experts, factor of a loss that spreads tokens over experts (load balancing; config.json often
    has one as router_aux_loss_coef, which is not read); 0 is off."""
    router_z_coef: float = Field(0.0, ge=0)
    """With a mixture of experts, factor of a loss that keeps the logits of routers small (z-loss); 0 is off."""
    updates_per_rollout: int = Field(4, ge=1)
    """Number of updates, one per mini-batch, made from the rollouts of one step. With 1, ACR equals TIS."""
    overlong_buffer: int = Field(0, ge=0)
    """Number of tokens before max_new_tokens over which a penalty that is added to the reward falls from 0 to -1; 0 is
    off."""

    @model_validator(mode="before")
    @classmethod
    def _default_types(cls, settings: Any) -> Any:
        return with_default_types(settings)

    @field_validator("correction", mode="before")
    @classmethod
    def _by_name(cls, correction: Any) -> Any:
        if not isinstance(correction, str | bool):
            return correction
        if correction in PRESETS:
            return PRESETS[correction]
        if isinstance(correction, bool):  # YAML makes one of no and off
            raise ValueError(f"give the name of a correction: {', '.join(PRESETS)}, or package.module:function")
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
    advantage: str = Field(
        "grpo", description=f"Advantage of a sample from the rewards of its group: {ADVANTAGES.help()}."
    )
    turn_credit: Literal["trajectory", "turn", "spread"] = "trajectory"
    """Rewards that decide the advantages of turns, with an environment: `trajectory` gives all turns the advantage of
    their trajectory; `turn` compares the return from a turn on, which is its reward and those of later turns, with the
    returns from the same turn number of the other samples of the group; `spread` divides the reward of the trajectory
    evenly over its turns and then does the same. A turn number that only one sample of the group reaches has advantage
    0."""
    max_refill_rounds: int = Field(10, ge=1)
    """Largest number of generation rounds in a step, with dynamic_sampling. A step that is still short then trains on
    what it has, and logs a warning."""

    @field_validator("advantage")
    @classmethod
    def _advantage_is_known(cls, advantage: str) -> str:
        return ADVANTAGES.check(advantage)


class DAPO(_Grouped):
    """DAPO: clip-higher, dynamic sampling, token mean over the global batch, soft overlong penalty."""

    type: Literal["dapo"] = "dapo"
    clip_high: float = Field(0.28, gt=0)
    """Distance of the ratio's upper clip bound from 1: the bound is 1 + clip_high. The default is 4e-4 with objectives
    gspo and tbpo, and 4 with cispo."""
    loss_mean: LossMean = "token"
    """How the loss is averaged: `token` is the mean over all tokens; `sequence` is the mean over each answer's tokens,
    then over answers; `fixed` is the sum divided by answers times max_new_tokens."""
    dynamic_sampling: bool = True
    """Drop groups whose answers all have the same reward, with turn_credit=turn the same return at every turn, and draw
    new prompts in their place."""


class GRPO(_Grouped):
    """GRPO: symmetric clip, mean per sequence, every group kept."""

    type: Literal["grpo"] = "grpo"
    loss_mean: LossMean = "sequence"
    """How the loss is averaged: `token` is the mean over all tokens; `sequence` is the mean over each answer's tokens,
    then over answers; `fixed` is the sum divided by answers times max_new_tokens."""
    dynamic_sampling: bool = False
    """Drop groups whose answers all have the same reward, with turn_credit=turn the same return at every turn, and draw
    new prompts in their place."""


class PPO(Algorithm):
    """PPO with a value model: advantages per token, so that one sample per prompt is enough."""

    type: Literal["ppo"] = "ppo"
    advantage: Literal["gae"] = "gae"
    """How credit is given to tokens: `gae`, the only value, is generalised advantage estimation from the value model,
    whitened over all tokens of the step."""
    turn_credit: Literal["token", "turn"] = "token"
    """Step of the estimation with an environment: `token` is a token, and the last one of a turn has the turn's reward;
    `turn` is a turn, whose tokens share its advantage, and only the values at the starts of turns are trained."""
    loss_mean: LossMean = "token"
    """How the loss is averaged: `token` is the mean over all tokens; `sequence` is the mean over each answer's tokens,
    then over answers; `fixed` is the sum divided by answers times max_new_tokens."""
    dynamic_sampling: Literal[False] = False
    """Always false, the only value: with PPO there are no groups to compare."""
    max_refill_rounds: Literal[1] = 1
    """Always 1, the only value: there is no dynamic_sampling."""
    gamma: float = Field(1.0, gt=0, le=1)
    """Discount factor of rewards per token, or per turn with turn_credit=turn; 1 does not discount."""
    gae_lambda: float = Field(1.0, ge=0, le=1)
    """Parameter lambda of generalised advantage estimation; with 1, an advantage is the return minus the value."""
    critic: Literal["separate", "shared"] = "separate"
    """Value model: `separate` is a second model; `shared` is a second head on the policy. In both, the head starts with
    zeros."""
    critic_lr: float = Field(1e-5, gt=0)
    """Learning rate of a separate value model, which starts as a copy of the policy. It warms up and falls as
    `learner.lr` does."""
    critic_coef: float = Field(0.1, gt=0)
    """Factor of a shared value model's loss, which is added to the policy's."""
    value_clip: float | None = Field(0.5, gt=0)
    """Distance, in units of reward, at which the value loss clips a token's value around its value from before the
    step. null does not clip."""


AlgorithmConfig = Annotated[DAPO | GRPO | PPO, Field(discriminator="type")]
