"""Weight sync within one process: for evaluations, serving, benchmarks and tests."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Protocol, TypeVar

import torch
from torch import nn

from qurl_ray.config.quantization import QuantizationConfig
from qurl_ray.errors import QuantizationError
from qurl_ray.policy.export import QuantizedPolicy
from qurl_ray.policy.ranges import measured_factors
from qurl_ray.quant.equalize import Factors, equalized
from qurl_ray.quant.formats import Format, get_format
from qurl_ray.quant.quantize import QTensor
from qurl_ray.quant.units import Unit, units
from qurl_ray.types import Manifest
from qurl_ray.weights.receiver import Arrays, decode_buckets
from qurl_ray.weights.stream import Publisher, Unquantized, assemble_manifest


class Receiver(Protocol):
    """The part of an engine that a sync needs."""

    def load(self, manifest: Manifest, buckets: Iterable[Mapping[str, Arrays]]) -> None: ...
    def resident(self, name: str) -> Arrays: ...


class Quantizing(Receiver, Protocol):
    """The part of an engine that takes codes."""

    def weight_max_code(self, format_name: str) -> int: ...
    def close(self) -> None: ...


E = TypeVar("E", bound=Quantizing)


def load_into(
    engine: Receiver,
    parameters: Iterable[tuple[str, torch.Tensor | QTensor]],
    fmt: Format | None,
    *,
    quantized: Mapping[str, Unit],
    version: int = 1,
    unquantized: Unquantized = "float32",
    tied: Mapping[str, str] | None = None,
) -> Manifest:
    """Send all `parameters` whole, as a learner of one rank would. Returns the manifest, after the engine has verified
    them."""
    publisher = Publisher(quantized, tied=tied or {})
    return send_into(publisher, engine, parameters, fmt, version=version, unquantized=unquantized)


def send_into(
    publisher: Publisher,
    engine: Receiver,
    parameters: Iterable[tuple[str, torch.Tensor | QTensor]],
    fmt: Format | None,
    *,
    version: int,
    base_version: int | None = None,
    unquantized: Unquantized = "float32",
) -> Manifest:
    """Send what a publisher of one rank prepares (see Publisher.prepare). Returns the manifest, after the engine has
    verified it."""
    buckets = list(
        publisher.prepare(parameters, fmt, version=version, base_version=base_version, unquantized=unquantized)
    )
    manifest = assemble_manifest(version, fmt, [bucket.records for bucket in buckets])
    engine.load(manifest, decode_buckets((bucket.payloads for bucket in buckets), manifest, engine.resident))
    return manifest


def with_codes(
    make: Callable[[str], E], kernel: str, stored: QuantizedPolicy, *, unquantized: Unquantized = "float32"
) -> tuple[E, Manifest]:
    """Return an engine of `make(kernel)` that holds a checkpoint's codes as they are stored, and the manifest of what
    it was sent."""
    engine = make(kernel)
    if stored.fmt.weight_max > engine.weight_max_code(stored.fmt.name):
        # The checkpoint was made for a kernel that takes larger codes; the kernel here would saturate.
        engine.close()
        engine = make("emulation")
    sent = load_into(engine, stored.parameters.items(), stored.fmt, quantized={}, unquantized=unquantized)
    return engine, sent


def quantize_into(
    engine: Quantizing,
    model: Any,
    quantization: str,
    config: QuantizationConfig,
    *,
    unquantized: Unquantized = "float32",
) -> Manifest:
    """Quantize the linears of a transformers model as configured, and send the whole model. With `quantization` "none",
    no linear is quantized."""
    fmt, quantized = chosen_codes(engine, model, quantization, config.kept(model.config.num_hidden_layers))
    factors: Mapping[str, Factors] = {}
    if fmt and config.equalizes(fmt.name):
        try:
            factors = measured_factors(model, quantized)  # on random tokens
        except QuantizationError:
            if config.equalize is True:
                raise
    parameters = equalized(model.named_parameters(), factors)
    return load_into(engine, parameters, fmt, quantized=quantized, unquantized=unquantized)


def chosen_codes(
    engine: Quantizing, model: nn.Module, quantization: str, keep: Sequence[str]
) -> tuple[Format | None, Mapping[str, Unit]]:
    """Return the format, with codes that the engine's kernel can take, and the units to quantize by the names of their
    parameters; for `quantization` "none", None and no units."""
    if quantization == "none":
        return None, {}
    fmt = get_format(quantization, engine.weight_max_code(quantization))
    return fmt, units(model, keep)
