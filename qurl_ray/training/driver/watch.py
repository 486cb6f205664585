"""The driver while the learner trains: it passes events on, heeds requests to stop, and keeps the fleet complete."""

import threading
import time
from contextlib import suppress
from typing import Any

import ray
from ray import ObjectRef
from ray.actor import ActorHandle
from ray.exceptions import ActorDiedError, GetTimeoutError, RayActorError
from ray.train.torch import TorchTrainer
from ray.train.v2._internal.exceptions import WorkerGroupStartupTimeoutError

from qurl_ray.actors.cluster import kill_actors, there_is, without_room
from qurl_ray.actors.placement import counts, demand
from qurl_ray.actors.worker_group import WorkerGroup
from qurl_ray.config import RunConfig
from qurl_ray.errors import CoordinatorDied, DeadlineExceeded, ExtensionError, QurlError
from qurl_ray.signals import StopRequests
from qurl_ray.tracking.tracker import Tracker
from qurl_ray.training.messages import Drained
from qurl_ray.training.totals import RunTotals
from qurl_ray.types import Event

_POLL_S = 0.2
_DRAIN_S = 120.0
_SLICE_S = 1.0
_END_S = 120.0  # a controller may have to start first, on a busy machine
_LOOK_S = 3.0
_LOOKS = 3  # checks in a row without room: at a single one, Ray Train may just be placing its ranks


class Fit(threading.Thread):
    """Thread that runs `trainer.fit()`, which on the main thread would replace the handler of SIGINT."""

    def __init__(self, trainer: TorchTrainer) -> None:
        super().__init__(name="fit", daemon=True)
        self._trainer = trainer
        self.error: BaseException | None = None

    def run(self) -> None:
        try:
            self._trainer.fit()
        except BaseException as error:  # handed to the main thread, which raises it
            self.error = error

    def end(self) -> None:
        """End the training if it still goes on. While this thread waits for an actor, ray.shutdown would end the
        process without a message. A controller that is still starting can only be killed once it has started."""
        until = time.monotonic() + _END_S
        while self.is_alive() and time.monotonic() < until:
            kill_actors("TrainController")
            self.join(_POLL_S)


