"""Bounded queue with one thread, so that a slow or dead server never slows the caller."""

import queue
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable
from itertools import chain, repeat

from qurl_ray.config.shown import reason

Operation = Callable[[], None]

# Pauses between attempts at one operation: about ten minutes in total, enough to restart a server.
_RETRY_DELAYS_S = (1.0, 2.0, 4.0, 8.0, 15.0, 30.0, 60.0, 120.0, 180.0, 180.0)
_CLOSING_DELAY_S, _POLL_S = 0.5, 0.1
# A server that fails after the end of the run has this time to recover, instead of the whole deadline.
_LAST_CHANCE_S = 5.0


class Background:
    """Runs operations one after the other, in the order of their arrival, in a daemon thread.

    consumes:  operations   from offer() and submit()
    waits for: the next operation, or the pause before a retry; drain() shortens both
    ends:      when drain() was called and either the queue is empty or the deadline has passed

    An operation that fails for a transient reason is retried for ten minutes (`first` without limit), and later ones
    wait for it. After any other failure it is skipped. If `first` fails permanently, nothing after it is run. Only the
    first failure becomes a notice, so that an outage of an hour is reported once.
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
        """Start the thread with the operation `first`. `recourse` ends the sentence that reports how much was lost."""
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
        """Queue an operation, or count it as lost if `capacity` operations already wait. The default is the capacity of
        the queue; operations that take much memory may have a lower one."""
        if self._queue.qsize() < (capacity or self._capacity):
            self.submit(operation)
        else:
            self._lost += 1

    def submit(self, operation: Operation) -> None:
        """Queue an operation even if the queue is full."""
        self._queue.put(operation)

    @property
    def lost(self) -> int:
        """Number of operations that were given up so far."""
        return self._lost

    def made_good(self) -> None:
        """Reset `lost`. Called by an operation that did the work of the lost operations."""
        self._lost = 0

    def notices(self) -> list[str]:
        """Return the notices since the last call."""
        return [self._notices.popleft() for _ in range(len(self._notices))]

    def drain(self, timeout_s: float) -> None:
        """Finish the queued operations within `timeout_s` seconds. Call it once, and submit nothing after it."""
        began = time.monotonic()
        self._deadline = began + timeout_s
        self._closing.set()
        self._queue.put(None)
        while self._thread.is_alive() and (now := time.monotonic()) < self._deadline:
            if (since := self._failing_since) is not None and now - max(since, began) > _LAST_CHANCE_S:
                self._deadline = now
            self._thread.join(_POLL_S)
        self._thread.join(2 * _CLOSING_DELAY_S)  # so that it can count the operations that it leaves
        # While the thread hangs in an operation, the end mark in the queue stands for that operation in the count.
        lost = self._lost + (self._queue.qsize() if self._thread.is_alive() else 0)
        if lost and (self._done or not self._announced):  # else the notice about the failure is enough
            self._notices.append(f"{self._name} lacks {lost} of this run's records; {self._recourse}")

    def _work(self) -> None:
        first = self._queue.get()
        # No other operation can work without it, so it is retried for as long as the run lasts.
        endless = chain(self._retry_delays_s, repeat(self._retry_delays_s[-1]))
        self._abandoned = first is not None and not self._perform(first, endless)
        while (operation := self._queue.get()) is not None:
            if self._abandoned or time.monotonic() > self._deadline:
                self._lost += 1
            else:
                self._perform(operation, self._retry_delays_s)

    def _perform(self, operation: Operation, delays_s: Iterable[float]) -> bool:
        """Retry an operation until it succeeds (True) or is given up (False)."""
        for delay_s in chain(delays_s, (None,)):
            try:
                operation()
            except Exception as error:  # whatever a client library raises, training continues
                passing = self._is_transient(error)
                self._failing_since = (self._failing_since or time.monotonic()) if passing else None
                if not self._announced:
                    self._announced = True
                    plan = "retrying in the background" if passing else "not retried"
                    self._notices.append(
                        f"{self._name} failed ({reason(error)}); {plan}, training goes on, metrics.jsonl is complete"
                    )
                if not passing or delay_s is None or not self._may_retry(delay_s):
                    break
            else:
                self._failing_since = None
                self._done += 1
                return True
        self._lost += 1
        return False

    def _may_retry(self, delay_s: float) -> bool:
        """Wait before the next attempt. Return False once the deadline of drain() has passed."""
        if not self._closing.wait(delay_s):
            return True
        time.sleep(_CLOSING_DELAY_S)
        self._abandoned = time.monotonic() > self._deadline
        return not self._abandoned
