"""Find the fastest layout of a step in each format, and the gain from quantization."""

from collections.abc import Iterator, Sequence, Set
from dataclasses import dataclass, replace
from functools import cache, cached_property
from math import ceil
from typing import get_args

from qurl_ray.config.placement import Placement
from qurl_ray.errors import ConfigError
from qurl_ray.planning.machines import EIGHT_BIT, NODE, PRECISIONS, Gpu, Precision
from qurl_ray.planning.memory import STAGES, EngineSpec, Footprint, Layout, Stage, footprint, kv_room
from qurl_ray.planning.shapes import Shape
from qurl_ray.planning.speed import EngineRoofline, learn_s, rollout_s, turn_s
from qurl_ray.planning.sync import sync_s
from qurl_ray.planning.workload import TransportName, Workload

PAYS = 1.05
"""Speedup of a step below which quantization is not worth its mismatch."""
RESOLVED_S = 1.0
"""Seconds of a step below which a plan judges nothing: Ray's calls, rewards, probes, and what vLLM's host does for each
token are left out. In a run of 135 M parameters on an H200, a sync took 1.3 s (docs/gpu.md), where a plan has 0.1."""
MOST_GPUS = 10_000
SEARCHED = {
    "transport": "sync.transport",
    "sequence_parallel": "learner.sequence_parallel",
    "micro_tokens": "learner.tokens_per_micro_batch",
}
"""Fields of the workload that the search may change, and their settings."""
_LEAST_MICRO_TOKENS = 2048


@dataclass(frozen=True, slots=True, kw_only=True)
class StepEstimate:
    """Estimated durations of a step in one format and layout, in seconds."""

    engine: EngineRoofline
    layout: Layout
    work: Workload
    """Workload with the transport, the micro-batch and the ranks that share a sequence of this estimate."""
    memory: Footprint
    rollout: float
    learn: float
    sync: float
    turns: float

    @property
    def overlapped(self) -> bool:
        """True if rollouts run at the same time as the learner."""
        return self.work.staleness > 0

    @property
    def batch(self) -> float:
        """Sequences that an engine decodes while it is full."""
        return min(ceil(self.work.rounds[0] / self.layout.engines), self.memory.slots)

    @property
    def step(self) -> float:
        both = max(self.rollout, self.learn) if self.overlapped else self.rollout + self.learn
        return both + self.sync + self.turns

    @property
    def tokens_per_s(self) -> float:
        """Tokens per second of all engines together, during rollouts."""
        return self.work.drawn * self.work.answer / self.rollout

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

    @property
    def resolved(self) -> bool:
        """True if a step in bf16 is long enough to compare formats (RESOLVED_S), or fits nowhere."""
        base = self.best["bf16"]
        return base is None or base.step >= RESOLVED_S

    @cached_property
    def chosen(self) -> Precision:
        """Fastest format; bf16 unless another is `PAYS` times as fast.

        FP8 is preferred to INT8 if it is within 1 % of the fastest and the GPU has FP8 products: its KL to full
        precision is smaller (docs/results.md).
        """
        steps = {name: estimate.step for name, estimate in self.best.items() if estimate}
        base = steps.get("bf16", float("inf"))
        quantized = [name for name in reversed(EIGHT_BIT) if name in steps and base / steps[name] >= PAYS]
        if not quantized or not self.resolved:
            return "bf16"
        fastest = min(quantized, key=lambda name: round(steps[name], 9))
        near = [name for name in quantized if name in self.gpu.flops and steps[name] <= 1.01 * steps[fastest]]
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
        freed = 0.0 if base.layout.colocated else kv_room(engine) - kv_room(base.engine)
        room, engines, slots = base.memory.room + freed, base.layout.engines, self.work.slots
        return base.rollout / sum(
            rollout_s(engine, self.work, ceil(drawn / engines), slots, room) for drawn in self.work.rounds
        )


def widths(shape: Shape, gpus: int) -> list[int]:
    """Possible tensor parallel widths with `gpus` GPUs: within a node, with equally many heads on each GPU."""
    return [width for width in (1, 2, 4, NODE) if width <= gpus and shape.heads % width == 0]


