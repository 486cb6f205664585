"""Load a policy's folder into an engine, and verify it: stored codes, or weights that are quantized here."""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from transformers import PreTrainedTokenizerBase

from qurl_ray.config.quantization import QuantizationConfig
from qurl_ray.config.serving import ServingConfig
from qurl_ray.engines.torch.engine import TorchEngine
from qurl_ray.errors import ConfigError
from qurl_ray.policy.adapters import CodedBase, SavedAdapter, read_adapter
from qurl_ray.policy.load import context_length, stop_ids
from qurl_ray.quant.fingerprint import fingerprint
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
    coded: CodedBase | None = None
    """How the codes were made that adapters beside the policy were trained over; None if that is not known."""

    def adapter(self, folder: Path) -> "LoadedAdapter":
        """Read an adapter that can stand beside this policy.

        Raises:
            ConfigError: it cannot be read, or was trained over other codes.
        """
        saved = read_adapter(folder)
        if saved.coded and (self.coded is None or saved.coded.fingerprint != self.coded.fingerprint):
            raise ConfigError(
                f"{folder} was trained over the codes {saved.coded.fingerprint}, and the policy that is served has "
                f"{self.coded.fingerprint if self.coded else 'others'}: serve it alone, as policy"
            )
        digest = hashlib.blake2b(digest_size=8)
        for name, value in sorted(saved.parameters.items()):
            digest.update(f"{name} {fingerprint(value):016x}\n".encode())
        return LoadedAdapter(saved=saved, fingerprint=digest.hexdigest())


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadedAdapter:
    """An adapter that can stand beside a policy."""

    saved: SavedAdapter
    fingerprint: str
    """Fingerprint of its matrices: 16 hexadecimal digits."""


def load_policy(folder: Path, config: ServingConfig, adapters: Sequence[Path] = ()) -> LoadedPolicy:
    """Load the policy of a folder into an engine, which verifies the weights that it holds.

    Args:
        adapters: folders of the adapters that will stand beside it. If the policy is in full precision and the settings
            ask for no format, it gets the codes over which the first of them was trained.

    Raises:
        QurlError: the policy cannot be loaded, or has codes of a format other than the requested one.
    """
    held = policy_in(folder)
    coded = read_adapter(adapters[0]).coded if adapters else None
    if coded and not held.adapter and held.held == "none" and config.quantization in ("auto", coded.format):
        held = replace(held, coded=coded)
    if held.adapter and adapters:
        raise ConfigError(f"{folder} is an adapter itself: give its base model as policy, and it among the adapters")
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
        coded=held.coded,
    )


def fingerprint_of(manifest: Manifest) -> str:
    """Return one fingerprint for all tensors, which differs between policies and between formats."""
    digest = hashlib.blake2b(digest_size=8)
    for record in sorted(manifest.tensors, key=lambda record: record.name):
        digest.update(f"{record.name} {record.format} {record.fingerprint:016x}\n".encode())
    return digest.hexdigest()
