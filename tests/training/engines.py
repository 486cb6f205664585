"""Engines for whole runs, named as tests.training.engines:name."""

from qurl_ray.engines.protocol import EngineOptions
from qurl_ray.engines.torch.drafts import Drafter
from qurl_ray.engines.torch.engine import TorchEngine
from qurl_ray.types import PolicySpec


def plain(spec: PolicySpec, options: EngineOptions) -> TorchEngine:
    return TorchEngine(spec, slots=4)


def drafting(spec: PolicySpec, options: EngineOptions) -> TorchEngine:
    """It drafts for every pass in full precision. By time, it would not for a tiny policy."""
    Drafter.count = lambda self, rows, most: min(most, 3) if self._forward else 0  # type: ignore[method-assign]
    return TorchEngine(spec, slots=4, drafts=True)
