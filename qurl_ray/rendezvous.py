"""Rendezvous of the learner's ranks: each hands in a value, one action follows, each gets its result."""

import asyncio
from collections.abc import Awaitable, Callable, Hashable
from dataclasses import dataclass, field
from typing import Any


@dataclass
class _Gathering:
    outcome: asyncio.Future
    brought: dict[int, Any] = field(default_factory=dict)
    left: int = 0


class Rendezvous:
    """Rendezvous of `ranks` ranks. It has no deadline: the action has its own, and a rank may rightly be late."""

    def __init__(self, ranks: int) -> None:
        self._ranks = ranks
        self._gatherings: dict[Hashable, _Gathering] = {}

    async def arrive(self, key: Hashable, rank: int, what: Any, action: Callable[[list[Any]], Awaitable[Any]]) -> Any:
        """Return the result of `action` on the values of all ranks, in their order. The last rank to arrive runs it.

        An error of the action is raised on every rank, or the others would wait for their deadline.
        """
        gathering = self._gatherings.setdefault(key, _Gathering(asyncio.get_running_loop().create_future()))
        gathering.brought[rank] = what
        if len(gathering.brought) == self._ranks:
            try:
                gathering.outcome.set_result(await action([gathering.brought[r] for r in range(self._ranks)]))
            except Exception as error:
                gathering.outcome.set_exception(error)
        try:
            return await asyncio.shield(gathering.outcome)
        finally:
            gathering.left += 1
            if gathering.left == self._ranks:
                self._gatherings.pop(key, None)
