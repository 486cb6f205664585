"""The gate between the learner's ranks and the engines: a version passes once it is verified. The coordinator's side.

    ranks commit their buckets ─► engines load, verify fingerprints, draw the probe ─► ranks score the probe
                ▲                                                                           │
                └──────── once more and in full, for engines in quarantine ◄── unfit ───────┤
                                                                        fit ─► generation resumes

An engine that fails either check does not generate. It gets the same version again, whole; if it fails again, it is
left out, and if none is left the run ends. An engine that died and restarted gets the current version the same way,
while others generate.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, Protocol

from qurl_ray.engines.requests import derive_seed
from qurl_ray.errors import QurlError, SyncError
from qurl_ray.quant.formats import get_format
from qurl_ray.rendezvous import Rendezvous
from qurl_ray.types import Manifest, Request, StagedBucket
from qurl_ray.weights.floor import ProbeFloor
from qurl_ray.weights.messages import Begin, Commit, Engines, Gap, LoadReport, Probes, Put, Scored, WeightMessage
from qurl_ray.weights.stream import assemble_manifest, count_codes


def sync_metrics(manifest: Manifest, gaps: Sequence[Gap], *, whole: int, resent: int, refits: int) -> dict[str, float]:
    """Return the metrics of a sync: bytes sent and their ratio to unquantized weights, share of changed codes, gaps
    and KLs of the probe.

    Args:
        whole: bytes of all tensors in float32.
        resent: bytes of refits in full.
    """
    sent = sum(record.bytes for record in manifest.tensors) + resent
    codes, changed = count_codes(manifest.tensors)
    metrics = {
        "sync/bytes": sent,
        "sync/bytes_ratio": sent / whole,
        "sync/bytes_over_bf16": 2 * sent / whole,
        "sync/delta": float(manifest.base_version is not None),
        "sync/refits": refits,
        "sync/codes_changed": changed.total() / codes.total() if codes else 0.0,
    }
    if gaps:
        metrics["sync/probe_gap"] = max(gap.mean for gap in gaps)
        metrics["sync/probe_gap_max"] = max(gap.largest for gap in gaps)
        if kls := [(gap.kl, gap.kl_keys) for gap in gaps if gap.kl is not None and gap.kl_keys is not None]:
            metrics["sync/probe_kl"], metrics["sync/probe_kl_keys"] = map(max, zip(*kls, strict=True))
    return metrics | {f"sync/codes_changed_{kind}": changed[kind] / count for kind, count in sorted(codes.items())}


class FleetWorker(Protocol):
    """A rollout worker as the gate sees it."""

    index: int
    refusals: int
    """Number of times that it failed to take the version that it is to hold."""

    @property
    def alive(self) -> bool: ...


class EngineFleet(Protocol):
    """The fleet as the gate sees it, such as actors.fleet.Fleet. Calls to workers return results or errors by index."""

    @property
    def members(self) -> Sequence[FleetWorker]: ...
    async def pause(self) -> None: ...
    async def some_alive(self) -> None: ...
    def resume(self) -> None: ...
    def takers(self) -> Sequence[FleetWorker]: ...
    def stale(self) -> Sequence[FleetWorker]: ...
    def distrust(self, member: Any) -> None: ...
    def leave_out(self, member: Any) -> None: ...
    def holds(self, member: Any, version: int) -> None: ...
    @property
    def serving(self) -> bool: ...
    @property
    def hopeless(self) -> bool: ...
    async def begin(
        self, members: Sequence[Any], version: int, format_name: str, timeout_s: float
    ) -> Mapping[int, tuple[str, int] | QurlError]: ...
    async def put(self, indices: Sequence[int], bucket: StagedBucket, timeout_s: float) -> Mapping[int, QurlError]: ...
    async def commit(
        self,
        members: Sequence[Any],
        manifest: Manifest,
        tickets: Sequence[Any] | None,
        probe: Sequence[Request],
        timeout_s: float,
    ) -> Mapping[int, LoadReport | QurlError]: ...


class WeightGate:
    """Weight syncs of one session. `fleet` is the one that generates; it pauses while a version is loaded.

    Args:
        probe: requests that every engine answers after loading; [] skips that check.
        tolerance: largest mean gap of the probe, in nats, that is not certain to be a fault.
        floor: usual gaps, which it keeps up to date.
        warn: called with the text of a warning about a quarantine.
        verified: called with each version that engines may generate with.
    """

    def __init__(
        self,
        fleet: EngineFleet,
        *,
        ranks: int,
        timeout_s: float,
        probe: Sequence[Request],
        tolerance: float,
        floor: ProbeFloor,
        warn: Callable[[str], None],
        verified: Callable[[int], None] = lambda _: None,
    ) -> None:
        self._fleet, self._timeout_s, self._tolerance, self._warn = fleet, timeout_s, tolerance, warn
        self._verified = verified
        self._probe, self.floor = list(probe), floor
        self._rendezvous = Rendezvous(ranks)
        self._manifest: Manifest | None = None
        self._whole = self._resent = self._refits = 0
        self._loaded: list[FleetWorker] = []
        """Workers whose probes the learner is scoring."""
        self._hardware: dict[int, str] = {}
        """Hardware that each engine computes on, by worker index."""
        self._taking: dict[int, tuple[str, int]] = {}
        """Engines that take a version from a direct transport: identity and number of processes, by worker index."""
        self._missed: dict[int, str] = {}
        """Reasons why other engines do not take it, by worker index."""
        self._unfit: dict[int, str] = {}
        """Reasons why workers did not take the version, by worker index."""
        self.kernels: list[str] = []
        """Kernels of the engines that loaded the last version."""
        self.metrics: dict[str, float] = {}

    async def receive(self, message: WeightMessage) -> Any:
        """Take a rank's message. The last rank's completes it; each gets the reply that the message describes.

        Raises:
            SyncError: no engine could take the version; none of them, or one of a group, could take a bucket; or ranks
                differ in what they sent.
        """
        header, arrive = message.header, self._rendezvous.arrive
        match message:
            case Begin():
                return await arrive(("begin", header.version), header.rank, message, self._begin)
            case Put(bucket=bucket) if "memory" not in bucket.source:
                return await self._put([message])
            case Put(bucket=bucket):
                return await arrive(("put", header.version, bucket.number), header.rank, message, self._put)
            case Commit():
                return await arrive(("commit", header.version, header.attempt), header.rank, message, self._commit)
            case Scored():
                return await arrive(("scored", header.version, header.attempt), header.rank, message, self._judge)

    async def _begin(self, messages: list[Begin]) -> Engines:
        header = messages[0].header
        await self._fleet.pause()
        await self._fleet.some_alive()
        replies = await self._fleet.begin(self._fleet.takers(), header.version, header.format, self._timeout_s)
        self._missed = {index: str(error) for index, error in replies.items() if isinstance(error, QurlError)}
        self._taking = {index: engine for index, engine in replies.items() if not isinstance(engine, QurlError)}
        return self._taking

    async def _put(self, messages: list[Put]) -> None:
        buckets = [message.bucket for message in messages]
        first = buckets[0]
        if any(bucket.items != first.items for bucket in buckets):
            raise SyncError(f"the learner's ranks staged different tensors in bucket {first.number}")
        of_ranks = {device: where for bucket in buckets for device, where in bucket.source.get("memory", {}).items()}
        bucket = replace(first, source={"memory": of_ranks}) if of_ranks else first
        failed = await self._fleet.put(list(self._taking), bucket, self._timeout_s)
        self._missed |= {index: str(error) for index, error in failed.items()}
        self._taking = {index: engine for index, engine in self._taking.items() if index not in failed}
        if failed and not (of_ranks and self._taking):
            raise next(iter(failed.values()))

    async def _commit(self, messages: list[Commit]) -> Probes:
        header, direct = messages[0].header, messages[0].tickets is None
        fmt = None if header.format == "none" else get_format(header.format, header.weight_max_code)
        records = [message.records for message in messages]
        manifest = assemble_manifest(header.version, fmt, records, subset_of=header.subset_of)
        if manifest.complete:
            self._whole = sum(record.float32_bytes for record in manifest.tensors)
        tickets = None if direct else [ticket for message in messages for ticket in message.tickets or ()]
        members: Sequence[FleetWorker]
        if header.attempt == 0:
            self._manifest, self._resent, self._refits = manifest, 0, 0
            await self._fleet.pause()
            await self._fleet.some_alive()
            members = self._fleet.takers()
            for member in members:
                member.refusals = 0
        else:
            members = self._fleet.stale()
            self._refits += len(members)
            self._resent += sum(record.bytes for record in manifest.tensors)
        stale = {member.index for member in self._fleet.stale()}
        new = any(member.index in stale or not self.floor.known(self._engine(member)) for member in members)
        probe = []
        if header.probe or new:
            # Other tokens each time: those of one seed would always be off in the same way.
            seeds = [derive_seed(request.seed, header.version, header.attempt) for request in self._probe]
            probe = [replace(request, seed=seed) for request, seed in zip(self._probe, seeds, strict=True)]
        self._unfit = {}
        if direct:  # the transport has sent the version already, and not every engine may have taken it
            failure = next((message.failed for message in messages if message.failed), None)
            absent = "it did not take part in the direct transfer"
            for member in members:
                if failure or member.index not in self._taking:
                    self._unfit[member.index] = failure or self._missed.get(member.index, absent)
        for member in members:
            self._fleet.distrust(member)
        loading = [member for member in members if member.index not in self._unfit]
        replies = await self._fleet.commit(loading, manifest, tickets, probe, self._timeout_s)
        self._unfit |= {index: str(error) for index, error in replies.items() if isinstance(error, QurlError)}
        taken = {index: report for index, report in replies.items() if not isinstance(report, QurlError)}
        self._hardware |= {index: report.hardware for index, report in taken.items()}
        self._loaded = [member for member in members if member.index not in self._unfit]
        self.kernels = sorted({kernel for member in self._loaded for kernel in taken[member.index].kernels})
        return [taken[member.index].probe for member in self._loaded]

    async def _judge(self, messages: list[Scored]) -> bool:
        """Decide for all ranks by rank 0's gaps."""
        version, gaps = messages[0].header.version, messages[0].gaps
        for member, gap in zip(self._loaded, gaps, strict=bool(gaps)):
            if not gap.mean <= self._tolerance:  # also nan
                self._unfit[member.index] = f"its log-probs of the probe are off by {gap.mean:.3g} nats on average"
            elif changed := self._changed(member, gap.mean):
                self._unfit[member.index] = changed
        for member in self._loaded:
            if member.index not in self._unfit:
                self._fleet.holds(member, version)
        self._verified(version)
        # A worker is in quarantine after its first failure, and left out after its second.
        for member in [self._fleet.members[index] for index in self._unfit]:
            if not member.alive:  # the fleet reports dead workers
                continue
            member.refusals += 1
            reason = self._unfit[member.index]
            if member.refusals == 1:
                self._warn(
                    f"rollout worker {member.index} is in quarantine and gets weights {version} in full: {reason}"
                )
            else:
                self._fleet.leave_out(member)
                self._warn(
                    f"rollout worker {member.index} is left out, it failed to take weights {version} twice: {reason}"
                )
        again = any(member.refusals for member in self._fleet.stale())
        if not again and not self._fleet.serving:
            if self._fleet.hopeless:
                raise SyncError(f"no rollout worker could take weights {version}: {'; '.join(self._unfit.values())}")
            await self._fleet.some_alive()
            again = True
        if again:
            return True
        assert self._manifest
        # An infinite or nan gap made its engine unfit, and is in the warning.
        fit = [gap for gap in gaps if math.isfinite(gap.mean)]
        self.metrics = sync_metrics(self._manifest, fit, whole=self._whole, resent=self._resent, refits=self._refits)
        self._fleet.resume()
        return False

    def _engine(self, member: FleetWorker) -> str:
        """Return the name of an engine in the floor: the worker, and what its usual gap depends on."""
        assert self._manifest
        hardware = self._hardware.get(member.index, "unknown hardware")
        return f"worker {member.index}, {self._manifest.precision} on {hardware}"

    def _changed(self, member: FleetWorker, gap: float) -> str | None:
        """Return the reason if an engine's gap has changed, and its weights are to be sent again. If that was done
        already, the weights are right: the change is only reported, because it may be no fault of the engine."""
        engine = self._engine(member)
        usual = self.floor.usual(engine)
        off = (
            f"its log-probs of the probe are off by {gap:.3g} nats on average, {gap / usual:.2g} times as far as usual"
        )
        if member.refusals:
            if self.floor.persists(engine, gap):
                self._warn(
                    f"rollout worker {member.index} ({engine}) has verified weights, but {off}, and sending them again "
                    "did not help: a kernel, a driver or the hardware may have changed. It goes on; from now on this "
                    "is taken as usual"
                )
            return None
        return off if self.floor.add(engine, gap) else None
