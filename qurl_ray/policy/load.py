"""Load a policy from a folder or the hub, with the attention that engine and learner share."""

import hashlib
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from accelerate import init_empty_weights
from huggingface_hub import snapshot_download
from huggingface_hub.errors import LocalEntryNotFoundError
from safetensors import safe_open
from torch import nn
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    GenerationConfig,
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)
from transformers.activations import ACT2FN
from transformers.utils import GENERATION_CONFIG_NAME, logging

from qurl_ray.errors import ConfigError
from qurl_ray.extensions import did_you_mean
from qurl_ray.numerics.activations import MODULES
from qurl_ray.numerics.products import Linear
from qurl_ray.policy.attention import NAME
from qurl_ray.policy.experts import mixture_of, stored_name, with_experts
from qurl_ray.policy.layers import check_layers
from qurl_ray.policy.settings import activation_of, existing_ids, fitting, reading, trainable, turn_end
from qurl_ray.policy.stacked import BLOCKS, SCALES, StackedPart, mxfp4_values, place_of
from qurl_ray.policy.weights import HEAD, Stored, check_weights, same_values, stored_tensors
from qurl_ray.types import PolicySpec

_LOOKS, _LOOK_BYTES = 64, 4096  # places of a file that its digest looks at, and bytes at each

logging.disable_progress_bar()  # a progress bar per load would break up the run's own table


@dataclass(frozen=True, slots=True, kw_only=True)
class Outline:
    """A policy without its weights, for checks before they are loaded or made."""

    model: PreTrainedModel
    """Model on the meta device."""
    tokenizer: PreTrainedTokenizerBase
    context: int
    """Largest number of tokens that prompt and answer may have together."""

    @property
    def stop_ids(self) -> tuple[int, ...]:
        """Ids that end an answer; see `stop_ids`."""
        return _stop_ids(self.model.config, self.model.generation_config, self.tokenizer)


def outline(spec: PolicySpec) -> Outline:
    """Return the policy without its weights, after checking that its files hold them.

    Raises:
        ConfigError: see `check_policy`, `load_tokenizer`, `generation_settings` and `context_length`.
    """
    model, tokenizer = check_policy(spec), load_tokenizer(spec)
    model.generation_config = generation_settings(spec, tokenizer)
    return Outline(model=model, tokenizer=tokenizer, context=context_length(spec))


def outline_of(config: PreTrainedConfig, tokenizer: PreTrainedTokenizerBase, spec: PolicySpec) -> Outline:
    """Return the outline of a policy with these settings and this tokenizer, after checking them.

    Raises:
        ConfigError: such a model cannot be trained here, or the tokenizer does not fit it.
    """
    with torch.device("meta"):
        model = _model_of(trainable(config, spec), spec)
    check_layers(model, spec.source)
    return Outline(model=model, tokenizer=fitting(tokenizer, config, spec.source), context=_context_of(config, spec))


def local_copy(source: str) -> Path | None:
    """Return the folder of a policy: `source` itself, or that of a hub id in this machine's cache; None if its weights
    are not there.

    Raises:
        ConfigError: `source` is neither a folder nor a hub id.
    """
    with reading(source):
        if (folder := Path(source)).is_dir():
            return folder
        try:
            folder = Path(snapshot_download(source, local_files_only=True))
        except LocalEntryNotFoundError:
            return None
    return folder if any(folder.glob("*.safetensors")) else None


def load_tokenizer(spec: PolicySpec, folder: str | None = None) -> PreTrainedTokenizerBase:
    """Load the policy's tokenizer, or the one of another folder. If it has no padding token, it gets the end token as
    one.

    Raises:
        ConfigError: there is no tokenizer, or it does not fit the policy's embedding.
    """
    config, source = _config(spec), folder or spec.source
    with reading(source):
        return fitting(AutoTokenizer.from_pretrained(source, trust_remote_code=False), config, source)


def context_length(spec: PolicySpec) -> int:
    """Return the largest number of tokens that prompt and answer may have together."""
    return _context_of(_config(spec), spec)


