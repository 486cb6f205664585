"""A rank's part of every sync: quantize, send what changed, and see for itself that the engines compute with it."""

import time
from collections.abc import Iterable

import numpy as np
import ray
from ray import ObjectRef
from ray.actor import ActorHandle

from qurl_ray.config import RunConfig
from qurl_ray.learner.probe import Codes
from qurl_ray.learner.protocol import Learner
from qurl_ray.loop.refit import Gap, Offer
from qurl_ray.loop.wait import wait
from qurl_ray.quant.formats import Format, get_format
from qurl_ray.sync.publish import Bucket, Publisher
from qurl_ray.types import Completion, TensorRecord


class Sender:
    """Sends this rank's part of each version and waits until the engines have verified the whole.

    Args:
        prompt_ids: of the probe; None for none.
    """

    def __init__(
        self,
        config: RunConfig,
        learner: Learner,
        publisher: Publisher,
        coordinator: ActorHandle,
        prompt_ids: np.ndarray | None,
    ) -> None:
        self._config, self._learner, self._publisher = config, learner, publisher
        self._coordinator, self._prompt_ids = coordinator, prompt_ids
        self._version = 0
        self.sent: str | None = None
        """Format of the weights that the engines hold."""

    def send(self, format_name: str) -> float:
        """Send the weights as they are now. Returns the seconds it took, verification included."""
        started = time.perf_counter()
        fmt = None
        if format_name != "none":
            fmt = get_format(format_name, weight_max_code(self._config, self._coordinator, format_name))
        unquantized = self._config.sync.unquantized
        if unquantized == "auto":
            unquantized = "bfloat16" if fmt or self._config.rollout.dtype == "bfloat16" else "float32"
        base = self._version if self._config.sync.delta and self.sent == format_name else None
        self._version += 1
        buckets = self._publisher.prepare(
            self._learner.named_parameters(), fmt, version=self._version, base_version=base, unquantized=unquantized
        )
        codes = Codes(
            fmt=fmt,
            quantized=self._publisher.quantized,
            unquantized=unquantized,
            kv_cache=self._config.rollout.kv_cache,
        )
        for attempt in range(2):
            if not self._offer(buckets, fmt, codes, attempt):
                break
            buckets = self._publisher.resend()
        self.sent = format_name
        return time.perf_counter() - started

    def _offer(self, buckets: Iterable[Bucket], fmt: Format | None, codes: Codes, attempt: int) -> bool:
        """Whether some engines need the version once more."""
        refs: list[ObjectRef] = []
        records: list[TensorRecord] = []
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
        probes = wait(self._coordinator.offer.remote(offer, refs), limit, what)
        gaps = self._gaps(probes, codes)
        call = self._coordinator.conclude.remote(self._version, attempt, self._publisher.rank, gaps)
        return wait(call, limit, what)

    def _gaps(self, probes: list[list[Completion]], codes: Codes) -> list[Gap]:
        """One per engine. All ranks compute them, as a sharded learner's forward takes them all."""
        if self._prompt_ids is None or not probes:
            return []
        scored = self._learner.logprobs([c for probe in probes for c in probe], self._prompt_ids, codes)
        gaps = []
        for probe in probes:
            own, scored = scored[: len(probe)], scored[len(probe) :]
            off = np.abs(np.concatenate([c.logprobs for c in probe]) - np.concatenate(own))
            gaps.append(Gap(mean=float(off.mean()), largest=float(off.max())))
        return gaps


def weight_max_code(config: RunConfig, coordinator: ActorHandle, format_name: str) -> int:
    """Largest weight code that all engines can take; the first question waits until they are up."""
    call = coordinator.weight_max_code.remote(format_name)
    return wait(call, config.rollout.start_timeout_s, "the rollout workers to start")
