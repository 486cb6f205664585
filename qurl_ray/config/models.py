"""Settings of a run. Class defaults are vetted; the docstring under a field is its help.

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
from qurl_ray.config.section import Section, Share, with_default_types, without_removed
from qurl_ray.tables import PROBLEMS, REWARDS, SINKS

# --- model ---------------------------------------------------------------------------------------


class TinyModel(Section):
    """A small Qwen2-architecture policy with a character-level tokenizer, made on this machine."""

    type: Literal["tiny"] = "tiny"
    hidden_size: int = Field(256, ge=64)
    """Width of the hidden states; `hidden_size` / `heads` must be 32, 64, 96 or 128."""
    layers: int = Field(4, ge=1)
    """Number of decoder layers."""
    heads: int = Field(4, ge=1)
    """Number of attention heads of a layer; a multiple of `kv_heads`."""
    kv_heads: int = Field(2, ge=1)
    """Number of key and value heads of a layer (grouped-query attention)."""
    intermediate_size: int = Field(512, ge=64)
    """Width of the hidden layer of each MLP."""
    max_length: int = Field(64, ge=8)
    """Context length: prompt and answer together, in tokens."""
    cold_start: bool = True
    """Train the policy on the task by supervised learning before the run, until `cold_start_accuracy`; false leaves
    random weights."""
    cold_start_accuracy: float = Field(0.4, gt=0, lt=1)
    """Share of problems answered correctly, by greedy decoding, at which the cold start stops. It is measured on
    training problems that the cold start does not learn from: a fifth of them, at most 1000."""
    cold_start_steps: int = Field(3000, ge=1)
    """Largest number of supervised steps; it is an error if the accuracy is not reached by then."""
    seed: int = 0
    """Seed of the random weights and of the cold start."""

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
    """Folder of the model, or its Hugging Face hub id, such as HuggingFaceTB/SmolLM2-135M-Instruct."""
    max_length: int | None = Field(None, ge=8)
    """Context length to use (prompt and answer together), in tokens. null uses the model's own; a value above that is
    an error."""


class GgufModel(Section):
    """A causal language model in a GGUF file, dequantized to float32 once and kept in the cache folder."""

    type: Literal["gguf"] = "gguf"
    path: str
    """Path of the GGUF file; `<package>/<file>` is also looked for among the installed Python packages."""
    max_length: int | None = Field(None, ge=8)
    """Context length to use (prompt and answer together), in tokens. null uses the model's own; a value above that is
    an error."""


ModelConfig = Annotated[TinyModel | PretrainedModel | GgufModel, Field(discriminator="type")]

# --- task ----------------------------------------------------------------------------------------


class TaskBase(Section):
    """Settings of all types of task."""

    reward: str | None = Field(
        None,
        description=f"Function that judges answers, (answer: str, problem: Problem) -> float: {REWARDS.help()}. null "
        "takes the one of the task's type.",
    )
    reward_timeout_s: float = Field(5.0, gt=0)
    """Deadline for judging one answer, in seconds. The process that judges it is killed at the deadline, and the reward
    has failed: the sample is counted in `reward/failed` and left out of the update. In an evaluation a failed reward
    counts as 0."""
    reward_memory_gb: float = Field(4.0, gt=0)
    """Largest amount of memory, memfds, /dev/shm and temporary files that the process that judges, and all processes
    that it starts, may hold together, in GB (2^30 bytes). Beyond it an allocation fails or the process is killed, and
    the reward has failed, as at the deadline. docs/failure.md says what is guaranteed where."""
    verifiers: int = Field(1, ge=1)
    """Number of verifiers, which judge answers at the same time."""
    template: str = "{prompt}"
    """Text around a problem's prompt, which replaces {prompt} in it. It is used if the tokenizer has no chat template
    or `chat` is off; the tiny policy takes only the default."""
    chat: bool = False
    """Wrap the prompt with the tokenizer's chat template, as one user message."""


class ArithmeticTask(TaskBase):
    """Sums (or differences, products) generated from a seed; no problem is both trained on and held out."""

    type: Literal["arithmetic"] = "arithmetic"
    operators: str = "+"
    """Operators of the problems: one or more of + - *, each equally frequent."""
    min_operand: int = Field(0, ge=0)
    """Smallest operand."""
    max_operand: int = Field(99, ge=1)
    """Largest operand."""
    held_out_share: float = Field(0.2, gt=0, lt=1)
    """Share of all problems that is held out for evaluation."""
    seed: int = 0
    """Seed that shuffles the problems, and so decides which are held out."""


