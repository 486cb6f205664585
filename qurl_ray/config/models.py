"""The settings of a run. Class defaults are vetted; the text under a field is its help.

Every section is frozen and rejects unknown keys. Units are in the names. The layers below get
values from here, never a section itself, except where a section is their whole argument.
"""

import re
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field, field_validator, model_validator

from qurl_ray.config.algorithm import DAPO, AlgorithmConfig
from qurl_ray.config.guard import GuardConfig
from qurl_ray.config.placement import Placement, check_placement, check_transport, with_offload
from qurl_ray.config.rollout import Format, RolloutConfig
from qurl_ray.config.section import Section, Share, with_default_types
from qurl_ray.errors import DataError
from qurl_ray.tables import PROBLEMS, REWARDS, SINKS

# --- model ---------------------------------------------------------------------------------------


class TinyModel(Section):
    """A small Qwen2-architecture policy with a character-level tokenizer, made on this machine."""

    type: Literal["tiny"] = "tiny"
    hidden_size: int = Field(256, ge=64)
    layers: int = Field(4, ge=1)
    heads: int = Field(4, ge=1)
    kv_heads: int = Field(2, ge=1)
    intermediate_size: int = Field(512, ge=64)
    max_length: int = Field(64, ge=8)
    """Context: prompt and answer together, in tokens."""
    cold_start: bool = True
    """Teach the task by supervised learning first, until `cold_start_accuracy`; False leaves random weights."""
    cold_start_accuracy: float = Field(0.4, gt=0, lt=1)
    """Greedy accuracy, on problems held out from the cold start (1000 where the task has 5000), at which it stops."""
    cold_start_steps: int = Field(3000, ge=1)
    """At most this many supervised steps; not reaching the accuracy by then is an error."""
    seed: int = 0

    @model_validator(mode="after")
    def _shapes_fit(self) -> "TinyModel":
        if self.hidden_size % self.heads or self.heads % self.kv_heads:
            raise ValueError("hidden_size must be a multiple of heads, and heads a multiple of kv_heads")
        if self.hidden_size // self.heads not in (32, 64, 96, 128):
            raise ValueError(f"hidden_size / heads must be 32, 64, 96 or 128, not {self.hidden_size // self.heads}")
        return self


class PretrainedModel(Section):
    """A causal language model from a local folder or the Hugging Face hub."""

    type: Literal["pretrained"] = "pretrained"
    path: str
    """Folder, or hub id such as HuggingFaceTB/SmolLM2-135M-Instruct."""
    max_length: int | None = Field(None, ge=8)
    """Context to use, in tokens; the model's own if absent."""


class GgufModel(Section):
    """A causal language model in a GGUF file, dequantized to float32 once and kept in the cache folder."""

    type: Literal["gguf"] = "gguf"
    path: str
    """The file; `<package>/<file>` is also looked for among the installed Python packages."""
    max_length: int | None = Field(None, ge=8)
    """Context to use, in tokens; the model's own if absent."""


ModelConfig = Annotated[TinyModel | PretrainedModel | GgufModel, Field(discriminator="type")]

# --- task ----------------------------------------------------------------------------------------


class TaskBase(Section):
    reward: str | None = Field(
        None,
        description="Judge answers with this function, (answer: str, problem: Problem) -> float, in place of the "
        f"task's own. {REWARDS.help()}.",
    )
    reward_timeout_s: float = Field(5.0, gt=0)
    """Deadline for one answer. The process that judges it is killed at the deadline, and the reward has failed: the
    sample is counted in `reward/failed` and left out of the update. In an evaluation a failed reward counts as 0."""
    reward_memory_gb: float = Field(4.0, gt=0)
    """What the process that judges, and all that it starts, may hold together in memory, memfds, /dev/shm and temporary
    files. Beyond it an allocation fails or the process is killed, and the reward has failed, as at the deadline.
    docs/failure.md says what is guaranteed where."""
    verifiers: int = Field(1, ge=1)
    """Processes that judge answers."""
    template: str = "{prompt}"
    """Text around a problem's prompt, when the tokenizer has no chat template or `chat` is off."""
    chat: bool = False
    """Wrap the prompt with the tokenizer's chat template."""


