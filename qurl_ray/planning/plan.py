"""Find the fastest layout of a step in each format, and the gain from quantization."""

from collections.abc import Iterator, Sequence, Set
from dataclasses import dataclass, replace
from functools import cache, cached_property
from math import ceil
from typing import Literal, get_args

from qurl_ray.errors import ConfigError
from qurl_ray.planning.machines import EIGHT_BIT, HOST_MEMORY, NODE, PRECISIONS, Gpu, Precision
from qurl_ray.planning.memory import (
    STAGES,
    Stage,
    TurnName,
    activation_bytes,
    asleep_bytes,
    engine_bytes,
    gpu_bytes,
    host_bytes,
    kv_room,
    kv_slots,
    learner_bytes,
    stages_that_fit,
)
from qurl_ray.planning.phases import learn_s, rollout_s, turn_s
from qurl_ray.planning.roofline import EngineRoofline, widths
from qurl_ray.planning.shapes import Shape
from qurl_ray.planning.sync import Route, sync_s
from qurl_ray.planning.workload import TransportName, Workload

PAYS = 1.05
"""Speedup of a step below which quantization is not worth its mismatch."""
MOST_GPUS = 10_000
_LEAST_MICRO_TOKENS = 2048


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """Assignment of GPUs to engines and learner ranks."""

    placement: Literal["colocated", "disaggregated"]
    engines: int
    tensor_parallel: int
    ranks: int
    stage: Stage

    @property
    def gpus(self) -> int:
        rollout = self.engines * self.tensor_parallel
        return self.ranks if self.placement == "colocated" else self.ranks + rollout

    def route(self, work: Workload) -> Route:
        """Return the way of weights from these ranks to these engines."""
        return Route(
            transport=work.transport,
            ranks=self.ranks,
            gpus=self.gpus,
            gathered=self.stage in (3, "fsdp") and self.ranks > 1,
            delta=work.sends_changes(nodes=ceil(self.gpus / NODE)),
            bucket=work.bucket,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class StepEstimate:
    """Estimated durations of a step in one format and layout, in seconds."""

    engine: EngineRoofline
    layout: Layout
    work: Workload
    """Workload with the transport, the micro-batch and the ranks that share a sequence of this estimate."""
    room: float
    """Bytes for keys and values in each engine: what is left on GPUs of its own, and on shared ones as much as bf16
    leaves (rollout.vllm.kv_cache_gb)."""
    slots: int
    """Sequences that each engine can hold at a time."""
    batch: float
    """Sequences that an engine decodes while it is full."""
    rollout: float
    learn: float
    sync: float
    turns: float
    overlapped: bool
    """True if rollouts run at the same time as the learner."""
    answers: float
    """Number of tokens drawn in a step."""

    @property
    def step(self) -> float:
        both = max(self.rollout, self.learn) if self.overlapped else self.rollout + self.learn
        return both + self.sync + self.turns

    @property
    def tokens_per_s(self) -> float:
        """Tokens per second of all engines together, during rollouts."""
        return self.answers / self.rollout

    @property
    def share(self) -> float:
        """Rollouts' share of the duration of the step."""
        return self.rollout / self.step


@dataclass(frozen=True, kw_only=True)
class Plan:
    """Best estimate in each format for a model, GPUs and a workload."""

    shape: Shape
    gpu: Gpu
    gpus: int
    work: Workload
    best: dict[Precision, StepEstimate | None]
    """Estimate of the fastest layout in each format; None if no layout fits."""

    @cached_property
    def chosen(self) -> Precision:
        """Fastest format; bf16 unless another is `PAYS` times as fast.

        FP8 is preferred to INT8 if it is within 1 % of the fastest and the GPU has FP8 products: its KL to full
        precision is smaller (docs/results.md).
        """
        found = {name: estimate.step for name, estimate in self.best.items() if estimate}
        base = found.get("bf16", float("inf"))
        quantized = [name for name in reversed(EIGHT_BIT) if name in found and base / found[name] >= PAYS]
        fastest = min(quantized, key=lambda name: round(found[name], 9), default=PRECISIONS[0])
        near = [name for name in quantized if name in self.gpu.flops and found[name] <= 1.01 * found[fastest]]
        return near[0] if near else fastest

    def gain(self, precision: Precision) -> float | None:
        """Speedup of the step over bf16, each format in its best layout; None if either fits nowhere."""
        base, other = self.best["bf16"], self.best[precision]
        return base.step / other.step if base and other else None

    def rollout_gain(self, precision: Precision, kv_bytes: float = 2) -> float | None:
        """Speedup of rollouts over bf16, in the layout of bf16; None if bf16 fits nowhere."""
        base = self.best["bf16"]
        if not base:
            return None
        engine = replace(base.engine, precision=precision, kv_bytes=kv_bytes)
        freed = kv_room(engine) - kv_room(base.engine) if base.layout.placement == "disaggregated" else 0.0
        return base.rollout / all_rounds_s(engine, self.work, base.layout.engines, base.room + freed)

    @property
    def amdahl(self) -> float | None:
        """Speedup of the step by Amdahl's law, if only rollouts use the better 8-bit format, in the layout of bf16.

        None if bf16 fits nowhere, or if rollouts overlap with the learner.
        """
        base = self.best["bf16"]
        if not base or base.overlapped:
            return None
        return amdahl(base.share, max(self.rollout_gain(name) or 1.0 for name in ("int8", "fp8")))


def all_rounds_s(engine: EngineRoofline, work: Workload, engines: int, room: float) -> float:
    """Seconds of a step's rollouts. The answers of each round are divided among the engines."""
    return sum(rollout_s(engine, work, ceil(drawn / engines), work.slots, room) for drawn in work.rounds)


def amdahl(share: float, speedup: float) -> float:
    """Speedup of the whole if `share` of it becomes `speedup` times as fast: 1 / (1 - share + share / speedup)."""
    return 1 / (1 - share + share / speedup)


def make_plan(
    shape: Shape, gpu: Gpu, gpus: int, work: Workload, width: int | None = None, *, fixed: Set[str] | None = None
) -> Plan:
    """Return the best of all layouts for each format.

    Args:
        width: GPUs of each engine; all possible widths are tried if absent.
        fixed: fields of the workload among transport, sequence_parallel and micro_tokens that stay as they are; others
            are searched over. None searches over none of them.

    Raises:
        ConfigError: the number of GPUs or `width` is not possible, or nothing fits in any format.
    """
    if not 1 <= gpus <= MOST_GPUS:
        raise ConfigError(f"{gpus} GPUs: plans are for 1 to {MOST_GPUS:,}")
    if work.staleness and gpus < 2:
        raise ConfigError("with staleness engines and learner work at the same time: that needs 2 GPUs or more")
    possible = widths(shape, gpus)
    if width is not None and width not in possible:
        raise ConfigError(f"an engine of {width} GPUs: {shape.name} on {gpus} of them can have {possible}")
    tried = [width] if width else possible
    works = [work] if fixed is None else _variants(shape, gpus, work, fixed)
    transports = (work.transport,) if fixed is None or "transport" in fixed else get_args(TransportName)
    best: dict[Precision, StepEstimate | None] = {}
    for precision in PRECISIONS:
        found = [search(shape, gpu, gpus, one, precision, tried, transports) for one in works]
        best[precision] = min(filter(None, found), key=lambda estimate: estimate.step, default=None)
    if not any(best.values()):
        raise ConfigError(_why_nothing_fits(shape, gpu, gpus, works, tried))
    return Plan(shape=shape, gpu=gpu, gpus=gpus, work=work, best=best)


def _variants(shape: Shape, gpus: int, work: Workload, fixed: Set[str]) -> list[Workload]:
    """Return the workload with other numbers of ranks that share a sequence, and smaller micro-batches, down to the
    part of the longest sequence that a rank holds anyway."""
    shared, found = [work.sequence_parallel], []
    if "sequence_parallel" not in fixed:
        shared += [n for n in (1, 2, 4, 8) if n <= min(gpus, shape.heads) and n not in shared]
    for ranks in shared:
        one = replace(work, sequence_parallel=ranks)
        found.append(one)
        least = max(_LEAST_MICRO_TOKENS, ceil((work.prompt + work.response) / ranks))
        if "micro_tokens" not in fixed and least < work.micro_tokens:
            found.append(replace(one, micro_tokens=least))
    return found


def _why_nothing_fits(shape: Shape, gpu: Gpu, gpus: int, works: Sequence[Workload], tried: Sequence[int]) -> str:
    """Return the one limit that is in the way, with its arithmetic: of the learner on all GPUs, or of an engine."""
    engine = EngineRoofline(
        shape=shape,
        gpu=gpu,
        precision="fp8",
        tensor_parallel=max(tried),
        engine=works[0].engine,
        graphs=works[0].graphs,
    )
    c, stages = engine.constants, STAGES if gpus > 1 else STAGES[:1]
    limit, hosts = gpu.memory * c.memory, HOST_MEMORY * c.memory
    beside = c.context + asleep_bytes(engine)
    found = []
    for work in works:
        for stage in stages:
            held = learner_bytes(shape, work, ranks=gpus, stage=stage, offloads=True)
            found.append((max(held["start"], held["learn"]), host_bytes(shape, work, ranks=gpus, stage=stage), work))
    learn, host, work = min(found, key=lambda one: max((one[0] + beside) / limit, one[1] / hosts))
    where = f"{shape.name} does not fit on {gpus} × {gpu.name} in any format"
    if learn + beside > limit:
        states, activations = learn - activation_bytes(shape, work), activation_bytes(shape, work)
        return (
            f"{where}: the learner on all of them, with {work.sequence_parallel} rank(s) to a sequence, holds "
            f"{states / 1e9:,.1f} GB of parameters, gradients, moments and logits and {activations / 1e9:,.1f} GB of "
            f"activations, beside {beside / 1e9:,.1f} GB of CUDA and a sleeping engine: "
            f"{(learn + beside) / 1e9:,.1f} of the {limit / 1e9:,.1f} GB that can be planned with. Take more or larger "
            f"GPUs{', or shorter answers' if states + beside < limit else ''}"
        )
    if host > hosts:
        return (
            f"{where}: hosts need {host / 1e9:,.0f} GB for the learner's states during rollouts and have "
            f"{hosts / 1e9:,.0f}; take more nodes"
        )
    return (
        f"{where}: an engine holds {engine_bytes(engine) / 1e9:,.1f} GB on each of its {engine.tensor_parallel} GPUs, "
        f"and has no room beside the learner for one answer of {work.response:,} tokens; take more or larger GPUs, or "
        "shorter answers"
    )


def search(
    shape: Shape,
    gpu: Gpu,
    gpus: int,
    work: Workload,
    precision: Precision,
    tried: Sequence[int],
    transports: Sequence[TransportName],
) -> StepEstimate | None:
    """Return the layout with the shortest step on at most `gpus` GPUs, of all splits; None if none fits.

    Args:
        tried: engine widths to try, in GPUs.
        transports: those to try; a layout takes the fastest that its placement allows.
    """
    fp8 = work.fp8_learner and precision == "fp8"

    @cache
    def learned(ranks: int, stage: Stage) -> float:
        return learn_s(shape, gpu, work, ranks=ranks, stage=stage, fp8=fp8)

    found: StepEstimate | None = None
    rounds = work.rounds
    for width in tried:
        engine = EngineRoofline(
            shape=shape, gpu=gpu, precision=precision, tensor_parallel=width, engine=work.engine, graphs=work.graphs
        )
        rollout = cache(lambda samples, room, e=engine: rollout_s(e, work, samples, work.slots, room))
        for layout, beside in _layouts(engine, gpus, work):
            together = layout.placement == "colocated"
            # Evaluations in full precision, and the guard's fallback, restart an engine in bf16 with the same room.
            room = kv_room(replace(engine, precision="bf16") if together else engine, beside)
            slots, learn = kv_slots(engine, work, room), learned(layout.ranks, layout.stage)
            if not slots or (found and learn >= found.step):
                continue
            seconds = sum(rollout(ceil(drawn / layout.engines), room) for drawn in rounds)
            if found and seconds >= found.step:
                if not together:
                    break  # all further splits have fewer engines
                continue
            direct = "ipc" if together else "nccl"
            possible = [replace(work, transport=one) for one in transports if one in ("object_store", direct)]
            if not possible:
                continue
            syncs = {one.transport: sync_s(shape, gpu, precision, layout.route(one)) for one in possible}
            transport = min(syncs, key=lambda name: syncs[name])
            estimate = StepEstimate(
                engine=engine,
                layout=layout,
                work=replace(work, transport=transport),
                room=room,
                slots=slots,
                batch=min(ceil(rounds[0] / layout.engines), slots),
                rollout=seconds,
                learn=learn,
                sync=syncs[transport],
                turns=turn_s(engine, ranks=layout.ranks, stage=layout.stage) if together else 0.0,
                overlapped=work.staleness > 0,
                answers=work.drawn * work.answer,
            )
            if found is None or estimate.step < found.step:
                found = estimate
    return found


def _layouts(engine: EngineRoofline, gpus: int, work: Workload) -> Iterator[tuple[Layout, float]]:
    """Yield the layouts whose learner fits, each with the bytes that it leaves on its GPUs beside an engine."""
    stages = cache(lambda ranks, colocated: stages_that_fit(engine, work, ranks=ranks, colocated=colocated))
    width = engine.tensor_parallel
    for placement, engines, ranks in _splits(gpus, width, work):
        if ranks % work.sequence_parallel:
            continue
        for stage, beside in stages(ranks, placement == "colocated").items():
            layout = Layout(placement=placement, engines=engines, tensor_parallel=width, ranks=ranks, stage=stage)
            yield layout, beside


def memory_of(estimate: StepEstimate) -> dict[TurnName, float]:
    """Return the bytes on a GPU in each turn; see memory.gpu_bytes."""
    layout, engine, work = estimate.layout, estimate.engine, estimate.work
    colocated = layout.placement == "colocated"
    learner = learner_bytes(engine.shape, work, ranks=layout.ranks, stage=layout.stage, offloads=colocated)
    return gpu_bytes(engine, learner, estimate.room / layout.tensor_parallel, colocated=colocated)


def _splits(gpus: int, width: int, work: Workload) -> Iterator[tuple[Literal["colocated", "disaggregated"], int, int]]:
    """Yield (placement, engines, ranks); of disaggregated splits, those with most engines first.

    A learner on one node, and everything on one node, are tried, too: across nodes both may be slower.
    """
    if not work.staleness:
        for used in sorted({gpus - gpus % width, min(gpus, NODE) // width * width}):
            yield "colocated", used // width, used
    counts = [1]
    while counts[-1] * width < gpus:
        counts.append(max(counts[-1] + 1, round(counts[-1] * 1.05)))  # all up to thirty, then steps of a twentieth
    for engines in reversed(counts[:-1]):
        left = gpus - engines * width
        for ranks in {left, min(left, NODE), min(gpus, NODE) - engines * width}:
            if ranks > 0:
                yield "disaggregated", engines, ranks
