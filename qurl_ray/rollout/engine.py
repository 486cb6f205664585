"""What the rest of the package expects of an engine."""

from collections.abc import Mapping, Sequence
from typing import Protocol

import numpy as np

from qurl_ray.types import Completion, Manifest, Request

Buffers = Mapping[str, tuple[np.ndarray, ...]]
"""By tensor name: (codes [N, K] as bytes, scale float32 [N, groups]) if quantized, else (values,)."""


class Engine(Protocol):
    """Generates with the weights it verified last.

    Example:
        engine.load(manifest, buffers)
        completions = engine.generate(requests, version=manifest.version)
    """

    version: int | None
    """Version of the verified weights; None is STALE: nothing may be generated."""

    def load(self, manifest: Manifest, buffers: Buffers) -> None:
        """Replace all weights, then compare what is resident with the manifest.

        Raises:
            SyncError: something is missing, misshapen or damaged. The engine stays STALE.
        """

    def generate(self, requests: Sequence[Request], *, version: int) -> list[Completion]:
        """Completions in the order of the requests.

        Raises:
            StaleWeights: the engine does not hold `version`.
            EngineError: a request does not fit the context.
        """

    def weight_max_code(self, format_name: str) -> int:
        """Largest weight code that this engine's kernel for the format can take; 0 for "none"."""
