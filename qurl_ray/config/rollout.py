"""The settings of the fleet that generates."""

from typing import Literal

from pydantic import Field, model_validator

from qurl_ray.config.section import Section

Format = Literal["none", "int8", "fp8", "fp8_block", "int4"]


class VllmConfig(Section):
    """Of the engines, with `rollout.engine=vllm`."""

    tensor_parallel: int = Field(1, ge=1)
    """Processes (GPUs on CUDA) that share one engine's weights."""
    kv_cache_gb: float | None = Field(None, gt=0)
    """Memory for keys and values in each of them. If absent, a CPU takes what `slots` full contexts need, a GPU what
    is free."""


class RolloutConfig(Section):
    """The fleet that generates."""

    quantization: Format = "int8"
    """Format of the block linears during rollouts; `none` is full precision."""
    engine: Literal["torch", "vllm"] = "torch"
    """`torch` is embedded, and agrees with the learner bit for bit on a CPU; `vllm` is vLLM 0.32 with this package's
    quantization."""
    vllm: VllmConfig = VllmConfig()
    device: Literal["cpu", "cuda"] = "cpu"
    """Where engines compute. `cuda` gives each worker a GPU of its own, or `vllm.tensor_parallel` of them. Not measured
    yet."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """Of activations, and of weights that are not quantized. bfloat16 is for GPUs."""
    workers: int = Field(1, ge=1)
    """Engines that the run begins with."""
    max_workers: int | None = Field(None, ge=1)
    """Grow to so many when the cluster has room, such as after a node joined it; absent is `workers`."""
    max_staleness: int = Field(0, ge=0)
    """Steps that rollouts may run ahead of the learner. 0 takes turns, and repeats to the bit; with more, engines
    generate while the learner trains, and take new weights between two tokens: tokens of an answer may be of several
    versions, which objectives that correct by the engine's log-probs allow for."""
    prompts_per_step: int = Field(64, ge=1)
    samples_per_prompt: int = Field(8, ge=1)
    max_new_tokens: int = Field(8, ge=1)
    temperature: float = Field(1.0, gt=0)
    top_p: float = Field(1.0, gt=0, le=1)
    """Below 1 the engine's log-probs are of the truncated distribution, which the learner does not see."""
    top_k: int = Field(0, ge=0)
    """0 keeps the whole vocabulary; else see top_p."""
    ignore_eos: bool = False
    """Generate exactly max_new_tokens, for benchmarks."""
    slots: int = Field(512, ge=1)
    """Sequences that a worker decodes at a time; further requests wait for a free slot."""
    kv_cache: Literal["full", "fp8"] = "full"
    """`fp8` holds keys and values as E4M3 codes, in a quarter of the memory, with a scale per layer and key head that
    is measured anew for every version of the weights; whatever their format is, so in all evaluations of a run. On a
    CPU it is an emulation, slower than `full`."""
    cuda_graphs: bool = False
    """Of the torch engine on a GPU: capture decode steps, anew after each sync, and start each with one call. For long
    answers. Not measured yet."""
    compile: bool = False
    """Of the torch engine on a GPU: compile norms, rotary embeddings and activations. For use with `cuda_graphs`. Not
    measured yet."""
    threads: int | None = Field(None, ge=1)
    """CPU threads of a worker; all cores divided by the workers if absent."""
    timeout_s: float = Field(600.0, gt=0)
    """Deadline for the rollouts of one round of prompts."""
    start_timeout_s: float = Field(180.0, gt=0)
    """Deadline for placing and starting the workers, and for one to come back when none is left."""
    heartbeat_s: float = Field(2.0, gt=0)
    """Seconds between two questions whether a worker lives; at least 2 ms times the number of workers."""
    silent_s: float = Field(60.0, gt=0)
    """A worker that does not answer for a quarter of this is suspect; for all of it, it is ended and started anew."""
    hedge_after: float = Field(3.0, ge=1)
    """Ask an idle worker for what another one still generates after so many times the others' median."""

    @model_validator(mode="after")
    def _grows(self) -> "RolloutConfig":
        if self.max_workers is not None and self.max_workers < self.workers:
            raise ValueError(f"max_workers ({self.max_workers}) is below workers ({self.workers})")
        return self

    @model_validator(mode="after")
    def _made_for_gpus(self) -> "RolloutConfig":
        here = f"not engine={self.engine}, device={self.device}"
        if self.cuda_graphs and (self.engine, self.device) != ("torch", "cuda"):
            raise ValueError(f"cuda_graphs captures what the torch engine does on a GPU: {here}")
        if self.compile and (self.engine, self.device) != ("torch", "cuda"):
            raise ValueError(
                f"compile is for the torch engine on a GPU, {here}: on a CPU engine and learner agree to the bit, and "
                "what is compiled rounds otherwise"
            )
        return self
