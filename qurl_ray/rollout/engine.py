"""The interface of an engine, as the rest of the package uses it."""

from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Protocol

import numpy as np

from qurl_ray.types import Completion, Manifest, Request

Buffers = Mapping[str, tuple[np.ndarray, ...]]
"""Tensors by name: (codes [N, K] as bytes, scale float32 [N, groups]) if quantized, else (values,)."""


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

        A request that continues another (rollout.requests.continued) is answered only with the new tokens.

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
