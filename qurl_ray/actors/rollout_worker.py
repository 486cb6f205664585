"""Rollout worker: one engine in one Ray actor."""

import os
import uuid
from collections.abc import Collection, Sequence
from typing import Any, cast

import ray
import torch
from ray.actor import ActorMethod

from qurl_ray.actors.cluster import own_log
from qurl_ray.actors.health import Heartbeat
from qurl_ray.config.rollout import RolloutConfig
from qurl_ray.engines.make import make_engine, rollout_options
from qurl_ray.engines.protocol import DirectEngine
from qurl_ray.errors import SyncError
from qurl_ray.numerics.processor import processor_name
from qurl_ray.tables import TRANSPORTS
from qurl_ray.types import Completion, Manifest, PolicySpec, Request, StagedBucket
from qurl_ray.weights.messages import LoadReport
from qurl_ray.weights.receiver import decode_buckets
from qurl_ray.weights.transports.object_store import ObjectStore
from qurl_ray.weights.transports.protocol import transport_named

CONTROL = "control"
"""Concurrency group of calls that are answered while the engine works, which it does in the default group."""


def control(method: ActorMethod) -> ActorMethod:
    """Return the method, to be called in the CONTROL concurrency group."""
    return method.options(concurrency_group=CONTROL)


class RolloutWorker:
    """Owner of one engine. Weights arrive as tickets, for which the transport returns the senders' buckets.

    Args:
        colocated: the engine shares its device with a learner, and sleeps until its next request.
    """

    def __init__(
        self,
        spec: PolicySpec,
        config: RolloutConfig,
        *,
        kernel: str,
        threads: int,
        keep: Sequence[str] = (),
        transport: str = "object_store",
        colocated: bool = False,
    ) -> None:
        torch.set_num_threads(threads)
        self._boot = uuid.uuid4().hex
        direct = TRANSPORTS[transport].direct
        self._receive = ObjectStore.receive if direct else transport_named(transport).receive
        options = rollout_options(config, kernel=kernel, threads=threads, keep=keep, colocated=colocated)
        self._engine = make_engine(spec, config.engine, options)
        on_gpu = config.device == "cuda" and torch.cuda.is_available()
        self._hardware = torch.cuda.get_device_name() if on_gpu else processor_name()
        if colocated:
            self._engine.sleep()

    def heartbeat(self) -> Heartbeat:
        """Return a heartbeat: the process's identity and the weight version that it holds."""
        return Heartbeat(
            boot=self._boot,
            pid=os.getpid(),
            node=ray.get_runtime_context().get_node_id(),
            version=self._engine.version,
            log=own_log(),
        )

    def weight_max_code(self, format_name: str) -> int:
        """Largest weight code that this worker's kernel can take."""
        return self._engine.weight_max_code(format_name)

    def begin(self, version: int, format_name: str) -> tuple[str, int]:
        """Prepare for a version through a direct transport, whose buckets `put` takes; `commit` without tickets
        verifies it. Returns the engine's identity and its number of processes."""
        self._engine.wake()
        return cast(DirectEngine, self._engine).begin(version, format_name)

    def put(self, bucket: StagedBucket, index: int) -> None:
        """Take one bucket of that version, as the worker of this index."""
        cast(DirectEngine, self._engine).put(bucket, index)

    def commit(self, manifest: Manifest, tickets: Sequence[Any] | None, probe: Sequence[Request]) -> LoadReport:
        """Load and verify a version, or verify one that a direct transport has sent, then draw the probe from it.

        Raises:
            SyncError: the version is damaged, a delta to a version that this engine does not hold, or has codes that
                its kernel cannot take.
        """
        largest = self._engine.weight_max_code(manifest.precision)
        if manifest.weight_max_code > largest:
            raise SyncError(f"weight codes to {manifest.weight_max_code}, but the kernel here takes them to {largest}")
        self._engine.wake()
        if tickets is None:
            cast(DirectEngine, self._engine).commit(manifest)
        else:
            base, held = manifest.base_version, self._engine.version
            if base is not None and held != base:
                raise SyncError(f"version {manifest.version} is a delta to {base}, the engine holds {held}")
            arrived = map(self._receive, tickets)  # one at a time
            self._engine.load(manifest, decode_buckets(arrived, manifest, self._engine.resident))
        drawn = self._engine.generate(probe, version=manifest.version)
        return LoadReport(kernels=self._engine.kernels(), hardware=self._hardware, probe=drawn)

    def generate(self, requests: Sequence[Request], version: int, deadline_s: float) -> list[Completion]:
        self._engine.wake()
        return self._engine.generate(requests, version=version, deadline_s=deadline_s)

    def sleep(self) -> None:
        """Release the device's memory until the engine's next request. Nothing may run."""
        self._engine.sleep()

    def cancel(self, uids: Collection[str]) -> None:
        """End these requests at their next token, while `generate` runs in another thread of the actor."""
        self._engine.cancel(uids)

    def close(self) -> None:
        self._engine.close()
