"""The driver while the coordinator hangs, with a fake in its place."""

import signal
import threading
import time
from types import SimpleNamespace

import pytest
from ray.exceptions import GetTimeoutError

from qurl_ray.config import load_config
from qurl_ray.errors import DeadlineExceeded
from qurl_ray.signals import StopRequests
from qurl_ray.training.driver import watch
from qurl_ray.training.driver.watch import Watch
from qurl_ray.training.totals import RunTotals

HANGS = object()


class HangingCoordinator:
    """A coordinator that takes requests to stop, and answers no call."""

    def __init__(self) -> None:
        self.stops = 0
        self.drain = SimpleNamespace(remote=lambda: HANGS)
        self.stop = SimpleNamespace(remote=self._stop)

    def _stop(self) -> None:
        self.stops += 1


def get(call: object, timeout: float) -> None:
    """Wait as ray.get does for an answer that does not come."""
    assert call is HANGS
    time.sleep(timeout)
    raise GetTimeoutError


@pytest.fixture(autouse=True)
def _short(monkeypatch):
    """Slices of 10 ms, and no deadline beside `rollout.start_timeout_s`."""
    monkeypatch.setattr(watch.ray, "get", get)
    monkeypatch.setattr(watch, "_SLICE_S", 0.01, raising=False)
    monkeypatch.setattr(watch, "_DRAIN_S", 0.0)


class Driver:
    """The driver's loop over a coordinator that hangs, while the learner trains."""

    def __init__(self, *, grace_s: float = 1800.0, deadline_s: float = 30.0) -> None:
        settings = [f"checkpoint.grace_s={grace_s}", f"rollout.start_timeout_s={deadline_s}"]
        self.coordinator, self.stops, self.told = HangingCoordinator(), StopRequests(), []
        tracker = SimpleNamespace(handle=lambda event: self.told.append(event.message))
        config = load_config(None, settings)
        self._loop = Watch(config, self.coordinator, None, RunTotals(), tracker, self.stops)

    def request(self, number: signal.Signals, *, in_s: float) -> None:
        threading.Timer(in_s, self.stops.signals.append, [number]).start()

    def seconds(self, error: type[BaseException], match: str | None = None) -> float:
        """Run until the loop raises this error, and return how long that took."""
        started = time.monotonic()
        with pytest.raises(error, match=match):
            self._loop.until_over(SimpleNamespace(is_alive=lambda: True, error=None))
        return time.monotonic() - started


def test_the_grace_period_ends_while_the_coordinator_hangs():
    driver = Driver(grace_s=0.2)
    driver.request(signal.SIGTERM, in_s=0.1)
    assert driver.seconds(KeyboardInterrupt) >= 0.3
    assert driver.coordinator.stops == 1
    assert driver.told[-1] == "the run has not stopped within checkpoint.grace_s=0.2 and is aborted"


def test_a_second_request_aborts_while_the_coordinator_hangs():
    driver = Driver()
    driver.request(signal.SIGTERM, in_s=0.1)
    driver.request(signal.SIGINT, in_s=0.2)
    assert driver.seconds(KeyboardInterrupt) >= 0.2
    assert driver.coordinator.stops == 1


def test_without_a_request_a_coordinator_that_hangs_is_an_error_after_its_deadline():
    assert Driver(deadline_s=0.5).seconds(DeadlineExceeded, "the coordinator did not answer for 0.5 s") >= 0.5


def test_a_fit_whose_controller_is_still_starting_has_ended_before_ray_is_shut_down(monkeypatch):
    """A controller that starts is found only by a later look; ray.shutdown beside a fit that waits ends the process."""
    killed, looks = threading.Event(), []

    def look(name: str) -> None:
        looks.append(name)
        if len(looks) == 3:
            killed.set()

    monkeypatch.setattr(watch, "kill_actors", look)
    monkeypatch.setattr(watch, "_POLL_S", 0.01)
    fit = watch.Fit(SimpleNamespace(fit=killed.wait))
    fit.start()
    fit.end()
    assert not fit.is_alive()
    assert looks == ["TrainController"] * 3
