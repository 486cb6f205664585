"""Events on their way from the coordinator to the driver."""

import asyncio
from typing import Literal

from qurl_ray.types import Event

_POLL_S = 0.02


class EventBuffer:
    """Events that the driver has not taken yet. It takes them a few times a second and writes them to disk."""

    def __init__(self) -> None:
        self.step = 0
        """The last step that the ranks reported; events that name no other step belong to it."""
        self._events: list[Event] = []
        self._takes = 0

    def add(self, *events: Event) -> None:
        """Add events, in this order."""
        self._events += events

    def tell(self, kind: Literal["info", "warning"], message: str, *, step: int | None = None) -> None:
        """Add a sentence for the log."""
        self.add(Event(kind=kind, step=self.step if step is None else step, message=message))

    def warn(self, step: int, message: str) -> None:
        """Add a warning about a step."""
        self.tell("warning", message, step=step)

    def take(self) -> list[Event]:
        """Return the events since the last call. Only the driver calls this, after it has written the events of the
        call before."""
        events, self._events = self._events, []
        self._takes += 1
        return events

    async def written(self) -> None:
        """Return when the driver has written all events that were added before this call."""
        takes = self._takes + 2  # it takes them once, and again only after it has written them
        while self._takes < takes:
            await asyncio.sleep(_POLL_S)
