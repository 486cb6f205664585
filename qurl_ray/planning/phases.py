"""Seconds of a step's phases: rollouts, the learner's passes, and the turns of a colocated learner."""

import math
from typing import Protocol

import numpy as np

from qurl_ray.planning.machines import CONSTANTS, NETWORK, NODE, Constants, Gpu
from qurl_ray.planning.measured import measured_card
from qurl_ray.planning.memory import Stage, state_bytes
from qurl_ray.planning.roofline import BLOCK_BYTES, EngineRoofline
from qurl_ray.planning.shapes import Shape
from qurl_ray.planning.workload import Workload

_BINS = 48  # classes of an answer's length


class Decoding(Protocol):
    """Speed of an engine, computed or measured."""

    def decode_s(self, batch: float, context: float) -> float: ...

    def prefill_s(self, prompts: float, length: float) -> float: ...

    def kv_of(self, context: float) -> float:
        """Bytes of keys and values of a sequence with `context` tokens."""
        ...


def rollout_s(engine: Decoding, work: Workload, samples: float, slots: float, room: float = math.inf) -> float:
    """Seconds in which one engine draws `samples` answers, with `slots` sequences at a time in `room` bytes.

    Each group's prompt is prefilled once. Sequences are simulated in `_BINS` classes, by the number of tokens that they
    have drawn. In each tick of the clock a class becomes the next one, less the answers that end there. Waiting
    sequences take free slots, the longest first. If keys and values exceed `room`, the shortest sequences wait again,
    and are computed again, as in vLLM.
    """
    tick = work.response / _BINS
    starts = np.arange(_BINS) * tick
    alive = np.array([work.running(drawn) for drawn in [*starts, work.response]])
    ending = 1 - np.divide(alive[1:], alive[:-1], out=np.zeros(_BINS), where=alive[:-1] > 0)
    contexts = work.prompt + starts + tick / 2
    held = np.array([engine.kv_of(context) for context in contexts])
    running, waiting = np.zeros(_BINS), np.zeros(_BINS)
    waiting[0] = samples
    seconds = engine.prefill_s(max(1.0, samples / work.samples), work.prompt)
    while running.sum() + waiting.sum() >= 0.5:  # a rest below half a sequence is ignored
        for index in _move(running, waiting, held, slots, room):
            seconds += engine.prefill_s(1.0, work.prompt + starts[index])
        ends = running * ending
        counted = running if waiting.sum() > ends.sum() else running - ends / 2  # a free slot is taken at once
        batch = counted.sum()
        seconds += tick * engine.decode_s(max(1.0, batch), float(counted @ contexts / batch))
        running[1:], running[0] = (running - ends)[:-1], 0.0
    return seconds


def _move(running: np.ndarray, waiting: np.ndarray, held: np.ndarray, slots: float, room: float) -> list[int]:
    """Move sequences that have no room out of `running`, or waiting ones into free slots, in place, between two ticks.

    Returns the class of each sequence that is computed again because it had drawn tokens, one entry per sequence.
    """
    free = room - running @ held if math.isfinite(room) else math.inf
    again = []
    for index in range(_BINS) if free < 0 else ():
        moved = min(running[index], max(0.0, -free) / held[index])
        running[index] -= moved
        waiting[index] += moved
        free += moved * held[index]
    places = slots - running.sum()
    for index in np.flatnonzero(waiting)[::-1] if free > 0 else ():
        moved = min(waiting[index], places, free / held[index] if held[index] else math.inf)
        running[index] += moved
        waiting[index] -= moved
        places, free = places - moved, free - moved * held[index]
        again += [int(index)] * math.ceil(moved) if index else []
    return again


def pass_flops(shape: Shape, length: float) -> float:
    """Flops of one token's forward pass in a sequence of `length` tokens: two per weight, and causal attention."""
    weights = shape.block_params + shape.head_params
    return 2 * weights + 2 * shape.layers * shape.heads * shape.head_dim * length


def learn_s(
    shape: Shape, gpu: Gpu, work: Workload, *, ranks: int, stage: Stage, fp8: bool = False, c: Constants = CONSTANTS
) -> float:
    """Seconds of the log-prob passes before the first update, and of all updates. Communication overlaps with products.

    A backward pass costs two forward passes, and one more with checkpointing. A sequence stays on one rank, or is
    shared by some.
    """
    rate = _learner_rate(shape, gpu, fp8, c)
    busy = min(ranks, work.sequence_parallel * max(1.0, work.sequences / work.updates))
    forward = work.tokens * pass_flops(shape, work.attended) / (busy * rate)
    longest = work.prompt + work.longest(work.sequences / work.updates)
    forward = max(forward, work.updates * longest * pass_flops(shape, longest) / (work.sequence_parallel * rate))
    scored = (work.updates - 1) / work.updates + work.reference + work.critic
    trained = (4 if work.checkpointing else 3) * (2 if work.critic else 1)
    sent = 0.0
    if ranks > 1:
        passes = max(1.0, work.tokens / work.updates / busy / work.micro_tokens)
        per_pass, per_update = {0: (0, 8), 1: (0, 8), 2: (4, 4), 3: (12, 0), "fsdp": (12, 0)}[stage]
        scoring = 4 * passes * scored if stage in (3, "fsdp") else 0
        line = (gpu.link if ranks <= NODE else NETWORK) * c.link
        sent = work.updates * shape.params * (per_pass * passes + per_update + scoring) / line
    return max(forward * (scored + trained), sent) + work.updates * _moments_s(shape, gpu, c) / ranks


def _moments_s(shape: Shape, gpu: Gpu, c: Constants) -> float:
    """Seconds to update all parameters on one GPU, which reads 16 bytes of each and writes 12."""
    return 28 * shape.params / (gpu.bandwidth * c.bandwidth)


def _learner_rate(shape: Shape, gpu: Gpu, fp8: bool, c: Constants) -> float:
    """Flops per second of the learner's passes on one GPU: as planning.measured has it, else a share of the peak."""
    if card := measured_card(shape, gpu):
        flops = 3 * card.learn_tokens * pass_flops(shape, card.sample)
        return flops / (card.learn_s["fp8" if fp8 else "bf16"] - _moments_s(shape, gpu, c))
    return gpu.flops["bf16"] * c.learner_flops * (c.learner_fp8 if fp8 else 1)


def turn_s(engine: EngineRoofline, *, ranks: int, stage: Stage) -> float:
    """Seconds to copy the learner's states and the engine's weights to the host and back, when they take turns.

    At stage 0, DeepSpeed moves no states.
    """
    shape, c = engine.shape, engine.constants
    states = state_bytes(shape, ranks=ranks, stage=stage) if stage else 0.0
    weights = shape.weight_bytes(BLOCK_BYTES[engine.precision]) / engine.tensor_parallel
    return 2 * (states + weights) / (engine.gpu.host * c.link)
