"""Requests to stop, as terminals (SIGINT, SIGHUP), Kubernetes, Slurm and spot instances (SIGTERM) send them."""

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager


class StopRequests:
    """Signals that ask this process to stop: SIGINT, SIGTERM, and SIGHUP unless it is ignored, as under nohup.

    A request raises KeyboardInterrupt in the main thread; while they are `deferred`, it is only recorded.

    Example:
        with (stops := StopRequests()).caught():
            ray.init()
            stops.install()
    """

    def __init__(self) -> None:
        self.signals: list[signal.Signals] = []
        """The requests so far, the oldest first."""
        self._deferred = False

    @property
    def exit_status(self) -> int:
        """Status of a process that was stopped by the first request: 128 and its number, 130 after Ctrl-C."""
        return 128 + (self.signals[0] if self.signals else signal.SIGINT)

    @contextmanager
    def caught(self) -> Iterator[None]:
        """Catch requests while the context lasts. Does nothing off the main thread, which alone may do it."""
        before = {number: signal.getsignal(number) for number in _asking()}
        self.install()
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    def install(self) -> None:
        """Catch requests again, after something else has replaced the handlers.

        Ray does so when it starts or attaches: its handler of SIGTERM ends the process within three seconds.
        """
        for number in _asking():
            signal.signal(number, self._record)

    @contextmanager
    def deferred(self) -> Iterator[None]:
        """Only record requests while the context lasts."""
        before, self._deferred = self._deferred, True
        try:
            yield
        finally:
            self._deferred = before

    def _record(self, number: int, _frame: object) -> None:
        self.signals.append(signal.Signals(number))
        if not self._deferred:
            raise KeyboardInterrupt


def _asking() -> list[signal.Signals]:
    if threading.current_thread() is not threading.main_thread():
        return []
    hang_up = [] if signal.getsignal(signal.SIGHUP) == signal.SIG_IGN else [signal.SIGHUP]
    return [signal.SIGINT, signal.SIGTERM, *hang_up]
