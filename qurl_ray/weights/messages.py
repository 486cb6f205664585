"""Messages of the learner's ranks to the gate, in the order in which they send a version, and of workers to it."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from qurl_ray.types import Completion, StagedBucket, TensorRecord

Engines = Mapping[int, tuple[str, int]]
"""Identity and number of processes of engines, by worker index."""
Probes = list[list[Completion]]
"""Answers to the probe, one list per engine that took the version."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Header:
    """The version that a message is about, and the rank that sends it.

    Example:
        Header(version=7, attempt=0, rank=0, format="int8", weight_max_code=127)
    """

    version: int
    attempt: int
    """Number of earlier attempts: above 0, the version is sent again to engines that are STALE (in quarantine, or
    restarted)."""
    rank: int
    format: str
    weight_max_code: int | None
    """Largest code of a weight; None in full precision."""
    probe: bool = True
    """Engines draw the probe from this version. Engines that were STALE always do."""
    subset_of: int | None = None
    """Version whose other tensors engines keep; None if this one is sent with all of its tensors."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Begin:
    """Have the engines prepare for a version that a direct transport sends. The reply is those that take part
    (Engines)."""

    header: Header


@dataclass(frozen=True, slots=True, kw_only=True)
class Put:
    """Have these engines take a bucket from its sender's group, or from the memory of all ranks."""

    header: Header
    bucket: StagedBucket


@dataclass(frozen=True, slots=True, kw_only=True)
class Commit:
    """Have the engines load and verify the version, once all ranks have sent this. The reply is the Probes of those
    that succeeded."""

    header: Header
    records: tuple[TensorRecord, ...]
    """Records of the rank's tensors."""
    tickets: Sequence[Any] | None = None
    """Tickets, for which the transport's `receive` returns the rank's buckets; None if a direct transport has sent
    them."""
    failed: str | None = None
    """Reason why the rank's direct transfer failed, so that all engines must get the version again."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Gap:
    """Absolute difference between an engine's log-probs of its probe and the learner's, in nats."""

    mean: float
    largest: float
    kl: float | None = None
    """k3 estimate of KL(b‖p) on the probe's tokens, nats per token, with p in full precision; None without FP8 keys."""
    kl_keys: float | None = None
    """The same of the engine's distribution against that with the same codes, but keys and values in full precision."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Scored:
    """The gaps of the probes, one per engine that drew one. The reply is True if the ranks must send the version again,
    whole."""

    header: Header
    gaps: tuple[Gap, ...]


WeightMessage = Begin | Put | Commit | Scored


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadReport:
    """Report of a worker on a version that it has loaded and verified."""

    kernels: list[str]
    """Kernels in use now."""
    hardware: str
    """Name of the GPU or of the processor that the engine computes on."""
    probe: list[Completion]
