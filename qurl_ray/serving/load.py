"""Load a policy's folder into an engine, and verify it: stored codes, or weights that are quantized here."""

import hashlib
import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import cast

from transformers import PreTrainedTokenizerBase

from qurl_ray.config.quantization import QuantizationConfig
from qurl_ray.config.serving import ServingConfig
from qurl_ray.engines.make import make_engine
from qurl_ray.engines.protocol import EngineOptions, StreamingEngine
from qurl_ray.errors import ConfigError
from qurl_ray.policy.export import QuantizedPolicy, is_quantized_checkpoint, read_quantized
from qurl_ray.policy.load import context_length, load_model, load_tokenizer, stop_ids
from qurl_ray.quant.quantize import QTensor
from qurl_ray.tables import ENGINES
from qurl_ray.types import Manifest, PolicySpec
from qurl_ray.weights.local import quantize_into, with_codes

_LONGEST = 2048  # tokens of prompt and answer together, unless max_length is set


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadedPolicy:
    """A policy that is loaded in an engine."""

    engine: StreamingEngine
    tokenizer: PreTrainedTokenizerBase
    stop_ids: tuple[int, ...]
    length: int
    """Most tokens of prompt and answer together."""
    fingerprint: str
    """Fingerprint of all weights as the engine holds them: 16 hexadecimal digits."""


def load_policy(folder: Path, config: ServingConfig, *, threads: int) -> LoadedPolicy:
    """Load the policy of a folder into an engine, which verifies the weights that it holds.

    Raises:
        QurlError: the policy cannot be loaded, or has codes of a format other than the requested one.
    """
    spec = PolicySpec(source=str(folder), quantized=is_quantized_checkpoint(folder))
    length = config.max_length or min(_LONGEST, context_length(spec))
    spec = PolicySpec(source=spec.source, max_length=length, quantized=spec.quantized)
    tokenizer = load_tokenizer(spec)
    context_length(spec)  # raises if max_length exceeds the context of the model
    make = partial(_engine, spec, config, threads)
    if spec.quantized:
        stored = _stored(folder, config)
        floats = [name for name, value in stored.parameters.items() if not isinstance(value, QTensor)]
        make = partial(make, format_name=stored.fmt.name, keep=[f"^{re.escape(name)}$" for name in floats])
        engine, manifest = with_codes(make, config.kernel, stored, unquantized=config.dtype)
    else:
        fmt = "none" if config.quantization == "auto" else config.quantization
        model, quantization = load_model(spec), QuantizationConfig()
        engine = make(config.kernel, format_name=fmt, keep=quantization.keep)
        manifest = quantize_into(engine, model, fmt, quantization, unquantized=config.dtype)
    engine.reserve(config.slots, length)  # here, in the loading thread, not on the event loop: see Service._load
    return LoadedPolicy(
        engine=engine,
        tokenizer=tokenizer,
        stop_ids=stop_ids(spec, tokenizer),
        length=length,
        fingerprint=fingerprint_of(manifest),
    )


def fingerprint_of(manifest: Manifest) -> str:
    """Return one fingerprint for all tensors, which differs between policies and between formats."""
    digest = hashlib.blake2b(digest_size=8)
    for record in sorted(manifest.tensors, key=lambda record: record.name):
        digest.update(f"{record.name} {record.format} {record.fingerprint:016x}\n".encode())
    return digest.hexdigest()


def _engine(
    spec: PolicySpec, config: ServingConfig, threads: int, kernel: str, *, format_name: str, keep: Sequence[str]
) -> StreamingEngine:
    entry = ENGINES[config.engine]
    options = EngineOptions(
        slots=config.slots,
        format_name=format_name,
        keep=tuple(keep),
        threads=threads,
        kernel=kernel,
        device=config.device,
        dtype=config.dtype,
        kv_cache_bytes=None if config.kv_cache_gb is None else int(config.kv_cache_gb * 2**30),
        processes=config.tensor_parallel if entry.tensor_parallel else 1,
        cuda_graphs=entry.graphs_on_cuda and config.device == "cuda",
        policy_logprobs=True,
        start_timeout_s=config.start_timeout_s,
    )
    return cast(StreamingEngine, make_engine(spec, config.engine, options))


def _stored(folder: Path, config: ServingConfig) -> QuantizedPolicy:
    stored = read_quantized(folder)
    if config.quantization not in ("auto", stored.fmt.name):
        raise ConfigError(f"{folder} holds {stored.fmt.name} codes: it cannot be served in {config.quantization}")
    return stored
