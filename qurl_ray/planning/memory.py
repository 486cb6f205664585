"""Memory of engines and learners: slots for an engine's keys and values, and the ZeRO stage of a learner.

ZeRO shards as in https://arxiv.org/abs/1910.02054. Parameters, gradients and both moments are float32 here.
"""

from typing import Literal

from qurl_ray.planning.machines import CONSTANTS, Constants, Gpu
from qurl_ray.planning.roofline import BLOCK_BYTES, EngineRoofline
from qurl_ray.planning.shapes import Shape
from qurl_ray.planning.workload import Workload

Stage = Literal[0, 1, 2, 3]
STATES = 16
"""Bytes of the float32 states of one parameter: the parameter itself, its gradient, two moments."""
_SHARDED: dict[Stage, int] = {0: 0, 1: 8, 2: 12, 3: 16}
"""Bytes of the states of one parameter that each stage shards: moments, then gradients, then parameters."""
_LOGITS = 0.6e9
"""Bytes of logits, their gradient and log-softmax of one chunk (policy.logprobs.HEAD_BYTES), and allocator overhead."""


def kv_room(engine: EngineRoofline) -> float:
    """Bytes available for keys and values in all GPUs of an engine; negative if its weights alone do not fit."""
    c, gpu = engine.constants, engine.gpu
    weights = engine.shape.weight_bytes(BLOCK_BYTES[engine.precision])
    return engine.tensor_parallel * (gpu.memory * c.memory - c.workspace) - weights


def kv_slots(engine: EngineRoofline, work: Workload) -> int:
    """Number of sequences that an engine can hold at a time, at most `work.slots`.

    Each counts with the mean number of tokens at the moment of the largest total (see `held`). 0 if not even one
    sequence of full length fits.
    """
    room, shape = kv_room(engine), engine.shape
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


def learner_bytes(shape: Shape, work: Workload, *, ranks: int, stage: Stage) -> float:
    """Bytes on each rank during training: states, autocast copies, a reference or value model, activations, logits."""
    sharded = _SHARDED[stage]
    states = shape.params * (STATES - sharded + sharded / ranks)
    layer = shape.block_params / shape.layers
    if stage == 3:
        states += 4 * (2 * layer + shape.head_params)  # parameters gathered at a time
        cast = 2 * (layer + shape.head_params)
    else:
        cast = 2 * shape.params
    critic = states + cast if work.critic else 0
    reference = 4 * shape.params if work.reference else 0
    return states + cast + critic + reference + activation_bytes(shape, work) + _LOGITS


def activation_bytes(shape: Shape, work: Workload) -> float:
    """Bytes kept for the backward pass of a micro-batch, which holds at least one whole sequence.

    The residual stream is float32, activations inside a block are bfloat16. With checkpointing only the inputs of all
    blocks and the inside of one block are kept.
    """
    tokens = max(work.micro_tokens, work.prompt + work.response)
    attention = 2 * (shape.heads + shape.kv_heads) * shape.head_dim
    inside = 2 * (6 * shape.hidden + attention + 4 * shape.intermediate)
    blocks = 1 if work.checkpointing else shape.layers
    return tokens * (4 * shape.hidden * shape.layers + inside * blocks)


def zero_stage(shape: Shape, gpu: Gpu, work: Workload, *, ranks: int, constants: Constants = CONSTANTS) -> Stage | None:
    """Lowest ZeRO stage with which the learner fits; None if none does."""
    stages: tuple[Stage, ...] = (0, 1, 2, 3) if ranks > 1 else (0,)
    limit = gpu.memory * constants.memory
    return next((s for s in stages if learner_bytes(shape, work, ranks=ranks, stage=s) <= limit), None)