def _context_of(config: PreTrainedConfig, spec: PolicySpec) -> int:
    own = config.max_position_embeddings
    if spec.max_length and spec.max_length > own:
        raise ConfigError(f"model.max_length={spec.max_length} exceeds the context of {spec.source}, {own} tokens")
    return spec.max_length or own


def tied_head(model: PreTrainedModel) -> dict[str, str]:
    """Return {name of the head's weight: name of the embedding it is tied to}; empty if it has a weight of its own."""
    head = model.get_output_embeddings().weight
    (own,) = (name for name, parameter in model.named_parameters() if parameter is head)
    return {} if own == HEAD else {HEAD: own}


def stop_ids(spec: PolicySpec, tokenizer: PreTrainedTokenizerBase) -> tuple[int, ...]:
    """Return the ids that end an answer, in order: the tokenizer's end token, those that config.json and
    generation_config.json list, and the token that the chat template writes after a turn.

    Raises:
        ConfigError: see `generation_settings`.
    """
    return _stop_ids(_config(spec), _own_generation_settings(spec), tokenizer)


def generation_settings(spec: PolicySpec, tokenizer: PreTrainedTokenizerBase) -> GenerationConfig:
    """Return the policy's settings of generation, with all of `stop_ids` as end tokens: whatever reads them stops where
    the engines do.

    Raises:
        ConfigError: generation_config.json is damaged, or names an end token that does not exist.
    """
    settings, ids = _own_generation_settings(spec), stop_ids(spec, tokenizer)
    settings.eos_token_id = list(ids) if len(ids) > 1 else ids[0]
    return settings


def _own_generation_settings(spec: PolicySpec) -> GenerationConfig:
    """Return the settings of generation_config.json, or those that config.json implies if there is no such file."""
    config = _config(spec)
    with reading(spec.source):
        try:
            settings = GenerationConfig.from_pretrained(spec.source)
        except OSError:  # also for a file that is no JSON
            if (Path(spec.source) / GENERATION_CONFIG_NAME).is_file():
                raise
            settings = GenerationConfig.from_model_config(config)
    name = f"{spec.source}: eos_token_id of {GENERATION_CONFIG_NAME}"
    settings.eos_token_id = existing_ids(settings.eos_token_id, name, config)
    return settings


def _stop_ids(
    config: PreTrainedConfig, generation: GenerationConfig, tokenizer: PreTrainedTokenizerBase
) -> tuple[int, ...]:
    tokens = {tokenizer.eos_token_id, turn_end(tokenizer)}
    for ids in (config.eos_token_id, generation.eos_token_id):
        tokens.update(ids if isinstance(ids, list) else [ids])
    return tuple(sorted(tokens - {None}))


def load_model(spec: PolicySpec) -> PreTrainedModel:
    """Load the policy with its weights, in float32, without dropout.

    Raises:
        ConfigError: see `check_policy`.
    """
    check_policy(spec)
    if mixture_of(_config(spec)):
        return _read(unloaded_model(spec), spec)
    with reading(spec.source):
        model = AutoModelForCausalLM.from_pretrained(
            spec.source, config=_config(spec), dtype=torch.float32, attn_implementation=NAME
        )
    return _knowing_its_text(with_row_rules(model), spec).eval()


def _read(model: PreTrainedModel, spec: PolicySpec) -> PreTrainedModel:
    """Give a model without weights those of its files; return it."""
    stored = StoredWeights(spec, model)
    for name, parameter in list(model.named_parameters()):
        path, _, leaf = name.rpartition(".")
        value = stored.rows(name, 0, len(parameter)).clone()  # files lie anywhere in memory, and bits may depend on it
        setattr(model.get_submodule(path), leaf, nn.Parameter(value))
    model.tie_weights()
    return model


def unloaded_model(spec: PolicySpec) -> PreTrainedModel:
    """Return the policy as `load_model` does, but with its weights on the meta device, for `StoredWeights` to read.
    Buffers that it computes from its settings, such as the frequencies of positions, are there.

    Raises:
        ConfigError: see `check_policy`.
    """
    check_policy(spec)
    with init_empty_weights(include_buffers=False):
        model = empty_model(spec)
    model.tie_weights()  # each weight has become one of its own
    return model


