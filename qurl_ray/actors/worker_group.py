"""The worker group: processes of the rollout workers. The driver owns, places, adds and ends them."""

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import ray
from ray.actor import ActorHandle
from ray.util.placement_group import PlacementGroup, placement_group, remove_placement_group
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy, PlacementGroupSchedulingStrategy

from qurl_ray.actors.cluster import there_is
from qurl_ray.actors.placement import GpuAssignment, counts, engine_assignments, gpus_of_worker, worker_resources
from qurl_ray.actors.rollout_worker import CONTROL, RolloutWorker
from qurl_ray.config.rollout import RolloutConfig
from qurl_ray.errors import DeadlineExceeded
from qurl_ray.types import PolicySpec

_CLOSE_S = 20.0
_GLANCE_S = 0.01
_ASK_S = 1.0
_TIMES = 10  # requests in a row that find room, one every 2 s: longer than Ray Train takes to place a rank again


@dataclass(slots=True, kw_only=True)
class WorkerGroup:
    """Group of rollout workers.

    Disaggregated: one placement group per worker, so that each can be lost, and one more be added, independently.
    Colocated: workers that request nothing from Ray, on the GPUs of the learner's ranks, once these are known.

    Example:
        worker_group = WorkerGroup(config=config.rollout, spec=spec, kernel="auto", threads=2)
        worker_group.start()
        ...
        newcomer = worker_group.grow()  # periodically; colocated: worker_group.place_on(assignments)
        worker_group.stop()
    """

    config: RolloutConfig
    spec: PolicySpec
    kernel: str
    threads: int
    keep: tuple[str, ...] = ()
    """Patterns of the parameters that stay in full precision."""
    transport: str = "object_store"
    colocated: bool = False
    worker: type = RolloutWorker
    """Class of the workers; placement tests substitute another one."""
    actors: list[ActorHandle] = field(default_factory=list)
    assignments: tuple[GpuAssignment, ...] | None = None
    """GPU assignments of the ranks on whose GPUs the colocated workers run."""
    _placements: list[PlacementGroup] = field(default_factory=list)
    _wanted: PlacementGroup | None = None
    """Placement group of one more worker, requested only to see whether there are free resources."""
    _asked: float = 0.0
    """Time of that request, in seconds of the monotonic clock."""
    _successes: int = 0
    """Number of requests in a row for which there were free resources."""

    def start(self) -> None:
        """Place and start the configured number of workers. Colocated ones wait for `place_on`.

        Raises:
            DeadlineExceeded: the cluster could not place them in time; the message says what is missing.
        """
        if self.colocated:
            return
        limit = self.config.start_limit_s
        groups = [self._place() for _ in range(self.config.workers)]
        ends = time.monotonic() + limit
        missing = [group for group in groups if not group.wait(max(_GLANCE_S, ends - time.monotonic()))]
        if missing:
            for group in groups:
                remove_placement_group(group)
            raise DeadlineExceeded(
                f"{len(missing)} of {len(groups)} rollout worker(s) of {counts(worker_resources(self.config))} were "
                f"not placed within {limit:g} s; {there_is()}"
            )
        for group in groups:
            self._start_worker(group)

    def place_on(self, assignments: Sequence[GpuAssignment]) -> None:
        """Start a colocated run's workers on the GPUs of the learner's ranks; restart them if the ranks have moved.

        Raises:
            PlacementError: the ranks are placed such that an engine would have GPUs of two nodes.
        """
        if tuple(assignments) == self.assignments:
            return
        self._dismiss(self.actors)
        self.assignments = tuple(assignments)
        for assignment in engine_assignments(assignments, max(1, gpus_of_worker(self.config))):
            where = NodeAffinitySchedulingStrategy(assignment.node, soft=False)
            options: dict[str, Any] = {"num_cpus": 0, "num_gpus": 0, "scheduling_strategy": where}
            if assignment.gpus:  # Ray leaves CUDA_VISIBLE_DEVICES alone where an actor requests no GPU
                options["runtime_env"] = {"env_vars": {"CUDA_VISIBLE_DEVICES": ",".join(assignment.gpus)}}
            self.actors.append(self._make(options))

    def grow(self) -> ActorHandle | None:
        """Add and return one worker, if `max_workers` allows it and there have been free resources for a while; else
        return None. To be called often.

        The wait leaves the resources of a dead learner rank to the rank that replaces it. Every other second this
        requests the resources from Ray, so that an autoscaler sees the demand, and releases them again.
        """
        now = time.monotonic()
        if self.colocated or len(self.actors) >= (self.config.max_workers or self.config.workers):
            return None
        if self._wanted is None:
            if now - self._asked > 2 * _ASK_S:
                self._wanted, self._asked = self._place(), now
            return None
        there = self._wanted.wait(_GLANCE_S)
        if not there and now - self._asked < _ASK_S:
            return None
        self._successes = self._successes + 1 if there else 0
        group, self._wanted = self._wanted, None
        if self._successes >= _TIMES:
            self._successes = 0
            return self._start_worker(group)
        remove_placement_group(group)
        return None

    @property
    def spare(self) -> bool:
        """True if a disaggregated run has more workers than `workers`."""
        return not self.colocated and len(self.actors) > self.config.workers

    def shrink(self) -> None:
        """End the worker that was added last, and release its resources."""
        self._dismiss(self.actors[-1:])
        remove_placement_group(self._placements.pop())

    def withdraw_request(self) -> None:
        """Withdraw the request for one more worker: others need the resources."""
        if self._wanted:
            remove_placement_group(self._wanted)
        self._wanted, self._successes = None, 0

    def stop(self) -> None:
        """End all workers and release their resources."""
        self._dismiss(self.actors)
        self.withdraw_request()
        for group in self._placements:
            remove_placement_group(group)

    def _dismiss(self, actors: list[ActorHandle]) -> None:
        closing = [actor.close.remote() for actor in actors]
        if closing:  # an engine may have child processes
            ray.wait(closing, num_returns=len(closing), timeout=_CLOSE_S)
        for actor in actors:
            ray.kill(actor)
        self.actors = self.actors[: -len(actors) or None]

    def _place(self) -> PlacementGroup:
        return placement_group([worker_resources(self.config)], strategy="STRICT_PACK")

    def _start_worker(self, group: PlacementGroup) -> ActorHandle:
        bundle = worker_resources(self.config)
        where = PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=0)
        actor = self._make({"num_cpus": bundle["CPU"], "num_gpus": bundle.get("GPU", 0), "scheduling_strategy": where})
        self.actors.append(actor)
        self._placements.append(group)
        return actor

    def _make(self, options: dict[str, Any]) -> ActorHandle:
        return (
            ray.remote(concurrency_groups={CONTROL: 4})(self.worker)
            .options(
                **options,
                max_restarts=-1,  # it restarts without weights; a refit sends them again
                max_task_retries=0,
            )
            .remote(
                self.spec,
                self.config,
                kernel=self.kernel,
                threads=self.threads,
                keep=self.keep,
                transport=self.transport,
                colocated=self.colocated,
            )
        )
