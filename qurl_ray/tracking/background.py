"""A bounded queue with one thread, so that a slow or dead server never slows the caller."""

import queue
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable
from itertools import chain, repeat

Operation = Callable[[], None]

# Pauses between tries of one operation: about ten minutes in all, enough for a server to be restarted.
_RETRY_DELAYS_S = (1.0, 2.0, 4.0, 8.0, 15.0, 30.0, 60.0, 120.0, 180.0, 180.0)
_CLOSING_DELAY_S, _POLL_S = 0.5, 0.1
# A server that fails when the run has ended gets this long to come back, instead of the whole deadline.
_LAST_CHANCE_S = 5.0
_MAX_ERROR_LENGTH = 300


class Background:
    """Runs operations one after the other, in the order they came, in a daemon thread.

    consumes:  operations   from offer() and submit()
    waits for: the next operation, or the pause before a retry; drain() cuts both short
    ends:      when drain() was called and the queue is empty, or its deadline has passed

    An operation that fails for a passing reason is tried again for ten minutes, `first` without end, and later ones
    wait behind it; any other failure skips it. If `first` fails for good, nothing after it is run. Only the first
    failure becomes a notice: an outage of an hour is one piece of news.
    """

    def __init__(
        self,
        name: str,
        *,
        first: Operation,
        is_transient: Callable[[Exception], bool],
        capacity: int = 10_000,
        retry_delays_s: tuple[float, ...] = _RETRY_DELAYS_S,
        recourse: str = "metrics.jsonl has all of them",
    ) -> None:
        """Start with the operation `first`. `recourse` ends the sentence that says how much was lost."""
        self._name = name
        self._recourse = recourse
        self._is_transient = is_transient
        self._capacity = capacity
        self._retry_delays_s = retry_delays_s
        self._queue: queue.SimpleQueue[Operation | None] = queue.SimpleQueue()
        self._notices: deque[str] = deque()
        self._announced = self._abandoned = False
        self._failing_since: float | None = None
        self._done = self._lost = 0
        self._deadline = float("inf")
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._work, name=f"tracking-{name}", daemon=True)
        self._queue.put(first)
        self._thread.start()

    def offer(self, operation: Operation, capacity: int | None = None) -> None:
        """Queue an operation, or count it as lost if `capacity` operations wait already: the queue's, or a lower one
        for what takes much memory."""
        if self._queue.qsize() < (capacity or self._capacity):
            self.submit(operation)
        else:
            self._lost += 1

    def submit(self, operation: Operation) -> None:
        """Queue an operation that must not be lost to a full queue."""
        self._queue.put(operation)

    @property
    def lost(self) -> int:
        """Operations that were given up until now."""
        return self._lost

    def made_good(self) -> None:
        """Called by an operation that did what the lost ones should have done."""
        self._lost = 0

    def notices(self) -> list[str]:
        """What happened since the last call."""
        return [self._notices.popleft() for _ in range(len(self._notices))]

    def drain(self, timeout_s: float) -> None:
        """Finish what is queued, for at most `timeout_s` seconds; call it once, and submit nothing after it."""
        began = time.monotonic()
        self._deadline = began + timeout_s
        self._closing.set()
        self._queue.put(None)
        while self._thread.is_alive() and (now := time.monotonic()) < self._deadline:
            if (since := self._failing_since) is not None and now - max(since, began) > _LAST_CHANCE_S:
                self._deadline = now
            self._thread.join(_POLL_S)
        self._thread.join(2 * _CLOSING_DELAY_S)  # for it to count what it leaves
        # While the thread hangs, the end mark in the queue makes up for the operation that it hangs in.
        lost = self._lost + (self._queue.qsize() if self._thread.is_alive() else 0)
        if lost and (self._done or not self._announced):  # else the notice about the failure has said it
            self._notices.append(f"{self._name} lacks {lost} of this run's records; {self._recourse}")

    def _work(self) -> None:
        first = self._queue.get()
        # Without it nothing else can be done, so it is tried for as long as the run lasts.
        endless = chain(self._retry_delays_s, repeat(self._retry_delays_s[-1]))
        self._abandoned = first is not None and not self._perform(first, endless)
        while (operation := self._queue.get()) is not None:
            if self._abandoned or time.monotonic() > self._deadline:
                self._lost += 1
            else:
                self._perform(operation, self._retry_delays_s)

    def _perform(self, operation: Operation, delays_s: Iterable[float]) -> bool:
        """Try until it is done (True) or not worth another try (False)."""
        for delay_s in chain(delays_s, (None,)):
            try:
                operation()
            except Exception as error:  # whatever a client library throws, training goes on
                passing = self._is_transient(error)
                self._failing_since = (self._failing_since or time.monotonic()) if passing else None
                self._announce(error, passing)
                if not passing or delay_s is None or not self._may_retry(delay_s):
                    break
            else:
                self._failing_since = None
                self._done += 1
                return True
        self._lost += 1
        return False

    def _may_retry(self, delay_s: float) -> bool:
        """Wait before the next try; False once the deadline of drain() has passed."""
        if not self._closing.wait(delay_s):
            return True
        time.sleep(_CLOSING_DELAY_S)
        self._abandoned = time.monotonic() > self._deadline
        return not self._abandoned

    def _announce(self, error: Exception, passing: bool) -> None:
        if self._announced:
            return
        self._announced = True
        reason = " ".join(f"{type(error).__name__}: {error}".split())[:_MAX_ERROR_LENGTH]
        what_next = "retrying in the background" if passing else "not retried"
        self._notices.append(
            f"{self._name} failed ({reason}); {what_next}, training goes on, metrics.jsonl is complete"
        )
