"""Memory of learner and engines on each GPU in each turn (training.rank.gpu_turns), of their hosts, and what fits.

ZeRO shards as in https://arxiv.org/abs/1910.02054. Everything is float32 here. Bytes that each of n ranks holds of one
parameter while it learns, with DeepSpeed 0.19.8 (learner.deepspeed_backend):

| stage | whole | a share of 1/n |
|---|---|---|
| 0, and backend=torch | parameter, gradient, two moments: 16 | |
| 1 | parameter, gradient: 8 | parameter again, two moments: 12 |
| 2 | parameter: 4 | parameter again, gradient, two moments: 16 |
| 3 | | parameter twice, gradient, two moments: 20 |
| FSDP2 | | parameter, gradient, two moments: 16 |

In the optimizer's step, stages 1 to 3 hold their share of the gradient once more: 24 bytes with stage 3, when nothing
else is in use. In passes they hold buffers of fixed size (below), and stage 3 gathered parameters and gradients that it
joins before they are reduced. FSDP2 gathers what is outside of blocks for a whole pass, with its gradient, and blocks
one at a time. benchmarks/planner.py and benchmarks/sharding.py compare this with what is allocated.

With LoRA, the base has neither gradients nor moments: 4 bytes, or those of its codes, which every rank holds whole.
Adapters take 16.
"""

from dataclasses import dataclass, replace
from typing import Literal

from qurl_ray.config import RunConfig
from qurl_ray.config.learner import LearnerConfig
from qurl_ray.config.placement import Placement
from qurl_ray.planning.machines import BLOCK_BYTES, CONSTANTS, HOST_MEMORY, NODE, Constants, Gpu, Precision
from qurl_ray.planning.shapes import Shape
from qurl_ray.planning.workload import Workload

Stage = Literal[0, 1, 2, 3, "fsdp", "torch"]
"""Stage of ZeRO with DeepSpeed, or another backend. backend=torch shards nothing, and can move its states."""
STAGES: tuple[Stage, ...] = (0, 1, 2, "fsdp", 3)
TurnName = Literal["start", "learn", "sync", "rollout"]
_STATES: dict[Stage, tuple[int, int]] = {
    0: (16, 0),
    "torch": (16, 0),
    1: (8, 12),
    2: (4, 16),
    3: (0, 20),
    "fsdp": (0, 16),
}
"""Bytes of one parameter's states: those that every rank holds, and those that ranks share."""
BUCKET, _ALLREDUCED, _LIVE, _GROUP = 50_000_000, 500_000_000, 1_000_000_000, 1_000_000_000
"""Elements: the learner's reduce_bucket_size (learner.deepspeed_backend), and DeepSpeed's own buffer without ZeRO, its
stage3_max_live_parameters and sub_group_size."""
FILE = 2_000_000_000
"""Bytes of a policy that its writer holds (policy.save.FILE_BYTES)."""
_LOGITS = 0.6e9
"""Bytes of logits, their gradient and log-softmax of one chunk (policy.logprobs.HEAD_BYTES), and allocator overhead."""
_HOST_LIMIT = HOST_MEMORY * CONSTANTS.memory
"""Bytes of a node's host that can be planned with."""


# --- the learner -------------------------------------------------------------------------------------------------


def learner_stage(learner: LearnerConfig) -> Stage:
    """Return how a learner is sharded."""
    stages: dict[str, Stage] = {"torch": "torch", "fsdp": "fsdp", "deepspeed": learner.zero_stage}
    return stages[learner.backend]


def state_bytes(shape: Shape, work: Workload, *, ranks: int, stage: Stage) -> float:
    """Bytes of parameters, gradients and moments on each rank."""
    if work.lora_rank:
        codes = shape.block_params if work.lora_codes else 0
        rest = 4 * (shape.params - codes) + 16 * shape.adapter_params(work.lora_rank)
        return codes * _coded_bytes(work) + rest / (ranks if stage in (3, "fsdp") else 1)
    whole, shared = _STATES[stage]
    return shape.params * (whole + shared / ranks)


