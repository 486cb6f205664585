"""What the tracker asks of a place that receives events."""

from typing import Literal, Protocol

from qurl_ray.types import Event

Outcome = Literal["finished", "failed", "interrupted"]


class Sink(Protocol):
    """One destination. It may raise: the tracker announces the first failure and goes on."""

    name: str
    """As a warning calls it."""

    def handle(self, event: Event, at: float) -> None:
        """Take one event that reached the driver at unix time `at`, in seconds. Must not block."""
        ...

    def notices(self) -> list[str]:
        """Trouble since the last call that did not surface as an exception, one sentence each."""
        ...

    def close(self, outcome: Outcome) -> None:
        """Write what is outstanding; may take until the sink's own deadline."""
        ...
