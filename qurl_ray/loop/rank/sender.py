"""A rank's part of every weight sync: quantize, send the changes, and check that the engines compute with them."""

import time
from collections.abc import Callable, Iterable, Mapping, Sequence, Set
from dataclasses import replace
from typing import Any

import numpy as np
import ray
import torch
from ray import ObjectRef
from ray.actor import ActorHandle

from qurl_ray.actors.object_store import ObjectStore
from qurl_ray.config import RunConfig
from qurl_ray.learner.flow import UnifiedFlow
from qurl_ray.learner.protocol import EnginePrecision, Learner
from qurl_ray.loop.deadlines import sync_deadline
from qurl_ray.loop.messages import Gap, Offer
from qurl_ray.loop.rank.wait import wait
from qurl_ray.quant.equalize import Factors, equalized
from qurl_ray.quant.formats import get_format
from qurl_ray.quant.training import announced
from qurl_ray.sync.direct import Direct
from qurl_ray.sync.publish import Bucket, Publisher
from qurl_ray.sync.transport import Link, Probes, Transport, connect
from qurl_ray.tables import TRANSPORTS
from qurl_ray.types import Completion, Event, StagedBucket, TensorRecord


class Sender:
    """Sender of this rank's part of each version. It waits until the engines have verified the whole version.

    Args:
        prompt_ids: token ids of the probe's prompt; None without a probe.
        version: highest version that an engine may hold from an earlier sender.
        across_nodes: engines may be on other nodes, so that small messages are worth the time they take to make.
    """

    def __init__(
        self,
        config: RunConfig,
        learner: Learner,
        publisher: Publisher,
        coordinator: ActorHandle,
        prompt_ids: np.ndarray | None,
        version: int = 0,
        *,
        across_nodes: bool = True,
    ) -> None:
        self._config, self._learner, self._publisher = config, learner, publisher
        self._coordinator, self._prompt_ids = coordinator, prompt_ids
        self._version = version
        self._attempt = 0
        self._precision: EnginePrecision | None = None
        """Form in which the current version was sent; None before the first."""
        link = self._link()
        self._across_nodes = across_nodes
        self._transport = connect(link)
        self._fallback: Transport = ObjectStore(link) if TRANSPORTS[link.name].direct else self._transport
        """Transport of versions that are sent again, and of those whose format the engines do not hold yet."""
        self._unprobed = 0
        """Versions since the last one that was probed."""
        self._probed = True
        """The current version is probed."""
        self.sent: str | None = None
        """Format of the weights that the engines hold; None before the first send."""

    def send(self, format_name: str) -> float:
        """Send the current weights. Returns the seconds it took, verification included."""
        started = time.perf_counter()
        fmt = None
        if format_name != "none":
            fmt = get_format(format_name, fleet_weight_max_code(self._config, self._coordinator, format_name))
        unquantized = self._config.sync.unquantized
        if unquantized == "auto":
            # In a unified flow the learner keeps tensors without codes in float32, and so must the engines.
            may_differ = fmt and self._config.precision_flow == "rollout_only"
            own = self._config.rollout.dtype
            unquantized = "bfloat16" if may_differ and own == "float32" else own
        transport = self._transport if self.sent == format_name else self._fallback
        changes = self._sends_changes() and transport.sends_changes and self.sent == format_name
        base = self._version if changes else None
        self._version += 1
        before = self._precision
        self._precision = EnginePrecision(
            fmt=fmt,
            quantized=self._publisher.quantized,
            unquantized=unquantized,
            kv_cache=self._config.rollout.kv_cache,
            factors=self._learner.factors() if fmt and self._config.quantization.equalizes(fmt.name) else {},
        )
        parameters: Iterable[tuple[str, Any]] = equalized(self._learner.named_parameters(), self._precision.factors)
        if isinstance(transport, Direct):
            parameters = transport.staged(parameters, fmt, unquantized)
        buckets = self._publisher.prepare(
            parameters, fmt, version=self._version, base_version=base, unquantized=unquantized
        )
        self._attempt = 0
        usual = self.sent == format_name and before is not None and _same(before.factors, self._precision.factors)
        self._unprobed += 1
        self._probed = not usual or self._unprobed >= self._config.sync.probe_every
        self._unprobed = 0 if self._probed else self._unprobed
        if self._offer(buckets, transport):
            self.resend()
        self.sent = format_name
        return time.perf_counter() - started

    def _sends_changes(self) -> bool:
        delta = self._config.sync.delta
        return self._across_nodes if delta == "auto" else delta

    def resend(self) -> None:
        """Send the last version again, whole, for engines that did not take it or were restarted."""
        again = True
        while again:
            self._attempt += 1
            again = self._offer(self._publisher.resend(), self._fallback)

    def _offer(self, buckets: Iterable[Bucket], transport: Transport) -> bool:
        """Offer the version to the engines and score their probes. Returns True if some engines need the version
        again."""
        precision = self._precision
        assert precision, "nothing was published"
        try:
            transport.announce(buckets, precision.fmt, precision.unquantized)
            transport.send()
            probes = transport.verify()
        except BaseException:
            transport.abort()
            raise
        gaps = self._gaps(probes, precision)
        call = self._coordinator.conclude.remote(self._version, self._attempt, self._publisher.rank, gaps)
        return self._wait(call, f"verify weights {self._version}")

    def _link(self) -> Link:
        def verify(records: Sequence[TensorRecord], tickets: Sequence[Any] | None) -> Probes:
            call = self._coordinator.offer.remote(self._announcement(records), tickets)
            return self._wait(call, f"verify weights {self._version}")

        def expect() -> Mapping[int, tuple[str, int]]:
            call = self._coordinator.expect.remote(self._announcement(()))
            return self._wait(call, f"expect weights {self._version}")

        def take(bucket: StagedBucket) -> Callable[[], None]:
            call = self._coordinator.take.remote(self._version, self._publisher.rank, bucket)
            return lambda: self._wait(call, f"take bucket {bucket.number} of weights {self._version}")

        def accept(records: Sequence[TensorRecord], failed: str | None) -> Probes:
            call = self._coordinator.offer.remote(replace(self._announcement(records), failed=failed), None)
            return self._wait(call, f"verify weights {self._version}")

        return Link(
            name=self._config.sync.transport,
            publisher=self._publisher,
            verify=verify,
            host=ray.util.get_node_ip_address(),
            timeout_s=self._config.sync.timeout_s,
            expect=expect,
            take=take,
            accept=accept,
        )

    def _announcement(self, records: Sequence[TensorRecord]) -> Offer:
        fmt = self._precision.fmt if self._precision else None
        return Offer(
            version=self._version,
            attempt=self._attempt,
            rank=self._publisher.rank,
            format=fmt.name if fmt else "none",
            weight_max_code=fmt.weight_max if fmt else None,
            records=tuple(records),
            probe=self._probed or self._attempt > 0,
        )

    def _wait(self, call: ObjectRef, what: str) -> Any:
        return wait(call, sync_deadline(self._config), f"the engines to {what}")

    def _gaps(self, probes: list[list[Completion]], precision: EnginePrecision) -> list[Gap]:
        """Return one gap per engine. All ranks compute them, because a sharded learner's forward pass is collective."""
        if self._prompt_ids is None or not any(probes):
            return []
        scored = self._learner.logprobs([c for probe in probes for c in probe], self._prompt_ids, precision)
        gaps = []
        for probe in probes:
            own, scored = scored[: len(probe)], scored[len(probe) :]
            off = np.abs(np.concatenate([c.logprobs for c in probe]) - np.concatenate(own))
            gaps.append(Gap(mean=float(off.mean()), largest=float(off.max())))
        return gaps


