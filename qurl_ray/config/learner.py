"""Settings of the learner."""

from typing import Literal

from pydantic import Field, model_validator

from qurl_ray.config.section import Section, Share


class LearnerConfig(Section):
    """The learner, which trains the full-precision weights."""

    backend: Literal["torch", "deepspeed"] = "torch"
    """Training backend: `torch` replicates the parameters on every rank; `deepspeed` shards as `zero_stage` says."""
    workers: int = Field(1, ge=1)
    """Number of learner ranks (processes), which share the samples of each update."""
    device: Literal["cpu", "cuda"] = "cpu"
    """Device of the ranks: `cpu`, or `cuda`, which gives each rank one GPU."""
    compute: Literal["float32", "bfloat16"] = "float32"
    """Number format of forward and backward passes: `float32`, or `bfloat16` by autocast. Parameters, gradients and
    optimizer stay float32 in both."""
    lr: float = Field(1e-6, gt=0)
    """Learning rate of AdamW, after the warm-up."""
    warmup_steps: int = Field(0, ge=0)
    """Number of updates over which the learning rate rises linearly; 0 starts with the full rate."""
    lr_final_share: float = Field(1.0, ge=0, le=1)
    """Share of `lr` that is left at the last update, after a linear fall; 1 keeps the rate constant."""
    betas: tuple[Share, Share] = (0.9, 0.999)
    """AdamW's decay rates of the running means of the gradient and of its square."""
    weight_decay: float = Field(0.0, ge=0)
    """Weight decay of AdamW, for matrices only; norms and biases do not decay. 0 is off."""
    grad_clip: float = Field(1.0, gt=0)
    """Upper bound on the global norm of an update's gradient; a larger gradient is scaled down to it."""
    tokens_per_micro_batch: int = Field(4096, ge=1)
    """Largest number of tokens of one forward and backward pass; padding counts unless `packing` is on. A sample that
    is longer is alone in its pass."""
    packing: bool = False
    """Join the samples of a micro-batch end to end instead of padding them; attention stays within each."""
    share_prompts: bool = True
    """Compute the prompt that a group's samples share once, and without padding. It has an effect only on a CPU and
    without `packing`."""
    gradient_checkpointing: bool = False
    """Keep only the inputs of the blocks for the backward pass, and compute the rest again."""
    zero_stage: Literal[0, 1, 2, 3] = 2
    """State that DeepSpeed shards over the ranks, with backend=deepspeed: 0 shards nothing; 1 the optimizer's states; 2
    also the gradients; 3 also the parameters."""
    offload_optimizer: bool = False
    """Keep the optimizer's states on the CPU, and make its step there; needs backend=deepspeed and `zero_stage` 1 to
    3."""
    offload_while_waiting: bool = False
    """Move optimizer, gradients and parameters to the CPU during rollouts, for engines that share the GPU. With
    `placement=colocated` it is on unless it is set to false, and everything except the parameters is moved during
    syncs, too."""
    threads: int | None = Field(None, ge=1)
    """Number of CPU threads of a rank. null divides the cores of the rank's machine by the number of ranks."""
    timeout_s: float = Field(600.0, gt=0)
    """Deadline for collectives, and for placing and starting the ranks, in seconds."""
    max_failures: int = Field(3, ge=0)
    """Number of times that the ranks may be restarted, from the latest checkpoint, after one of them, or the
    coordinator, died."""

    @model_validator(mode="after")
    def _backend_can(self) -> "LearnerConfig":
        if self.offload_optimizer and (self.backend == "torch" or self.zero_stage == 0):
            raise ValueError("offload_optimizer needs backend=deepspeed and zero_stage 1, 2 or 3")
        return self
