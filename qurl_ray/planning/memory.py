"""What fits: slots of an engine's keys and values, and the ZeRO stage with which a learner's states fit.

ZeRO's shards are those of https://arxiv.org/abs/1910.02054; parameters, gradients and both moments are float32 here.
"""

from typing import Literal

from qurl_ray.planning.machines import CONSTANTS, Constants, Gpu
from qurl_ray.planning.roofline import BLOCK_BYTES, Engine
from qurl_ray.planning.shapes import Shape
from qurl_ray.planning.workload import Workload

Stage = Literal[0, 1, 2, 3]
STATES = 16
"""Bytes of a parameter's states in float32: itself, its gradient, two moments."""
_SHARDED: dict[Stage, int] = {0: 0, 1: 8, 2: 12, 3: 16}
"""Of those, what a stage shards: moments, gradients, parameters."""
_LOGITS = 0.6e9
"""Logits, their gradient and log-softmax of one piece (policy.logprobs.HEAD_BYTES), and the allocator's rest."""


def kv_room(engine: Engine) -> float:
    """Bytes for keys and values in all GPUs of an engine; negative if its weights alone do not fit."""
    c, gpu = engine.constants, engine.gpu
    weights = engine.shape.weight_bytes(BLOCK_BYTES[engine.precision])
    return engine.tensor_parallel * (gpu.memory * c.memory - c.workspace) - weights


def kv_slots(engine: Engine, work: Workload) -> int:
    """Sequences that an engine holds at a time: as many as fit with the tokens that they have on average when those
    are most, not more than `work.slots`. 0 if not even one of full length fits."""
    room, shape = kv_room(engine), engine.shape
    if room < shape.kv_bytes(work.prompt + work.response, engine.kv_bytes):
        return 0
    return max(1, min(work.slots, int(room / shape.kv_bytes(work.prompt + held(work), engine.kv_bytes))))


def held(work: Workload) -> float:
    """Drawn tokens per slot: the larger of a steady batch's mean and of the peak, t · running(t), of one that starts
    at once."""
    k = work.spread
    peak = work.response * (k / (k + 1)) ** k / (k + 1) if k else work.response
    return max(work.age, peak)


def learner_bytes(shape: Shape, work: Workload, *, ranks: int, stage: Stage) -> float:
    """On each rank while it trains: states, what autocast casts, a reference or value model, activations."""
    sharded = _SHARDED[stage]
    states = shape.params * (STATES - sharded + sharded / ranks)
    layer = shape.block_params / shape.layers
    if stage == 3:
        states += 4 * (2 * layer + shape.head_params)  # gathered at a time
        cast = 2 * (layer + shape.head_params)
    else:
        cast = 2 * shape.params
    critic = states + cast if work.critic else 0
    reference = 4 * shape.params if work.reference else 0
    return states + cast + critic + reference + activation_bytes(shape, work) + _LOGITS


def activation_bytes(shape: Shape, work: Workload) -> float:
    """Kept for the backward pass of a micro-batch, which holds at least one whole sequence. The residual stream is
    float32, what lies inside a block bfloat16; with checkpointing only blocks' inputs stay, and one block's inside."""
    tokens = max(work.micro_tokens, work.prompt + work.response)
    attention = 2 * (shape.heads + shape.kv_heads) * shape.head_dim
    inside = 2 * (6 * shape.hidden + attention + 4 * shape.intermediate)
    blocks = 1 if work.checkpointing else shape.layers
    return tokens * (4 * shape.hidden * shape.layers + inside * blocks)


def zero_stage(shape: Shape, gpu: Gpu, work: Workload, *, ranks: int, constants: Constants = CONSTANTS) -> Stage | None:
    """The lowest stage that fits; None if none does."""
    stages: tuple[Stage, ...] = (0, 1, 2, 3) if ranks > 1 else (0,)
    limit = gpu.memory * constants.memory
    return next((s for s in stages if learner_bytes(shape, work, ranks=ranks, stage=s) <= limit), None)
