"""Load a policy's folder into an engine, and verify it: stored codes, or weights that are quantized here."""

import hashlib
from dataclasses import dataclass, replace
from pathlib import Path

from transformers import PreTrainedTokenizerBase

from qurl_ray.config.quantization import QuantizationConfig
from qurl_ray.config.serving import ServingConfig
from qurl_ray.engines.torch.engine import TorchEngine
from qurl_ray.policy.load import context_length, stop_ids
from qurl_ray.types import Manifest
from qurl_ray.weights.local import policy_in

_LONGEST = 2048  # tokens of prompt and answer together, unless max_length is set


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadedPolicy:
    """A policy that is loaded in an engine."""

    engine: TorchEngine
    tokenizer: PreTrainedTokenizerBase
    stop_ids: tuple[int, ...]
    length: int
    """Most tokens of prompt and answer together."""
    fingerprint: str
    """Fingerprint of all weights as the engine holds them: 16 hexadecimal digits."""


def load_policy(folder: Path, config: ServingConfig) -> LoadedPolicy:
    """Load the policy of a folder into an engine, which verifies the weights that it holds.

    Raises:
        QurlError: the policy cannot be loaded, or has codes of a format other than the requested one.
    """
    held = policy_in(folder)
    length = config.max_length or min(_LONGEST, context_length(held.spec))
    spec = replace(held.spec, max_length=length)
    tokenizer = held.tokenizer()
    context_length(spec)  # raises if max_length exceeds the context of the model
    quantization = held.format(None if config.quantization == "auto" else config.quantization)
    engine, manifest = held.into(
        lambda kernel: TorchEngine(spec, slots=config.slots, kernel=kernel), quantization, QuantizationConfig()
    )
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