def make_plan(
    shape: Shape,
    gpu: Gpu,
    gpus: int,
    work: Workload,
    width: int | None = None,
    *,
    fixed: Set[str] = SEARCHED.keys(),
    more: Sequence[Precision] = (),
) -> Plan:
    """Return the best of all layouts for each format.

    Args:
        width: GPUs of each engine; all possible widths are tried if absent.
        fixed: fields of the workload that stay as they are; the search is over the others of SEARCHED.
        more: formats to estimate besides PRECISIONS; none of them is chosen.

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
    works = _variants(shape, gpus, work, fixed)
    transports = (work.transport,) if "transport" in fixed else get_args(TransportName)
    best: dict[Precision, StepEstimate | None] = {}
    for precision in dict.fromkeys((*PRECISIONS, *more)):
        estimates = [search(shape, gpu, gpus, variant, precision, tried, transports) for variant in works]
        best[precision] = min(filter(None, estimates), key=lambda estimate: estimate.step, default=None)
    if not any(best.values()):
        raise ConfigError(_refusal(shape, gpu, gpus, works, tried))
    return Plan(shape=shape, gpu=gpu, gpus=gpus, work=work, best=best)


def _variants(shape: Shape, gpus: int, work: Workload, fixed: Set[str]) -> list[Workload]:
    """Return the workload with other numbers of ranks that share a sequence, and smaller micro-batches, down to the
    part of the longest sequence that a rank holds anyway."""
    shared, variants = [work.sequence_parallel], []
    if "sequence_parallel" not in fixed:
        shared += [n for n in (1, 2, 4, 8) if n <= min(gpus, shape.heads) and n not in shared]
    for ranks in shared:
        variants.append(replace(work, sequence_parallel=ranks))
        least = max(_LEAST_MICRO_TOKENS, ceil((work.prompt + work.response) / ranks))
        if "micro_tokens" not in fixed and least < work.micro_tokens:
            variants.append(replace(work, sequence_parallel=ranks, micro_tokens=least))
    return variants


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

    best: StepEstimate | None = None
    for width in tried:
        engine = EngineRoofline(shape=shape, gpu=gpu, precision=precision, tensor_parallel=width)
        drawn_s = cache(lambda samples, room, e=engine: rollout_s(e, work, samples, work.slots, room))
        for layout in _layouts(gpus, width, work):
            memory = footprint(engine, layout, work)
            if memory.excess > 1:
                continue
            learn = learned(layout.ranks, layout.stage)
            if best and learn >= best.step:
                continue
            rollout = sum(drawn_s(ceil(drawn / layout.engines), memory.room) for drawn in work.rounds)
            if best and rollout >= best.step:
                if not layout.colocated:
                    break  # all further splits have fewer engines
                continue
            allowed = ("object_store", "ipc" if layout.colocated else "nccl")
            possible = [replace(work, transport=name) for name in transports if name in allowed]
            if not possible:
                continue
            sending = min(possible, key=lambda variant: sync_s(engine, layout, variant))
            estimate = StepEstimate(
                engine=engine,
                layout=layout,
                work=sending,
                memory=memory,
                rollout=rollout,
                learn=learn,
                sync=sync_s(engine, layout, sending),
                turns=turn_s(engine, layout, work) if layout.colocated else 0.0,
            )
            if best is None or estimate.step < best.step:
                best = estimate
    return best


def _layouts(gpus: int, width: int, work: Workload) -> Iterator[Layout]:
    """Yield the layouts with engines of `width` GPUs; of disaggregated ones, those with most engines first.

    A learner on one node, and everything on one node, are tried, too: across nodes both may be slower.
    """
    node = min(gpus, NODE)
    shared = [] if work.staleness else sorted({gpus - gpus % width, node // width * width})
    splits: list[tuple[Placement, int, int]] = [("colocated", used // width, used) for used in shared]
    counts = [1]
    while counts[-1] * width < gpus:
        counts.append(max(counts[-1] + 1, round(counts[-1] * 1.05)))  # all up to thirty, then steps of a twentieth
    for engines in reversed(counts[:-1]):
        left = gpus - engines * width
        splits += [("disaggregated", engines, ranks) for ranks in {left, min(left, NODE), node - engines * width}]
    for placement, engines, ranks in splits:
        if ranks < 1 or ranks % work.sequence_parallel:
            continue
        for stage in STAGES if ranks > 1 else STAGES[:1]:
            yield Layout(placement=placement, engines=engines, tensor_parallel=width, ranks=ranks, stage=stage)


def _refusal(shape: Shape, gpu: Gpu, gpus: int, works: Sequence[Workload], tried: Sequence[int]) -> str:
    """Return the limit that the layout which is nearest to fitting exceeds most, with its arithmetic."""
    nearest = min(
        (
            (footprint(engine, layout, work), engine, layout, work)
            for engine in (EngineSpec(shape=shape, gpu=gpu, precision="fp8", tensor_parallel=width) for width in tried)
            for work in works
            for layout in _layouts(gpus, engine.tensor_parallel, work)
        ),
        key=lambda candidate: candidate[0].excess,
    )
    memory, engine, layout, work = nearest
    shortest = replace(work, prompt=1, response=1, mean=1.0, micro_tokens=1)
    shorter = ", or shorter answers" if footprint(engine, layout, shortest).excess <= 1 else ""
    return (
        f"{shape.name} does not fit on {gpus} × {gpu.name} in any format. In the nearest layout, {layout.placement}, "
        f"engines {layout.engines} × {engine.tensor_parallel} GPU, a learner on {layout.ranks} GPU "
        f"({sharding(layout.stage)}) with {work.sequence_parallel} rank(s) to a sequence: {memory.problems[0]}. "
        f"Take more or larger GPUs{shorter}"
    )


def sharding(stage: Stage) -> str:
    """Return the name of a stage, as tables have it."""
    return "FSDP2" if stage == "fsdp" else f"ZeRO {stage}"
