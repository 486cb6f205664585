"""Interface of a sink, which receives events from the tracker."""

from typing import Protocol

from qurl_ray.types import Event, Outcome


class Sink(Protocol):
    """Destination of events. Its methods may raise: the tracker reports the first failure and continues. Sinks that
    derive from this class need no `notices`."""

    name: str
    """Name of the sink in warnings."""

    def handle(self, event: Event, at: float) -> None:
        """Take one event that reached the driver at unix time `at`, in seconds. Must not block."""
        ...

    def notices(self) -> list[str]:
        """Return the problems since the last call that were not raised as exceptions, one sentence each."""
        return []

    def close(self, outcome: Outcome) -> None:
        """Write all outstanding records. This may take until the sink's own deadline."""
        ...
