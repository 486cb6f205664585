"""One engine in one actor."""

from collections.abc import Sequence

import ray
import torch
from ray import ObjectRef

from qurl_ray.rollout.torch_engine import TorchEngine
from qurl_ray.types import Completion, Manifest, PolicySpec, Request


class RolloutWorker:
    """Owns an engine; weights arrive as references to the senders' buffers, one copy per node."""

    def __init__(self, spec: PolicySpec, *, slots: int, kernel: str, threads: int) -> None:
        torch.set_num_threads(threads)
        self._engine = TorchEngine(spec, slots=slots, kernel=kernel)

    def weight_max_code(self, format_name: str) -> int:
        """Largest weight code that this worker's kernel can take."""
        return self._engine.weight_max_code(format_name)

    def load(self, manifest: Manifest, parts: Sequence[ObjectRef]) -> list[str]:
        """Load and verify a version. Returns the kernels now in use."""
        buffers = {name: tensors for part in ray.get(list(parts)) for name, tensors in part.items()}
        self._engine.load(manifest, buffers)
        return self._engine.kernels()

    def generate(self, requests: Sequence[Request], version: int) -> list[Completion]:
        return self._engine.generate(requests, version=version)