class ReasoningGymTask(TaskBase):
    """Any data set of reasoning-gym, chosen by name and judged by its own scorer."""

    type: Literal["reasoning_gym"] = "reasoning_gym"
    dataset: str
    """Name of the data set, such as chain_sum or leg_counting."""
    params: dict[str, Any] = {}
    """Parameters of the data set, by name, except its seed and size."""
    train_size: int = Field(10_000, ge=1)
    """Number of problems generated for training."""
    held_out_size: int = Field(500, ge=1)
    """Number of problems generated for evaluation; repeated prompts are left out."""
    seed: int = 0
    """Seed of the first training problem. Each further problem has the next seed; those of held-out problems follow
    those of training problems."""


class DatasetTask(TaskBase):
    """Prompts and answers from a local .jsonl/.parquet file or a Hugging Face data set, judged by math-verify."""

    type: Literal["dataset"] = "dataset"
    path: str
    """Local .jsonl or .parquet file, or hub id of a data set."""
    name: str | None = None
    """Configuration of a hub data set, such as `main` for openai/gsm8k; null means its default."""
    split: str = "train"
    """Split of a hub data set that is trained on."""
    held_out_path: str | None = None
    """Local file or hub id of the held-out problems; null holds out the last `held_out_share` of `path`."""
    held_out_split: str = "test"
    """Split of `held_out_path`, if that is a hub data set."""
    held_out_share: float = Field(0.1, gt=0, lt=1)
    """Share of the problems of `path`, the last ones, that is held out if `held_out_path` is null."""
    prompt_column: str = "prompt"
    """Name of the column of prompts."""
    answer_column: str = "answer"
    """Name of the column of answers."""
    held_out_prompt_column: str | None = None
    """Name of the column of prompts in `held_out_path`; null means `prompt_column`."""
    held_out_answer_column: str | None = None
    """Name of the column of answers in `held_out_path`; null means `answer_column`."""


class CustomTask(TaskBase):
    """Problems that a function of your own makes or reads; docs/extending.md has an example."""

    type: Literal["custom"] = "custom"
    problems: str
    """Function that makes or reads the problems: `package.module:function`, or an entry point of the group
    qurl_ray.problems. It is called with `params` as keywords, and returns or yields problems: mappings with a prompt,
    an answer and, for the reward, meta. It may also return {"train": problems, "held_out": problems}."""
    params: dict[str, Any] = {}
    """Keyword arguments of the function, by name."""
    held_out_share: float = Field(0.1, gt=0, lt=1)
    """Share of the problems, the last ones, that is held out if the function does not return held-out problems."""

    @field_validator("problems")
    @classmethod
    def _is_known(cls, problems: str) -> str:
        return PROBLEMS.check(problems)


TaskConfig = Annotated[ArithmeticTask | ReasoningGymTask | DatasetTask | CustomTask, Field(discriminator="type")]

# --- quantization --------------------------------------------------------------------------------


class QuantizationConfig(Section):
    """Quantization of weights: which linears become codes, and how."""

    kernel: Literal["auto", "emulation"] = "auto"
    """How quantized linears are computed: `auto` uses the device's kernel for the format if there is one, else
    emulation; `emulation` computes the reference in float32."""
    keep: tuple[str, ...] = (r"(^|\.)lm_head\.", r"(^|\.)embed_tokens\.")
    """Regular expressions (re.search) of names of linears that stay in full precision. This is the only such list:
    learner, engines and sync all read it."""
    keep_first_layers: int = Field(0, ge=0)
    """Number of layers, from the first on, whose linears also stay in full precision."""
    keep_last_layers: int = Field(0, ge=0)
    """Number of layers, up to the last, whose linears also stay in full precision."""
    weight_max_code: int | None = Field(None, ge=1)
    """Upper bound on weight codes, below the format's own; int4 with 1 has ternary weights. null leaves the format's.
    For experiments with a mismatch as large as that of large models and long answers."""
    backward: Literal["auto", "quantized", "straight_through", "full"] = "auto"
    """How the gradients of linears are computed in a unified precision flow: `quantized` computes both from FP8 codes
    (fp8_block only); `straight_through` from the forward's dequantized operands; `full` from weights and activations in
    full precision; `auto` is `quantized` with fp8_block, else `straight_through`."""
    uaq_scale: float = Field(1.0, ge=1)
    """Scale s of update-aware quantization: weights of linears that a norm feeds are divided by s, and the norm's gain
    is multiplied by s, so that an update moves their codes s times as far. 1 is off."""
    uaq_layers: Literal["qkv", "qkv+mlp"] = "qkv+mlp"
    """Linears that `uaq_scale` applies to: `qkv` is the query, key and value projections; `qkv+mlp` is these and the
    MLP's gate and up projections."""

    def kept(self, layers: int) -> tuple[str, ...]:
        """Return `keep` with patterns added for the first and last layers that are kept, for a model of so many
        layers."""
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


