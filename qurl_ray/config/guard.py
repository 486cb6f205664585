"""When a run is in danger, and what may be done about it."""

from typing import Annotated, Literal

from pydantic import Field, model_validator

from qurl_ray.config.section import Section

_OpenShare = Annotated[float, Field(gt=0, lt=1)]


class GuardConfig(Section):
    """Compares each step's figures with thresholds and acts where they stay beyond: warns, tightens the objective,
    rolls out in full precision, stops with a checkpoint (docs/guard.md). A threshold of null is off."""

    enabled: bool = True
    highest: Literal["warn", "tighten", "full_precision", "stop"] = "stop"
    """The last action of that ladder which the guard may take."""
    ess_min: _OpenShare | None = 0.3
    """Least `mismatch/ess`."""
    kl_max: float | None = Field(0.1, gt=0)
    """Largest `mismatch/kl`, nats per token."""
    rho_max: float | None = Field(None, gt=1)
    """Largest `mismatch/max_rho`. Off: it grows with the number of tokens, and one token decides it."""
    clip_max: float | None = Field(0.6, gt=0, le=1)
    """Largest `clip/upper` + `clip/lower`. gspo and tbpo cut off up to half of all tokens, ppo rarely a tenth."""
    grad_norm_max: float | None = Field(10.0, gt=1)
    """Largest `grad_norm`, as a multiple of its median over the last 50 steps that were not beyond."""
    reward_min: _OpenShare | None = 0.5
    """Least `reward/mean`, as a share of its best mean over `window` steps in the rollouts' own format; not looked at
    where that is not above 0."""
    entropy_min: _OpenShare | None = None
    """Least `policy/entropy`, as a share of its mean over the first `window` steps. Off: it falls to 0 when a task is
    solved, too."""
    garbage_max: _OpenShare | None = 0.5
    """Largest `rollout/garbage_share`."""
    window: int = Field(10, ge=1)
    """Steps that are looked back on."""
    patience: int = Field(5, ge=1)
    """In so many of them a figure must have been beyond before the next action is taken."""
    release: float = Field(0.8, gt=0, le=1)
    """A step is calm if every figure has kept to this share of the way from its ideal to its threshold."""
    calm_steps: int = Field(10, ge=1)
    """Calm steps in a row after which the last action is taken back."""
    precision_steps: int = Field(20, ge=1)
    """Steps in full precision, before the rollouts' own format is tried again; twice as many after each relapse."""
    trips: int = Field(3, ge=1)
    """Relapses that are met with full precision, or sat out where there is none to change to, before the guard stops
    the run. They are forgotten when all is calm again."""

    @model_validator(mode="after")
    def _patience_fits(self) -> "GuardConfig":
        if self.patience > self.window:
            raise ValueError(f"patience={self.patience} counts steps among the last window={self.window}")
        return self
