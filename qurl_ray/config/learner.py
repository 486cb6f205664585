"""Settings of the learner."""

import math
from typing import Any, Literal

from pydantic import Field, model_validator

from qurl_ray.config.lora import LoraConfig
from qurl_ray.config.section import Section, Share


class LearnerConfig(Section):
    """The learner, which trains the full-precision weights."""

    backend: Literal["torch", "fsdp", "deepspeed"] = "torch"
    """Training backend: `torch` replicates the parameters on every rank; `fsdp` shards everything over the ranks, which
    read only their parts of the model's files (FSDP2); `deepspeed` shards as `zero_stage` says."""
    workers: int = Field(1, ge=1)
    """Number of learner ranks (processes), which share the samples of each update."""
    device: Literal["cpu", "cuda"] = "cpu"
    """Device of the ranks: `cpu`, or `cuda`, which gives each rank one GPU."""
    compute: Literal["float32", "bfloat16", "float16"] = "float32"
    """Number format of forward and backward passes: `float32`; `bfloat16` or `float16`, by autocast. float16 has 8
    times the precision of bfloat16 and a small range: losses are scaled, and an update that overflows is left out.
    Parameters, gradients and optimizer stay float32 in all."""
    optimizer: Literal["adamw", "adamw_8bit", "muon"] = "adamw"
    """Optimizer: `adamw`; `adamw_8bit`, which keeps its two means in 8 bits, on CUDA and with bitsandbytes installed;
    `muon`, which orthogonalises the updates of the blocks' matrices, scaled so that AdamW's rates fit, and leaves
    embeddings, head and vectors to AdamW. `muon` needs backend=torch."""
    lr: float = Field(1e-6, gt=0)
    """Learning rate, after the warm-up."""
    warmup_steps: int = Field(0, ge=0)
    """Number of updates over which the learning rate rises linearly; 0 starts with the full rate."""
    schedule: Literal["constant", "linear", "cosine", "wsd"] = "constant"
    """Course of the learning rate after the warm-up: `constant` keeps it; `linear` and `cosine` let it fall to
    `lr_final_share` over the whole run; `wsd` (warmup-stable-decay) keeps it and lets it fall linearly over the last
    `decay_share` of the updates. Where only `lr_final_share` is given, the schedule is linear."""
    lr_final_share: float = Field(1.0, ge=0, le=1)
    """Share of `lr` that is left at the last update; 0 is the default of all schedules but `constant`."""
    decay_share: float = Field(0.1, gt=0, le=1)
    """Share of the updates, the last ones, over which the rate falls, with schedule=wsd."""
    betas: tuple[Share, Share] = (0.9, 0.999)
    """AdamW's decay rates of the running means of the gradient and of its square."""
    weight_decay: float = Field(0.0, ge=0)
    """Weight decay, for matrices only; norms and biases do not decay. 0 is off."""
    grad_clip: float = Field(1.0, gt=0)
    """Upper bound on the global norm of an update's gradient; a larger gradient is scaled down to it."""
    lora: LoraConfig | None = None
    """Train adapters alone; null trains all parameters."""
    tokens_per_micro_batch: int = Field(4096, ge=1)
    """Largest number of tokens of one forward and backward pass, of each of the ranks that share it; padding counts
    unless `packing` is on. A sample that is longer is alone in its pass."""
    packing: bool = False
    """Join the samples of a micro-batch end to end instead of padding them; attention stays within each."""
    share_prompts: bool = True
    """Compute the prompt that a group's samples share once, and without padding. It has an effect only on a CPU and
    without `packing`."""
    gradient_checkpointing: bool = False
    """Keep only the inputs of the blocks for the backward pass, and compute the rest again."""
    sequence_parallel: int = Field(1, ge=1)
    """Number of ranks that share the tokens of each sample, for long answers: each computes a part of the tokens, and
    in attention all tokens of a part of the heads (Ulysses). `workers` must be a multiple of it. 1 is off."""
    expert_parallel: bool = False
    """With a mixture of experts and backend=fsdp, divide the experts over the ranks: each computes its own for the
    tokens of all, and a pass gathers each expert on one rank, not on all. `workers` must divide the number of
    experts."""
    zero_stage: Literal[0, 1, 2, 3] = 2
    """State that DeepSpeed shards over the ranks, with backend=deepspeed: 0 shards nothing; 1 the optimizer's states; 2
    also the gradients; 3 also the parameters."""
    offload_optimizer: bool = False
    """Keep the optimizer's states on the CPU, and make its step there; needs backend=deepspeed and `zero_stage` 1 to
    3."""
    offload_while_waiting: bool | Literal["auto"] = False
    """Move optimizer, gradients and parameters to the CPU during rollouts, for engines that share the GPU. With
    `placement=colocated` everything except the parameters is moved during syncs, too, and the default is `auto`: on,
    unless learner and engine fit into the GPU's memory at the same time, as the planner computes and the run says."""
    threads: int | None = Field(None, ge=1)
    """Number of CPU threads of a rank. null divides the cores of the rank's machine by the number of ranks."""
    timeout_s: float = Field(600.0, gt=0)
    """Deadline for collectives, and for placing and starting the ranks, in seconds."""
    max_failures: int = Field(3, ge=0)
    """Number of times that the ranks may be restarted, from the latest checkpoint, after one of them, or the
    coordinator, died."""

    @model_validator(mode="before")
    @classmethod
    def _schedule_and_share(cls, settings: Any) -> Any:
        if not isinstance(settings, dict):
            return settings
        schedule, share = settings.get("schedule"), settings.get("lr_final_share")
        if schedule is None and isinstance(share, int | float) and share < 1:
            return {**settings, "schedule": "linear"}
        if schedule in ("linear", "cosine", "wsd") and share is None:
            return {**settings, "lr_final_share": 0.0}
        return settings

    @model_validator(mode="after")
    def _schedule_falls(self) -> "LearnerConfig":
        if self.schedule == "constant" and self.lr_final_share < 1:
            raise ValueError(
                f"schedule=constant keeps the rate, and lr_final_share={self.lr_final_share:g} lets it fall: choose "
                "linear, cosine or wsd, or leave lr_final_share out"
            )
        if self.schedule != "constant" and self.lr_final_share == 1:
            raise ValueError(f"schedule={self.schedule} with lr_final_share=1 never falls: choose constant, or a share")
        return self

    def rate(self, updates: int, total_updates: int) -> float:
        """Return the factor on the learning rate of the next update, after `updates` of `total_updates`: a linear
        warm-up times the schedule."""
        warm = min(1.0, (updates + 1) / max(1, self.warmup_steps))
        progress = min(1.0, updates / max(1, total_updates - 1))
        match self.schedule:
            case "constant":
                fallen = 0.0
            case "linear":
                fallen = progress
            case "cosine":
                fallen = (1 - math.cos(math.pi * progress)) / 2
            case "wsd":
                fallen = max(0.0, 1 - (1 - progress) / self.decay_share)
        return warm * (1 - (1 - self.lr_final_share) * fallen)

    def same_rates(self, done: int, total: int, other: int) -> bool:
        """True if the first `done` of `total` updates have the same rates as the first `done` of `other` updates."""
        if self.schedule == "constant" or total == other:
            return True
        return self.schedule == "wsd" and self.rate(done - 1, min(total, other)) == self.rate(done - 1, 10**9)

    @model_validator(mode="after")
    def _backend_can(self) -> "LearnerConfig":
        if self.offload_optimizer and (self.backend != "deepspeed" or self.zero_stage == 0):
            raise ValueError("offload_optimizer needs backend=deepspeed and zero_stage 1, 2 or 3")
        if self.workers % self.sequence_parallel:
            raise ValueError(
                f"workers={self.workers} is no multiple of sequence_parallel={self.sequence_parallel}, the ranks that "
                "share a sample"
            )
        if self.expert_parallel and (self.backend != "fsdp" or self.lora):
            raise ValueError("expert_parallel divides what backend=fsdp trains: it needs that backend, and no lora")
        if self.compute == "float16" and self.backend == "deepspeed":
            raise ValueError("compute=float16 scales losses, which backend=deepspeed does not: choose torch or fsdp")
        if self.optimizer == "muon" and self.backend != "torch":
            raise ValueError(
                f"optimizer=muon works on whole matrices, which backend={self.backend} divides: choose backend=torch, "
                "or adamw"
            )
        if self.optimizer == "adamw_8bit" and self.backend == "fsdp":
            raise ValueError(
                "optimizer=adamw_8bit knows no parameters that are divided by rows: choose another backend"
            )
        if self.optimizer == "adamw_8bit" and self.device == "cpu":
            raise ValueError("optimizer=adamw_8bit is bitsandbytes', which computes on GPUs: choose adamw, or muon")
        if self.optimizer != "adamw" and self.offload_optimizer:
            raise ValueError(f"offload_optimizer moves AdamW to the CPU, and cannot move optimizer={self.optimizer}")
        return self
