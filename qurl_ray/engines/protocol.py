"""The interface of an engine, as the rest of the package uses it."""

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from qurl_ray.types import Completion, Manifest, Request, StagedBucket

Buffers = Mapping[str, tuple[np.ndarray, ...]]
"""Tensors by name: the parts of its format (quant.formats) if quantized, else (values,)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineOptions:
    """Everything but the policy that an engine is made with (tables.ENGINES). An engine refuses an option that it does
    not have, unless the settings were checked against its entry in the table.

    Example:
        EngineOptions(slots=64, threads=8, kernel="auto")
    """

    slots: int
    """Number of answers that it decodes at a time."""
    format_name: str = "none"
    """Number format of the first weights, for an engine that is made for one."""
    keep: tuple[str, ...] = ()
    """Patterns of the parameters that have no codes in any format (quant.units)."""
    threads: int
    """Number of CPU threads that it may use."""
    kernel: str = "auto"
    """How quantized linears are computed: "auto", or "emulation" in float32."""
    device: str = "cpu"
    dtype: str = "float32"
    """Number format of activations and of tensors without codes."""
    kv_cache: str = "full"
    """Number format of keys and values."""
    kv_cache_bytes: int | None = None
    """Memory for keys and values in each process; None leaves the choice to the engine."""
    kept_bytes: int = 0
    """Memory for keys and values of requests that may be continued."""
    processes: int = 1
    """Number of processes that share its weights."""
    cuda_graphs: bool = False
    """Capture decode steps as CUDA graphs."""
    routes: bool = False
    """Note the experts of each token."""
    route_weights: bool = False
    """Note their weights, too."""
    lossless: bool = False
    """Draft tokens with codes of weights in full precision."""
    sleeps: bool = False
    """It must be able to sleep while a learner uses its device."""
    start_timeout_s: float = 600.0
    """Longest time that its start may take, in seconds."""


class Engine(Protocol):
    """An engine, which generates with the weights that it verified last.

    Example:
        engine.load(manifest, [buffers])
        completions = engine.generate(requests, version=manifest.version)
    """

    version: int | None
    """Version of the verified weights; None means STALE: nothing may be generated."""

    def load(self, manifest: Manifest, buckets: Iterable[Buffers]) -> None:
        """Replace all weights, bucket by bucket, then compare the resident weights with the manifest. No request may
        run meanwhile: cancel requests, and wait until `generate` returns.

        Raises:
            SyncError: a tensor is missing, misshapen or damaged. The engine stays STALE.
        """

    def resident(self, name: str) -> tuple[np.ndarray, ...]:
        """Return one tensor as the engine holds it now, in the form of Buffers."""

    def kernels(self) -> list[str]:
        """Return the kernels of the linears: "fbgemm", "emulation of fp8", … or [] in full precision."""

    def generate(
        self, requests: Sequence[Request], *, version: int, deadline_s: float | None = None
    ) -> list[Completion]:
        """Return completions in the order of the requests. Unfinished ones end after `deadline_s` ("deadline").

        A request that continues another (engines.requests.continued) is answered only with the new tokens.

        Raises:
            StaleWeights: the engine does not hold `version`.
            EngineError: a request does not fit the context.
        """

    def cancel(self, uids: Collection[str]) -> None:
        """End these requests at their next token ("cancelled"). From any thread; unknown ones are ignored.

        Only requests that run now are affected: a cancel that arrives before its `generate` is lost, and has no effect
        on a later one. A caller that must be sure repeats it until `generate` returns, and requests the remaining
        tokens when the last cancel has returned.
        """

    def weight_max_code(self, format_name: str) -> int:
        """Return the largest weight code that this engine's kernel for the format can take; 0 for "none"."""

    def sleep(self) -> None:
        """Release device memory that can be restored without a sync, until `wake`. No request may run meanwhile. The
        verified weights are kept, possibly on the host."""

    def wake(self) -> None:
        """Undo `sleep`; do nothing if the engine is awake."""

    def close(self) -> None:
        """Release everything. The engine cannot be used again."""


class DirectEngine(Engine, Protocol):
    """An engine that also takes weights from a direct transport: `begin`, `put` for each bucket, then `commit`."""

    def begin(self, version: int, format_name: str) -> tuple[str, int]:
        """Become STALE and prepare for a version. Returns an identity, which changes when the engine's processes do,
        and their number.

        Raises:
            SyncError: the engine holds another format, and cannot change it by itself.
        """

    def put(self, bucket: StagedBucket, index: int) -> None:
        """Write a bucket's tensors to their places. Returns when its memory may be used again.

        Args:
            index: of this engine among those of the run, by which it finds its place in a group.

        Raises:
            SyncError: the bucket did not arrive, or has no place here.
        """

    def commit(self, manifest: Manifest) -> None:
        """Compare the weights that were put since `begin` with the manifest.

        Raises:
            SyncError: a tensor is missing or damaged. The engine stays STALE.
        """
