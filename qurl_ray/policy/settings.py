"""Checks of a model's settings and tokenizer: whether they fit together, and whether it can be trained here."""

import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from transformers import PreTrainedConfig, PreTrainedTokenizerBase
from transformers.activations import ACT2FN

from qurl_ray.errors import ConfigError, QurlError
from qurl_ray.policy.experts import GPT_OSS, mixture_of
from qurl_ray.types import PolicySpec

MXFP4 = "mxfp4"
BEHIND_HEAD = ("final_logit_softcapping", "logits_scaling", "logit_scale", "lm_head_multiplier")
"""Options by which a model changes logits after its head: here, log-probs are computed from the head's output."""
# Sizes of an architecture. transformers has other names for some of them, and a model may lack the last three.
_SIZES = (
    *("vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads", "max_position_embeddings"),
    *("num_key_value_heads", "head_dim", "intermediate_size"),
)
_REQUIRED = 5
_SPECIAL = ("bos_token_id", "eos_token_id", "pad_token_id")
_ANSWER = "qurl answer 4b1f"
"""Stand-in for the text of a turn."""


def trainable(config: PreTrainedConfig, spec: PolicySpec) -> PreTrainedConfig:
    """Return the settings after checking that such a model can be trained here.

    Raises:
        ConfigError: the message names the setting that stands against it.
    """
    # Options of a transformers config differ by architecture, hence getattr.
    if any(getattr(config, part, None) for part in ("vision_config", "audio_config")):
        raise ConfigError(f"{spec.source} is a multimodal model, which is not supported: use a text-only model")
    try:
        mixture_of(config)
    except ConfigError as error:
        raise ConfigError(f"{spec.source}: {error}") from None
    _check_sizes(config, spec.source)
    if (quantization := getattr(config, "quantization_config", None)) and not spec.quantized:
        if (config.model_type, quantization.get("quant_method")) != (GPT_OSS, MXFP4):
            raise ConfigError(
                f"{spec.source} is quantized already, which cannot be trained: use the checkpoint in full precision"
            )
        del config.quantization_config  # weights are dequantized when they are read (policy.stacked)
    if getattr(config, "attn_logit_softcapping", None):
        raise ConfigError(f"{spec.source}: attn_logit_softcapping is not supported by the shared attention")
    if "longrope" in str(getattr(config, "rope_parameters", None)):
        raise ConfigError(f"{spec.source}: longrope is not supported: its angles depend on the longest of a batch")
    for option in BEHIND_HEAD:
        if getattr(config, option, None) not in (None, 1):
            raise ConfigError(f"{spec.source}: {option}={getattr(config, option)} is not supported: it changes logits")
    for option, value in config.to_dict().items():
        if ("dropout" in option or option.endswith("pdrop")) and isinstance(value, float) and value > 0:
            raise ConfigError(f"{spec.source}: {option}={value} is not supported: engine and learner would differ")
    return config


def _check_sizes(config: PreTrainedConfig, source: str) -> None:
    """Raise ConfigError if sizes contradict each other, or special tokens or the activation function do not exist."""
    for place, key in enumerate(_SIZES):
        size = getattr(config, key, None)
        if size is None and place >= _REQUIRED:
            continue
        if not isinstance(size, int) or isinstance(size, bool) or size < 1:
            raise ConfigError(f"{source}: {key} is {size!r}, expected a whole number above 0")
    heads, width = config.num_attention_heads, head_dim(config)
    groups = getattr(config, "num_key_value_heads", None) or heads
    if heads % groups:
        raise ConfigError(f"{source}: num_attention_heads={heads} is no multiple of num_key_value_heads={groups}")
    if config.hidden_size % heads and width == config.hidden_size // heads:  # it is not a width of its own
        raise ConfigError(f"{source}: hidden_size={config.hidden_size} is no multiple of num_attention_heads={heads}")
    activation = activation_of(config)
    if activation not in (None, *ACT2FN):
        raise ConfigError(f"{source}: the activation function {activation!r} is not known to transformers")
    for key in _SPECIAL:
        if hasattr(config, key):
            setattr(config, key, existing_ids(getattr(config, key), f"{source}: {key}", config))