def _coded_bytes(work: Workload) -> float:
    """Bytes of each weight that the learner holds as codes."""
    return BLOCK_BYTES[work.lora_codes] if work.lora_codes else 0.0


def activation_bytes(shape: Shape, work: Workload) -> float:
    """Bytes kept for the backward pass of a micro-batch, which holds at least one whole sequence.

    The residual stream is float32, activations inside a block are bfloat16 (float32 without autocast). With
    checkpointing only the inputs of all blocks and the inside of one block are kept.
    """
    attention = 2 * (shape.heads + shape.kv_heads) * shape.head_dim
    mlps = 4 * shape.intermediate * shape.active
    if shape.experts > 1:  # rows by expert, before and after, and their weighted sum
        mlps += 3 * shape.hidden * shape.active
    inside = (2 if work.autocast else 4) * (6 * shape.hidden + attention + mlps)
    blocks = 1 if work.checkpointing else shape.layers
    return work.pass_tokens * (4 * shape.hidden * shape.layers + inside * blocks)


def learner_bytes(
    shape: Shape, work: Workload, *, ranks: int, stage: Stage, offloads: bool = True, overlaps: bool = True
) -> dict[TurnName, float]:
    """Bytes of a learner on each rank's GPU in each turn.

    Each rank starts with the whole model on its GPU (learner.scorer.on_device), but with FSDP2. bfloat16 copies of all
    weights, also of gathered ones, are kept for the backward pass; with checkpointing there is one at a time.

    Args:
        offloads: it gives up its GPU while it does not learn. At stage 0, DeepSpeed cannot.
        overlaps: gradients are reduced during the backward pass, as on CUDA: stages 1 and 2 take two buffers.
    """
    params, states = shape.params, state_bytes(shape, work, ranks=ranks, stage=stage)
    if work.lora_rank:
        return _adapting_bytes(shape, work, states, waits=offloads and stage != 0)
    whole, share = 4 * params, 4 * params / ranks
    logits = 3 * 4 * shape.vocab * work.pass_tokens  # float32, with gradient and log-softmax
    kept = activation_bytes(shape, work) + min(_LOGITS, logits)
    cast = 2 * (shape.head_params if work.checkpointing else params) if work.autocast else 0
    # Where the head is the embedding, each of the two has a gradient before these are added.
    second_gradient = 4 * shape.head_params if shape.tied else 0
    if stage == "fsdp":
        # In a pass: outside of blocks parameters and gradient; of a block both, and each once more in the buffer of its
        # collective.
        elsewhere = shape.expert_params * (1 - 1 / ranks) if work.expert_parallel else 0
        outside, block = 4 * (params - shape.block_params), 4 * (shape.block_params - elsewhere) / shape.layers
        passing = 2 * outside + second_gradient + 4 * block + cast + kept
        reference = share if work.reference else 0
        learning = states * (1 + work.critic) + passing + reference
        start = share * (1 + work.critic) + reference
    else:
        several = ranks > 1  # backend=torch joins all gradients to reduce them
        whole_model = {0: _ALLREDUCED if several else 0, "torch": params if several else 0}
        numbers = (whole_model | {3: BUCKET}).get(stage, 2 * BUCKET if overlaps else BUCKET)
        fixed = 4 * numbers if stage == 3 else 0
        gathered = 4 * min(params, _LIVE) if stage == 3 and several else 0
        joined = 4 * min(params, BUCKET) if stage == 3 else 0
        forward = fixed + gathered + cast + kept
        backward = 4 * numbers + joined + gathered + kept + cast + second_gradient
        step = fixed if stage in whole_model else fixed + 4 * (min(params, _GROUP) if stage == 3 else params) / ranks
        critic = states + fixed if work.critic else 0
        reference = whole if work.reference else 0
        learning = states + max(forward, backward, step) + critic + reference
        start = whole + critic + reference
    waits = offloads and stage != 0
    sync = share + 4 * shape.head_params if stage in (3, "fsdp") else whole
    return {
        "start": start,
        "learn": learning,
        "sync": sync if waits else learning,
        "rollout": 0.0 if waits else learning,
    }


