"""Where the learner's ranks meet: all bring something, one action follows, all hear of its outcome."""

import asyncio
from collections.abc import Awaitable, Callable, Hashable
from dataclasses import dataclass, field
from typing import Any


@dataclass
class _Table:
    outcome: asyncio.Future
    brought: dict[int, Any] = field(default_factory=dict)
    left: int = 0


class Meeting:
    """For `ranks` ranks. No deadline here: the action has its own, and a rank may rightly be late."""

    def __init__(self, ranks: int) -> None:
        self._ranks = ranks
        self._tables: dict[Hashable, _Table] = {}

    async def attend(self, key: Hashable, rank: int, what: Any, action: Callable[[list[Any]], Awaitable[Any]]) -> Any:
        """The outcome of `action` on what all ranks brought, in their order; the last one to come sets it off. Its
        error is everybody's, or the others would wait for their deadline."""
        table = self._tables.setdefault(key, _Table(asyncio.get_running_loop().create_future()))
        table.brought[rank] = what
        if len(table.brought) == self._ranks:
            try:
                table.outcome.set_result(await action([table.brought[r] for r in range(self._ranks)]))
            except Exception as error:
                table.outcome.set_exception(error)
        try:
            return await asyncio.shield(table.outcome)
        finally:
            table.left += 1
            if table.left == self._ranks:
                self._tables.pop(key, None)
