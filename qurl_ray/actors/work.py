"""The requests of one call on their way through the fleet. Pure.

waiting ─► running on a worker (a straggler's on two) ─► answered, each request exactly once
   ▲                 │
   └─────────────────┘ the worker died, or was interrupted for new weights: what it drew so far is kept
"""

import statistics
from bisect import insort
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

from qurl_ray.errors import QurlError
from qurl_ray.rollout.requests import continued, joined
from qurl_ray.types import Completion, Request


@dataclass(slots=True)
class FleetCounts:
    """Since the fleet began."""

    deaths: int = 0
    repeated: int = 0
    """Requests that were begun anew, or gone on with, on another worker or after new weights."""
    hedged: int = 0
    """Pieces that a second worker was given, since the first took long."""


@dataclass(eq=False, slots=True)
class Piece:
    """Requests that a worker gets in one call: neighbours, so that samples of a prompt share its prefill."""

    places: tuple[int, ...]
    """In the list of all requests."""
    runners: dict[int, float] = field(default_factory=dict)
    """Workers that it runs on, and since when."""


class Work:
    """See above. Times are of one monotonic clock, in seconds.

    Args:
        size: requests of a piece.
    """

    def __init__(self, requests: Sequence[Request], *, size: int) -> None:
        self._requests = list(requests)
        self._parts: list[list[Completion]] = [[] for _ in requests]
        self._answers: list[Completion | None] = [None] * len(requests)
        self._seconds: list[float] = []
        """That pieces took, sorted."""
        places = range(len(self._requests))
        self.waiting = deque(Piece(tuple(places[i : i + size])) for i in range(0, len(places), size))
        self.running: dict[Piece, None] = {}
        """In the order in which they were begun."""
        self.open = len(self._requests)
        """Requests without an answer."""
        self.error: QurlError | None = None
        self.hedged = self.repeated = 0
        """Pieces given to a second worker; requests begun anew or gone on with elsewhere."""

    @property
    def over(self) -> bool:
        return not self.open or self.error is not None

    def next(self, worker: int, now: float, *, hedge_after: float) -> Piece | None:
        """What this idle worker is to do: a piece that waits, or else the one that runs on one worker for longest, if
        that is `hedge_after` times the median of those that are done."""
        piece = None
        if self.over:
            return None
        if self.waiting:
            piece = self.waiting.popleft()
            self.running[piece] = None
        elif self._seconds and (alone := next((p for p in self.running if len(p.runners) == 1), None)):
            (since,) = alone.runners.values()
            if now - since > hedge_after * statistics.median(self._seconds):
                piece = alone
                self.hedged += 1
        if piece:
            piece.runners[worker] = now
        return piece

    def requests(self, piece: Piece) -> list[Request]:
        """As they are to be sent now."""
        return [self._requests[place] for place in piece.places]

    def take(self, piece: Piece, worker: int, completions: Sequence[Completion], now: float) -> None:
        """What a worker answered. The first answer to a request counts; what was interrupted waits once more."""
        since = piece.runners.pop(worker)
        cut = []
        for place, completion in zip(piece.places, completions, strict=True):
            if self._answers[place] is not None:
                continue
            if completion.finish == "cancelled":
                cut.append((place, completion))
                continue
            self._answers[place] = joined([*self._parts[place], completion])
            self.open -= 1
        if cut and not piece.runners:
            for place, completion in cut:
                if len(completion.token_ids):
                    self._requests[place] = continued(self._requests[place], completion)
                    self._parts[place].append(completion)
            self._again([place for place, _ in cut])
        if not cut:
            insort(self._seconds, now - since)
        self._settle(piece)

    def give_back(self, piece: Piece, worker: int) -> int:
        """That worker will not answer. Returns the requests that wait once more."""
        piece.runners.pop(worker)
        missing = [] if piece.runners else [place for place in piece.places if self._answers[place] is None]
        self._again(missing)
        self._settle(piece)
        return len(missing)

    def answers(self) -> list[Completion]:
        """In the order of the requests, once all are there."""
        assert not self.open
        return [answer for answer in self._answers if answer]

    def _again(self, places: list[int]) -> None:
        if places:
            self.repeated += len(places)
            self.waiting.appendleft(Piece(tuple(places)))

    def _settle(self, piece: Piece) -> None:
        del self.running[piece]
        if piece.runners:
            self.running[piece] = None  # the second began later