class StoredWeights:
    """The weights of a policy in its files, of which a learner that is sharded reads its own rows.

    Args:
        model: the policy, with or without weights.

    Raises:
        ConfigError: the policy cannot be found, or its files name their tensors in a way that only transformers' own
            loading knows.
    """

    def __init__(self, spec: PolicySpec, model: PreTrainedModel) -> None:
        _, stored = _stored(spec, _config(spec))
        body = f"{model.base_model_prefix}."
        tied = {own: head for head, own in tied_head(model).items()}
        self._keys: dict[str, str] = {}
        self._places: dict[str, StackedPart] = {}
        for name, _ in model.named_parameters():
            if place := place_of(model.config, name):
                self._places[name] = place
                continue
            others = (name, name.removeprefix(body), body + name, tied.get(name, name), stored_name(model.config, name))
            key = next((other for other in others if other in stored), None)
            if key is None:
                raise ConfigError(
                    f"{spec.source} holds no tensor of the name {name}, and learner.backend=fsdp reads them by name: "
                    "load and save the model once with transformers, or choose learner.backend=deepspeed"
                )
            self._keys[name] = key
        self._files = {key: tensor.file for key, tensor in stored.items()}

    def rows(self, name: str, first: int, end: int) -> torch.Tensor:
        """Return rows `first` to `end`, without the latter, of a parameter, float32.

        Raises:
            ConfigError: a weight in MXFP4 is not finite.
        """
        if place := self._places.get(name):
            return self._of_expert(place, first, end)
        return self._part(self._keys[name], slice(first, end)).float()

    def _of_expert(self, place: StackedPart, first: int, end: int) -> torch.Tensor:
        own, within = slice(place.expert, place.expert + 1), place.within(first, end)
        if place.key in self._files:
            # The last axis, of two or three, are the outputs.
            whole = self._part(place.key, own, *([slice(None)] * place.transposed), within)
            return replace(place, expert=0).of(whole).float().contiguous()
        parts = [self._part(place.key + part, own, within)[0, place.first :: place.step] for part in (BLOCKS, SCALES)]
        values = mxfp4_values(*parts)
        if not values.isfinite().all():
            raise ConfigError(f"{place.key}{SCALES} holds no numbers for expert {place.expert}: get the model again")
        return values

    def _part(self, key: str, *part: slice) -> torch.Tensor:
        with safe_open(self._files[key], framework="pt") as opened:
            return opened.get_slice(key)[part]


