"""Requests of one call on their way through the fleet. Pure.

waiting ─► running on a worker (a straggler's on two) ─► answered, each request exactly once
   ▲                 │
   └─────────────────┘ the worker died, or was interrupted for new weights: what it drew so far is kept
"""

import statistics
from bisect import insort
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

from qurl_ray.engines.requests import continued, joined
from qurl_ray.errors import QurlError
from qurl_ray.types import Completion, Request


@dataclass(slots=True)
class FleetCounts:
    """Counts since the fleet started."""

    deaths: int = 0
    repeated: int = 0
    """Requests that were restarted or resumed, on another worker or after new weights."""
    hedged: int = 0
    """Chunks that a second worker was given, because the first took long."""


@dataclass(eq=False, slots=True)
class Chunk:
    """Chunk of requests that a worker gets in one call: neighbours, so that samples of a prompt share its prefill."""

    places: tuple[int, ...]
    """Indices of its requests in the list of all requests."""
    runners: dict[int, float] = field(default_factory=dict)
    """Start time on each worker that runs it, by worker index."""


class Work:
    """Requests of one call, with their states as above. All times are of one monotonic clock, in seconds.

    Args:
        size: most requests of a chunk.
    """

    def __init__(self, requests: Sequence[Request], *, size: int) -> None:
        self._size = size
        self._requests = list(requests)
        self._parts: list[list[Completion]] = [[] for _ in requests]
        self._answers: list[Completion | None] = [None] * len(requests)
        self._seconds: list[float] = []
        """Durations of completed chunks, in seconds, sorted."""
        places = range(len(self._requests))
        self._new = deque(Chunk(tuple(places[i : i + size])) for i in range(0, len(places), size))
        """Chunks that any worker may take."""
        self.running: dict[Chunk, None] = {}
        """Chunks under way, in the order in which they were started."""
        self.open = len(self._requests)
        """Number of requests without an answer."""
        self.error: QurlError | None = None
        self.hedged = self.repeated = 0
        """Chunks given to a second worker; requests restarted or resumed elsewhere."""

    @property
    def over(self) -> bool:
        return not self.open or self.error is not None

    @property
    def waiting(self) -> int:
        """Number of chunks that wait for a worker."""
        return len(self._new)

    @property
    def asked(self) -> int:
        """Number of requests so far."""
        return len(self._requests)

    def next(self, worker: int, now: float, hedge_after: float) -> Chunk | None:
        """Return the next chunk for this idle worker, or None: a waiting chunk, or else the one that has run on a
        single worker for longest, if that is longer than `hedge_after` times the median of completed chunks."""
        if self.over:
            return None
        if self._new:
            return self._started(self._new.popleft(), worker, now)
        if self._seconds and (alone := next((p for p in self.running if len(p.runners) == 1), None)):
            (since,) = alone.runners.values()
            if now - since > hedge_after * statistics.median(self._seconds):
                self.hedged += 1
                return self._started(alone, worker, now)
        return None

    def _started(self, chunk: Chunk, worker: int, now: float) -> Chunk:
        self.running[chunk] = None  # one that runs already keeps its place
        chunk.runners[worker] = now
        return chunk

    def requests(self, chunk: Chunk) -> list[Request]:
        """Requests of a chunk, as they are to be sent now."""
        return [self._requests[place] for place in chunk.places]

    def take(self, chunk: Chunk, worker: int, completions: Sequence[Completion], now: float) -> None:
        """Record a worker's answers. The first answer to a request counts; interrupted requests wait again."""
        since = chunk.runners.pop(worker)
        cut = []
        for place, completion in zip(chunk.places, completions, strict=True):
            if self._answers[place] is not None:
                continue
            if completion.finish == "cancelled":
                cut.append((place, completion))
                continue
            self._answers[place] = joined([*self._parts[place], completion])
            self.open -= 1
        if cut and not chunk.runners:
            for place, completion in cut:
                if len(completion.token_ids):
                    self._requests[place] = continued(self._requests[place], completion)
                    self._parts[place].append(completion)
            self._again([place for place, _ in cut])
        if not cut:
            insort(self._seconds, now - since)
        self._settle(chunk)

    def give_back(self, chunk: Chunk, worker: int) -> int:
        """Record that the worker will not answer. Returns the number of requests that wait again."""
        chunk.runners.pop(worker)
        missing = [] if chunk.runners else [place for place in chunk.places if self._answers[place] is None]
        self._again(missing)
        self._settle(chunk)
        return len(missing)

    def answers(self) -> list[Completion]:
        """Return the answers in the order of the requests, once all are there."""
        assert not self.open
        return [answer for answer in self._answers if answer]

    def _again(self, places: list[int]) -> None:
        if places:
            self.repeated += len(places)
            self._new.appendleft(Chunk(tuple(places)))

    def _settle(self, chunk: Chunk) -> None:
        del self.running[chunk]
        if chunk.runners:
            self.running[chunk] = None  # last in order: the second worker started later