class ArithmeticTask(TaskBase):
    """Sums (or differences, products) generated from a seed; training and held-out problems never meet."""

    type: Literal["arithmetic"] = "arithmetic"
    operators: str = "+"
    """Any of + - *, drawn evenly."""
    min_operand: int = Field(0, ge=0)
    max_operand: int = Field(99, ge=1)
    held_out_share: float = Field(0.2, gt=0, lt=1)
    """Share of all problems kept for evaluation."""
    seed: int = 0


class ReasoningGymTask(TaskBase):
    """Any reasoning-gym data set by name, judged by its own scorer."""

    type: Literal["reasoning_gym"] = "reasoning_gym"
    dataset: str
    """Name of the data set, such as chain_sum or leg_counting."""
    params: dict[str, Any] = {}
    """Settings of the data set itself."""
    train_size: int = Field(10_000, ge=1)
    held_out_size: int = Field(500, ge=1)
    seed: int = 0


class DatasetTask(TaskBase):
    """Prompts and answers from a local .jsonl/.parquet file or a Hugging Face data set, judged by math-verify."""

    type: Literal["dataset"] = "dataset"
    path: str
    """Local file, or hub id."""
    name: str | None = None
    """Configuration of a hub data set, such as `main` for openai/gsm8k."""
    split: str = "train"
    held_out_path: str | None = None
    """Local file or hub id of the held-out problems; the last `held_out_share` of `path` if absent."""
    held_out_split: str = "test"
    held_out_share: float = Field(0.1, gt=0, lt=1)
    prompt_column: str = "prompt"
    answer_column: str = "answer"
    held_out_prompt_column: str | None = None
    """Of `held_out_path`, if it is not `prompt_column`."""
    held_out_answer_column: str | None = None
    """Of `held_out_path`, if it is not `answer_column`."""


class CustomTask(TaskBase):
    """Problems that a function of your own makes or reads; docs/extending.md has an example."""

    type: Literal["custom"] = "custom"
    problems: str
    """`package.module:function`, or an entry point of the group qurl_ray.problems. It is called with `params` as
    keywords, and returns or yields problems: mappings with a prompt, an answer and, for the reward, meta. It may also
    return {"train": problems, "held_out": problems}."""
    params: dict[str, Any] = {}
    """Keyword arguments of the function."""
    held_out_share: float = Field(0.1, gt=0, lt=1)
    """Share of the problems, the last ones, that is held out, where the function does not say."""

    @field_validator("problems")
    @classmethod
    def _is_known(cls, problems: str) -> str:
        try:
            return PROBLEMS.check(problems)
        except DataError as error:
            raise ValueError(str(error)) from None


TaskConfig = Annotated[ArithmeticTask | ReasoningGymTask | DatasetTask | CustomTask, Field(discriminator="type")]

# --- quantization --------------------------------------------------------------------------------