def _adapting_bytes(shape: Shape, work: Workload, states: float, *, waits: bool) -> dict[TurnName, float]:
    """Bytes of a learner whose adapters alone are trained. Codes stay on the GPU in all turns."""
    codes = shape.block_params if work.lora_codes else 0
    floats = shape.params - codes
    logits = 3 * 4 * shape.vocab * work.pass_tokens
    cast = 2 * (shape.head_params if work.checkpointing else floats) if work.autocast else 0
    opened = 4 * shape.hidden * shape.intermediate if codes else 0  # a weight that the backward pass dequantizes
    learning = states * (1 + work.critic) + activation_bytes(shape, work) + min(_LOGITS, logits) + cast + opened
    resting = codes * _coded_bytes(work) if waits else learning
    return {
        "start": states * (1 + work.critic),
        "learn": learning,
        "sync": states if waits else learning,
        "rollout": resting,
    }


def host_bytes(shape: Shape, work: Workload, *, ranks: int, stage: Stage) -> float:
    """Bytes of a node's host: every rank there loads the whole models before it shards them, with FSDP2 its share. What
    ranks give up for engines comes later, and so do two copies of what was sent, and a file of the policy
    (policy.save)."""
    here = min(ranks, NODE)
    models = 1 + work.reference + work.critic
    models = 1 + work.critic if work.lora_rank else models
    divided = ranks if stage == "fsdp" and not work.lora_rank else 1
    loading = here * models * 4 * shape.params / divided
    running = here * state_bytes(shape, work, ranks=ranks, stage=stage) * (1 + work.critic) + 2 * 2 * shape.params
    return max(loading, running + min(4 * shape.params, FILE))


# --- engines -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineSpec:
    """A vLLM engine with CUDA graphs and weights in one format, on `tensor_parallel` GPUs of a node."""

    shape: Shape
    gpu: Gpu
    precision: Precision
    tensor_parallel: int = 1
    kv_bytes: float = 2
    """Bytes of each element of keys and values."""
    constants: Constants = CONSTANTS


def weights_bytes(engine: EngineSpec) -> float:
    """Bytes of an engine's weights on each of its GPUs."""
    return engine.shape.weight_bytes(BLOCK_BYTES[engine.precision]) / engine.tensor_parallel


def asleep_bytes(engine: EngineSpec) -> float:
    """Bytes that an engine which sleeps leaves on each of its GPUs: CUDA's own, and its graphs."""
    return engine.constants.context + engine.constants.graphs


def engine_bytes(engine: EngineSpec) -> float:
    """Bytes of an engine on each of its GPUs, without keys and values: weights, activations and CUDA's own (both in
    `workspace`), graphs. Codes are allocated at once: nothing else was there before them."""
    return weights_bytes(engine) + engine.constants.workspace + engine.constants.graphs


def kv_room(engine: EngineSpec, beside: float = 0.0) -> float:
    """Bytes available for keys and values in all GPUs of an engine; negative if its weights alone do not fit.

    Args:
        beside: bytes of a learner on each GPU at the same time.
    """
    limit = engine.gpu.memory * engine.constants.memory
    return engine.tensor_parallel * (limit - engine_bytes(engine) - beside)


def kv_slots(engine: EngineSpec, work: Workload, room: float) -> int:
    """Number of sequences that an engine can hold in `room` bytes at a time, at most `work.slots`.

    Each counts with the mean number of tokens at the moment of the largest total (see `held`). 0 if not even one
    sequence of full length fits.
    """
    shape = engine.shape
    if room < shape.kv_bytes(work.prompt + work.response, engine.kv_bytes):
        return 0
    return max(1, min(work.slots, int(room / shape.kv_bytes(work.prompt + held(work), engine.kv_bytes))))


