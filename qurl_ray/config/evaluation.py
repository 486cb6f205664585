"""Settings of evaluations."""

from pydantic import Field, model_validator

from qurl_ray.config.section import Section


class CertificateConfig(Section):
    """Certificate of the rollouts' format: some steps answer the same problems in full precision, too, with the same
    noise, and bound the reward that quantization costs (docs/monitoring.md)."""

    every: int = Field(0, ge=0)
    """Number of steps between two certificates; 0 makes none."""
    prompts: int = Field(16, ge=1)
    """Number of training problems and, as many, of held-out problems, chosen at random each time; each is answered
    `rollout.samples_per_prompt` times in both formats."""
    reward_range: tuple[float, float] = (0.0, 1.0)
    """Least and largest reward. The bounds are as wide as this range when little is known; rewards beyond it count as
    its ends."""

    @model_validator(mode="after")
    def _a_range_has_a_width(self) -> "CertificateConfig":
        least, most = self.reward_range
        if least >= most:
            raise ValueError(f"reward_range is [least, largest], and {least:g} is not below {most:g}")
        return self


class EvaluationConfig(Section):
    """Evaluations on held-out problems: mean reward, and the share of problems solved (reward above 0.5)."""

    problems: int = Field(500, ge=1)
    """Largest number of held-out problems in an evaluation, of each set if there are several; each is answered once,
    greedily."""
    every: int = Field(0, ge=0)
    """Number of steps between two evaluations of the quantized policy during training; 0 evaluates only before and
    after training."""
    target_reward: float | None = None
    """Mean held-out reward at which the run ends, after the first evaluation during training (see `every`) that reaches
    it; `steps` is then an upper limit. The learning rate falls as if all `steps` were made. null sets no target."""

    full_precision: bool | None = None
    """Evaluate the full-precision weights before and after training; false draws all evaluations in the format of the
    rollouts. null is true, except for engines that must restart for another format (engine=vllm with device=cuda),
    which takes minutes each time (true then costs three more starts), and for adapters over codes, of which there is
    no policy in full precision."""

    certificate: CertificateConfig = CertificateConfig()

    @model_validator(mode="after")
    def _a_target_needs_evaluations(self) -> "EvaluationConfig":
        if self.target_reward is not None and not self.every:
            raise ValueError(
                f"evaluation.target_reward={self.target_reward:g} is looked at every evaluation.every steps, and that "
                "is 0: set it to a number of steps"
            )
        return self