class QuantizationConfig(Section):
    """How weights become codes."""

    kernel: Literal["auto", "emulation"] = "auto"
    """`auto` takes the device's integer kernel where there is one; `emulation` computes the reference in float32."""
    keep: tuple[str, ...] = (r"(^|\.)lm_head\.", r"(^|\.)embed_tokens\.")
    """Regular expressions (re.search) of linears that stay in full precision. The only list: learner, engines and
    sync read this one."""
    keep_first_layers: int = Field(0, ge=0)
    """Also keep the linears of so many layers at the bottom in full precision."""
    keep_last_layers: int = Field(0, ge=0)
    """And at the top."""
    weight_max_code: int | None = Field(None, ge=1)
    """Bound on weight codes, below the format's own: int4 with 1 has ternary weights. For experiments with a mismatch
    as large as that of large models and long answers."""
    rounding: Literal["nearest", "stochastic", "error_feedback"] = "nearest"
    """The last two are experiments that lost (docs/LOG.md): they change a third of all codes at every sync, so they
    need `sync.delta=false`, and `sync.probe_tokens=0`, as nobody but the sender can make the same codes."""
    backward: Literal["auto", "quantized", "straight_through", "full"] = "auto"
    """Of a unified flow's linears: `quantized` makes both gradients from FP8 codes (fp8_block, and `auto` there),
    `straight_through` from the forward's dequantized operands (`auto` elsewhere), `full` from weights and activations
    in full precision."""
    uaq_scale: float = Field(1.0, ge=1)
    """s of update-aware quantization: linears fed by a norm are divided by s, the norm's gain multiplied. 1 is off."""
    uaq_layers: Literal["qkv", "qkv+mlp"] = "qkv+mlp"

    def kept(self, layers: int) -> tuple[str, ...]:
        """`keep` for a model of so many layers, with those that are kept at its ends."""
        ends = [*range(self.keep_first_layers), *range(max(0, layers - self.keep_last_layers), layers)]
        return (*self.keep, *(rf"(^|\.)layers\.{layer}\." for layer in sorted(set(ends))))

    @field_validator("keep")
    @classmethod
    def _patterns_compile(cls, keep: tuple[str, ...]) -> tuple[str, ...]:
        for pattern in keep:
            try:
                re.compile(pattern)
            except re.error as error:
                raise ValueError(f"{pattern!r} is no regular expression: {error}") from None
        return keep


# --- learner, sync, tracking, evaluation ---------------------------------------------------------


class LearnerConfig(Section):
    """The full-precision side."""

    backend: Literal["torch", "deepspeed"] = "torch"
    """`torch` replicates the parameters on every rank; `deepspeed` shards as `zero_stage` says."""
    workers: int = Field(1, ge=1)
    device: Literal["cpu", "cuda"] = "cpu"
    """`cuda` gives each rank a GPU of its own."""
    compute: Literal["float32", "bfloat16"] = "float32"
    """bfloat16 is autocast; parameters, gradients and optimizer stay float32."""
    lr: float = Field(1e-6, gt=0)
    warmup_steps: int = Field(0, ge=0)
    """Updates over which the learning rate rises linearly."""
    lr_final_share: float = Field(1.0, ge=0, le=1)
    """Share of `lr` that is left at the last update, after a linear fall; 1 keeps the rate constant."""
    betas: tuple[Share, Share] = (0.9, 0.999)
    weight_decay: float = Field(0.0, ge=0)
    grad_clip: float = Field(1.0, gt=0)
    """Bound on the global norm of the gradient."""
    tokens_per_micro_batch: int = Field(4096, ge=1)
    """Tokens of one forward and backward pass; padding counts unless `packing` is on."""
    packing: bool = False
    """Join the samples of a micro-batch end to end instead of padding them; attention stays within each."""
    share_prompts: bool = True
    """Compute the prompt of a group's samples once, and no padding; on a CPU, without `packing`."""
    gradient_checkpointing: bool = False
    """Keep only the blocks' inputs for the backward pass and compute the rest again."""
    zero_stage: Literal[0, 1, 2, 3] = 2
    """With `deepspeed`, what is sharded over the ranks: 1 optimizer, 2 and gradients, 3 and parameters."""
    offload_optimizer: bool = False
    """With `deepspeed` and `zero_stage` 1 to 3: keep the optimizer's states, and make its step, on the CPU."""
    offload_while_waiting: bool = False
    """Move optimizer, gradients and parameters to the CPU during rollouts, for engines that share the GPU. With
    `placement=colocated` it is on unless it is set to false, and all but the parameters are moved during syncs, too."""
    threads: int | None = Field(None, ge=1)
    """CPU threads of a rank; all cores divided by the workers if absent."""
    timeout_s: float = Field(600.0, gt=0)
    """Deadline for collectives, and for placing and starting the ranks."""
    max_failures: int = Field(3, ge=0)
    """How often the ranks are started anew, from the latest checkpoint, after one of them, or the coordinator, died."""

    @model_validator(mode="after")
    def _backend_can(self) -> "LearnerConfig":
        if self.offload_optimizer and (self.backend == "torch" or self.zero_stage == 0):
            raise ValueError("offload_optimizer needs backend=deepspeed and zero_stage 1, 2 or 3")
        return self


