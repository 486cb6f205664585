"""A rank's part of every weight sync: quantize, send the changes, and check that the engines compute with them."""

import time
from collections.abc import Iterable, Set
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np
import ray
from ray import ObjectRef
from ray.actor import ActorHandle

from qurl_ray.config import RunConfig
from qurl_ray.learner.flow import UnifiedFlow
from qurl_ray.learner.probe import EnginePrecision
from qurl_ray.learner.protocol import Learner
from qurl_ray.loop.messages import Gap, Offer
from qurl_ray.loop.rank.wait import wait
from qurl_ray.quant.formats import get_format
from qurl_ray.sync.publish import Bucket, Publisher
from qurl_ray.types import Completion, TensorRecord

if TYPE_CHECKING:
    from qurl_ray.sync.transfer import Transfer


class Sender:
    """Sender of this rank's part of each version. It waits until the engines have verified the whole version.

    Args:
        prompt_ids: token ids of the probe's prompt; None without a probe.
        version: highest version that an engine may hold from an earlier sender.
    """

    def __init__(
        self,
        config: RunConfig,
        learner: Learner,
        publisher: Publisher,
        coordinator: ActorHandle,
        prompt_ids: np.ndarray | None,
        version: int = 0,
    ) -> None:
        self._config, self._learner, self._publisher = config, learner, publisher
        self._coordinator, self._prompt_ids = coordinator, prompt_ids
        self._version = version
        self._attempt = 0
        self._codes: EnginePrecision | None = None
        """Form in which the current version was sent; None before the first."""
        self._transfer = self._make_transfer() if config.sync.transport != "object_store" else None
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
            unquantized = "bfloat16" if may_differ or self._config.rollout.dtype == "bfloat16" else "float32"
        # vLLM's own transfer needs weights of the same format in place; else, and for refits, the object store is used.
        transfer = self._transfer if self.sent == format_name else None
        deltas = self._config.sync.delta and (transfer is None or transfer.sparse)
        base = self._version if deltas and self.sent == format_name else None
        self._version += 1
        buckets = self._publisher.prepare(
            self._learner.named_parameters(), fmt, version=self._version, base_version=base, unquantized=unquantized
        )
        self._codes = EnginePrecision(
            fmt=fmt,
            quantized=self._publisher.quantized,
            unquantized=unquantized,
            kv_cache=self._config.rollout.kv_cache,
        )
        self._attempt = 0
        if self._offer(buckets, transfer):
            self.resend()
        self.sent = format_name
        return time.perf_counter() - started

    def resend(self) -> None:
        """Send the last version again, whole, for engines that did not take it or were restarted."""
        again = True
        while again:
            self._attempt += 1
            again = self._offer(self._publisher.resend(), None)

    def _offer(self, buckets: Iterable[Bucket], transfer: "Transfer | None") -> bool:
        """Offer the version to the engines and score their probes. Returns True if some engines need the version
        again."""
        codes, attempt = self._codes, self._attempt
        assert codes, "nothing was published"
        fmt = codes.fmt
        refs: list[ObjectRef] = []
        records: list[TensorRecord] = []
        if transfer:
            shard = transfer.shard(list(buckets), fmt)
            refs, records = [ray.put(shard.scales)], list(shard.records)
        else:
            for bucket in buckets:
                refs.append(ray.put(bucket.payloads))
                records += bucket.records
        offer = Offer(
            version=self._version,
            attempt=attempt,
            rank=self._publisher.rank,
            format=fmt.name if fmt else "none",
            weight_max_code=fmt.weight_max if fmt else None,
            records=tuple(records),
        )
        limit = self._config.sync.timeout_s
        what = f"the engines to verify weights {self._version}"
        if transfer:
            wait(self._coordinator.expect.remote(offer, refs), limit, f"the engines to expect weights {self._version}")
            transfer.send(shard, fmt, codes.unquantized)
            offer, refs = replace(offer, transferred=True), []
        probes = wait(self._coordinator.offer.remote(offer, refs), limit, what)
        gaps = self._gaps(probes, codes)
        call = self._coordinator.conclude.remote(self._version, attempt, self._publisher.rank, gaps)
        return wait(call, limit, what)

    def _make_transfer(self) -> "Transfer":
        from qurl_ray.sync.transfer import Transfer

        def call(method: str, arguments: dict) -> None:
            wait(self._coordinator.transfer.remote(method, arguments), self._config.sync.timeout_s, f"vLLM to {method}")

        rollout = self._config.rollout
        return Transfer(
            self._config.sync.transport,
            self._publisher,
            self._learner.named_parameters,
            call,
            workers=rollout.workers * rollout.vllm.tensor_parallel,
            timeout_s=self._config.sync.timeout_s,
        )

    def _gaps(self, probes: list[list[Completion]], codes: EnginePrecision) -> list[Gap]:
        """Return one gap per engine. All ranks compute them, because a sharded learner's forward pass is collective."""
        if self._prompt_ids is None or not probes:
            return []
        scored = self._learner.logprobs([c for probe in probes for c in probe], self._prompt_ids, codes)
        gaps = []
        for probe in probes:
            own, scored = scored[: len(probe)], scored[len(probe) :]
            off = np.abs(np.concatenate([c.logprobs for c in probe]) - np.concatenate(own))
            gaps.append(Gap(mean=float(off.mean()), largest=float(off.max())))
        return gaps


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
    )


def fleet_weight_max_code(config: RunConfig, coordinator: ActorHandle, format_name: str) -> int:
    """Return the largest weight code that all engines can take and the settings allow. The first call waits until the
    engines are up."""
    call = coordinator.weight_max_code.remote(format_name)
    largest = wait(call, config.rollout.start_timeout_s, "the rollout workers to start")
    return min(largest, config.quantization.weight_max_code or largest)
