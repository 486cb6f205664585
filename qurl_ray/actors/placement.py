"""Resources that a run requests from Ray, and the placement of colocated engines: records and functions. Pure.

    disaggregated   one placement group for all ranks (Ray Train's), and one per engine, each of one bundle
    colocated       only the ranks' group; an engine requests nothing from Ray and is pinned to the GPUs of its ranks

A bundle is never split over nodes, so the GPUs of a tensor-parallel engine are on one node.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from qurl_ray.config import RunConfig
from qurl_ray.config.rollout import RolloutConfig
from qurl_ray.errors import PlacementError

Resources = Mapping[str, float]
"""Amounts of Ray resources, by kind: {"CPU": 1, "GPU": 8}."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuAssignment:
    """GPU assignment of a process: the node and the GPUs on which it computes."""

    node: str
    """Ray's id of the node."""
    gpus: tuple[str, ...] = ()
    """GPUs as CUDA_VISIBLE_DEVICES names them on that node: numbers or UUIDs."""

    def __str__(self) -> str:
        return f"GPU {', '.join(self.gpus)} of node {self.node[:8]}" if self.gpus else f"node {self.node[:8]}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Demand:
    """Resources that a run requests from Ray before it starts."""

    ranks: int
    rank: dict[str, float]
    """Resources of each rank."""
    workers: int
    worker: dict[str, float]
    """Resources of each rollout worker; {} for colocated engines."""
    shared: int
    """Number of GPUs that each engine computes on."""

    @property
    def total(self) -> dict[str, float]:
        kinds = dict.fromkeys([*self.rank, *self.worker])
        return {k: self.ranks * self.rank.get(k, 0) + self.workers * self.worker.get(k, 0) for k in kinds}

    def __str__(self) -> str:
        each = f"{self.shared} GPU" if self.shared else "1 CPU"
        engines = f"{_plural(self.workers, 'rollout worker')} of {each}"
        how = f"and {engines} (disaggregated)" if self.worker else f"with {engines} on the same (colocated)"
        rank = f"{self.rank['GPU']:g} GPU" if "GPU" in self.rank else f"{self.rank['CPU']:g} CPU"  # the scarcest kind
        return f"{_plural(self.ranks, 'learner rank')} of {rank} {how}: {counts(self.total)}"


def demand(config: RunConfig) -> Demand:
    """Resources that this run requests. Coordinator and verifiers request none."""
    return Demand(
        ranks=config.learner.workers,
        rank=_of_one(1 if config.learner.device == "cuda" else 0),
        workers=config.rollout.workers,
        worker={} if config.placement == "colocated" else worker_resources(config.rollout),
        shared=gpus_of_worker(config.rollout),
    )


def gpus_of_worker(config: RolloutConfig) -> int:
    """Number of GPUs that one engine computes on."""
    return 0 if config.device == "cpu" else config.processes


def worker_resources(config: RolloutConfig) -> dict[str, float]:
    """Bundle of a rollout worker with GPUs of its own."""
    return _of_one(gpus_of_worker(config))


def what_is_missing(asked: Demand, nodes: Sequence[Resources]) -> str | None:
    """Reason why these nodes can never hold the run, even if nothing else runs on them; None if no reason is known.

    Args:
        nodes: total resources of each node.
    """
    total = {kind: sum(node.get(kind, 0) for node in nodes) for kind in asked.total}
    short = {kind: count for kind, count in asked.total.items() if total[kind] < count}
    if short:
        return f"{counts(short)} are asked for, and it has {counts({kind: total[kind] for kind in short})} in all"
    for number, each, role in ((asked.workers, asked.worker, "rollout worker"), (asked.ranks, asked.rank, "rank")):
        room = sum(_fit(each, node) for node in nodes) if each else number
        if room < number:
            largest = max((node.get("GPU", 0) for node in nodes), default=0)
            return (
                f"{_plural(number, role)} of {counts(each)} are asked for, each on one node, and there is room for "
                f"{room}: no node has more than {largest:g} GPU"
            )
    return None


def engine_assignments(assignments: Sequence[GpuAssignment], each: int) -> list[GpuAssignment]:
    """GPU assignments of colocated engines.

    Args:
        assignments: GPU assignments of the learner's ranks, in the order of the ranks.
        each: number of ranks whose GPUs one engine uses.

    Raises:
        PlacementError: an engine would have GPUs of two nodes.
    """
    of_node: dict[str, list[GpuAssignment]] = {}
    for assignment in assignments:
        of_node.setdefault(assignment.node, []).append(assignment)
    if odd := {node[:8]: len(ranks) for node, ranks in of_node.items() if len(ranks) % each}:
        where = ", ".join(f"{count} on node {node}" for node, count in odd.items())
        raise PlacementError(
            f"engines of rollout.vllm.tensor_parallel={each} GPUs each need whole multiples of {each} learner ranks on "
            f"a node, and Ray Train placed {where}: set learner.workers to a multiple of the GPUs of a node"
        )
    return [
        GpuAssignment(
            node=node, gpus=tuple(gpu for assignment in ranks[start : start + each] for gpu in assignment.gpus)
        )
        for node, ranks in of_node.items()
        for start in range(0, len(ranks), each)
    ]


def counts(resources: Resources) -> str:
    """Ray resources in words: "2 CPU, 0 GPU"."""
    return ", ".join(f"{resources[kind]:g} {kind}" for kind in ("CPU", "GPU") if kind in resources)


def _of_one(gpus: int) -> dict[str, float]:
    return {"CPU": 1.0} | ({"GPU": float(gpus)} if gpus else {})


def _fit(each: Resources, node: Resources) -> int:
    return min(int(node.get(kind, 0) // count) for kind, count in each.items())


def _plural(count: int, noun: str) -> str:
    return f"{count} {noun}{'s' if count != 1 else ''}"
