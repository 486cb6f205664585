"""The protocol of a transport: how the weights of a version travel from the learner's ranks to the engines.

    rank:    begin ─► put, for each bucket ─► commit        abort, if one of them fails
    worker:                 ╰─► receive, for each ticket, where the engine loads the version

Every rank has one transport, and all call it at the same time. `commit` gives the engines the tickets of what was sent,
and returns when they have compared what they hold with the manifest's fingerprints: whatever a transport does, wrong
weights never generate.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, cast

from qurl_ray.errors import ConfigError
from qurl_ray.tables import TRANSPORTS
from qurl_ray.types import StagedBucket, TensorRecord
from qurl_ray.weights.delta import Payload
from qurl_ray.weights.messages import Begin, Commit, Engines, Header, Probes, Put, WeightMessage
from qurl_ray.weights.stream import Bucket, Publisher


@dataclass(slots=True, kw_only=True)
class Link:
    """A rank's line to the gate, with which its transport is made. Its methods raise DeadlineExceeded.

    Example:
        link.header = Header(version=8, attempt=0, rank=0, format="int8", weight_max_code=127)
        probes = link.commit(records, tickets)
    """

    name: str
    """`sync.transport`."""
    publisher: Publisher
    call: Callable[[WeightMessage, str], Callable[[], Any]]
    """Sends a message to the gate, with a text that names the step for a timeout's error. Returns a function that waits
    for the reply."""
    host: str
    """Address of this rank's machine."""
    timeout_s: float
    header: Header = field(init=False)
    """Header of the version that is sent now."""

    def begin(self) -> Engines:
        """For direct transports: have the engines prepare for the version. Returns those that take part. All ranks
        call it."""
        return self.call(Begin(header=self.header), f"expect weights {self.header.version}")()

    def put(self, bucket: StagedBucket) -> Callable[[], None]:
        """For direct transports: have these engines take a bucket. Returns a function that waits until they have. If
        its source is memory, all ranks call it with theirs."""
        step = f"take bucket {bucket.number} of weights {self.header.version}"
        return self.call(Put(header=self.header, bucket=bucket), step)

    def commit(
        self, records: Sequence[TensorRecord], tickets: Sequence[Any] | None = None, failed: str | None = None
    ) -> Probes:
        """Have the engines load what this rank's tickets stand for (without tickets, they have taken it already),
        verify the version and draw the probe. With a reason why the transfer failed, they must get it again."""
        message = Commit(header=self.header, records=tuple(records), tickets=tickets, failed=failed)
        return self.call(message, f"verify weights {self.header.version}")()


class Transport(Protocol):
    """A rank's side of a transport, made with a Link; `receive` is the engines' side.

    Example:
        transport.begin()
        for bucket in buckets:
            transport.put(bucket)
        probes = transport.commit()
    """

    sends_changes: bool
    """Buckets may hold changes to the version before, in place of whole tensors."""

    def __init__(self, link: Link) -> None: ...

    def begin(self) -> None:
        """Begin a version, and have the engines prepare for it if they must."""

    def put(self, bucket: Bucket) -> None:
        """Send one bucket of this rank's part."""

    def commit(self) -> Probes:
        """Return the probes, once all engines have loaded and verified the version."""

    def abort(self) -> None:
        """Release what the version holds; called when one of the other methods has failed."""

    @staticmethod
    def receive(ticket: Any) -> Sequence[Payload]:
        """Return the payloads that a ticket stands for, in the process of an engine. Not called for direct
        transports.

        Raises:
            SyncError: they did not arrive.
        """


_METHODS = ("begin", "put", "commit", "abort", "receive")


def transport_named(name: str) -> type[Transport]:
    """Import and return the class of a transport.

    Raises:
        ConfigError: there is none, or it lacks a method of the protocol.
    """
    transport = TRANSPORTS.load(name)
    if missing := [method for method in _METHODS if not hasattr(transport, method)]:
        raise ConfigError(
            f"transport {name!r} has no {', '.join(missing)} (qurl_ray.weights.transports.protocol.Transport)"
        )
    return cast(type[Transport], transport)


def connect(link: Link) -> Transport:
    """Return the transport that the link names.

    Raises:
        ConfigError: it does not say whether it sends changes; see also transport_named.
    """
    transport = transport_named(link.name)(link)
    if not hasattr(transport, "sends_changes"):
        raise ConfigError(
            f"transport {link.name!r} has no sends_changes (qurl_ray.weights.transports.protocol.Transport)"
        )
    return transport
