"""A rank's part of every version of the weights: quantize, send what changed, and check that the engines compute with
it."""

import time
from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any

import numpy as np
import torch

from qurl_ray.config import RunConfig
from qurl_ray.learner.protocol import EnginePrecision, Learner
from qurl_ray.quant.equalize import equalized
from qurl_ray.quant.formats import get_format
from qurl_ray.rl.ratios import kl_estimate
from qurl_ray.types import Completion
from qurl_ray.weights.messages import Gap, Header, Probes, Scored
from qurl_ray.weights.stream import Bucket, Unquantized
from qurl_ray.weights.transports.direct import Direct
from qurl_ray.weights.transports.object_store import ObjectStore
from qurl_ray.weights.transports.protocol import Link, Transport, connect

_FULL = EnginePrecision(fmt=None, quantized={}, unquantized="float32")
"""Precision of p, the learner's own policy."""


class Sender:
    """Sender of this rank's part of each version. It waits until the engines have verified the whole version.

    Args:
        largest_code: returns the largest weight code in a format that all engines can take.
        prompt_ids: token ids of the probe's prompt; None without a probe.
        version: highest version that an engine may hold from an earlier sender.
        across_nodes: engines may be on other nodes, so that small messages are worth the time they take to make.
    """

    def __init__(
        self,
        config: RunConfig,
        learner: Learner,
        link: Link,
        largest_code: Callable[[str], int],
        prompt_ids: np.ndarray | None,
        version: int = 0,
        *,
        across_nodes: bool = True,
    ) -> None:
        self._config, self._learner, self._link, self._largest_code = config, learner, link, largest_code
        self._prompt_ids, self._version = prompt_ids, version
        self._attempt = 0
        self._precision: EnginePrecision | None = None
        """Form in which the current version was sent; None before the first."""
        delta = config.sync.delta
        self._sends_changes = across_nodes if delta == "auto" else delta
        self._transport = connect(link)
        self._fallback: Transport = ObjectStore(link) if isinstance(self._transport, Direct) else self._transport
        """Transport of versions that are sent again, and of those whose format the engines do not hold yet."""
        self._subset_of: int | None = None
        """Version whose other tensors the engines keep; None if the current version is sent with all of its tensors."""
        self._unprobed = 0
        """Versions since the last one that was probed."""
        self._probed = True
        """The current version is probed."""
        self.sent: str | None = None
        """Format of the weights that the engines hold; None before the first send."""

    def send(self, format_name: str) -> float:
        """Send the current weights. Returns the seconds it took, verification included."""
        started = time.perf_counter()
        same_format = self.sent == format_name
        transport = self._transport if same_format else self._fallback
        before, precision = self._precision, self._precision_in(format_name)
        base = self._version if same_format and transport.sends_changes and self._sends_changes else None
        self._precision, self._version, self._attempt = precision, self._version + 1, 0
        usual = (
            same_format
            and before is not None
            and before.factors.keys() == precision.factors.keys()
            # The objects are the same unless some factors have moved.
            and all(precision.factors[name] is factors for name, factors in before.factors.items())
        )
        partial = usual and self._learner.adapters is not None
        self._subset_of = self._version - 1 if partial else None
        self._probed = not usual or self._unprobed + 1 >= self._config.sync.probe_every
        self._unprobed = 0 if self._probed else self._unprobed + 1
        learner = self._learner
        named: Iterable[tuple[str, Any]] = learner.changing_parameters() if partial else learner.named_parameters()
        parameters: Iterable[tuple[str, Any]] = equalized(named, precision.factors)
        if isinstance(transport, Direct):
            parameters = transport.staged(parameters, precision.fmt, precision.unquantized)
        buckets = self._link.publisher.prepare(
            parameters,
            precision.fmt,
            version=self._version,
            base_version=base,
            unquantized=precision.unquantized,
            complete=not partial,
        )
        if self._put(buckets, transport):
            self.resend()
        self.sent = format_name
        return time.perf_counter() - started

    def resend(self) -> None:
        """Send the last version again, whole, for engines that did not take it or were restarted."""
        again = True
        while again:
            self._attempt += 1
            self._subset_of = None
            again = self._put(self._link.publisher.resend(), self._fallback)

    def _put(self, buckets: Iterable[Bucket], transport: Transport) -> bool:
        """Send the version to the engines and score their probes. Returns True if some engines need it again."""
        precision = self._precision
        assert precision, "nothing was published"
        fmt = precision.fmt
        self._link.header = Header(
            version=self._version,
            attempt=self._attempt,
            rank=self._link.publisher.rank,
            format=fmt.name if fmt else "none",
            weight_max_code=fmt.weight_max if fmt else None,
            probe=self._probed or self._attempt > 0,
            subset_of=self._subset_of,
        )
        try:
            transport.begin()
            for bucket in buckets:  # one at a time: they are made on demand
                transport.put(bucket)
            probes = transport.commit()
        except BaseException:
            transport.abort()
            raise
        scored = Scored(header=self._link.header, gaps=tuple(self._gaps(probes, precision)))
        return self._link.call(scored, f"verify weights {self._version}")()

    def _precision_in(self, format_name: str) -> EnginePrecision:
        """Return the form in which a format's version is sent."""
        config = self._config
        fmt = get_format(format_name, self._largest_code(format_name)) if format_name != "none" else None
        unquantized: Unquantized = config.rollout.dtype
        if config.sync.unquantized != "auto":
            unquantized = config.sync.unquantized
        elif fmt and not config.trains_through_codes and unquantized == "float32":
            # Otherwise the learner keeps tensors without codes in float32, and so must the engines.
            unquantized = "bfloat16"
        return EnginePrecision(
            fmt=fmt,
            quantized=self._link.publisher.quantized,
            unquantized=unquantized,
            exact=self._link.publisher.exact,
            kv_cache=config.rollout.kv_cache,
            kv_scales=config.rollout.engine_entry.kv_scales,
            factors=self._learner.factors() if fmt and config.quantization.equalizes(fmt.name) else {},
        )

    def _gaps(self, probes: Probes, precision: EnginePrecision) -> list[Gap]:
        """Return one gap per engine. All ranks compute them, because a sharded learner's forward pass is collective."""
        if self._prompt_ids is None or not any(probes):
            return []
        drawn: list[Completion] = [completion for probe in probes for completion in probe]
        ends = np.cumsum([sum(len(c.token_ids) for c in probe) for probe in probes])[:-1]
        asked = [precision]
        if precision.kv_cache == "fp8":
            asked += [replace(precision, kv_cache="full"), _FULL]
        scored = [np.split(np.concatenate(self._learner.logprobs(drawn, self._prompt_ids, p)), ends) for p in asked]
        gaps = []
        for probe, own, *others in zip(probes, *scored, strict=True):
            behavior = np.concatenate([c.logprobs for c in probe])
            off = np.abs(behavior - own)
            kls = {"kl_keys": _kl(own, others[0]), "kl": _kl(behavior, others[1])} if others else {}
            gaps.append(Gap(mean=float(off.mean()), largest=float(off.max()), **kls))
        return gaps


def _kl(logprobs: np.ndarray, others: np.ndarray) -> float:
    """Return the k3 estimate of KL(x‖y) from log-probs under x and y of tokens drawn from x."""
    return float(kl_estimate(torch.from_numpy(logprobs - others), "k3").mean())