def files_digest(spec: PolicySpec) -> str:
    """Return a digest of a policy's files: names, shapes and types of their tensors, sizes, and some of the bytes.

    Raises:
        ConfigError: the policy cannot be found.
    """
    folder, stored = _stored(spec, _config(spec))
    digest = hashlib.sha256(repr(sorted((name, *tensor[1:]) for name, tensor in stored.items())).encode())
    for path in sorted({tensor.file for tensor in stored.values()}):
        size = path.stat().st_size
        with path.open("rb") as file:
            for place in range(0, size, max(1, size // _LOOKS)):
                file.seek(place)
                digest.update(file.read(_LOOK_BYTES))
        digest.update(f"{path.relative_to(folder)} {size}".encode())
    return digest.hexdigest()[:16]


def check_policy(spec: PolicySpec) -> PreTrainedModel:
    """Check that the policy's files hold the weights that its settings describe. Only their headers are read; but if
    there is a head beside the embedding that it is tied to, these two are compared.

    Returns:
        The policy without weights, on the meta device.

    Raises:
        ConfigError: the policy cannot be found, is of a kind that cannot be trained here, or its files are damaged,
            incomplete or of another model.
    """
    config = _config(spec)
    with reading(spec.source):
        folder, stored = _stored(spec, config)
        if config.num_hidden_layers > len(stored):  # before they are made
            raise ConfigError(
                f"{folder}: num_hidden_layers is {config.num_hidden_layers}, and the files hold {len(stored)} tensors"
            )
        with torch.device("meta"):
            model = empty_model(spec)
        check_layers(model, spec.source)
        check_weights(folder, model, stored)
        for tied, own in tied_head(model).items():
            if {tied, own} <= stored.keys() and not same_values(stored, tied, own):
                raise ConfigError(
                    f"{folder}: config.json ties the head to the embedding, and the files hold a {tied} that differs "
                    f"from {own}: set tie_word_embeddings to false in config.json"
                )
    return model


def empty_model(spec: PolicySpec, dtype: torch.dtype = torch.float32) -> PreTrainedModel:
    """Return a model of the policy's architecture with arbitrary weights, for an engine before its first sync.

    Raises:
        ConfigError: the policy cannot be found, is of a kind that cannot be trained here, or its settings describe no
            model that can be made.
    """
    return _knowing_its_text(_model_of(_config(spec), spec, dtype), spec)


def architecture(spec: PolicySpec, tokenizer: PreTrainedTokenizerBase) -> PreTrainedModel:
    """Return the policy without weights, on the meta device, with its settings of generation.

    Raises:
        ConfigError: see `empty_model` and `generation_settings`.
    """
    with torch.device("meta"):
        model = empty_model(spec)
    model.generation_config = generation_settings(spec, tokenizer)
    return model


def _model_of(config: PreTrainedConfig, spec: PolicySpec, dtype: torch.dtype = torch.float32) -> PreTrainedModel:
    with reading(spec.source):
        model = AutoModelForCausalLM.from_config(config, dtype=dtype, attn_implementation=NAME, trust_remote_code=False)
    return with_row_rules(with_experts(model)).eval()


def _knowing_its_text(model: PreTrainedModel, spec: PolicySpec) -> PreTrainedModel:
    """Set the ids of the model's embedding for which the tokenizer has no text, which are never drawn: an embedding may
    have more rows than the tokenizer has ids (Qwen2.5's is padded to a round number). Without a tokenizer there are
    none."""
    with suppress(ConfigError):
        known = set(load_tokenizer(spec).get_vocab().values())
        ids = [token for token in range(model.config.vocab_size) if token not in known]
        model.textless = torch.tensor(ids, device="cpu") if ids else None
    return model


def with_row_rules(model: PreTrainedModel) -> PreTrainedModel:
    """Make the rows of `model`'s linears and activations independent (qurl_ray/numerics), in place; return it."""
    name = activation_of(model.config)
    make = MODULES.get(name) if name else None
    activation = type(ACT2FN[name]) if make else None
    for module in list(model.modules()):
        if type(module) is nn.Linear:
            module.__class__ = Linear
        for child_name, child in module.named_children():
            if make and type(child) is activation:
                setattr(module, child_name, make())
    return model


def _stored(spec: PolicySpec, config: PreTrainedConfig) -> tuple[Path, dict[str, Stored]]:
    """Return the policy's folder and the tensors of its files, which are downloaded if they are not there."""
    with reading(spec.source):
        folder = Path(spec.source)
        if not folder.is_dir():
            folder = Path(snapshot_download(spec.source, allow_patterns=["model*.safetensors", "model*.json"]))
        return folder, stored_tensors(folder, getattr(config, "transformers_weights", None))


def _config(spec: PolicySpec) -> PreTrainedConfig:
    """Return the policy's own settings.

    Raises:
        ConfigError: the policy cannot be found, or is of a kind that cannot be trained here.
    """
    folder = Path(spec.source)
    if (folder / "adapter_config.json").is_file():
        raise ConfigError(f"{spec.source} is a LoRA adapter: give its base model, and the adapter as learner.lora.path")
    if folder.is_dir() and not (folder / "config.json").is_file():
        raise ConfigError(f"{spec.source} has no config.json, so it is no folder of a model")
    with reading(spec.source):
        config = AutoConfig.from_pretrained(spec.source, trust_remote_code=False)
        if spec.overrides:
            own, _ = PreTrainedConfig.get_config_dict(spec.source)
            known = {*own, *config.to_dict(), "rope_scaling"}
            if unknown := [name for name in spec.overrides if name not in known]:
                near = did_you_mean(unknown[0], known)
                raise ConfigError(f"model.overrides: {spec.source} has no setting {unknown[0]!r}{near}")
            config = type(config).from_dict({**own, **spec.overrides})
        return trainable(config, spec)
