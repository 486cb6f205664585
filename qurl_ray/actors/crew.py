"""The processes of the rollout workers: placed, grown and ended by the driver, which owns them."""

import time
from dataclasses import dataclass, field

import ray
from ray.actor import ActorHandle
from ray.util.placement_group import PlacementGroup, placement_group, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from qurl_ray.actors.rollout_worker import CONTROL, RolloutWorker
from qurl_ray.config.rollout import RolloutConfig
from qurl_ray.errors import DeadlineExceeded
from qurl_ray.types import PolicySpec

_CLOSE_S = 20.0
_GLANCE_S = 0.01
IPC_SHARE = 0.5
"""Of a GPU, for the learner and for the engine each, when one hands its memory to the other."""


@dataclass(slots=True, kw_only=True)
class Crew:
    """One placement group per worker, so that each can be lost, and one more be added, by itself.

    Example:
        crew = Crew(config=config.rollout, spec=spec, kernel="auto", threads=2)
        crew.start()
        ...
        newcomer = crew.grow()  # now and then
        crew.stop()
    """

    config: RolloutConfig
    spec: PolicySpec
    kernel: str
    threads: int
    transport: str = "object_store"
    actors: list[ActorHandle] = field(default_factory=list)
    _placements: list[PlacementGroup] = field(default_factory=list)
    _wanted: PlacementGroup | None = None
    """Of a worker that the cluster has no room for yet."""

    def start(self) -> None:
        """Place and start `workers` of them.

        Raises:
            DeadlineExceeded: the cluster cannot hold them; the message says what is missing.
        """
        limit = self.config.start_timeout_s
        groups = [self._place() for _ in range(self.config.workers)]
        ends = time.monotonic() + limit
        missing = [group for group in groups if not group.wait(max(_GLANCE_S, ends - time.monotonic()))]
        if missing:
            for group in groups:
                remove_placement_group(group)
            raise DeadlineExceeded(
                f"{len(missing)} of {len(groups)} rollout worker(s) of {self._bundle()} were not placed "
                f"within {limit:g} s; the cluster has {counts(ray.cluster_resources())}, "
                f"free now {counts(ray.available_resources())}"
            )
        for group in groups:
            self._hire(group)

    def grow(self) -> ActorHandle | None:
        """One more worker, if `max_workers` allows and there is room for it now. The wish for room stays with Ray,
        whose autoscaler sees it."""
        if len(self.actors) >= (self.config.max_workers or self.config.workers):
            return None
        if self._wanted is None:
            self._wanted = self._place()
        if not self._wanted.wait(_GLANCE_S):
            return None
        group, self._wanted = self._wanted, None
        return self._hire(group)

    def stop(self) -> None:
        """End the workers and give their resources back."""
        closing = [actor.close.remote() for actor in self.actors]
        if closing:  # an engine may have processes of its own
            ray.wait(closing, num_returns=len(closing), timeout=_CLOSE_S)
        for actor in self.actors:
            ray.kill(actor)
        for group in (*self._placements, *([self._wanted] if self._wanted else [])):
            remove_placement_group(group)

    def _bundle(self) -> dict[str, float]:
        config = self.config
        shared = config.vllm.tensor_parallel if config.engine == "vllm" else 1
        gpus = 0 if config.device == "cpu" else IPC_SHARE if self.transport == "ipc" else shared
        return {"CPU": 1.0} | ({"GPU": float(gpus)} if gpus else {})

    def _place(self) -> PlacementGroup:
        return placement_group([self._bundle()], strategy="PACK")

    def _hire(self, group: PlacementGroup) -> ActorHandle:
        bundle = self._bundle()
        actor = (
            ray.remote(concurrency_groups={CONTROL: 4})(RolloutWorker)
            .options(
                num_cpus=bundle["CPU"],
                num_gpus=bundle.get("GPU", 0),
                max_restarts=-1,  # it comes back without weights, and the fleet gives it some
                max_task_retries=0,
                scheduling_strategy=PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=0),
            )
            .remote(self.spec, self.config, kernel=self.kernel, threads=self.threads, transport=self.transport)
        )
        self.actors.append(actor)
        self._placements.append(group)
        return actor


def counts(resources: dict[str, float]) -> str:
    """Ray's resources in words: "2 CPU, 0 GPU"."""
    return ", ".join(f"{resources.get(kind, 0):g} {kind}" for kind in ("CPU", "GPU"))
