"""Memory of engines and learners on each GPU in each turn (training.rank.gpu_turns), and of their hosts.

ZeRO shards as in https://arxiv.org/abs/1910.02054. Everything is float32 here. Bytes that each of n ranks holds of one
parameter while it learns, with DeepSpeed 0.19.8 (learner.deepspeed_backend):

| stage | whole | a share of 1/n |
|---|---|---|
| 0 | parameter, gradient, two moments: 16 | |
| 1 | parameter, gradient: 8 | parameter again, two moments: 12 |
| 2 | parameter: 4 | parameter again, gradient, two moments: 16 |
| 3 | | parameter twice, gradient, two moments: 20 |
| FSDP2 | | parameter, gradient, two moments: 16 |

In the optimizer's step, stages 1 to 3 hold their share of the gradient once more: 24 bytes with stage 3, when nothing
else is in use. In passes they hold buffers of fixed size (below), and stage 3 gathered parameters and gradients that it
joins before they are reduced. FSDP2 gathers what is outside of blocks for a whole pass, with its gradient, and blocks
one at a time. benchmarks/planner.py and benchmarks/sharding.py compare this with what is allocated.
"""

from typing import Literal

from qurl_ray.planning.machines import HOST_MEMORY, NODE
from qurl_ray.planning.roofline import BLOCK_BYTES, EngineRoofline
from qurl_ray.planning.shapes import Shape
from qurl_ray.planning.workload import Workload

Stage = Literal[0, 1, 2, 3, "fsdp"]
"""Stage of ZeRO with DeepSpeed, 0 also for backend=torch; or FSDP2."""
STAGES: tuple[Stage, ...] = (0, 1, 2, "fsdp", 3)
TurnName = Literal["start", "learn", "sync", "rollout"]
_STATES: dict[Stage, tuple[int, int]] = {0: (16, 0), 1: (8, 12), 2: (4, 16), 3: (0, 20), "fsdp": (0, 16)}
"""Bytes of one parameter's states: those that every rank holds, and those that ranks share."""
BUCKET, _ALLREDUCED, _LIVE, _GROUP = 50_000_000, 500_000_000, 1_000_000_000, 1_000_000_000
"""Elements: the learner's reduce_bucket_size (learner.deepspeed_backend), and DeepSpeed's own buffer without ZeRO, its
stage3_max_live_parameters and sub_group_size."""
FILE = 2_000_000_000
"""Bytes of a policy that its writer holds (policy.save.FILE_BYTES)."""
_LOGITS = 0.6e9
"""Bytes of logits, their gradient and log-softmax of one chunk (policy.logprobs.HEAD_BYTES), and allocator overhead."""


def state_bytes(shape: Shape, *, ranks: int, stage: Stage) -> float:
    """Bytes of parameters, gradients and moments on each rank."""
    whole, shared = _STATES[stage]
    return shape.params * (whole + shared / ranks)


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
    params = shape.params
    states = state_bytes(shape, ranks=ranks, stage=stage)
    if stage == "fsdp":
        return _fsdp_bytes(shape, work, ranks=ranks, offloads=offloads)
    cast = 2 * (shape.head_params if work.checkpointing else params) if work.autocast else 0
    numbers = {0: _ALLREDUCED if ranks > 1 else 0, 3: BUCKET}.get(stage, 2 * BUCKET if overlaps else BUCKET)
    buckets = 4 * numbers
    fixed = buckets if stage == 3 else 0
    gathered = 4 * min(params, _LIVE) if stage == 3 and ranks > 1 else 0
    joined = 4 * min(params, BUCKET) if stage == 3 else 0
    kept = activation_bytes(shape, work) + min(_LOGITS, logit_bytes(shape, work))
    forward = fixed + gathered + cast + kept
    backward = buckets + joined + gathered + kept + cast + _second_gradient(shape)
    step = fixed + (4 * (min(params, _GROUP) if stage == 3 else params) / ranks if stage else 0)
    critic = states + fixed if work.critic else 0
    reference = 4 * params if work.reference else 0
    learning = states + max(forward, backward, step) + critic + reference
    waits = offloads and stage != 0
    whole = 4 * params
    sync = whole / ranks + 4 * shape.head_params if stage == 3 else whole
    return {
        "start": whole + critic + reference,
        "learn": learning,
        "sync": sync if waits else learning,
        "rollout": 0.0 if waits else learning,
    }


def _fsdp_bytes(shape: Shape, work: Workload, *, ranks: int, offloads: bool) -> dict[TurnName, float]:
    params, states = shape.params, state_bytes(shape, ranks=ranks, stage="fsdp")
    outside, block = 4 * (params - shape.block_params), 4 * shape.block_params / shape.layers
    cast = 2 * (shape.head_params if work.checkpointing else params) if work.autocast else 0
    # In a pass: outside of blocks parameters and gradient; of a block both, and each once more in the buffer of its
    # collective.
    kept = activation_bytes(shape, work) + min(_LOGITS, logit_bytes(shape, work))
    passing = 2 * outside + _second_gradient(shape) + 4 * block + cast + kept
    reference = 4 * params / ranks if work.reference else 0
    learning = states * (1 + work.critic) + passing + reference
    start = 4 * params / ranks * (1 + work.critic) + reference
    sync = 4 * params / ranks + 4 * shape.head_params
    return {
        "start": start,
        "learn": learning,
        "sync": sync if offloads else learning,
        "rollout": 0.0 if offloads else learning,
    }


