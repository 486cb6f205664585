"""Seconds of a step's phases: rollouts, the learner's passes, and the turns of a colocated learner.

A decode step takes the longer of reading and multiplying, plus overhead:

    step = layers · (layer_s + quantize) + linears + head + keys and values + sequences · sequence_s
    linears, head = max(bytes / (bandwidth · share), flops / (peak · share))

The second line is the roofline of https://doi.org/10.1145/1498765.1498785, once for the block linears and once for the
head. The engine is vLLM with CUDA graphs, whose compiler fuses the quantization of activations to FP8 with what comes
before. In INT8 it is one operation more for each linear (tests/engines/test_vllm_kernels.py), which takes operation_s
and the time of its reads and writes. Formats of weights alone are read as they are and multiplied in bfloat16, by a
kernel that this package does not have yet.

Where decode steps were measured (planning.measured), those are taken. The formula adds what longer sequences read, and
divides reads and products among several GPUs.
"""

import math
from dataclasses import dataclass, replace

import numpy as np

from qurl_ray.planning.machines import BLOCK_BYTES, CONSTANTS, EIGHT_BIT, NETWORK, NODE, Constants, Gpu
from qurl_ray.planning.measured import Card, measured_card
from qurl_ray.planning.memory import EngineSpec, Layout, Stage, state_bytes, weights_bytes
from qurl_ray.planning.shapes import Shape
from qurl_ray.planning.workload import Workload

_LINEARS = 4  # of a layer: q/k/v and gate/up are one each
_MOVED = 3  # bytes of an input that quantizing it to INT8 reads and writes
_BINS = 48  # classes of an answer's length


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineRoofline(EngineSpec):
    """Speed of an engine."""

    @property
    def card(self) -> Card | None:
        """Measured figures of this model on one GPU; None if it was not measured."""
        return measured_card(self.shape, self.gpu)

    def decode_s(self, batch: float, context: float) -> float:
        """Seconds to draw one token for each of `batch` sequences of `context` tokens."""
        return sum(self.parts(batch, context).values())

    def parts(self, batch: float, context: float) -> dict[str, float]:
        """Seconds of each part of a decode step: weights and products, keys and values, overhead."""
        c, shape = self.constants, self.shape
        read = self.gpu.bandwidth * c.bandwidth
        heads = min(self.tensor_parallel, shape.kv_heads)  # beyond that, key heads are replicated
        if card := self.card:  # overhead is what was measured beyond weights, keys and values
            known = self if self.precision in card.decode_ms else replace(self, precision="bf16")
            reads = batch * shape.kv_bytes(card.context) / read
            overhead = card.decode_s(known.precision, batch) - known._linears(batch) - reads
        else:
            overhead = shape.layers * (c.layer_s + self._quantizing(batch)) + batch * c.sequence_s
        return {
            "weights and products": self._linears(batch) / self.tensor_parallel,
            "keys and values": batch * self.kv_of(context) / read / heads,
            "overhead": overhead + self._all_reduces(batch),
        }

    def kv_of(self, context: float) -> float:
        """Bytes of keys and values of a sequence with `context` tokens, in all GPUs of the engine."""
        return self.shape.kv_bytes(context, self.kv_bytes)

    def prefill_s(self, prompts: float, length: float) -> float:
        """Seconds to prefill `prompts` whole prompts of `length` tokens. Half of a causal product is not computed."""
        c, shape, tokens = self.constants, self.shape, prompts * length
        linears = 2 * shape.active_params * tokens / self._flops()
        attention = 2 * shape.layers * shape.heads * shape.head_dim * length * tokens
        return (linears + attention / (self.gpu.flops["bf16"] * c.flops_16)) / self.tensor_parallel

    def _quantizing(self, batch: float) -> float:
        """Seconds per layer to quantize activations."""
        c, shape = self.constants, self.shape
        if self.precision not in EIGHT_BIT:
            return 0.0
        if self.precision == "fp8":
            return c.quantize_s
        inputs = 2 * shape.hidden + shape.heads * shape.head_dim + shape.intermediate
        moved = batch * inputs * _MOVED / (self.gpu.bandwidth * c.bandwidth) / self.tensor_parallel
        return _LINEARS * c.operation_s + moved

    def _flops(self) -> float:
        """Flops per second that the products of the block linears reach on one GPU."""
        c, peaks = self.constants, self.gpu.flops
        if self.precision == "bf16" or self.precision not in peaks:
            return peaks["bf16"] * c.flops_16
        return peaks[self.precision] * c.flops_8

    def _linears(self, batch: float) -> float:
        """Seconds to read and multiply all weights on one GPU."""
        shape, flops = self.shape, self.gpu.flops["bf16"] * self.constants.flops_16
        head = self._product(shape.head_params, shape.head_params, 2, batch, flops)
        read, each = shape.read_params(batch), BLOCK_BYTES[self.precision]
        return self._product(read, shape.active_params, each, batch, self._flops()) + head

    def _product(self, weights: float, active: int, bytes_each: float, batch: float, flops: float) -> float:
        """Seconds of products that read `weights`, with `active` of which each sequence is multiplied."""
        read = weights * bytes_each / (self.gpu.bandwidth * self.constants.bandwidth)
        return max(read, 2 * active * batch / flops)

    def _all_reduces(self, batch: float) -> float:
        """Seconds of the all-reduces of a decode step: two per layer, of one hidden state per sequence."""
        if self.tensor_parallel == 1:
            return 0.0
        c, others = self.constants, (self.tensor_parallel - 1) / self.tensor_parallel
        sent = 2 * others * batch * self.shape.hidden * 2
        return 2 * self.shape.layers * (c.all_reduce_s + sent / (self.gpu.link * c.link))


def rollout_s(engine: EngineRoofline, work: Workload, samples: float, slots: float, room: float = math.inf) -> float:
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
    weights = shape.active_params + shape.head_params
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
    sent, gathered = 0.0, float(shape.params)
    if ranks > 1:
        passes = max(1.0, work.tokens / work.updates / busy / work.micro_tokens)
        per_pass, per_update = {0: (0, 8), 1: (0, 8), 2: (4, 4), 3: (12, 0), "fsdp": (12, 0)}[stage]
        scoring = 4 * passes * scored if stage in (3, "fsdp") else 0
        line = (gpu.link if ranks <= NODE else NETWORK) * c.link
        if work.expert_parallel and stage == "fsdp":
            gathered -= shape.expert_params * (1 - 1 / ranks)
            there_and_back = 2 * (2 if work.autocast else 4) * shape.layers * shape.active * shape.hidden
            sent = work.tokens / busy * there_and_back * (scored + trained) / line
        sent += work.updates * gathered * (per_pass * passes + per_update + scoring) / line
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


def turn_s(engine: EngineSpec, layout: Layout, work: Workload) -> float:
    """Seconds to copy the learner's states and the engine's weights to the host and back, when they take turns.

    At stage 0, DeepSpeed moves no states.
    """
    states = state_bytes(engine.shape, work, ranks=layout.ranks, stage=layout.stage) if layout.stage else 0.0
    return 2 * (states + weights_bytes(engine)) / (engine.gpu.host * engine.constants.link)
