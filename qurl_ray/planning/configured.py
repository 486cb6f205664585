"""Check a run's own layout: whether it can start, and what it holds on GPUs and hosts."""

from dataclasses import dataclass

from qurl_ray.config import RunConfig
from qurl_ray.config.learner import LearnerConfig
from qurl_ray.planning.machines import HOST_MEMORY, Gpu, Precision
from qurl_ray.planning.memory import Stage, TurnName, gpu_bytes, host_bytes, kv_room, kv_slots, learner_bytes
from qurl_ray.planning.roofline import EngineRoofline
from qurl_ray.planning.shapes import Shape
from qurl_ray.planning.workload import Workload

_PRECISIONS: dict[str, Precision] = {"int8": "int8", "fp8": "fp8", "fp8_block": "fp8"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Check:
    """Memory of a run's layout, in bytes, and what is in the way of its start."""

    gpu: dict[TurnName, float]
    """Bytes on a GPU in each turn, in the format of rollouts or in bf16, whichever are more: evaluations in full
    precision, and the guard's fallback to it, restart the engines in bf16."""
    host: float
    """Bytes of a node's host."""
    slots: int
    """Answers of which an engine can hold keys and values at a time."""
    problems: tuple[str, ...]
    """Reasons why the run cannot start; none if it can."""


def learner_stage(learner: LearnerConfig) -> Stage:
    """Return how a learner is sharded."""
    stages: dict[str, Stage] = {"torch": 0, "fsdp": "fsdp", "deepspeed": learner.zero_stage}
    return stages[learner.backend]


def check_layout(shape: Shape, gpu: Gpu, work: Workload, config: RunConfig) -> Check:
    """Check the layout of a run on GPUs.

    Args:
        work: the run's workload, as configured_workload returns it.
    """
    rollout, learner = config.rollout, config.learner
    colocated = config.placement == "colocated"
    stage = learner_stage(learner)
    held = learner_bytes(shape, work, ranks=learner.workers, stage=stage, offloads=learner.offload_while_waiting)
    precisions: tuple[Precision, ...] = (_PRECISIONS.get(rollout.quantization, "bf16"), "bf16")
    engines = [
        EngineRoofline(
            shape=shape,
            gpu=gpu,
            precision=precision,
            tensor_parallel=rollout.processes,
            engine=work.engine,
            graphs=work.graphs,
        )
        for precision in precisions
    ]
    beside = held["sync"] + engines[0].constants.context if colocated else 0.0
    rooms = [kv_room(engine, beside) / engine.tensor_parallel for engine in engines]
    if rollout.vllm.kv_cache_gb is not None:
        rooms = [rollout.vllm.kv_cache_gb * 2**30] * len(engines)
    found = [gpu_bytes(one, held, max(0.0, kv), colocated=colocated) for one, kv in zip(engines, rooms, strict=True)]
    most = {turn: max(one[turn] for one in found) for turn in found[0]}
    host = host_bytes(shape, work, ranks=learner.workers, stage=stage)
    slots = min(kv_slots(one, work, kv * one.tensor_parallel) for one, kv in zip(engines, rooms, strict=True))
    limit = gpu.memory * engines[0].constants.memory
    problems = [
        f"{turn} takes {held_ / 1e9:,.1f} GB of a GPU, and {limit / 1e9:,.1f} can be planned with"
        for turn, held_ in most.items()
        if held_ > limit * (1 + 1e-9)
    ]
    if host > HOST_MEMORY * engines[0].constants.memory:
        problems.append(f"hosts need {host / 1e9:,.0f} GB, and have {HOST_MEMORY / 1e9:,.0f}")
    if not slots:
        problems.append(f"an engine has no room for one answer of {work.response:,} tokens")
    return Check(gpu=most, host=host, slots=slots, problems=tuple(problems))
