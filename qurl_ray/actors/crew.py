"""The processes of the rollout workers: placed, grown and ended by the driver, which owns them."""

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import ray
from ray.actor import ActorHandle
from ray.util.placement_group import PlacementGroup, placement_group, remove_placement_group
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy, PlacementGroupSchedulingStrategy

from qurl_ray.actors.cluster import there_is
from qurl_ray.actors.placement import Seat, counts, gpus_of_worker, guests, worker_resources
from qurl_ray.actors.rollout_worker import CONTROL, RolloutWorker
from qurl_ray.config.rollout import RolloutConfig
from qurl_ray.errors import DeadlineExceeded
from qurl_ray.types import PolicySpec

_CLOSE_S = 20.0
_GLANCE_S = 0.01
_ASK_S = 1.0
_TIMES = 10  # that there is room, every other second: longer than Ray Train takes to place a rank anew


@dataclass(slots=True, kw_only=True)
class Crew:
    """Disaggregated: one placement group per worker, so that each can be lost, and one more be added, by itself.
    Colocated: workers that take nothing of Ray, on the GPUs of the learner's ranks, once these are known.

    Example:
        crew = Crew(config=config.rollout, spec=spec, kernel="auto", threads=2)
        crew.start()
        ...
        newcomer = crew.grow()  # now and then; colocated: crew.sit(seats)
        crew.stop()
    """

    config: RolloutConfig
    spec: PolicySpec
    kernel: str
    threads: int
    transport: str = "object_store"
    colocated: bool = False
    worker: type = RolloutWorker
    """What is made of each; tests of placement put another one there."""
    actors: list[ActorHandle] = field(default_factory=list)
    seats: tuple[Seat, ...] | None = None
    """Of the ranks that the colocated workers are with."""
    _placements: list[PlacementGroup] = field(default_factory=list)
    _wanted: PlacementGroup | None = None
    """Of one more worker, to see whether there is room."""
    _asked: float = 0.0
    """When it was asked for."""
    _found: int = 0
    """How often in a row there was room."""

    def start(self) -> None:
        """Place and start `workers` of them. Colocated ones wait for `sit`.

        Raises:
            DeadlineExceeded: the cluster cannot hold them; the message says what is missing.
        """
        if self.colocated:
            return
        limit = self.config.start_timeout_s
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
            self._hire(group)

    def sit(self, seats: Sequence[Seat]) -> None:
        """Put the workers of a colocated run where the learner's ranks are; anew if these have moved.

        Raises:
            PlacementError: the ranks lie so that an engine would have GPUs of two nodes.
        """
        if tuple(seats) == self.seats:
            return
        self._dismiss(self.actors)
        self.seats = tuple(seats)
        for seat in guests(seats, max(1, gpus_of_worker(self.config))):
            self.actors.append(self._make(self._at(seat)))

    def grow(self) -> ActorHandle | None:
        """One more worker, if `max_workers` allows and there has been room for it for a while: what a rank of the
        learner leaves when it dies is not taken from the one that takes its place. To be called often.

        Every other second it asks Ray for the room, so that an autoscaler sees the wish, and gives it back."""
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
        self._found = self._found + 1 if there else 0
        group, self._wanted = self._wanted, None
        if self._found >= _TIMES:
            self._found = 0
            return self._hire(group)
        remove_placement_group(group)
        return None

    @property
    def spare(self) -> bool:
        """Whether there are more than `workers`."""
        return not self.colocated and len(self.actors) > self.config.workers

    def shrink(self) -> None:
        """End the worker that was hired last, and give its room back."""
        self._dismiss(self.actors[-1:])
        remove_placement_group(self._placements.pop())

    def forgo(self) -> None:
        """Take back the wish for one more worker: others need the room."""
        if self._wanted:
            remove_placement_group(self._wanted)
        self._wanted, self._found = None, 0

    def stop(self) -> None:
        """End the workers and give their resources back."""
        self._dismiss(self.actors)
        self.forgo()
        for group in self._placements:
            remove_placement_group(group)

    def _dismiss(self, actors: list[ActorHandle]) -> None:
        closing = [actor.close.remote() for actor in actors]
        if closing:  # an engine may have processes of its own
            ray.wait(closing, num_returns=len(closing), timeout=_CLOSE_S)
        for actor in actors:
            ray.kill(actor)
        self.actors = self.actors[: -len(actors) or None]

    def _place(self) -> PlacementGroup:
        return placement_group([worker_resources(self.config)], strategy="STRICT_PACK")

    def _hire(self, group: PlacementGroup) -> ActorHandle:
        bundle = worker_resources(self.config)
        where = PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=0)
        actor = self._make({"num_cpus": bundle["CPU"], "num_gpus": bundle.get("GPU", 0), "scheduling_strategy": where})
        self.actors.append(actor)
        self._placements.append(group)
        return actor

    def _at(self, seat: Seat) -> dict[str, Any]:
        """Options of a worker that takes the GPUs which Ray has given to ranks: Ray leaves the variable alone where an
        actor asks for no GPU."""
        where = NodeAffinitySchedulingStrategy(seat.node, soft=False)
        options = {"num_cpus": 0, "num_gpus": 0, "scheduling_strategy": where}
        if not seat.gpus:
            return options
        return options | {"runtime_env": {"env_vars": {"CUDA_VISIBLE_DEVICES": ",".join(seat.gpus)}}}

    def _make(self, options: dict[str, Any]) -> ActorHandle:
        return (
            ray.remote(concurrency_groups={CONTROL: 4})(self.worker)
            .options(
                **options,
                max_restarts=-1,  # it comes back without weights, and the fleet gives it some
                max_task_retries=0,
            )
            .remote(
                self.spec,
                self.config,
                kernel=self.kernel,
                threads=self.threads,
                transport=self.transport,
                colocated=self.colocated,
            )
        )
