"""Load a policy from a folder or the hub, with the attention that engine and learner share."""

from pathlib import Path

import torch
from torch import nn
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)
from transformers.activations import ACT2FN
from transformers.utils import logging

from qurl_ray.errors import ConfigError
from qurl_ray.numerics.activations import MODULES
from qurl_ray.numerics.products import Linear
from qurl_ray.policy.attention import NAME
from qurl_ray.types import PolicySpec

_EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")
# Operations that a model applies to logits after its head: here, log-probs are computed from the head's output.
_BEHIND_HEAD = ("final_logit_softcapping", "logits_scaling", "logit_scale", "lm_head_multiplier")

HEAD = "lm_head.weight"

logging.disable_progress_bar()  # a progress bar per load would break up the run's own table


def load_tokenizer(spec: PolicySpec) -> PreTrainedTokenizerBase:
    """Load the policy's tokenizer. If it has no padding token, it gets the end token as one."""
    try:
        tokenizer = AutoTokenizer.from_pretrained(spec.source)
    except (OSError, ValueError) as error:
        raise _missing(spec, error) from None
    if tokenizer.eos_token_id is None:
        raise ConfigError(f"{spec.source}: the tokenizer has no end token, so answers could never end")
    if tokenizer.pad_token_id is None:
        tokenizer.pad_token = tokenizer.eos_token
    return tokenizer


def context_length(spec: PolicySpec) -> int:
    """Return the largest number of tokens that prompt and answer may have together."""
    own = _config(spec).max_position_embeddings
    if spec.max_length and spec.max_length > own:
        raise ConfigError(f"model.max_length={spec.max_length} exceeds the context of {spec.source}, {own} tokens")
    return spec.max_length or own


def head_dim(config: PreTrainedConfig) -> int:
    """Width of an attention head."""
    return getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads


def tied_head(model: PreTrainedModel) -> dict[str, str]:
    """Return {name of the head's weight: name of the embedding it is tied to}; empty if it has a weight of its own."""
    head = model.get_output_embeddings().weight
    (own,) = (name for name, parameter in model.named_parameters() if parameter is head)
    return {} if own == HEAD else {HEAD: own}


def stop_ids(spec: PolicySpec, tokenizer: PreTrainedTokenizerBase) -> tuple[int, ...]:
    """Return the ids that end an answer: the tokenizer's end token and those of the model's generation settings."""
    own = _config(spec).eos_token_id
    listed = own if isinstance(own, list) else [own] if own is not None else []
    return tuple(sorted({tokenizer.eos_token_id, *listed}))


def load_model(spec: PolicySpec) -> PreTrainedModel:
    """Load the policy with its weights, in float32, without dropout."""
    try:
        model = AutoModelForCausalLM.from_pretrained(
            spec.source, config=_config(spec), dtype=torch.float32, attn_implementation=NAME
        )
    except (OSError, ValueError) as error:
        raise _missing(spec, error) from None
    return with_row_rules(model).eval()


def empty_model(spec: PolicySpec, dtype: torch.dtype = torch.float32) -> PreTrainedModel:
    """Return a model of the policy's architecture with arbitrary weights, for an engine before its first sync."""
    model = AutoModelForCausalLM.from_config(_config(spec), dtype=dtype, attn_implementation=NAME)
    return with_row_rules(model).eval()


def with_row_rules(model: PreTrainedModel) -> PreTrainedModel:
    """Make the rows of `model`'s linears and activations independent (qurl_ray/numerics), in place; return it."""
    name = getattr(model.config, "hidden_activation", None) or getattr(model.config, "hidden_act", None)
    make = MODULES.get(name) if name else None
    activation = type(ACT2FN[name]) if make else None
    for module in list(model.modules()):
        if type(module) is nn.Linear:
            module.__class__ = Linear
        for child_name, child in module.named_children():
            if make and type(child) is activation:
                setattr(module, child_name, make())
    return model


def _config(spec: PolicySpec) -> PreTrainedConfig:
    """Return the policy's own settings.

    Raises:
        ConfigError: the policy cannot be found, or is of a kind that cannot be trained here.
    """
    if (Path(spec.source) / "adapter_config.json").is_file():
        raise ConfigError(f"{spec.source} is a LoRA adapter, which is not supported: merge it into its base model")
    try:
        config = AutoConfig.from_pretrained(spec.source)
    except (OSError, ValueError) as error:
        raise _missing(spec, error) from None
    # Options of a transformers config differ by architecture, hence getattr.
    if any(getattr(config, part, None) for part in ("vision_config", "audio_config")):
        raise ConfigError(f"{spec.source} is a multimodal model, which is not supported: use a text-only model")
    if any((getattr(config, count, None) or 0) > 1 for count in _EXPERTS):
        raise ConfigError(f"{spec.source} is a mixture of experts, which is not supported: use a dense model")
    if getattr(config, "quantization_config", None) and not spec.quantized:
        raise ConfigError(
            f"{spec.source} is quantized already, which cannot be trained: use the checkpoint in full precision"
        )
    if getattr(config, "attn_logit_softcapping", None):
        raise ConfigError(f"{spec.source}: attn_logit_softcapping is not supported by the shared attention")
    if "longrope" in str(getattr(config, "rope_parameters", None)):
        raise ConfigError(f"{spec.source}: longrope is not supported: its angles depend on the longest of a batch")
    for option in _BEHIND_HEAD:
        if getattr(config, option, None) not in (None, 1):
            raise ConfigError(f"{spec.source}: {option}={getattr(config, option)} is not supported: it changes logits")
    for option, value in config.to_dict().items():
        if ("dropout" in option or option.endswith("pdrop")) and isinstance(value, float) and value > 0:
            raise ConfigError(f"{spec.source}: {option}={value} is not supported: engine and learner would differ")
    return config


def _missing(spec: PolicySpec, error: Exception) -> ConfigError:
    first = str(error).strip().splitlines()[0]
    return ConfigError(f"model {spec.source!r} cannot be loaded: {first}")
