"""A sync inside one process: for evaluations, benchmarks and tests."""

from collections.abc import Callable, Iterable, Mapping, Set
from typing import Protocol

import torch

from qurl_ray.quant.formats import Format
from qurl_ray.quant.quantize import QTensor
from qurl_ray.sync.publish import Publisher, Unquantized, assemble
from qurl_ray.sync.receive import Arrays, unpack
from qurl_ray.types import Manifest


class Receiver(Protocol):
    """The part of an engine that a sync needs."""

    load: Callable[[Manifest, Iterable[Mapping[str, Arrays]]], None]
    resident: Callable[[str], Arrays]


def load_into(
    engine: Receiver,
    parameters: Iterable[tuple[str, torch.Tensor | QTensor]],
    fmt: Format | None,
    *,
    quantized: Set[str],
    version: int = 1,
    unquantized: Unquantized = "float32",
    tied: Mapping[str, str] | None = None,
) -> Manifest:
    """Send `parameters` whole, as a learner of one rank would; the engine has verified them when this returns."""
    publisher = Publisher(quantized, tied=tied or {})
    buckets = list(publisher.prepare(parameters, fmt, version=version, unquantized=unquantized))
    manifest = assemble(version, fmt, [bucket.records for bucket in buckets])
    engine.load(manifest, unpack((bucket.payloads for bucket in buckets), manifest, engine.resident))
    return manifest
