"""Requests that come one by one, as those of trajectories' turns do, on their way through the fleet.

generate ─► waiting ─► a share of them for a free worker ─► answers, to whoever waits for them
"""

import asyncio
import time
from collections.abc import Callable, Sequence

from qurl_ray.actors.work import Chunk, Work
from qurl_ray.errors import QurlError
from qurl_ray.types import Completion, Request


class TurnsWork(Work):
    """Requests that are made one by one (Fleet.turns). Those that wait when a worker is free are sent to it together,
    but never more than its share, and none is sent to a second worker: chunks differ in size.

    Args:
        size: most requests of a chunk.
        workers: returns the number of workers that share what waits.
        offer: called after a request was added.
    """

    def __init__(self, *, size: int, workers: Callable[[], int], offer: Callable[[], None]) -> None:
        super().__init__([], size=size)
        self._workers, self._offer = workers, offer
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
        self.waiting.append(Chunk((place,)))
        return place

    def next(self, worker: int, now: float, hedge_after: float) -> Chunk | None:
        """Return the worker's share of what waits, or None."""
        if self.over or not self.waiting:
            return None
        return self._started(self._together(-(-len(self.waiting) // self._workers())), worker, now)

    def take(self, chunk: Chunk, worker: int, completions: Sequence[Completion], now: float) -> None:
        super().take(chunk, worker, completions, now)
        for place in chunk.places:
            answer = self._answers[place]
            if answer and not self.error:
                self.heard = now
                if (waiter := self._awaited.get(place)) and not waiter.done():
                    waiter.set_result(answer)

    def fail(self, error: QurlError) -> None:
        """Hand over an error to all who wait."""
        for waiter in self._awaited.values():
            if not waiter.done():
                waiter.set_exception(error)

    def _together(self, chunks: int) -> Chunk:
        """Join so many waiting chunks, but not more requests than fit one."""
        places = list(self.waiting.popleft().places)
        for _ in range(chunks - 1):
            if len(places) + len(self.waiting[0].places) > self._size:
                break
            places += self.waiting.popleft().places
        return Chunk(tuple(places))