class SyncConfig(Section):
    """Weight transfer from learner to engines."""

    transport: Literal["object_store", "nccl", "sparse_nccl", "ipc"] = "object_store"
    """How weights travel. All but the first are vLLM's own, from GPU to GPU, with codes as bfloat16: `nccl` sends all,
    `sparse_nccl` what changed, `ipc` hands over the memory of a GPU that learner and engine share, one of each, with
    `placement=colocated`. The first version in a format and refits go through the object store all the same. Not
    measured yet."""
    timeout_s: float = Field(120.0, gt=0)
    """Deadline for every engine to load and verify one version."""
    delta: bool = True
    """Send only what changed since the version that the engines hold; all of it where they hold another."""
    unquantized: Literal["auto", "float32", "bfloat16"] = "auto"
    """How embeddings, norms and other tensors outside the quantized set travel, and what engines then compute with:
    `auto` is bfloat16 for engines in bfloat16, and beside codes where the learner does not compute through them
    (precision_flow=rollout_only); else float32."""
    bucket_mb: int = Field(32, ge=1)
    """Tensors travel in buckets of so many MiB, which bounds what a sync holds in memory besides the weights."""
    probe_tokens: int = Field(4, ge=0)
    """Tokens that every engine draws after each sync from a fixed prompt, whose log-probs must be those of the
    learner's forward through the same codes; 0 leaves this check out."""
    probe_tolerance: float = Field(0.2, gt=0)
    """Largest mean difference of these log-probs, in nats. It is 0 with the torch engine on a CPU, and what another
    engine's arithmetic makes of it elsewhere; wrong weights are far above."""


class TrackingConfig(Section):
    """Where numbers go. metrics.jsonl is always written."""

    mlflow: bool = True
    mlflow_uri: str | None = None
    """Tracking server or database; sqlite in the output folder if absent."""
    experiment: str = "qurl-ray"
    sinks: tuple[str, ...] = ()
    """Receivers of your own, each `package.module:Class` or an entry point of the group qurl_ray.sinks: made with
    (run_dir, settings), and handed every event of the run (docs/extending.md)."""
    console: Literal["auto", "table", "plain", "none"] = "auto"
    """`auto` is a live table on a terminal and plain lines elsewhere."""
    samples_per_step: int = Field(2, ge=0)
    """Rollouts kept token by token per step, in samples.jsonl: one of each prompt, then a second one of each, and so
    on; prompts_per_step times samples_per_prompt keeps all of a round."""

    @field_validator("sinks")
    @classmethod
    def _sinks_are_known(cls, sinks: tuple[str, ...]) -> tuple[str, ...]:
        return tuple(SINKS.check(sink) for sink in sinks)


class EvaluationConfig(Section):
    """Held-out reward, and the share of held-out problems solved: those with a reward above 0.5."""

    problems: int = Field(500, ge=1)
    """Held-out problems, greedy."""
    every: int = Field(0, ge=0)
    """Also evaluate the quantized policy every so many steps; 0 is only before and after."""
    target_reward: float | None = None
    """The run ends after the first of these evaluations at which the mean held-out reward is at least this; `steps` is
    then a limit. The learning rate falls as if all of them were made."""

    @model_validator(mode="after")
    def _a_target_needs_evaluations(self) -> "EvaluationConfig":
        if self.target_reward is not None and not self.every:
            raise ValueError(
                f"evaluation.target_reward={self.target_reward:g} is looked at every evaluation.every steps, and that "
                "is 0: set it to a number of steps"
            )
        return self