class SyncConfig(Section):
    """Weight transfer from learner to engines."""

    transport: Literal["object_store", "nccl", "sparse_nccl", "ipc"] = "object_store"
    """How weights travel to the engines: `object_store` uses Ray's object store; `nccl` sends all weights from GPU to
    GPU; `sparse_nccl` sends only what changed from GPU to GPU; `ipc` hands over the memory of a GPU that one learner
    rank and one engine share, with `placement=colocated`. The last three are vLLM's own, send codes as bfloat16, and
    use the object store for the first version in a format and for versions that are sent again. They are not measured
    yet."""
    timeout_s: float = Field(120.0, gt=0)
    """Deadline for every engine to load and verify one weight version, in seconds."""
    delta: bool = True
    """Send only what changed since the version that the engines hold, and all weights to engines that hold another
    version; false always sends all."""
    unquantized: Literal["auto", "float32", "bfloat16"] = "auto"
    """Number format in which embeddings, norms and other tensors without codes travel, and in which engines then
    compute with them: `float32` (32 bits); `bfloat16` (16 bits); `auto` is bfloat16 for engines with dtype=bfloat16,
    and beside codes with precision_flow=rollout_only, else float32."""
    bucket_mb: int = Field(32, ge=1)
    """Size of the buckets in which tensors travel, in MiB (2^20 bytes). It bounds what a sync holds in memory besides
    the weights."""
    probe_tokens: int = Field(4, ge=0)
    """Number of tokens that every engine draws after each sync from a fixed prompt, to check that their log-probs are
    those of the learner's forward through the same codes; 0 skips this check."""
    probe_tolerance: float = Field(0.2, gt=0)
    """Largest accepted mean difference between engine and learner of the probe's log-probs, in nats. The difference is
    0 with the torch engine on a CPU, and elsewhere depends on the engine's arithmetic; wrong weights are far above."""


class TrackingConfig(Section):
    """Where the figures of a run are recorded. metrics.jsonl is always written."""

    mlflow: bool = True
    """Also record the run in MLflow: settings, metrics, sampled rollouts, files and the final policy."""
    mlflow_uri: str | None = None
    """MLflow tracking server or database; null means mlflow.db, a SQLite file in `output_dir`."""
    experiment: str = "qurl-ray"
    """Name of the MLflow experiment."""
    sinks: tuple[str, ...] = ()
    """Receivers of your own, each `package.module:Class` or an entry point of the group qurl_ray.sinks. Each is made
    with (run_dir, settings) and gets the events of the run (docs/extending.md)."""
    console: Literal["auto", "table", "plain", "none"] = "auto"
    """Output on the terminal: `table` is a live table with a progress bar; `plain` is one line per step; `none` is no
    output; `auto` is `table` on a terminal and `plain` elsewhere."""
    samples_per_step: int = Field(2, ge=0)
    """Number of rollouts of each step that are kept token by token, in samples.jsonl: one of each prompt, then a second
    one of each, and so on. prompts_per_step times samples_per_prompt keeps all of a round; 0 keeps none."""

    @field_validator("sinks")
    @classmethod
    def _sinks_are_known(cls, sinks: tuple[str, ...]) -> tuple[str, ...]:
        return tuple(SINKS.check(sink) for sink in sinks)


class EvaluationConfig(Section):
    """Evaluations on held-out problems: mean reward, and the share of problems solved (reward above 0.5)."""

    problems: int = Field(500, ge=1)
    """Largest number of held-out problems in an evaluation; each is answered once, greedily."""
    every: int = Field(0, ge=0)
    """Number of steps between two evaluations of the quantized policy during training; 0 evaluates only before and
    after training."""
    target_reward: float | None = None
    """Mean held-out reward at which the run ends, after the first evaluation during training (see `every`) that reaches
    it; `steps` is then an upper limit. The learning rate falls as if all `steps` were made. null sets no target."""

    @model_validator(mode="after")
    def _a_target_needs_evaluations(self) -> "EvaluationConfig":
        if self.target_reward is not None and not self.every:
            raise ValueError(
                f"evaluation.target_reward={self.target_reward:g} is looked at every evaluation.every steps, and that "
                "is 0: set it to a number of steps"
            )
        return self


