"""Settings of LoRA adapters."""

from typing import Any, Literal

from pydantic import Field, field_validator

from qurl_ray.config.section import Section


class NoiseConfig(Section):
    """Noise on the gains of norms, as exploration (QeRL's, in our reading: docs/adapters.md)."""

    start: float = Field(1e-2, gt=0)
    """Standard deviation in the second stage; the first has no noise."""
    end: float = Field(1e-4, gt=0)
    """Standard deviation in the last stage. Between them it falls by the same factor from stage to stage."""
    stages: int = Field(10, ge=2)
    """Number of equal stages of a run."""


class LoraConfig(Section):
    """LoRA: the policy's weights stay as they are, and adapters of low rank are trained beside its linears
    (docs/adapters.md)."""

    rank: int = Field(16, ge=1)
    """Rank r of the adapters, at most that of the smallest linear."""
    alpha: float = Field(32.0, gt=0)
    """α: an adapter's result is multiplied by α/r."""
    targets: tuple[str, ...] = Field(("all_linear",), min_length=1)
    """Linears that get an adapter: names, or their last parts such as q_proj; `all_linear` takes all but the head."""
    base: Literal["codes", "full"] = "codes"
    """Weights that the learner computes with: `codes` quantizes them once, and learner and engines multiply with the
    same codes, so that there is no mismatch to correct; `full` keeps them in full precision in the learner, while
    engines have codes, or full precision with rollout.quantization=none."""
    path: str | None = None
    """Folder of an adapter in PEFT's layout with which training begins. null begins with one that changes nothing."""
    dropout: Literal[0] = 0
    """Dropout before an adapter. There is none: engines and learner would compute different networks."""
    noise: NoiseConfig | None = None
    """Noise on the gains of norms, in engines and learner alike; null for none, {} for QeRL's values."""

    @field_validator("targets", mode="before")
    @classmethod
    def _one_target(cls, targets: Any) -> Any:
        return (targets,) if isinstance(targets, str) else targets