class CheckpointConfig(Section):
    """What a run needs to go on after it was killed, and the policy at that step. Ctrl-C always writes one."""

    every: int = Field(20, ge=0)
    """Save every so many steps; 0 is only at Ctrl-C."""
    keep: int = Field(2, ge=1)
    """How many of the latest to keep; the one with the best held-out reward (`evaluation.every`) stays besides."""


class ExportConfig(Section):
    """The final policy is always saved in full precision, under policy/."""

    quantized: Literal["auto", "none", "int8", "fp8"] = "auto"
    """Also save and evaluate a compressed-tensors checkpoint, which vLLM loads; `auto` takes the rollouts' format if
    it can be exported (int4 and fp8_block cannot)."""

    def format(self, rollouts: Format) -> Literal["none", "int8", "fp8"]:
        """Format of the exported checkpoint for rollouts in that one; "none" is no export."""
        if self.quantized != "auto":
            return self.quantized
        return rollouts if rollouts in ("int8", "fp8") else "none"


# --- the run -------------------------------------------------------------------------------------


class RunConfig(Section):
    """One training run."""

    name: str = Field("run", pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$")
    """Folder under output_dir, and name of the MLflow run."""
    seed: int = 0
    steps: int = Field(100, ge=1)
    """Rollout-and-learn steps; at most so many with `evaluation.target_reward`."""
    output_dir: Path | None = None
    """Where run folders go; $QURL_RUNS, or ~/qurl-runs for submitted jobs, or ./runs if absent."""
    model: ModelConfig = TinyModel()
    task: TaskConfig = ArithmeticTask()
    precision_flow: Literal["rollout_only", "unified", "unified_int8"] = "rollout_only"
    """`rollout_only` trains in full precision and corrects for the difference (QuRL). `unified` trains through the very
    codes that generate: with rollout.quantization=fp8_block, gradients and all, that is Jet-RL; `unified_int8` is the
    same with int8."""
    placement: Placement = "disaggregated"
    """Who computes where. `disaggregated` gives engines GPUs of their own. `colocated` puts them on the GPUs of the
    learner's ranks, where they take turns: engines sleep while the learner trains, and the learner's states are on the
    host while engines generate. It needs rollout.workers × tensor_parallel = learner.workers. Not measured on GPUs."""
    rollout: RolloutConfig = RolloutConfig()
    quantization: QuantizationConfig = QuantizationConfig()
    algorithm: AlgorithmConfig = DAPO()
    learner: LearnerConfig = LearnerConfig()
    guard: GuardConfig = GuardConfig()
    sync: SyncConfig = SyncConfig()
    tracking: TrackingConfig = TrackingConfig()
    evaluation: EvaluationConfig = EvaluationConfig()
    checkpoint: CheckpointConfig = CheckpointConfig()
    export: ExportConfig = ExportConfig()

    @model_validator(mode="before")
    @classmethod
    def _default_types(cls, settings: Any) -> Any:
        return with_offload(with_default_types(settings))

    @model_validator(mode="after")
    def _parts_agree(self) -> "RunConfig":
        rollout, algorithm = self.rollout, self.algorithm
        if rollout.samples_per_prompt < 2 and algorithm.type != "ppo":
            raise ValueError(
                f"rollout.samples_per_prompt is 1: {algorithm.type} compares the samples of a prompt with each other, "
                "so a group of one has no advantage; use at least 2"
            )
        if algorithm.updates_per_rollout > rollout.prompts_per_step:
            raise ValueError(
                f"algorithm.updates_per_rollout ({algorithm.updates_per_rollout}) exceeds rollout.prompts_per_step "
                f"({rollout.prompts_per_step}): a mini-batch holds whole groups"
            )
        if algorithm.overlong_buffer > rollout.max_new_tokens:
            raise ValueError("algorithm.overlong_buffer exceeds rollout.max_new_tokens")
        if rollout.dtype == "bfloat16" and self.sync.unquantized == "float32":
            raise ValueError("rollout.dtype=bfloat16 cannot hold what sync.unquantized=float32 sends: use auto")
        if rollout.engine == "vllm" and rollout.kv_cache != "full":
            raise ValueError("rollout.kv_cache=fp8 is the torch engine's: the learner knows nothing of vLLM's")
        if rollout.max_staleness:
            self._staleness_fits()
        check_transport(self)
        check_placement(self)
        if self.precision_flow != "rollout_only":
            self._flow_fits()
        elif self.quantization.backward != "auto":
            raise ValueError("quantization.backward is of unified flows: set precision_flow=unified")
        elif algorithm.calibrate_every and algorithm.correction.type != "naive":
            raise ValueError("algorithm.calibrate_every needs correction=naive, or a unified precision flow")
        if self.quantization.rounding != "nearest" and (self.sync.delta or self.sync.probe_tokens):
            raise ValueError(
                f"quantization.rounding={self.quantization.rounding} is an experiment that changes a third of all "
                "codes at every sync, at random: set sync.delta=false and sync.probe_tokens=0 with it"
            )
        if self.rollout.quantization == "none" and self.quantization.uaq_scale != 1.0:
            raise ValueError(
                "quantization.uaq_scale must be 1 when rollout.quantization is none: there is no error to outgrow"
            )
        return self

    def _staleness_fits(self) -> None:
        """What rollouts that run ahead need."""
        ahead, correction = f"rollout.max_staleness={self.rollout.max_staleness}", self.algorithm.correction
        if correction.type == "ignore" or correction.metrics_only:
            raise ValueError(
                f"{ahead} draws tokens with weights from before: they need a correction, and algorithm.correction="
                f"{correction.type} takes them for the learner's own"
            )
        if self.learner.offload_while_waiting and self.placement == "disaggregated":
            raise ValueError(
                f"{ahead} has engines generate while the learner trains: they cannot share a GPU "
                "(learner.offload_while_waiting)"
            )

    def _flow_fits(self) -> None:
        """What training through the rollouts' codes needs."""
        flow, rollout = f"precision_flow={self.precision_flow}", self.rollout
        if rollout.quantization == "none":
            raise ValueError(f"{flow} trains through the format of the rollouts: set rollout.quantization to one")
        if self.precision_flow == "unified_int8" and rollout.quantization != "int8":
            raise ValueError(f"{flow} needs rollout.quantization=int8, not {rollout.quantization}")
        if self.quantization.backward == "quantized" and rollout.quantization != "fp8_block":
            raise ValueError(
                "quantization.backward=quantized needs the square blocks of rollout.quantization=fp8_block; other "
                "formats have straight_through and full"
            )
        if self.quantization.rounding != "nearest":
            raise ValueError(f"{flow} needs quantization.rounding=nearest: the learner makes the same codes once more")
        if rollout.kv_cache != "full":
            raise ValueError(f"{flow} needs rollout.kv_cache=full: the learner attends to keys in full precision")
        if self.sync.unquantized == "bfloat16" and rollout.dtype == "float32":
            raise ValueError(f"{flow} needs sync.unquantized=auto: the learner computes what has no codes in float32")

    def shares_forward(self) -> bool:
        """True if engine and learner compute one forward pass, on CPUs and in float32, so that bits can be equal."""
        rollout, learner = self.rollout, self.learner
        ours_on_cpus = (rollout.engine, rollout.device, learner.device) == ("torch", "cpu", "cpu")
        return ours_on_cpus and (rollout.dtype, learner.compute) == ("float32", "float32")

    def backward(self) -> Literal["quantized", "straight_through", "full"]:
        """What gradients of a unified flow are made of."""
        if self.quantization.backward != "auto":
            return self.quantization.backward
        return "quantized" if self.rollout.quantization == "fp8_block" else "straight_through"