def held(work: Workload) -> float:
    """Drawn tokens per slot: the mean of a steady batch, or the peak of a batch that starts at once, if that is larger.

    The peak is the maximum of t · running(t).
    """
    k = work.spread
    peak = work.response * (k / (k + 1)) ** k / (k + 1) if k else work.response
    return max(work.age, peak)


# --- layouts -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """Assignment of GPUs to engines and learner ranks."""

    placement: Placement
    engines: int
    tensor_parallel: int
    ranks: int
    stage: Stage
    offloads: bool = True
    """True if ranks that share their GPUs give them up while they do not learn (learner.offload_while_waiting)."""
    sleeps: bool = True
    """True if engines that share their GPUs release them while ranks learn."""

    @property
    def colocated(self) -> bool:
        return self.placement == "colocated"

    @property
    def gpus(self) -> int:
        rollout = self.engines * self.tensor_parallel
        return self.ranks if self.colocated else self.ranks + rollout


@dataclass(frozen=True, slots=True, kw_only=True)
class Footprint:
    """Memory of a layout, in bytes, and what is in the way of its start."""

    parts: dict[str, dict[str, float]]
    """Bytes on a GPU in each turn, by holder."""
    host: float
    """Bytes of a node's host."""
    room: float
    """Bytes for keys and values in all GPUs of an engine."""
    slots: int
    """Answers of which an engine can hold keys and values at a time."""
    engine: EngineSpec
    """The engine that `room` is counted for."""
    answer: float
    """Bytes of keys and values of an answer of full length."""
    activations: float
    """Bytes that a rank keeps for the backward pass, a part of what the learner holds in `learn`."""

    @property
    def gpu(self) -> dict[str, float]:
        """Bytes on a GPU in each turn."""
        return {turn: sum(held.values()) for turn, held in self.parts.items()}

    @property
    def excess(self) -> float:
        """Largest need as a multiple of what there is; above 1 if the layout cannot start."""
        return max(self._needs().values())

    @property
    def problems(self) -> list[str]:
        """Limits that fail, with their arithmetic, the worst first; none if the layout can start."""
        needs = self._needs()
        return [self._arithmetic(limit) for limit in sorted(needs, key=lambda name: -needs[name]) if needs[limit] > 1]

    @property
    def limit(self) -> float:
        """Bytes of a GPU that can be planned with."""
        return self.engine.gpu.memory * self.engine.constants.memory

    def _needs(self) -> dict[str, float]:
        """Return by limit what is needed, as a multiple of what there is."""
        turns = {turn: total / self.limit / (1 + 1e-9) for turn, total in self.gpu.items()}
        missing = (self.answer - self.room) / self.engine.tensor_parallel
        return turns | {"host": self.host / _HOST_LIMIT, "answer": 1 + missing / self.limit}

    def _arithmetic(self, name: str) -> str:
        """Return the sum that a limit does not hold, in GB."""
        if name == "host":
            return f"hosts need {self.host / 1e9:,.0f} GB, and {_HOST_LIMIT / 1e9:,.0f} can be planned with"
        if name == "answer":
            width = self.engine.tensor_parallel
            beside = self.parts["rollout"] | {"engine": engine_bytes(self.engine), "keys and values": 0.0}
            return (
                f"an engine has no room for one answer of full length: its keys and values take "
                f"{self.answer / width / 1e9:,.1f} GB of a GPU, and of {self.limit / 1e9:,.1f} are left "
                f"{self.room / width / 1e9:,.1f} beside {_sum_of(beside)}"
            )
        held = self.parts[name]
        if name == "learn":
            held = held | {"learner": held["learner"] - self.activations, "activations": self.activations}
        total = sum(held.values())
        need = f"{name} takes {total / 1e9:,.1f} GB of a GPU, and {self.limit / 1e9:,.1f} can be planned with"
        return f"{need}: {_sum_of(held)}"


