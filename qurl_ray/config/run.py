"""Settings of a run: all sections, and the checks that concern several of them."""

from pathlib import Path
from typing import Any, Literal

from pydantic import Field, model_validator

from qurl_ray.config.algorithm import DAPO, AlgorithmConfig
from qurl_ray.config.checkpoint import CheckpointConfig
from qurl_ray.config.environment import EnvironmentConfig
from qurl_ray.config.evaluation import EvaluationConfig
from qurl_ray.config.export import ExportConfig
from qurl_ray.config.guard import GuardConfig
from qurl_ray.config.learner import LearnerConfig
from qurl_ray.config.lora import LoraConfig
from qurl_ray.config.model import ModelConfig, TinyModel
from qurl_ray.config.placement import Placement, check_placement, check_transport, with_offload
from qurl_ray.config.quantization import QuantizationConfig
from qurl_ray.config.rollout import EMULATED, FOUR_BIT_FLOATS, FormatName, RolloutConfig
from qurl_ray.config.section import Section, with_default_types
from qurl_ray.config.sync import SyncConfig
from qurl_ray.config.task import ArithmeticTask, TaskConfig
from qurl_ray.config.tracking import TrackingConfig


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
    rollout.quantization=int8. With nvfp4, nvfp4_w4a4 and mxfp4 the default is `unified`, unless adapters are trained: a
    published run with NVFP4 in rollouts alone collapsed (https://arxiv.org/abs/2607.15810)."""
    placement: Placement = "disaggregated"
    """GPUs of engines and learner: `disaggregated` gives engines GPUs of their own; `colocated` puts them on the GPUs
    of the learner's ranks. Unless these hold both at the same time, they take turns: engines sleep while the learner
    trains, and the learner's states are in host memory while engines generate. `colocated` needs rollout.workers ×
    tensor_parallel = learner.workers. It has run on one H200, with vLLM."""
    rollout: RolloutConfig = RolloutConfig()
    environment: EnvironmentConfig = EnvironmentConfig()
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
        return _with_flow(with_offload(with_default_types(settings)))

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
        whole = type(algorithm).model_fields["turn_credit"].default
        if self.environment.type is None and algorithm.turn_credit != whole:
            raise ValueError(
                f"algorithm.turn_credit={algorithm.turn_credit} has no effect without environment.type, since answers "
                f"have one turn: set environment.type, or turn_credit to {whole}"
            )
        if algorithm.overlong_buffer > rollout.max_new_tokens:
            raise ValueError("algorithm.overlong_buffer exceeds rollout.max_new_tokens")
        if rollout.dtype != "float32" and self.sync.unquantized not in ("auto", rollout.dtype):
            raise ValueError(
                f"rollout.dtype={rollout.dtype} cannot hold what sync.unquantized={self.sync.unquantized} sends: use "
                "auto"
            )
        self._kernels_fit()
        if rollout.max_staleness:
            self._staleness_fits()
        if self.learner.lora:
            self._lora_fits(self.learner.lora)
        if self.evaluation.certificate.every:
            self._certificate_fits()
        elif self.guard.cost_max is not None:
            raise ValueError("guard.cost_max is compared with certificates: set evaluation.certificate.every")
        check_transport(self.placement, rollout, self.learner, self.sync)
        check_placement(self.placement, rollout, self.learner, self.sync)
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

    def _kernels_fit(self) -> None:
        """Raise ValueError if vLLM has no CUDA kernel for the settings."""
        rollout, quantization = self.rollout, self.quantization
        if not rollout.restarts_for_formats or rollout.quantization == "none" or quantization.kernel == "emulation":
            return
        if rollout.dtype == "float32":
            raise ValueError(
                f"rollout.engine={rollout.engine} multiplies codes with kernels that return 16 bits: set "
                "rollout.dtype=bfloat16 or float16, or quantization.kernel=emulation, which saves no time"
            )
        if rollout.quantization in EMULATED:
            raise ValueError(
                f"rollout.engine={rollout.engine} on CUDA has no kernel for {rollout.quantization} whose codes can be "
                "written in place: take fp8 or int8, or quantization.kernel=emulation, which saves no time"
            )

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

    def _certificate_fits(self) -> None:
        """Raise ValueError if answers in full precision cannot be compared with the rollouts'."""
        given, rollout = f"evaluation.certificate.every={self.evaluation.certificate.every}", self.rollout
        if rollout.quantization == "none":
            raise ValueError(f"{given} certifies a format, and rollout.quantization=none has none: set it to 0")
        if self.lora_over_codes:
            raise ValueError(f"{given}: learner.lora.base=codes has no policy in full precision to compare with")
        if rollout.restarts_for_formats:
            raise ValueError(
                f"{given}: engines of rollout.engine={rollout.engine} on CUDA must restart for full precision, which "
                "takes minutes each time; set it to 0 (qurl evaluate --against compares what the run saves)"
            )
        if rollout.max_staleness:
            raise ValueError(
                f"{given} gives engines full-precision weights between two steps, and with rollout.max_staleness="
                f"{rollout.max_staleness} they would draw answers of the next steps with these: set one of them to 0"
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
        if rollout.processes > 1 and rollout.quantization in ("int8", "fp8", "nvfp4_w4a4"):
            raise ValueError(
                f"{flow} computes activations as one process does: with rollout.vllm.tensor_parallel="
                f"{rollout.vllm.tensor_parallel}, each quantizes its part of a row by the range of that part; take "
                "fp8_block, whose groups lie within a part, or tensor_parallel=1"
            )
        if rollout.kv_cache != "full":
            raise ValueError(f"{flow} needs rollout.kv_cache=full: the learner attends to keys in full precision")
        if self.sync.unquantized not in ("auto", "float32") and rollout.dtype == "float32":
            raise ValueError(f"{flow} needs sync.unquantized=auto: the learner computes what has no codes in float32")

    def _lora_fits(self, lora: LoraConfig) -> None:
        """Raise ValueError if another setting contradicts adapters."""
        rollout, learner = self.rollout, self.learner
        if not rollout.engine_entry.adapters:
            raise ValueError(f"learner.lora: rollout.engine={rollout.engine} takes no adapters: take torch or vllm")
        if self.precision_flow != "rollout_only":
            raise ValueError(
                f"learner.lora trains through the engines' codes with lora.base=codes: leave precision_flow="
                f"{self.precision_flow} out"
            )
        if self.quantization.uaq_scale != 1:
            raise ValueError(
                "quantization.uaq_scale moves codes faster than weights, and with learner.lora no code moves: set it "
                "to 1"
            )
        if self.algorithm.kl_coef and learner.backend == "deepspeed" and learner.zero_stage == 3:
            raise ValueError(
                "algorithm.kl_coef with learner.lora compares with the adapters of the start, of which zero_stage=3 "
                "has parts alone: choose learner.zero_stage=2, or backend=fsdp"
            )
        if lora.noise and learner.backend == "deepspeed" and learner.zero_stage == 3:
            raise ValueError(
                "learner.lora.noise changes the gains of norms, of which zero_stage=3 has parts alone: choose "
                "learner.zero_stage=2, or backend=fsdp"
            )
        if lora.base == "full":
            return
        if rollout.quantization == "none":
            raise ValueError("learner.lora.base=codes needs codes: set rollout.quantization, or lora.base=full")
        if rollout.processes > 1:
            raise ValueError(
                "learner.lora.base=codes computes activations as one process does: set "
                f"rollout.vllm.tensor_parallel=1, not {rollout.vllm.tensor_parallel}"
            )
        if self.evaluation.full_precision:
            raise ValueError(
                "learner.lora.base=codes has no policy in full precision: leave evaluation.full_precision out, or set "
                "lora.base=full"
            )
        if self.algorithm.calibrate_every:
            raise ValueError(
                "algorithm.calibrate_every compares with full precision, which learner.lora.base=codes has not: set "
                "it to 0, or lora.base=full"
            )

    @property
    def trains_through_codes(self) -> bool:
        """True if the learner computes with the engines' codes, so that there is no mismatch to correct."""
        return self.precision_flow != "rollout_only" or self.lora_over_codes

    @property
    def lora_over_codes(self) -> bool:
        """True if adapters alone are trained, over codes that are made once."""
        return self.learner.lora is not None and self.learner.lora.base == "codes"

    def shares_forward(self) -> bool:
        """True if engine and learner compute one forward pass, on CPUs and in float32, so that bits can be equal."""
        rollout, learner = self.rollout, self.learner
        ours_on_cpus = rollout.engine_entry.equal_bits and (rollout.device, learner.device) == ("cpu", "cpu")
        return ours_on_cpus and (rollout.dtype, learner.compute) == ("float32", "float32")

    @property
    def evaluates_full_precision(self) -> bool:
        """`evaluation.full_precision`, with null resolved."""
        asked = self.evaluation.full_precision
        return not (self.rollout.restarts_for_formats or self.lora_over_codes) if asked is None else asked

    @property
    def evaluated_format(self) -> FormatName:
        """Number format of the evaluation `after, quantized`: the export's, for which an engine may have to restart,
        else the rollouts'; none if both are full precision."""
        exported, rollouts = self.export.format(self.rollout.quantization), self.rollout.quantization
        return exported if exported != "none" and self.evaluates_full_precision else rollouts

    @property
    def probe_tokens(self) -> int:
        """`sync.probe_tokens`, with null resolved."""
        default = 8 if self._rounds_like_the_learner else 8192 if self.rollout.device == "cuda" else 512
        return default if self.sync.probe_tokens is None else self.sync.probe_tokens

    @property
    def probe_tolerance(self) -> float:
        """`sync.probe_tolerance`, with null resolved."""
        return self.sync.probe_tolerance or (0.2 if self._rounds_like_the_learner else 1.0)

    @property
    def _rounds_like_the_learner(self) -> bool:
        """True if engines round nearly as the learner does. Processes that share an engine quantize activations by
        ranges of their own."""
        rollout = self.rollout
        return (rollout.device, rollout.dtype, rollout.processes) == ("cpu", "float32", 1)

    def backward(self) -> Literal["quantized", "straight_through", "full"]:
        """Return how gradients of a unified flow are computed: `quantization.backward`, with `auto` resolved."""
        if self.quantization.backward != "auto":
            return self.quantization.backward
        return "quantized" if self.rollout.quantization == "fp8_block" else "straight_through"


def _with_flow(settings: Any) -> Any:
    """Set precision_flow to unified with 4-bit floats, unless the settings give it, or adapters."""
    if not isinstance(settings, dict) or "precision_flow" in settings:
        return settings
    rollout, learner = (settings.get(name) for name in ("rollout", "learner"))
    four_bit = isinstance(rollout, dict) and rollout.get("quantization") in FOUR_BIT_FLOATS
    adapts = isinstance(learner, dict) and learner.get("lora")
    return settings | {"precision_flow": "unified"} if four_bit and not adapts else settings
