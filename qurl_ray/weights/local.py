"""Weight sync within one process: for evaluations, serving, benchmarks and tests."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, TypeVar

import torch
from torch import nn

from qurl_ray.config.quantization import QuantizationConfig
from qurl_ray.errors import ConfigError
from qurl_ray.policy.adapters import CodedBase, SavedAdapter, add_adapters, is_adapter, load_adapter, read_adapter
from qurl_ray.policy.export import QuantizedPolicy, is_quantized_checkpoint, read_quantized
from qurl_ray.policy.load import load_model, load_tokenizer
from qurl_ray.policy.ranges import configured_factors
from qurl_ray.quant.equalize import equalized
from qurl_ray.quant.fingerprint import total_fingerprint
from qurl_ray.quant.formats import Format, get_format
from qurl_ray.quant.quantize import QTensor
from qurl_ray.quant.units import Unit, units
from qurl_ray.types import Manifest, PolicySpec
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
    subset_of: int | None = None,
) -> Manifest:
    """Send what a publisher of one rank prepares (see Publisher.prepare). Returns the manifest, after the engine has
    verified it.

    Args:
        subset_of: version whose other tensors the engine keeps; None if `parameters` are all.
    """
    buckets = list(
        publisher.prepare(
            parameters,
            fmt,
            version=version,
            base_version=base_version,
            unquantized=unquantized,
            complete=subset_of is None,
        )
    )
    manifest = assemble_manifest(version, fmt, [bucket.records for bucket in buckets], subset_of=subset_of)
    engine.load(manifest, decode_buckets((bucket.payloads for bucket in buckets), manifest, engine.resident))
    return manifest


@dataclass(frozen=True, slots=True, kw_only=True)
class FolderPolicy:
    """A policy as its folder holds it: in full precision, as codes, or as an adapter of another policy."""

    folder: Path
    spec: PolicySpec
    stored: QuantizedPolicy | None
    """Its codes; None if it holds none."""
    adapter: SavedAdapter | None
    coded: CodedBase | None = None
    """How its weights become codes; None if that is left to the settings."""

    @property
    def held(self) -> str:
        """Format of its linears: "none" in full precision."""
        if self.coded:
            return self.coded.format
        return self.stored.fmt.name if self.stored else "none"

    def format(self, wanted: str | None) -> str:
        """Return the format in which the policy is used: `wanted`, or its own for None.

        Raises:
            ConfigError: it holds codes of another format.
        """
        if wanted and self.stored and wanted != self.held:
            raise ConfigError(f"{self.folder} holds {self.held} codes: it cannot be used in {wanted}")
        return wanted or self.held

    def tokenizer(self) -> Any:
        """Load the tokenizer: that of the folder, or of the base model of an adapter that brings none."""
        own = self.adapter and (self.folder / "tokenizer_config.json").is_file()
        return load_tokenizer(self.spec, str(self.folder) if own else None)

    def into(self, make: Callable[[str], E], quantization: str, config: QuantizationConfig) -> tuple[E, Manifest]:
        """Return an engine that holds the policy, and the manifest of what it was sent.

        Args:
            make: makes an engine with the kernel of this name.
            quantization: format of the linears, from `format`. Codes that the folder holds, or whose adapter it holds,
                are used as they are if it is theirs.

        Raises:
            QurlError: the weights cannot be read or quantized, or the folder holds an adapter of another base model.
        """
        if stored := self.stored:
            engine = _made_for(stored.fmt, make, config.kernel)
            return engine, load_into(engine, stored.parameters.items(), stored.fmt, quantized={})
        model: Any = load_model(self.spec)
        if self.adapter:
            add_adapters(model, self.adapter.adapters)
            load_adapter(model, self.adapter, self.folder)
        if self.coded and quantization == self.coded.format:
            engine = _made_for(get_format(self.coded.format, self.coded.weight_max_code), make, config.kernel)
            return engine, coded_into(engine, model, self.coded)
        engine = make(config.kernel)
        return engine, quantize_into(engine, model, quantization, config)


def policy_in(folder: Path, max_length: int | None = None) -> FolderPolicy:
    """Look at a policy's folder, as a run or peft writes it.

    Raises:
        QurlError: it holds no policy, or one that cannot be read.
    """
    if is_adapter(folder):
        adapter = read_adapter(folder)
        if not adapter.base:
            raise ConfigError(f"{folder} is an adapter that names no base model (base_model_name_or_path)")
        spec = PolicySpec(source=adapter.base, max_length=max_length, adapters=adapter.adapters)
        return FolderPolicy(folder=folder, spec=spec, stored=None, adapter=adapter, coded=adapter.coded)
    if not (folder / "config.json").is_file():
        raise ConfigError(f"{folder} holds no policy: config.json is missing")
    stored = read_quantized(folder) if is_quantized_checkpoint(folder) else None
    spec = PolicySpec(source=str(folder), max_length=max_length, quantized=stored is not None)
    return FolderPolicy(folder=folder, spec=spec, stored=stored, adapter=None)


def _made_for(fmt: Format, make: Callable[[str], E], kernel: str) -> E:
    """Return an engine of `make(kernel)`; an emulated one if the codes were made for a kernel that takes larger ones,
    with which this kernel would saturate."""
    engine = make(kernel)
    if fmt.weight_max <= engine.weight_max_code(fmt.name):
        return engine
    engine.close()
    return make("emulation")


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
    factors = configured_factors(model, quantized, config, fmt.name) if fmt else {}
    parameters = equalized(model.named_parameters(), factors)
    return load_into(engine, parameters, fmt, quantized=quantized, unquantized=unquantized)


def coded_into(engine: Quantizing, model: Any, coded: CodedBase) -> Manifest:
    """Send a model, with its adapter if it has one, in the codes that adapters were trained over.

    Raises:
        ConfigError: the base model gives other codes, so it is not the adapter's.
    """
    fmt = get_format(coded.format, coded.weight_max_code)
    quantized = {name: unit for name, unit in units(model).items() if name in coded.names}
    manifest = load_into(engine, equalized(model.named_parameters(), coded.factors), fmt, quantized=quantized)
    codes = total_fingerprint(record.fingerprint for record in manifest.tensors if record.format != "none")
    if codes != coded.fingerprint:
        raise ConfigError(
            f"the adapter was trained over other codes ({coded.fingerprint}) than this base model gives ({codes}): its "
            "files have changed, or it is another model"
        )
    return manifest


def chosen_codes(
    engine: Quantizing, model: nn.Module, quantization: str, keep: Sequence[str]
) -> tuple[Format | None, Mapping[str, Unit]]:
    """Return the format, with codes that the engine's kernel can take, and the units to quantize by the names of their
    parameters; for `quantization` "none", None and no units."""
    if quantization == "none":
        return None, {}
    fmt = get_format(quantization, engine.weight_max_code(quantization))
    return fmt, units(model, keep)
