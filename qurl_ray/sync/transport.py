"""The protocol of a transport: how the weights of a version travel from the learner's ranks to the engines.

    rank:    announce ─► send ─► verify        abort, if one of them fails
    worker:                ╰─► receive, for each ticket, where the engine loads the version

Every rank has one transport, and all call it at the same time. `verify` gives the engines the tickets of what was sent,
and returns when they have compared what they hold with the manifest's fingerprints: whatever a transport does, wrong
weights never generate.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, cast

from qurl_ray.errors import ConfigError
from qurl_ray.quant.formats import Format
from qurl_ray.sync.delta import Payload
from qurl_ray.sync.publish import Bucket, Publisher, Unquantized
from qurl_ray.tables import TRANSPORTS
from qurl_ray.types import Completion, StagedBucket, TensorRecord

Probes = list[list[Completion]]
"""Answers to the probe of the engines that took the version."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Link:
    """A rank's connection to the engines, with which its transport is made. Its calls raise DeadlineExceeded."""

    name: str
    """`sync.transport`."""
    publisher: Publisher
    verify: Callable[[Sequence[TensorRecord], Sequence[Any] | None], Probes]
    """Has the engines load what this rank's tickets stand for, verify the version and draw the probe."""
    host: str
    """Address of this rank's machine."""
    timeout_s: float
    expect: Callable[[], Mapping[int, tuple[str, int]]]
    """For direct transports: has the engines prepare for a version. Returns identity and number of processes of those
    that take part, by index. All ranks call it."""
    take: Callable[[StagedBucket], Callable[[], None]]
    """For direct transports: has these engines take a bucket. Returns a function that waits until they have. If its
    source is memory, all ranks call it with theirs."""
    accept: Callable[[Sequence[TensorRecord], str | None], Probes]
    """For direct transports: has the engines verify what they took and draw the probe; or send the version again, if
    the transfer has failed for the given reason."""


class Transport(Protocol):
    """A rank's side of a transport, made with a Link; `receive` is the engines' side.

    Example:
        transport.announce(buckets, fmt, unquantized)
        transport.send()
        probes = transport.verify()
    """

    sends_changes: bool
    """Buckets may hold changes to the version before, in place of whole tensors."""

    def __init__(self, link: Link) -> None: ...

    def announce(self, buckets: Iterable[Bucket], fmt: Format | None, unquantized: Unquantized) -> None:
        """Take this rank's part of a version, bucket by bucket, and have the engines prepare for it if they must."""

    def send(self) -> None:
        """Send it."""

    def verify(self) -> Probes:
        """Return the probes, once all engines have loaded and verified the version."""

    def abort(self) -> None:
        """Release what an announced version holds; called when one of the other methods has failed."""

    @staticmethod
    def receive(ticket: Any) -> Sequence[Payload]:
        """Return the payloads that a ticket stands for, in the process of an engine. Not called for direct
        transports.

        Raises:
            SyncError: they did not arrive.
        """


_METHODS = ("announce", "send", "verify", "abort", "receive")


def transport_named(name: str) -> type[Transport]:
    """Import and return the class of a transport.

    Raises:
        ConfigError: there is none, or it lacks a method of the protocol.
    """
    found = TRANSPORTS.load(name)
    if missing := [method for method in _METHODS if not hasattr(found, method)]:
        raise ConfigError(f"transport {name!r} has no {', '.join(missing)} (qurl_ray.sync.transport.Transport)")
    return cast(type[Transport], found)


def connect(link: Link) -> Transport:
    """Return the transport that the link names.

    Raises:
        ConfigError: it does not say whether it sends changes; see also transport_named.
    """
    transport = transport_named(link.name)(link)
    if not hasattr(transport, "sends_changes"):
        raise ConfigError(f"transport {link.name!r} has no sends_changes (qurl_ray.sync.transport.Transport)")
    return transport