class Watch:
    """Loop of the driver while the learner trains: it passes events on, heeds requests to stop, and adds workers."""

    def __init__(
        self,
        config: RunConfig,
        coordinator: ActorHandle,
        worker_group: WorkerGroup,
        totals: RunTotals,
        tracker: Tracker,
        stops: StopRequests,
    ) -> None:
        self._config, self._coordinator, self._worker_group = config, coordinator, worker_group
        self._totals, self._tracker, self._stops = totals, tracker, stops
        self._asked: float | None = None
        """Time of the first request to stop, in monotonic seconds."""
        self._heard = time.monotonic()
        self._looked, self._short = 0.0, 0
        """Time of the last check for room for the ranks, and number of checks in a row that found none."""
        self._log = "not known yet"
        self._begun = False
        """True once a rank has begun."""

    def until_over(self, fit: Fit) -> RunTotals:
        """Return the totals of the whole run, once the learner has ended.

        Raises:
            QurlError: an error of ours ended the run; any other error is raised as it is.
            KeyboardInterrupt: stopping was asked for twice, or took longer than the grace period.
        """
        self._stops.raising = False
        begin_s = 2 * self._config.learner.timeout_s + self._config.rollout.start_limit_s  # placed, and one waits
        ranks_late = time.monotonic() + begin_s
        while True:
            alive = fit.is_alive()
            if alive:
                self._heed_requests()
            drained = self._drain()
            for event in drained.events if drained else []:
                if event.kind == "rewind":  # the learner resumes from a checkpoint: later events will come again
                    state = event.values["totals"]
                    self._totals = RunTotals.of(state) if state else RunTotals()
                    self._tracker.rewind(event.step, self._totals.evaluations)
                else:
                    self._begun |= event.kind == "phase"
                    self._totals.add(event)
                    self._tracker.handle(event)
            if not alive:
                break
            if drained:
                if isinstance(drained.failure, DeadlineExceeded):  # the rank that has told it may never end
                    raise drained.failure
                self._complete_fleet(drained)
            if time.monotonic() > ranks_late and not self._begun:
                raise DeadlineExceeded(f"placing and starting the learner's ranks: none has begun within {begin_s:g} s")
            time.sleep(_POLL_S)
        if drained and isinstance(drained.failure, ExtensionError):
            raise ExtensionError(f"{drained.failure} (during step {self._totals.steps + 1})")
        if drained and drained.failure:
            raise drained.failure
        if fit.error is not None:
            raise _cause(fit.error, self._config)
        return self._totals

    def _heed_requests(self) -> None:
        """Stop after the step at the first request; abort at the second, or at the end of the grace period."""
        signals, grace_s = self._stops.signals, self._config.checkpoint.grace_s
        if not signals:
            return
        if self._asked is None:
            self._asked = time.monotonic()
            self._coordinator.stop.remote()
            self._tell(f"{signals[0].name}: stopping after this step, within {grace_s:g} s; once more aborts the run")
        if time.monotonic() - self._asked > grace_s:
            self._tell(f"the run has not stopped within checkpoint.grace_s={grace_s:g} and is aborted")
            raise KeyboardInterrupt
        if len(signals) > 1:
            raise KeyboardInterrupt

    def _tell(self, message: str) -> None:
        self._tracker.handle(Event(kind="info", step=0, message=message))

    def _drain(self) -> Drained | None:
        """Return the coordinator's events and state; None while it restarts."""
        limit = max(_DRAIN_S, self._config.rollout.start_limit_s)  # it starts together with the rollout workers
        try:
            drained = self._answer(self._coordinator.drain.remote(), limit)
        except GetTimeoutError:
            raise DeadlineExceeded(f"the coordinator did not answer for {limit:g} s; log {self._log}") from None
        except RayActorError as error:
            if isinstance(error, ActorDiedError) or time.monotonic() - self._heard > limit:
                message = f"the coordinator died, and did not come back; log {self._log}: {error}"
                raise CoordinatorDied(message) from None
            return None
        self._heard, self._log = time.monotonic(), drained.log
        return drained

    def _answer(self, call: ObjectRef, limit: float) -> Any:
        """Return the coordinator's answer. Requests to stop are heeded meanwhile, as it may hang.

        Raises:
            GetTimeoutError: it took longer than `limit` seconds.
        """
        until = time.monotonic() + limit
        while True:
            try:
                return ray.get(call, timeout=min(_SLICE_S, limit))
            except GetTimeoutError:
                if time.monotonic() >= until:
                    raise
            self._heed_requests()

    def _complete_fleet(self, drained: Drained) -> None:
        """Place colocated workers where the ranks are, or add a worker if there is room for one. Send the coordinator
        its workers if it does not know all of them, as after a restart."""
        short = self._make_room()
        if self._worker_group.colocated:
            if drained.ranks_at and drained.ranks_at != drained.workers_at:
                self._worker_group.place_on(drained.ranks_at)
                self._coordinator.join.remote(self._worker_group.actors, self._worker_group.assignments)
            return
        if drained.ranks_at and not short:  # before that, a worker could take the ranks' room
            self._worker_group.grow()
        if drained.workers < len(self._worker_group.actors):
            self._coordinator.join.remote(self._worker_group.actors, None)

    def _make_room(self) -> bool:
        """Return True if the ranks are known to wait for room. They have priority over workers above `rollout.workers`,
        one of which is ended; if there are none, log the resources that the ranks wait for."""
        if time.monotonic() - self._looked < _LOOK_S:
            return self._short > 0
        self._looked = time.monotonic()
        asked = demand(self._config)
        self._short = self._short + 1 if without_room(asked) else 0
        if self._short:
            self._worker_group.withdraw_request()
        if self._short == _LOOKS and self._worker_group.spare:
            with suppress(RayActorError, GetTimeoutError):  # a coordinator that restarts knows none of them
                self._answer(self._coordinator.leave.remote(len(self._worker_group.actors) - 1), _DRAIN_S)
            self._worker_group.shrink()
            self._short = 0
        elif self._short == 2 * _LOOKS:
            ranks = f"{asked.ranks} learner rank(s) of {counts(asked.rank)}"
            message = f"{ranks} wait for room, for {self._config.learner.timeout_s:g} s at most; {there_is()}"
            self._tracker.handle(Event(kind="warning", step=0, message=message))
        return self._short > 0


def _cause(error: BaseException, config: RunConfig) -> BaseException:
    """Return the error of ours (QurlError) inside the one that Ray Train raised, or the latter if there is none."""
    if isinstance(getattr(error, "controller_failure", None), WorkerGroupStartupTimeoutError):
        return DeadlineExceeded(
            f"{config.learner.workers} learner rank(s) of {counts(demand(config).rank)} were not placed within "
            f"{config.learner.timeout_s:g} s; {there_is()}"
        )
    failures = getattr(error, "worker_failures", None) or {}
    for inner in (error, *failures.values()):
        while inner is not None:
            if isinstance(inner, QurlError):
                return inner
            inner = inner.__cause__ or getattr(inner, "cause", None)
    return error