def existing_ids(given: Any, name: str, config: PreTrainedConfig) -> int | list[int] | None:
    """Return the id, or the ids, of a setting that names special tokens. Ids below 0 mean that there is none, as the -1
    of some settings on the hub: an embedding would take it for its last row, which would then never be trained.

    Raises:
        ConfigError: there is no such id; `name` names the setting in the message.
    """
    ids = given if isinstance(given, list) else [given]
    for token in ids:
        if token is not None and (type(token) is not int or token >= config.vocab_size):
            raise ConfigError(f"{name} is {given!r}, and vocab_size is {config.vocab_size}")
    kept = [token for token in ids if token is not None and token >= 0]
    return kept if isinstance(given, list) and kept else next(iter(kept), None)


def turn_end(tokenizer: PreTrainedTokenizerBase) -> int | None:
    """Return the token that the chat template writes after a turn of the assistant, such as <|im_end|>; None if there
    is no template, or it writes text there that is no token of its own."""
    turns = [("user", "1"), ("assistant", _ANSWER), ("user", "2")]
    try:
        text = tokenizer.apply_chat_template([{"role": r, "content": c} for r, c in turns], tokenize=False)
    except Exception:  # there is no template, or it takes no such turns: it is a program, which may raise anything
        return None
    _, answer, after = text.partition(_ANSWER)
    added = tokenizer.get_added_vocab()  # no text is encoded here: that starts threads, which stay
    ends = [token for token in added if answer and after.lstrip().startswith(token)]
    return added[max(ends, key=len)] if ends else None


def activation_of(config: PreTrainedConfig) -> str | None:
    """Return the name of the activation function of the MLPs; None if the settings name none."""
    return getattr(config, "hidden_activation", None) or getattr(config, "hidden_act", None)


def fitting(tokenizer: PreTrainedTokenizerBase, config: PreTrainedConfig, source: str) -> PreTrainedTokenizerBase:
    """Return the tokenizer, with a padding token, after checking that it fits the model.

    Args:
        source: name of the policy for messages.

    Raises:
        ConfigError: the tokenizer is empty, has ids beyond the embedding, or no end token.
    """
    ids = tokenizer.get_vocab()
    # Without its files, some classes make a tokenizer of special tokens alone. No text is encoded to find out: that
    # starts threads, which stay.
    if all(re.fullmatch("<.*>", token) for token in ids.keys() - tokenizer.get_added_vocab().keys()):
        raise ConfigError(f"{source}: the tokenizer is empty, it knows no text: is tokenizer.json missing?")
    last = max(ids, key=ids.__getitem__)
    if ids[last] >= config.vocab_size:
        raise ConfigError(
            f"{source}: the tokenizer gives {last!r} the id {ids[last]}, and the embedding has {config.vocab_size} "
            "rows (vocab_size): is it the tokenizer of another model?"
        )
    if tokenizer.eos_token_id is None:
        raise ConfigError(f"{source}: the tokenizer has no end token, so answers could never end")
    if tokenizer.pad_token_id is None:
        tokenizer.pad_token = tokenizer.eos_token
    return tokenizer


def head_dim(config: PreTrainedConfig) -> int:
    """Width of an attention head."""
    return getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads


@contextmanager
def reading(source: str) -> Iterator[None]:
    """Turn whatever transformers, tokenizers and the hub raise on a policy that is damaged or absent into a ConfigError
    with its name and the reason."""
    try:
        yield
    except QurlError:
        raise
    except Exception as error:
        kind = "" if isinstance(error, OSError | ValueError) else f"{type(error).__name__}: "
        reason = re.split(r"(?<!:)\n", str(error).strip())[0]  # advice follows
        raise ConfigError(f"model {source!r} cannot be loaded: {kind}{' '.join(reason.split())}") from error
