"""Settings of the rollout workers, which generate answers."""

from typing import Literal

from pydantic import Field, field_validator, model_validator

from qurl_ray.config.section import Section
from qurl_ray.tables import ENGINES, EngineEntry

FormatName = Literal["none", "int8", "fp8", "fp8_block", "int4", "nvfp4", "nvfp4_w4a4", "mxfp4", "mxfp8"]
"""Number formats of quantized linears; the help is at RolloutConfig.quantization."""
FOUR_BIT_FLOATS = ("nvfp4", "nvfp4_w4a4", "mxfp4")
"""Formats with codes that are floats of 4 bits."""
FOUR_BIT = ("int4", *FOUR_BIT_FLOATS)
"""Formats with codes of 4 bits."""
EMULATED = (*FOUR_BIT, "mxfp8")
"""Formats without a kernel."""

_START_S, _CAPTURE_START_S = 180.0, 900.0  # vLLM's first start on a machine compiles for minutes


class VllmConfig(Section):
    """Settings of vLLM engines, used with `rollout.engine=vllm`."""

    tensor_parallel: int = Field(1, ge=1)
    """Number of processes (one GPU each with device=cuda) that share the weights of one engine."""
    kv_cache_gb: float | None = Field(None, gt=0)
    """Memory for keys and values in each process of an engine, in GiB (2^30 bytes). null takes what `slots` full
    contexts need on a CPU, and what is free on a GPU; `placement=colocated` does not allow null."""


