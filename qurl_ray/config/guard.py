"""Settings of the guard: when a run is in danger, and what may be done about it."""

from typing import Annotated, Literal

from pydantic import Field, model_validator

from qurl_ray.config.section import Section

_OpenShare = Annotated[float, Field(gt=0, lt=1)]


class GuardConfig(Section):
    """Compares each step's figures with thresholds, and acts if they stay beyond them: warns, tightens the objective,
    generates rollouts in full precision, stops the run with a checkpoint (docs/monitoring.md). A threshold of null is
    not checked."""

    enabled: bool = True
    """Run the guard; if false, nothing is checked and nothing is done."""
    highest: Literal["warn", "tighten", "full_precision", "stop"] = "stop"
    """Highest level that the guard may reach: `warn` only logs a warning; `tighten` may also train with a stricter
    objective (masked importance sampling, clip bounds half as wide); `full_precision` may also generate rollouts
    without quantization; `stop` may also end the run with a checkpoint."""
    ess_min: _OpenShare | None = 0.3
    """Lowest accepted `mismatch/ess`: effective sample size as a share of the tokens, between 0 and 1."""
    kl_max: float | None = Field(0.1, gt=0)
    """Highest accepted `mismatch/kl`: KL divergence of engine and learner, in nats per token."""
    rho_max: float | None = Field(None, gt=1)
    """Highest accepted `mismatch/max_rho`: largest ratio of a token's probabilities, learner over engine. It is off by
    default, since it grows with the number of tokens, and one token decides it."""
    clip_max: float | None = Field(0.6, gt=0, le=1)
    """Highest accepted `clip/upper` + `clip/lower`: share of the tokens that the clip cuts off. gspo and tbpo cut off
    up to half of all tokens, ppo rarely a tenth."""
    grad_norm_max: float | None = Field(10.0, gt=1)
    """Highest accepted `grad_norm`, as a multiple of its median over the last 50 steps that were not beyond the
    threshold."""
    reward_min: _OpenShare | None = 0.5
    """Lowest accepted `reward/mean`, as a share of its best mean over `window` steps with rollouts in the run's own
    format. It is not checked while that best mean is not above 0."""
    entropy_min: _OpenShare | None = None
    """Lowest accepted `policy/entropy`, as a share of its mean over the first `window` steps. It is off by default,
    since the entropy also falls to 0 when a task is solved."""
    garbage_max: _OpenShare | None = 0.5
    """Highest accepted `rollout/garbage_share`: share of the tokens that lie in stretches which repeat themselves."""
    cost_max: float | None = Field(None, gt=0)
    """Highest accepted `certificate/cost_least`: mean reward that quantization costs at least, at 95 %, by the
    certificates (`evaluation.certificate`) since rollouts were last in full precision. The value holds until the next
    certificate."""
    window: int = Field(10, ge=1)
    """Number of latest steps in which the guard counts figures beyond their thresholds."""
    patience: int = Field(5, ge=1)
    """Number of steps among the last `window` in which a figure must be beyond its threshold before the guard takes the
    next action."""
    release: float = Field(0.8, gt=0, le=1)
    """Share of the way from a figure's ideal value to its threshold. A step is calm if every figure stays within this
    share."""
    calm_steps: int = Field(10, ge=1)
    """Number of calm steps in a row after which the guard undoes its last action."""
    precision_steps: int = Field(20, ge=1)
    """Number of steps with rollouts in full precision before the run's own format is tried again; it doubles with each
    relapse."""
    trips: int = Field(3, ge=1)
    """Number of relapses that the guard answers with full precision (or with the stricter objective, if no other
    precision is available) before the next one stops the run. The count restarts at 0 when the guard is back at its
    lowest level."""

    @model_validator(mode="after")
    def _patience_fits(self) -> "GuardConfig":
        if self.patience > self.window:
            raise ValueError(f"patience={self.patience} counts steps among the last window={self.window}")
        return self
