"""The driver while the learner trains: it passes events on, hears Ctrl-C, and keeps the fleet complete."""

import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

import ray
from ray.actor import ActorHandle
from ray.exceptions import ActorDiedError, GetTimeoutError, RayActorError
from ray.train.torch import TorchTrainer
from ray.train.v2._internal.exceptions import WorkerGroupStartupTimeoutError

from qurl_ray.actors.cluster import there_is, without_room
from qurl_ray.actors.crew import Crew
from qurl_ray.actors.placement import counts, demand
from qurl_ray.config import RunConfig
from qurl_ray.errors import CoordinatorDied, DeadlineExceeded, QurlError
from qurl_ray.loop.driver.summary import RunSummary
from qurl_ray.loop.messages import Drained
from qurl_ray.tracking.tracker import Tracker
from qurl_ray.types import Event

_POLL_S = 0.2
_DRAIN_S = 120.0
_LOOK_S = 3.0
_LOOKS = 3  # in a row: Ray Train may just be placing its ranks


class Fit(threading.Thread):
    """`trainer.fit()` off the main thread: it would replace the handler of Ctrl-C."""

    def __init__(self, trainer: TorchTrainer) -> None:
        super().__init__(name="fit", daemon=True)
        self._trainer = trainer
        self.error: BaseException | None = None

    def run(self) -> None:
        try:
            self._trainer.fit()
        except BaseException as error:  # handed to the main thread, which raises it
            self.error = error


class Watch:
    """What the driver does while the learner trains: events are passed on, Ctrl-C is heard, the fleet grows."""

    def __init__(
        self, config: RunConfig, coordinator: ActorHandle, crew: Crew, summary: RunSummary, tracker: Tracker
    ) -> None:
        self._config, self._coordinator, self._crew = config, coordinator, crew
        self._summary, self._tracker = summary, tracker
        self._heard = time.monotonic()
        self._looked, self._short = 0.0, 0
        """When it was asked whether the ranks have room, and how often in a row they had none."""
        self._log = "not known yet"

    def until_over(self, fit: Fit) -> dict[str, Any]:
        """The summary, once the learner has ended.

        Raises:
            QurlError: what ended the run, if it was one of ours; else the original error.
        """
        with _interrupts() as presses:
            asked = False
            while True:
                alive = fit.is_alive()
                if presses and not asked:
                    asked = True
                    self._coordinator.stop.remote()
                    message = "stopping after this step; press Ctrl-C again to abort"
                    self._tracker.handle(Event(kind="info", step=0, message=message))
                if len(presses) > 1:
                    raise KeyboardInterrupt
                found = self._drain()
                for event in found.events if found else []:
                    self._pass_on(event)
                if not alive:
                    break
                if found:
                    self._man(found)
                time.sleep(_POLL_S)
        if found and found.failure:
            raise found.failure
        if fit.error is not None:
            raise _cause(fit.error, self._config)
        return self._summary.finish()

    def _pass_on(self, event: Event) -> None:
        if event.kind == "rewind":  # the learner goes on from a checkpoint: what came after it comes once more
            self._summary = RunSummary(self._config, self._tracker.rewind(event.step))
        else:
            self._summary.add(event)
            self._tracker.handle(event)

    def _drain(self) -> Drained | None:
        """None while the coordinator is being started anew."""
        limit = max(_DRAIN_S, self._config.rollout.start_timeout_s)  # it starts beside the rollout workers
        try:
            found = ray.get(self._coordinator.drain.remote(), timeout=limit)
        except GetTimeoutError:
            raise DeadlineExceeded(f"the coordinator did not answer for {limit:g} s; log {self._log}") from None
        except RayActorError as error:
            if isinstance(error, ActorDiedError) or time.monotonic() - self._heard > limit:
                message = f"the coordinator died, and did not come back; log {self._log}: {error}"
                raise CoordinatorDied(message) from None
            return None
        self._heard, self._log = time.monotonic(), found.log
        return found

    def _man(self, found: Drained) -> None:
        """Put colocated workers where the ranks are, or add a worker if there is room for one, and tell the coordinator
        of those that it does not know: another one was started in its place."""
        short = self._make_room()
        if self._crew.colocated:
            if found.seats and found.seats != found.seated:
                self._crew.sit(found.seats)
                self._coordinator.join.remote(self._crew.actors, self._crew.seats)
            return
        if found.seats and not short:  # before, it could take the ranks' room
            self._crew.grow()
        if found.workers < len(self._crew.actors):
            self._coordinator.join.remote(self._crew.actors, None)

    def _make_room(self) -> bool:
        """Whether the ranks wait for room, as far as is known. They come before workers above `rollout.workers`; where
        there are none of these, it is said what is waited for."""
        if time.monotonic() - self._looked < _LOOK_S:
            return self._short > 0
        self._looked = time.monotonic()
        asked = demand(self._config)
        self._short = self._short + 1 if without_room(asked) else 0
        if self._short:
            self._crew.forgo()
        if self._short == _LOOKS and self._crew.spare:
            with suppress(RayActorError, GetTimeoutError):  # a coordinator that is made anew knows none of them
                ray.get(self._coordinator.leave.remote(len(self._crew.actors) - 1), timeout=_DRAIN_S)
            self._crew.shrink()
            self._short = 0
        elif self._short == 2 * _LOOKS:
            ranks = f"{asked.ranks} learner rank(s) of {counts(asked.rank)}"
            message = f"{ranks} wait for room, for {self._config.learner.timeout_s:g} s at most; {there_is()}"
            self._tracker.handle(Event(kind="warning", step=0, message=message))
        return self._short > 0


@contextmanager
def _interrupts() -> Iterator[list[float]]:
    """Collect the times of Ctrl-C instead of being ended by it. Does nothing off the main thread."""
    presses: list[float] = []
    if threading.current_thread() is not threading.main_thread():
        yield presses
        return
    before = signal.signal(signal.SIGINT, lambda *_: presses.append(time.monotonic()))
    try:
        yield presses
    finally:
        signal.signal(signal.SIGINT, before)


def _cause(error: BaseException, config: RunConfig) -> BaseException:
    """The error of ours inside what Ray Train raised, if there is one."""
    if isinstance(getattr(error, "controller_failure", None), WorkerGroupStartupTimeoutError):
        return DeadlineExceeded(
            f"{config.learner.workers} learner rank(s) of {counts(demand(config).rank)} were not placed within "
            f"{config.learner.timeout_s:g} s; {there_is()}"
        )
    failures = getattr(error, "worker_failures", None) or {}
    for found in (error, *failures.values()):
        while found is not None:
            if isinstance(found, QurlError):
                return found
            found = found.__cause__ or getattr(found, "cause", None)
    return error