class RolloutConfig(Section):
    """Rollout workers: the engines that generate answers."""

    quantization: FormatName = "int8"
    """Number format of the linears during rollouts, except those that `quantization.keep` names: `none` is full
    precision; `int8` is 8-bit integers, with one scale per output channel of the weights and per token of the
    activations; `fp8` is 8-bit floats (E4M3) with the same scales; `fp8_block` is E4M3 with one scale per block of 128
    × 128 weights and per 128 activations of a token; `int4`, `nvfp4`, `mxfp4` and `mxfp8` are of the weights
    only: 4-bit integers (-7 to 7) with one scale per 128 columns; 4-bit floats (E2M1) with an E4M3 scale per 16 columns
    and a power of two per tensor; E2M1, and E4M3, with a power of two per 32 columns. `nvfp4_w4a4` is nvfp4 with
    activations in the same form, a power of two per token. A format without a kernel on the device is emulated in
    float32, which saves no time; these five always are."""
    lossless: bool = False
    """While the weights are in full precision, draft tokens with INT8 codes, which the engine makes of them, and keep
    what the weights verify: tokens and log-probs are those of full precision, bit for bit, and come sooner where few
    answers are decoded at a time. With quantization=none that is in every step, else where the guard has rollouts in
    full precision, and in evaluations and certificates. Needs engine=torch, device=cpu and dtype=float32."""
    engine: str = Field("torch", description=f"Engine that generates: {ENGINES.help()}.")
    vllm: VllmConfig = VllmConfig()
    device: Literal["cpu", "cuda"] = "cpu"
    """Device of the engines: `cpu`, or `cuda`, which gives each worker one GPU, or `vllm.tensor_parallel` GPUs with
    engine=vllm. Both engines have run on an H200 (docs/gpu.md)."""
    dtype: Literal["float32", "bfloat16", "float16"] = "float32"
    """Number format of activations and of weights that are not quantized: `float32`, or `bfloat16` and `float16` (16
    bits), which are for GPUs and vLLM. float16 has more precision and a smaller range."""
    workers: int = Field(1, ge=1)
    """Number of rollout workers, each with one engine, at the start of the run."""
    max_workers: int | None = Field(None, ge=1)
    """Largest number of rollout workers: workers are added up to it when the cluster has room, for example after a node
    joined. null means `workers`."""
    max_staleness: int = Field(0, ge=0)
    """Number of steps that rollouts may run ahead of the learner. With 0 they take turns, and a run can be repeated bit
    for bit; above 0, engines generate while the learner trains and take new weights between two tokens. The tokens of
    an answer may then come from several weight versions, so a correction is needed (`algorithm.correction` other than
    ignore)."""
    prompts_per_step: int = Field(64, ge=1)
    """Number of prompts, and so of groups of answers, of a step. With dynamic sampling, more prompts are drawn until
    this number of groups is left."""
    samples_per_prompt: int = Field(8, ge=1)
    """Number of answers to each prompt, which form a group; at least 2, except with PPO."""
    max_new_tokens: int = Field(8, ge=1)
    """Largest length of an answer, in tokens."""
    temperature: float = Field(1.0, gt=0)
    """Sampling temperature of rollouts; the learner computes log-probs at the same one. Evaluations are greedy."""
    top_p: float = Field(1.0, gt=0, le=1)
    """Sample from the smallest set of likeliest tokens whose probabilities add up to this; 1 keeps all tokens. Below 1,
    the engine's log-probs are of the truncated distribution, but the learner's are not."""
    top_k: int = Field(0, ge=0)
    """Number of likeliest tokens to sample from; 0 keeps the whole vocabulary. Above 0, the engine's log-probs are of
    the truncated distribution, but the learner's are not."""
    ignore_eos: bool = False
    """Do not end answers at the end token, so that each has exactly max_new_tokens tokens; for benchmarks."""
    slots: int = Field(512, ge=1)
    """Number of answers that a worker decodes at a time; further requests wait for a free slot."""
    kv_cache: Literal["full", "fp8"] = "full"
    """Number format in which an engine stores keys and values: `full` is that of `dtype`; `fp8` is E4M3, in a quarter
    of the memory of float32, with scales that are measured again for every weight version: one per layer and key head
    (engine=torch), or one per layer (engine=vllm, which on a CPU needs AVX-512 or AMX, and heads whose width is a
    multiple of 32). `fp8` applies to all rollouts and evaluations of the run, whatever the format of the weights is.
    engine=torch emulates it on a CPU, slower than `full`."""
    kept_keys_gb: float = Field(1.0, ge=0)
    """Memory of a worker for keys and values of trajectories that wait for their environment, in GiB (2^30 bytes), with
    engine=torch. Rows for which it has no room are computed again at their next turn: slower, with the same bits."""
    router_replay: Literal["off", "rollout", "always"] = "off"
    """With a mixture of experts, compute the policy's training passes with the experts that the engine chose for each
    token (`rollout`), or those of the KL penalty's reference, too (`always`). A byte per expert, layer and token."""
    router_replay_weights: bool = False
    """With `router_replay`, take the engine's weights of these experts, too: routers are then not trained by replayed
    tokens. Eight bytes per expert, layer and token in place of one."""
    cuda_graphs: bool | None = None
    """Capture decode steps as CUDA graphs, so that one call starts all kernels of a step. null is true with engine=vllm
    and device=cuda, else false. The torch engine captures them again after each sync, so there it is for long answers;
    vLLM compiles the model as well, and keeps its graphs. Needs device=cuda. Both have run on an H200."""
    threads: int | None = Field(None, ge=1)
    """Number of CPU threads of a worker. null divides the cores of the driver's machine by the largest number of
    workers."""
    timeout_s: float = Field(600.0, gt=0)
    """Deadline for the rollouts of one round of prompts, or of an evaluation, in seconds; missing it ends the run. If
    requests were repeated, because a worker died or weights changed, it is twice as long plus `start_timeout_s`."""
    start_timeout_s: float | None = Field(None, gt=0)
    """Deadline for placing and starting the workers, and for one to come back when none is left, in seconds. null is
    900 for an engine that compiles and captures at its start (`cuda_graphs`), else 180."""
    heartbeat_s: float = Field(2.0, gt=0)
    """Time between two heartbeats of a worker, in seconds; never less than 2 ms times the number of workers."""
    silent_s: float = Field(60.0, gt=0)
    """Longest time without an answer from a worker, in seconds; after it the worker is killed and restarted. After a
    quarter of it the worker is suspect, and gets no new work."""
    hedge_after: float = Field(3.0, ge=1)
    """Multiple of the median duration of finished chunks of requests; a chunk that takes longer is also given to an
    idle worker, and the first answers count."""

    @field_validator("engine")
    @classmethod
    def _engine_is_known(cls, engine: str) -> str:
        return ENGINES.check(engine)

    @property
    def engine_entry(self) -> EngineEntry:
        """The engine's entry in its table, against which the settings are checked."""
        return ENGINES[self.engine]

    @property
    def processes(self) -> int:
        """Number of processes of one engine, with one GPU each on device=cuda."""
        return self.vllm.tensor_parallel if self.engine_entry.tensor_parallel else 1

    @model_validator(mode="after")
    def _grows(self) -> "RolloutConfig":
        if self.max_workers is not None and self.max_workers < self.workers:
            raise ValueError(f"max_workers ({self.max_workers}) is below workers ({self.workers})")
        if self.router_replay_weights and self.router_replay == "off":
            raise ValueError("router_replay_weights needs router_replay=rollout or always")
        return self

    @model_validator(mode="after")
    def _drafts(self) -> "RolloutConfig":
        if not self.lossless:
            return self
        if not self.engine_entry.drafts:
            engines = " or ".join(name for name, entry in ENGINES.entries.items() if entry.drafts)
            raise ValueError(
                f"lossless needs drafts that are drawn with the noise of their places, which the sampler of "
                f"engine={self.engine} cannot share: use engine={engines}"
            )
        if (self.device, self.dtype) != ("cpu", "float32"):
            raise ValueError(
                f"lossless needs products whose bits do not depend on the number of tokens: device=cpu and "
                f"dtype=float32, not {self.device} and {self.dtype}"
            )
        return self

    @property
    def graphs(self) -> bool:
        """True if decode steps are captured as CUDA graphs: `cuda_graphs`, with null resolved."""
        default = self.engine_entry.graphs_on_cuda and self.device == "cuda"
        return default if self.cuda_graphs is None else self.cuda_graphs

    @property
    def start_limit_s(self) -> float:
        """Deadline for a start in seconds: `start_timeout_s`, with null resolved."""
        return self.start_timeout_s or (_CAPTURE_START_S if self.graphs else _START_S)

    @property
    def restarts_for_formats(self) -> bool:
        """True if an engine holds one number format at a time, and is restarted for another one."""
        return self.engine_entry.graphs_on_cuda and self.device == "cuda"

    @model_validator(mode="after")
    def _made_for_gpus(self) -> "RolloutConfig":
        if self.cuda_graphs and not (self.engine_entry.captures and self.device == "cuda"):
            engines = " or ".join(name for name, entry in ENGINES.entries.items() if entry.captures)
            raise ValueError(
                f"cuda_graphs needs engine={engines} and device=cuda, not engine={self.engine} and device={self.device}"
            )
        if self.kv_cache not in self.engine_entry.kv_cache:
            raise ValueError(
                f"engine={self.engine} cannot store keys and values as kv_cache={self.kv_cache}: use "
                f"{' or '.join(self.engine_entry.kv_cache)}"
            )
        return self
