"""Refit of engines: they load a version and are checked before they generate. The coordinator's side of a weight sync.

    ranks offer their buckets ─► engines load, verify fingerprints, draw the probe ─► ranks score the probe
                ▲                                                                          │
                └──────── once more and in full, for engines in quarantine ◄── unfit ──────┤
                                                                       fit ─► generation resumes

An engine that fails either check does not generate. It gets the same version again, whole; if it fails again, it is
left out, and if none is left the run ends. An engine that died and restarted gets the current version the same way,
while others generate.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from qurl_ray.actors.fleet import Fleet
from qurl_ray.actors.health import Health, Member
from qurl_ray.errors import QurlError, SyncError
from qurl_ray.loop.coordinator.rendezvous import Rendezvous
from qurl_ray.loop.messages import Gap, Offer
from qurl_ray.quant.formats import get_format
from qurl_ray.rollout.requests import derive_seed
from qurl_ray.sync.floor import ProbeFloor
from qurl_ray.sync.publish import assemble_manifest, count_codes
from qurl_ray.types import Completion, Manifest, Request, StagedBucket


def sync_metrics(manifest: Manifest, gaps: Sequence[Gap], *, resent: int, refits: int) -> dict[str, float]:
    """Metrics of a sync: bytes sent and their ratio to unquantized weights, share of changed codes, gaps of the probe.
    `resent` are bytes of refits in full."""
    whole = sum(record.float32_bytes for record in manifest.tensors)
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
    return metrics | {f"sync/codes_changed_{kind}": changed[kind] / count for kind, count in sorted(codes.items())}


class Refit:
    """Weight syncs of one session. `fleet` is the one that generates; it pauses while a version is loaded.

    Args:
        probe: requests that every engine answers after loading; [] skips that check.
        tolerance: largest mean gap of the probe, in nats, that is not certain to be a fault.
        floor: usual gaps, which it keeps up to date.
        warn: called with the text of a warning about a quarantine.
    """

    def __init__(
        self,
        fleet: Fleet,
        *,
        ranks: int,
        timeout_s: float,
        probe: Sequence[Request],
        tolerance: float,
        floor: ProbeFloor,
        warn: Callable[[str], None],
    ) -> None:
        self._fleet, self._timeout_s, self._tolerance, self._warn = fleet, timeout_s, tolerance, warn
        self._probe, self.floor = list(probe), floor
        self._rendezvous = Rendezvous(ranks)
        self._manifest: Manifest | None = None
        self._resent = self._refits = 0
        self._loaded: list[Member] = []
        """Workers whose probes the learner is scoring."""
        self._hardware: dict[int, str] = {}
        """Hardware that each engine computes on, by worker index."""
        self._taking: dict[int, tuple[str, int]] = {}
        """Engines that take a version from a direct transport: identity and number of processes, by worker index."""
        self._missed: dict[int, str] = {}
        """Reasons why others do not, by worker index."""
        self._unfit: dict[int, str] = {}
        """Reasons why workers did not take the version, by worker index."""
        self.kernels: list[str] = []
        self.metrics: dict[str, float] = {}

    async def expect(self, offer: Offer) -> dict[int, tuple[str, int]]:
        """Have the engines prepare for a version that a direct transport sends. All ranks call it, then `take` for each
        bucket, then `offer` without tickets. Returns identity and number of processes of the engines that take part, by
        worker index."""
        key = ("expect", offer.version)
        return await self._rendezvous.arrive(key, offer.rank, offer, self._expect)

    async def take(self, version: int, rank: int, bucket: StagedBucket) -> None:
        """Have these engines take a bucket: from its sender's group, or from the memory of all ranks.

        Raises:
            SyncError: none of them could; one of a group could not; or ranks differ in what they staged.
        """
        if "memory" in bucket.source:
            await self._rendezvous.arrive(("take", version, bucket.number), rank, bucket, self._take)
        else:
            await self._take([bucket])

    async def offer(self, offer: Offer, tickets: Sequence[Any] | None) -> list[list[Completion]]:
        """Add one rank's part. Returns, once the engines have loaded all parts, the probes of those that succeeded.

        Args:
            tickets: what the transport's `receive` returns the rank's buckets for; None if a direct transport has sent
                them.
        """
        key = ("offer", offer.version, offer.attempt)
        return await self._rendezvous.arrive(key, offer.rank, (offer, tickets), self._load)

    async def conclude(self, version: int, attempt: int, rank: int, gaps: list[Gap]) -> bool:
        """Decide for all ranks by rank 0's gaps (one per engine that drew a probe). Returns True if the ranks must
        offer the version again, in full.

        Raises:
            SyncError: no engine could take it.
        """
        key = ("conclude", version, attempt)
        return await self._rendezvous.arrive(key, rank, gaps, lambda found: self._judge(version, attempt, found[0]))

    async def _expect(self, offers: list[Offer]) -> dict[int, tuple[str, int]]:
        await self._fleet.pause()
        await self._fleet.some_alive()
        members = self._fleet.those(Health.HEALTHY, Health.STALE)
        found = await self._fleet.expect(members, offers[0].version, offers[0].format, self._timeout_s)
        self._missed = {index: str(error) for index, error in found.items() if isinstance(error, QurlError)}
        self._taking = {index: engine for index, engine in found.items() if not isinstance(engine, QurlError)}
        return self._taking

    async def _take(self, buckets: list[StagedBucket]) -> None:
        first = buckets[0]
        if any(bucket.items != first.items for bucket in buckets):
            raise SyncError(f"the learner's ranks staged different tensors in bucket {first.number}")
        of_ranks = {device: where for bucket in buckets for device, where in bucket.source.get("memory", {}).items()}
        bucket = replace(first, source={"memory": of_ranks}) if of_ranks else first
        failed = await self._fleet.take(list(self._taking), bucket, self._timeout_s)
        self._missed |= {index: str(error) for index, error in failed.items()}
        self._taking = {index: engine for index, engine in self._taking.items() if index not in failed}
        if failed and not (of_ranks and self._taking):
            raise next(iter(failed.values()))

    async def _load(self, parts: list[tuple[Offer, Sequence[Any] | None]]) -> list[list[Completion]]:
        offer, manifest = parts[0][0], _manifest(parts)
        tickets = None if parts[0][1] is None else [ticket for _, own in parts for ticket in own or ()]
        if offer.attempt == 0:
            self._manifest, self._resent, self._refits = manifest, 0, 0
            await self._fleet.pause()
            await self._fleet.some_alive()
            members = self._fleet.those(Health.HEALTHY, Health.STALE)
            for member in members:
                member.refusals = 0
        else:
            members = self._fleet.those(Health.STALE)
            self._refits += len(members)
            self._resent += sum(record.bytes for record in manifest.tensors)
        new = any(member.health is Health.STALE or not self.floor.known(self._engine(member)) for member in members)
        probe = []
        if offer.probe or new:
            # Other tokens each time: those of one seed would always be off in the same way.
            seeds = [derive_seed(request.seed, offer.version, offer.attempt) for request in self._probe]
            probe = [replace(request, seed=seed) for request, seed in zip(self._probe, seeds, strict=True)]
        self._unfit = {} if tickets is not None else self._without(members, [part.failed for part, _ in parts])
        for member in members:
            member.turn(Health.STALE)
        loading = [member for member in members if member.index not in self._unfit]
        found = await self._fleet.load(loading, manifest, tickets, probe, self._timeout_s)
        self._unfit |= {index: str(error) for index, error in found.items() if isinstance(error, QurlError)}
        taken = {index: one for index, one in found.items() if not isinstance(one, QurlError)}
        self._hardware |= {index: one.hardware for index, one in taken.items()}
        self._loaded = [member for member in members if member.index not in self._unfit]
        self.kernels = sorted({kernel for member in self._loaded for kernel in taken[member.index].kernels})
        return [taken[member.index].probe for member in self._loaded]

    def _without(self, members: Sequence[Member], failures: Sequence[str | None]) -> dict[int, str]:
        """Return the reasons why some of these did not take a version that a direct transport has sent."""
        if failed := next(filter(None, failures), None):
            return {member.index: failed for member in members}
        absent = "it did not take part in the direct transfer"
        return {m.index: self._missed.get(m.index, absent) for m in members if m.index not in self._taking}

    async def _judge(self, version: int, attempt: int, gaps: list[Gap]) -> bool:
        for member, gap in zip(self._loaded, gaps, strict=bool(gaps)):
            if not gap.mean <= self._tolerance:  # also nan
                self._unfit[member.index] = f"its log-probs of the probe are off by {gap.mean:.3g} nats on average"
            elif changed := self._changed(member, gap.mean):
                self._unfit[member.index] = changed
        for member in self._loaded:
            if member.index not in self._unfit:
                self._fleet.holds(member, version)
        for member in [self._fleet.members[index] for index in self._unfit]:
            if member.alive:  # the fleet reports dead workers
                self._refused(member, version)
        again = any(member.refusals for member in self._fleet.those(Health.STALE))
        if not again and not self._fleet.those(Health.HEALTHY, Health.SUSPECT):
            if not self._fleet.those(*(set(Health) - {Health.OUT})):
                raise SyncError(f"no rollout worker could take weights {version}: {'; '.join(self._unfit.values())}")
            await self._fleet.some_alive()
            again = True
        if again:
            return True
        assert self._manifest
        # An infinite or nan gap made its engine unfit, and is in the warning.
        fit = [gap for gap in gaps if math.isfinite(gap.mean)]
        self.metrics = sync_metrics(self._manifest, fit, resent=self._resent, refits=self._refits)
        self._fleet.resume()
        return False

    def _engine(self, member: Member) -> str:
        """An engine in the floor, with what its usual gap depends on."""
        assert self._manifest
        hardware = self._hardware.get(member.index, "unknown hardware")
        return f"worker {member.index}, {self._manifest.precision} on {hardware}"

    def _changed(self, member: Member, gap: float) -> str | None:
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

    def _refused(self, member: Member, version: int) -> None:
        """Put a worker in quarantine after its first failure; leave it out after its second."""
        member.refusals += 1
        reason = self._unfit[member.index]
        if member.refusals == 1:
            self._warn(f"rollout worker {member.index} is in quarantine and gets weights {version} in full: {reason}")
        else:
            member.turn(Health.OUT)
            self._warn(
                f"rollout worker {member.index} is left out, it failed to take weights {version} twice: {reason}"
            )


def _manifest(parts: Sequence[tuple[Offer, Any]]) -> Manifest:
    """Manifest of a version, from the offers of its ranks."""
    offer = parts[0][0]
    fmt = None if offer.format == "none" else get_format(offer.format, offer.weight_max_code)
    return assemble_manifest(offer.version, fmt, [part.records for part, _ in parts])