class CheckpointConfig(Section):
    """Checkpoints: all that a killed run needs to resume, and the policy at that step. A run that ends before its last
    step, for example after Ctrl-C, always writes one."""

    every: int = Field(20, ge=0)
    """Number of steps between two checkpoints; 0 writes one only if the run ends before its last step."""
    keep: int = Field(2, ge=1)
    """Number of latest checkpoints to keep, in addition to the one with the best held-out reward
    (`evaluation.every`)."""


class ExportConfig(Section):
    """Export of the final policy, which is always saved in full precision, under policy/."""

    quantized: Literal["auto", "none", "int8", "fp8"] = "auto"
    """Format of an additional compressed-tensors checkpoint that is saved and evaluated, and that vLLM can load: `none`
    exports none; `int8` and `fp8` export that format; `auto` exports the rollouts' format if it is int8 or fp8 (int4
    and fp8_block cannot be exported)."""

    def format(self, rollouts: Format) -> Literal["none", "int8", "fp8"]:
        """Return the format of the exported checkpoint for rollouts in that format; "none" is no export."""
        if self.quantized != "auto":
            return self.quantized
        return rollouts if rollouts in ("int8", "fp8") else "none"


# --- the run -------------------------------------------------------------------------------------


class RunConfig(Section):
    """Settings of one training run."""

    name: str = Field("run", pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$")
    """Name of the run's folder under output_dir, and of its MLflow run."""
    seed: int = 0
    """Seed of the order of prompts, of sampling, and of mini-batches. Generated problems (`task.seed`) and the tiny
    policy (`model.seed`) have seeds of their own."""
    steps: int = Field(100, ge=1)
    """Number of steps, each of rollouts and learning; with `evaluation.target_reward` the run may end earlier."""
    output_dir: Path | None = None
    """Folder that holds the run folders. null means $QURL_RUNS if that is set, else ./runs, or ~/qurl-runs for
    submitted jobs."""
    model: ModelConfig = TinyModel()
    """Policy to be trained: `type` is tiny, pretrained or gguf."""
    task: TaskConfig = ArithmeticTask()
    """Problems to train on, and how answers are judged: `type` is arithmetic, reasoning_gym, dataset or custom. The
    settings directly below exist for every type."""
    precision_flow: Literal["rollout_only", "unified", "unified_int8"] = "rollout_only"
    """Precision of training compared with rollouts: `rollout_only` trains in full precision and corrects for the
    difference (QuRL); `unified` trains through the same codes as the engines, which with
    rollout.quantization=fp8_block, gradients included, is Jet-RL; `unified_int8` is `unified` with
    rollout.quantization=int8."""
    placement: Placement = "disaggregated"
    """GPUs of engines and learner: `disaggregated` gives engines GPUs of their own; `colocated` puts them on the GPUs
    of the learner's ranks, where they take turns: engines sleep while the learner trains, and the learner's states are
    in host memory while engines generate. `colocated` needs rollout.workers × tensor_parallel = learner.workers. Not
    measured on GPUs yet."""
    rollout: RolloutConfig = RolloutConfig()
    quantization: QuantizationConfig = QuantizationConfig()
    algorithm: AlgorithmConfig = DAPO()
    """Algorithm of reinforcement learning: `type` is dapo, grpo or ppo. The settings directly below exist for every
    type."""
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
        return with_offload(with_default_types(without_removed(settings)))

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
        if self.rollout.quantization == "none" and self.quantization.uaq_scale != 1.0:
            raise ValueError(
                "quantization.uaq_scale must be 1 when rollout.quantization is none: there is no error to outgrow"
            )
        return self

    def _staleness_fits(self) -> None:
        """Raise ValueError if another setting contradicts rollouts that run ahead of the learner."""
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
        """Raise ValueError if another setting contradicts a unified precision flow."""
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
        """Return how gradients of a unified flow are computed: `quantization.backward`, with `auto` resolved."""
        if self.quantization.backward != "auto":
            return self.quantization.backward
        return "quantized" if self.rollout.quantization == "fp8_block" else "straight_through"