def _second_gradient(shape: Shape) -> float:
    """Bytes of the embedding's gradient where the head, which has the same weights, already gave them one."""
    return 4 * shape.head_params if shape.tied else 0.0


def logit_bytes(shape: Shape, work: Workload) -> float:
    """Bytes of the float32 logits of a micro-batch, their gradient and log-softmax, if they are not cut into pieces."""
    return 3 * 4 * shape.vocab * _tokens(work)


def _tokens(work: Workload) -> float:
    """Tokens that a rank computes in a pass, which holds at least one whole sequence."""
    return max(work.micro_tokens, (work.prompt + work.response) / work.sequence_parallel)


def activation_bytes(shape: Shape, work: Workload) -> float:
    """Bytes kept for the backward pass of a micro-batch, which holds at least one whole sequence.

    The residual stream is float32, activations inside a block are bfloat16 (float32 without autocast). With
    checkpointing only the inputs of all blocks and the inside of one block are kept.
    """
    tokens = _tokens(work)
    attention = 2 * (shape.heads + shape.kv_heads) * shape.head_dim
    inside = (2 if work.autocast else 4) * (6 * shape.hidden + attention + 4 * shape.intermediate)
    blocks = 1 if work.checkpointing else shape.layers
    return tokens * (4 * shape.hidden * shape.layers + inside * blocks)


# --- engines -----------------------------------------------------------------------------------------------------


def engine_bytes(engine: EngineRoofline) -> float:
    """Bytes of an engine on each of its GPUs, without keys and values: weights, activations and CUDA's own (both in
    `workspace`), graphs. Codes are allocated at once: nothing else was there before them."""
    weights = engine.shape.weight_bytes(BLOCK_BYTES[engine.precision]) / engine.tensor_parallel
    return weights + engine.constants.workspace + _graphs(engine)


def asleep_bytes(engine: EngineRoofline) -> float:
    """Bytes that an engine which sleeps leaves on each of its GPUs."""
    return engine.constants.context + _graphs(engine)


def _graphs(engine: EngineRoofline) -> float:
    return engine.constants.graphs if engine.graphs else 0.0


def kv_room(engine: EngineRoofline, beside: float = 0.0) -> float:
    """Bytes available for keys and values in all GPUs of an engine; negative if its weights alone do not fit.

    Args:
        beside: bytes of a learner on each GPU at the same time.
    """
    limit = engine.gpu.memory * engine.constants.memory
    return engine.tensor_parallel * (limit - engine_bytes(engine) - beside)


def kv_slots(engine: EngineRoofline, work: Workload, room: float) -> int:
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


# --- both --------------------------------------------------------------------------------------------------------


def gpu_bytes(
    engine: EngineRoofline, learner: dict[TurnName, float], kv: float, *, colocated: bool
) -> dict[TurnName, float]:
    """Bytes on a GPU in each turn: of rank and engine if they share it, else of a rank in `start` and `learn`, and of
    an engine in `sync` and `rollout`.

    Args:
        learner: as learner_bytes returns it.
        kv: bytes of keys and values on each GPU. An engine that wakes up allocates them at once.
    """
    ranks = {turn: held + engine.constants.context for turn, held in learner.items()}
    awake = engine_bytes(engine) + kv
    if not colocated:
        return ranks | {"sync": awake, "rollout": awake}
    asleep = asleep_bytes(engine)
    beside: dict[TurnName, float] = {"start": asleep, "learn": asleep, "sync": awake, "rollout": awake}
    return {turn: ranks[turn] + beside[turn] for turn in beside}


def host_bytes(shape: Shape, work: Workload, *, ranks: int, stage: Stage) -> float:
    """Bytes of a node's host: every rank there loads the whole models before it shards them, with FSDP2 its share. What
    ranks give up for engines comes later, and so do two copies of what was sent, and a file of the policy
    (policy.save)."""
    here = min(ranks, NODE)
    models = 1 + work.reference + work.critic
    loading = here * models * 4 * shape.params / (ranks if stage == "fsdp" else 1)
    running = here * state_bytes(shape, ranks=ranks, stage=stage) * (1 + work.critic) + 2 * 2 * shape.params
    return max(loading, running + min(4 * shape.params, FILE))


def stages_that_fit(engine: EngineRoofline, work: Workload, *, ranks: int, colocated: bool) -> dict[Stage, float]:
    """Return the ZeRO stages with which a learner fits, with the bytes that it leaves on its GPUs beside an engine.

    Args:
        engine: shares the learner's GPUs if `colocated`.
    """
    shape, gpu, c = engine.shape, engine.gpu, engine.constants
    found: dict[Stage, float] = {}
    for stage in STAGES if ranks > 1 else STAGES[:1]:
        learner = learner_bytes(shape, work, ranks=ranks, stage=stage, offloads=colocated)
        most = c.context + max(learner["start"], learner["learn"]) + (asleep_bytes(engine) if colocated else 0.0)
        host = host_bytes(shape, work, ranks=ranks, stage=stage)
        if most <= gpu.memory * c.memory and host <= HOST_MEMORY * c.memory:
            found[stage] = learner["sync"] + c.context if colocated else 0.0
    return found
