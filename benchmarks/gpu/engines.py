"""Engines in processes of their own, and the random policies that they load."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from typing import Any

import torch
from transformers import PreTrainedModel

from benchmarks.gpu.bench import VOCABULARY, Bench, policy_of
from qurl_ray.config.quantization import QuantizationConfig
from qurl_ray.engines.make import make_engine
from qurl_ray.engines.protocol import Engine, EngineOptions
from qurl_ray.planning.shapes import Shape
from qurl_ray.policy.load import empty_model
from qurl_ray.types import PolicySpec
from qurl_ray.weights.stream import Unquantized

CONFIG = QuantizationConfig(equalize=False)


@dataclass(frozen=True, slots=True, kw_only=True)
class Setup:
    """An engine to be made, as plain values."""

    engine: str
    """Name in tables.ENGINES."""
    format_name: str
    graphs: bool
    source: str
    context: int
    slots: int
    kv_bytes: int | None
    device: str
    sleeps: bool = False
    keep: tuple[str, ...] = CONFIG.keep

    @property
    def spec(self) -> PolicySpec:
        return PolicySpec(source=self.source, max_length=self.context)

    @property
    def dtype(self) -> Unquantized:
        return "bfloat16" if self.device == "cuda" else "float32"

    def plain(self) -> dict[str, Any]:
        return asdict(self)

    def make(self) -> Engine:
        """Make the engine, in a process that has no other."""
        options = EngineOptions(
            slots=self.slots,
            format_name=self.format_name,
            keep=self.keep,
            threads=int(os.environ.get("OMP_NUM_THREADS", torch.get_num_threads())),
            device=self.device,
            dtype=self.dtype,
            kv_cache_bytes=self.kv_bytes,
            cuda_graphs=self.graphs,
            sleeps=self.sleeps,
        )
        return make_engine(self.spec, self.engine, options)


@contextmanager
def setup_of(
    bench: Bench,
    shape: Shape,
    layers: int,
    *,
    engine: str,
    format_name: str,
    graphs: bool,
    context: int,
    slots: int,
    vocabulary: int = VOCABULARY,
    sleeps: bool = False,
    keep: tuple[str, ...] = CONFIG.keep,
) -> Iterator[Setup]:
    """Yield the setup of an engine with this many layers, and memory for the keys of as many contexts as it has slots,
    and some more."""
    each = shape.kv_bytes(context + 64) * layers / shape.layers
    with policy_of(shape, layers, min(vocabulary, shape.vocab)) as spec:
        yield Setup(
            engine=engine,
            format_name=format_name,
            graphs=graphs,
            source=spec.source,
            context=context,
            slots=slots,
            kv_bytes=int((slots + 2) * each) if bench.cuda else None,
            device=bench.device.type,
            sleeps=sleeps,
            keep=keep,
        )


def random_policy(spec: PolicySpec, version: int) -> PreTrainedModel:
    """Return a policy with random weights on the CPU: the same in every process, others for each version."""
    torch.manual_seed(version)
    return empty_model(spec).requires_grad_(False)