def _sum_of(parts: dict[str, float]) -> str:
    """Return the parts in GB, without those below 50 MB."""
    return " + ".join(f"{name} {size / 1e9:,.1f}" for name, size in parts.items() if size >= 5e7)


def footprint(engine: EngineSpec, layout: Layout, work: Workload, room: float | None = None) -> Footprint:
    """Return what a layout holds, and the limits that it exceeds.

    Evaluations in full precision, and the guard's fallback to it, restart engines in bf16. On shared GPUs they then
    have the same room for keys and values, so it is what bf16 leaves.

    Args:
        room: bytes for keys and values in all GPUs of an engine (rollout.vllm.kv_cache_gb); all that is left if absent.
    """
    shape, context, shared = engine.shape, engine.constants.context, layout.colocated
    learner = learner_bytes(shape, work, ranks=layout.ranks, stage=layout.stage, offloads=layout.offloads)
    full = replace(engine, precision="bf16") if shared else engine
    if room is None:
        beside = learner["sync" if layout.sleeps else "learn"] + context if shared else 0.0
        room = kv_room(full, beside)
    return Footprint(
        parts=gpu_parts(engine, learner, max(0.0, room) / engine.tensor_parallel, layout),
        host=host_bytes(shape, work, ranks=layout.ranks, stage=layout.stage),
        room=room,
        slots=kv_slots(full, work, room),
        engine=full,
        answer=shape.kv_bytes(work.prompt + work.response, engine.kv_bytes),
        activations=activation_bytes(shape, work),
    )


def gpu_parts(
    engine: EngineSpec, learner: dict[TurnName, float], kv: float, layout: Layout
) -> dict[str, dict[str, float]]:
    """Bytes on a GPU in each turn, by holder: of rank and engine if they share it, else of a rank in `start` and
    `learn`, and of an engine in `sync` and `rollout`.

    Args:
        learner: as learner_bytes returns it.
        kv: bytes of keys and values on each GPU. An engine that wakes up allocates them at once.
    """
    ranks = {turn: {"learner": held, "CUDA": engine.constants.context} for turn, held in learner.items()}
    awake = {"engine": engine_bytes(engine), "keys and values": kv}
    if not layout.colocated:
        return {"start": ranks["start"], "learn": ranks["learn"], "sync": awake, "rollout": awake}
    asleep = {"sleeping engine": asleep_bytes(engine)}
    resting = {"start": asleep, "learn": asleep if layout.sleeps else awake, "sync": awake, "rollout": awake}
    return {turn: held | resting[turn] for turn, held in ranks.items()}


def check_layout(shape: Shape, gpu: Gpu, work: Workload, config: RunConfig, *, together: bool = False) -> Footprint:
    """Return what a run's own layout on GPUs holds, and what is in the way of its start.

    Its engines count as bf16, in which an evaluation in full precision restarts them.

    Args:
        work: the run's workload, as configured_workload returns it.
        together: ranks and engines that share GPUs stay there at the same time.
    """
    rollout, learner, width = config.rollout, config.learner, config.rollout.processes
    layout = Layout(
        placement=config.placement,
        engines=rollout.workers,
        tensor_parallel=width,
        ranks=learner.workers,
        stage=learner_stage(learner),
        offloads=bool(learner.offload_while_waiting) and not together,
        sleeps=not together,
    )
    kv_bytes = 1 if rollout.kv_cache == "fp8" else 2
    engine = EngineSpec(shape=shape, gpu=gpu, precision="bf16", tensor_parallel=width, kv_bytes=kv_bytes)
    cache_gb = rollout.vllm.kv_cache_gb
    return footprint(engine, layout, work, None if cache_gb is None else cache_gb * 2**30 * width)
