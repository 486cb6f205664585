"""Requests that come one by one, as those of trajectories' turns do, on their way through the fleet.

generate ─► waiting ─► a share of them for a free worker ─► answers, to whoever waits for them
"""

import asyncio
import time
from collections import deque
from collections.abc import Callable, Sequence

from qurl_ray.actors.work import Chunk, Work
from qurl_ray.errors import QurlError
from qurl_ray.types import Completion, Request


class TurnsWork(Work):
    """Requests that are made one by one (Fleet.turns). Requests that wait when a worker is free are sent to it
    together, and none is sent to a second worker: chunks differ in size.

    A worker keeps the keys and values of a row that may be continued (rollout.kept), so the next request of that row is
    left to it. Only a worker that would have nothing to do takes rows of others. The answer is the same.

    Args:
        size: most requests of a chunk.
        workers: returns the number of workers that share what waits.
        free: returns True if a worker, by index, will look for work now.
        offer: called after a request was added.
    """

    def __init__(
        self,
        *,
        size: int,
        workers: Callable[[], int],
        free: Callable[[int], bool],
        offer: Callable[[], None],
    ) -> None:
        super().__init__([], size=size)
        self._workers, self._free, self._offer = workers, free, offer
        self._keepers: dict[str, int] = {}
        """Worker that keeps a row, by uid."""
        self._kept: dict[int, deque[int]] = {}
        """Places of waiting requests whose rows a worker keeps, at least one of each worker; `_new` has all others."""
        self._kept_count = 0
        self._awaited: dict[int, asyncio.Future[Completion]] = {}
        """Answers that somebody waits for, by place of the request."""
        self.heard = time.monotonic()
        """Time of the last answer, or since when there has been something to answer."""

    @property
    def over(self) -> bool:
        return self.error is not None  # others may come

    async def generate(self, request: Request) -> Completion:
        """Return the completion of one request; see Fleet.generate."""
        if self.error:
            raise self.error
        place = self.add(request)
        answer = self._awaited[place] = asyncio.get_running_loop().create_future()
        self._offer()
        try:
            return await answer
        finally:
            self._awaited.pop(place, None)

    def add(self, request: Request) -> int:
        """Add a request. Return its place among all requests."""
        if not self.open:
            self.heard = time.monotonic()
        place = self.asked
        self._requests.append(request)
        self._parts.append([])
        self._answers.append(None)
        self.open += 1
        keeper = self._keepers.pop(request.uid, None)
        if keeper is None:
            self._new.append(Chunk((place,)))
        else:
            self._kept.setdefault(keeper, deque()).append(place)
            self._kept_count += 1
        return place

    @property
    def waiting(self) -> int:
        return len(self._new) + self._kept_count

    def next(self, worker: int, now: float, hedge_after: float) -> Chunk | None:
        """Return what an idle worker is to do, or None: the rows that it keeps, and those that nobody keeps up to its
        share, the oldest requests first: a row that has to wait until others have ended would be computed alone. If
        there are none, up to its share of the rows of a worker that is not free, or has more than its own.
        """
        if self.over:
            return None
        share = -(-self.waiting // self._workers())
        most_new = share - len(self._kept.get(worker, ()))
        places: list[int] = []
        while len(places) < self._size:
            kept = self._kept.get(worker)
            new: tuple[int, ...] = self._new[0].places if self._new else ()
            fits = most_new > 0 and 0 < len(new) <= self._size - len(places)
            if fits and not (kept and kept[0] < new[0]):
                places += self._new.popleft().places
                most_new -= len(new)
            elif kept:
                places += self._of_kept(worker, 1)
            else:
                break
        if not places and self._kept:
            left = min(share, self._size)  # to one that is free
            spare = {index: len(kept) - left * self._free(index) for index, kept in self._kept.items()}
            index = max(spare, key=lambda index: spare[index])
            places = self._of_kept(index, min(left, spare[index]))
        return self._started(Chunk(tuple(places)), worker, now) if places else None

    def _of_kept(self, keeper: int, most: int) -> list[int]:
        """Take so many of the requests whose rows a worker keeps, the oldest first. Return their places."""
        kept = self._kept.pop(keeper, deque())
        taken = [kept.popleft() for _ in range(min(most, len(kept)))]
        if kept:
            self._kept[keeper] = kept
        self._kept_count -= len(taken)
        return taken

    def take(self, chunk: Chunk, worker: int, completions: Sequence[Completion], now: float) -> None:
        super().take(chunk, worker, completions, now)
        for place in chunk.places:
            answer = self._answers[place]
            if answer and not self.error:
                self.heard = now
                if self._requests[place].continues:
                    self._keepers[answer.uid] = worker
                if (waiter := self._awaited.get(place)) and not waiter.done():
                    waiter.set_result(answer)

    def fail(self, error: QurlError) -> None:
        """Hand over an error to all who wait."""
        for waiter in self._awaited.values():
            if not waiter.done():
                waiter.set_exception(error)
