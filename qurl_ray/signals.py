"""Requests to stop, as terminals (SIGINT, SIGHUP), Kubernetes, Slurm and spot instances (SIGTERM) send them."""

import os
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache, partial
from typing import Any

_RAY_ABORTS_S = 3
"""Seconds from SIGTERM until Ray's C++ handler aborts the process, by an alarm."""
_AGAIN_S = 0.05
"""Seconds after which a request that came amid a fork is sent again: by then the fork is over."""
_forks: list[int] = []
"""Forks of the main thread that are under way, once `_watch_forks` was called."""


class StopRequests:
    """Signals that ask this process to stop: SIGINT, SIGTERM, and SIGHUP unless it is ignored, as under nohup.

    The first request raises KeyboardInterrupt in the main thread. Later ones are only recorded, so that they do not
    interrupt the clean-up.

    Example:
        with (stops := StopRequests()).caught():
            with stops.kept():
                ray.init()
    """

    def __init__(self) -> None:
        self.signals: list[signal.Signals] = []
        """The requests so far, the oldest first."""
        self.raising = True
        """True if the next request raises KeyboardInterrupt. It can be set: a process that drains lets the second
        request raise, a process that finishes a step lets none."""

    @property
    def exit_status(self) -> int:
        """Status of a process that was stopped by the first request: 128 and its number, 130 after Ctrl-C."""
        return 128 + (self.signals[0] if self.signals else signal.SIGINT)

    @contextmanager
    def caught(self, *, then_exit: bool = False) -> Iterator[None]:
        """Catch requests while the context lasts. Does nothing off the main thread, which alone may do it.

        Args:
            then_exit: the process ends after the context. If a request has come, later ones are ignored until then:
                else they would end it with their own status, while the interpreter still shuts down.
        """
        before = {number: signal.getsignal(number) for number in _asking()}
        self.install()
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, signal.SIG_IGN if then_exit and self.signals else handler)

    @contextmanager
    def kept(self) -> Iterator[None]:
        """Keep the handlers through the start of Ray, and raise KeyboardInterrupt at its end if a request has come.

        Ray would replace the handler of SIGTERM when it starts or attaches, by one whose exception may be dropped (see
        `_watch_forks`): the request would be lost. So `signal.signal` takes no handler of SIGTERM meanwhile. Ray's C++
        handler is replaced at the end; it has called ours until then.
        """
        change = signal.signal

        def keeping(number: int, handler: Any) -> Any:
            return signal.getsignal(number) if number == signal.SIGTERM else change(number, handler)

        if _asking():
            _watch_forks()
            signal.signal = keeping  # type: ignore[assignment]
        try:
            yield
        finally:
            signal.signal = change
            self.install()
        self.check()

    def check(self) -> None:
        """Raise KeyboardInterrupt if a request has come: where its handler ran, Python may have dropped the exception,
        as it does in finalizers."""
        if self.signals:
            raise KeyboardInterrupt

    def install(self) -> None:
        """Set the handlers. Does nothing off the main thread."""
        for number in _asking():
            signal.signal(number, self._record)

    def _record(self, number: int, _frame: object) -> None:
        # Cancel the alarm that Ray's C++ handler has set. A longer one is somebody else's.
        if 0 < signal.getitimer(signal.ITIMER_REAL)[0] <= _RAY_ABORTS_S:
            signal.alarm(0)
        if _forks:
            threading.Timer(_AGAIN_S, signal.pthread_kill, (threading.main_thread().ident, number)).start()
            return
        self.signals.append(signal.Signals(number))
        if self.raising:
            self.raising = False
            raise KeyboardInterrupt


@cache
def _watch_forks() -> None:
    """Note forks of the main thread from now on. Python drops an exception that a handler raises in a hook of a fork,
    such as logging's, so the handler sends the signal again a moment later. Hooks that are registered later are not
    covered."""

    def note(change: Callable[[], object]) -> None:
        if threading.current_thread() is threading.main_thread():
            change()

    end = partial(note, _forks.clear)
    os.register_at_fork(before=partial(note, partial(_forks.append, 1)), after_in_parent=end, after_in_child=end)


def _asking() -> list[signal.Signals]:
    if threading.current_thread() is not threading.main_thread():
        return []
    hang_up = [] if signal.getsignal(signal.SIGHUP) == signal.SIG_IGN else [signal.SIGHUP]
    return [signal.SIGINT, signal.SIGTERM, *hang_up]