def _same(before: Mapping[str, Factors], after: Mapping[str, Factors]) -> bool:
    """Return True if the factors are equal; they are the same objects unless some have moved."""
    return before.keys() == after.keys() and all(after[name] is one for name, one in before.items())


def unified_flow(config: RunConfig, coordinator: ActorHandle, quantized: Set[str]) -> UnifiedFlow | None:
    """Return the flow that has the learner compute as the engines do; None if it trains in full precision."""
    if config.precision_flow == "rollout_only":
        return None
    name = config.rollout.quantization
    return UnifiedFlow(
        fmt=get_format(name, fleet_weight_max_code(config, coordinator, name)),
        quantized=quantized,
        backward=config.backward(),
        emulate=config.quantization.kernel == "emulation",
        equalized=config.quantization.equalizes(name),
    )


def tell_gradients(flow: UnifiedFlow, config: RunConfig, coordinator: ActorHandle) -> None:
    """Announce what computes the gradients, if they come from codes and are not emulated by choice."""
    if flow.backward == "quantized" and not flow.emulate:
        used = announced(flow.fmt, torch.device(config.learner.device))
        event = Event(kind="info", step=0, message=f"gradients of the learner's linears run on: {used}")
        wait(coordinator.tell.remote(event), config.sync.timeout_s, "the coordinator")


def fleet_weight_max_code(config: RunConfig, coordinator: ActorHandle, format_name: str) -> int:
    """Return the largest weight code that all engines can take and the settings allow. The first call waits until the
    engines are up."""
    call = coordinator.weight_max_code.remote(format_name)
    largest = wait(call, config.rollout.start_limit_s, "the rollout workers to start")
    return min(largest, config.quantization.weight_max_code or largest)
