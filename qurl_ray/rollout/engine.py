"""What the rest of the package expects of an engine."""

from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Protocol

import numpy as np

from qurl_ray.types import Completion, Manifest, Request

Buffers = Mapping[str, tuple[np.ndarray, ...]]
"""By tensor name: (codes [N, K] as bytes, scale float32 [N, groups]) if quantized, else (values,)."""


class Engine(Protocol):
    """Generates with the weights it verified last.

    Example:
        engine.load(manifest, [buffers])
        completions = engine.generate(requests, version=manifest.version)
    """

    version: int | None
    """Version of the verified weights; None is STALE: nothing may be generated."""

    def load(self, manifest: Manifest, buckets: Iterable[Buffers]) -> None:
        """Replace all weights, bucket by bucket, then compare what is resident with the manifest. Nothing may run
        meanwhile: cancel it, and wait for its `generate`.

        Raises:
            SyncError: something is missing, misshapen or damaged. The engine stays STALE.
        """

    def resident(self, name: str) -> tuple[np.ndarray, ...]:
        """What the engine holds of one tensor now, as it would stand in Buffers."""

    def kernels(self) -> list[str]:
        """What computes the linears: "fbgemm", "emulation of fp8", … or [] in full precision."""

    def generate(
        self, requests: Sequence[Request], *, version: int, deadline_s: float | None = None
    ) -> list[Completion]:
        """Completions in the order of the requests. What is not done after `deadline_s` ends there ("deadline").

        A request that continues another (rollout.requests.continued) is answered with the rest alone.

        Raises:
            StaleWeights: the engine does not hold `version`.
            EngineError: a request does not fit the context.
        """

    def cancel(self, uids: Collection[str]) -> None:
        """End these requests at their next token ("cancelled"). From any thread; unknown ones are ignored.

        Only what runs now is meant: a cancel that overtakes its `generate` is lost, and none waits for the next one.
        Who must be sure repeats it until `generate` returns, and asks for the rest when the last cancel has returned.
        """

    def weight_max_code(self, format_name: str) -> int:
        """Largest weight code that this engine's kernel for the format can take; 0 for "none"."""

    def sleep(self) -> None:
        """Give back what memory of the device can be had again without a sync, until `wake`. Nothing may run meanwhile.
        The verified weights stay what they are, be it elsewhere."""

    def wake(self) -> None:
        """Undo `sleep`; nothing if it does not sleep."""

    def close(self) -> None:
        """Give everything back; the engine is of no further use."""
