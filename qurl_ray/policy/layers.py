"""Check that every layer of a model is of a kind that engine and learner compute, by one forward pass without data.

A model is taken because each of its layers is known, not because none is known to be bad:
- parameters belong to linears, embeddings and norms alone (not to convolutions, recurrences, experts), but for sinks;
- each layer calls the shared attention once, causally, with options that this has, and stores keys of one shape;
- sinks are those that the attention is given;
- its window is the one that the settings name;
- logits are the head's output, and the head's input the final states, as policy.logprobs computes them.
"""

from typing import Any

import torch
from torch import nn
from transformers import AttentionInterface, PreTrainedConfig, PreTrainedModel
from transformers.pytorch_utils import Conv1D

from qurl_ray.errors import ConfigError
from qurl_ray.policy.attention import unknown_options
from qurl_ray.policy.kv import MaximaRecorder
from qurl_ray.policy.settings import BEHIND_HEAD, head_dim

_TRACE = "qurl_trace"
_TOKENS = 4
_COMPUTED = {"dropout", "scaling", "sliding_window", "s_aux"}


def window_of(config: PreTrainedConfig) -> int | None:
    """Return the sliding window of the layers that have one; None if none has."""
    if not getattr(config, "sliding_window", None) or getattr(config, "use_sliding_window", True) is False:
        return None
    types = getattr(config, "layer_types", None)
    return config.sliding_window if types is None or "sliding_attention" in types else None


def has_sinks(model: PreTrainedModel) -> bool:
    """Return True if the model's attention has sinks."""
    return any("sinks" in module._parameters for module in model.modules())


def check_layers(model: PreTrainedModel, source: str) -> None:
    """Check that each layer is of a known kind.

    Args:
        model: on the meta device.

    Raises:
        ConfigError: the message names the layer, or the option that is not known.
    """
    if fault := _fault(model):
        raise ConfigError(f"{source}: {type(model).__name__} is not supported: {fault}")


def _fault(model: PreTrainedModel) -> str | None:
    config = model.config
    for name, module in model.named_modules():
        known = isinstance(module, nn.Linear | nn.Embedding | Conv1D) or "Norm" in type(module).__name__
        if not known and {leaf for leaf, _ in module.named_parameters(recurse=False)} - {"sinks"}:
            return f"{name} is a {type(module).__name__}, a kind of layer that is not known here"
    types = getattr(config, "layer_types", None) or ["full_attention"] * config.num_hidden_layers
    for index, kind in enumerate(types):
        if kind not in ("full_attention", "sliding_attention"):
            return f"layer {index} is of the kind {kind!r}, which is not known here"
    try:
        calls, logits_are_the_heads = _traced(model)
    except Exception as error:  # a model may need anything of its cache, or of its inputs
        reason = " ".join(str(error).split())
        return f"its forward pass needs more than the engine has ({type(error).__name__}: {reason})"
    if not logits_are_the_heads:
        return "its logits are not the output of its head on the final states"
    if sorted(layer for layer, _ in calls) != list(range(config.num_hidden_layers)):
        return f"{len(calls)} calls of the shared attention in {config.num_hidden_layers} layers, expected one in each"
    window = window_of(config)
    for layer, call in calls:
        expected = window if getattr(config, "layer_types", None) is None or types[layer] != "full_attention" else None
        if call["sliding_window"] != expected:
            return f"layer {layer} has the window {call['sliding_window']}, and its settings have {expected}"
        if fault := call["fault"]:
            return f"layer {layer} {fault}"
    return None


def _traced(model: PreTrainedModel) -> tuple[list[tuple[int, dict[str, Any]]], bool]:
    """Return (layer, its call) of each call of the attention in a forward pass as the engine makes it, and True if the
    logits are the head's output on the final states."""
    config, head = model.config, model.get_output_embeddings()
    seen: dict[str, Any] = {}
    hooks = [
        model.base_model.register_forward_hook(lambda _, __, out: seen.update(states=out.last_hidden_state)),
        head.register_forward_hook(lambda _, given, out: seen.update(given=given[0], out=out)),
    ]
    before, config._attn_implementation = config._attn_implementation, _TRACE
    try:
        with torch.no_grad(), torch.device("meta"):
            ids, places = torch.zeros(1, _TOKENS, dtype=torch.int64), torch.arange(_TOKENS)[None]
            cache: Any = MaximaRecorder([0] * (_TOKENS + 1))
            logits = model(input_ids=ids, position_ids=places, past_key_values=cache).logits
    finally:
        config._attn_implementation = before
        for hook in hooks:
            hook.remove()
    calls = [call for module in model.modules() for call in vars(module).pop(_TRACE, ())]
    scaled = any(getattr(config, option, None) == 1 for option in BEHIND_HEAD)  # by 1, which changes nothing
    same = logits is seen.get("out") or scaled
    return calls, same and {"given", "states"} <= seen.keys() and _whole(seen["given"]) is _whole(seen["states"])


def _whole(tensor: torch.Tensor) -> torch.Tensor:
    """Return the tensor that this one is a view of, or itself."""
    return tensor if tensor._base is None else tensor._base


def _trace(
    module: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: Any = None, **options: Any
) -> tuple[torch.Tensor, None]:
    """Take the place of an attention, and note the call in its module."""
    config = module.config
    heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
    unknown = unknown_options({name: given for name, given in options.items() if name not in _COMPUTED})
    fault = None
    if mask is not None:
        fault = "has a mask of its own"
    elif not getattr(module, "is_causal", True) or options.get("is_causal") is False:
        fault = "is not causal"
    elif options.get("position_ids") is None:
        fault = "does not tell its attention the positions"
    elif options.get("s_aux") is not module._parameters.get("sinks"):
        fault = "has sinks that its attention is not given, or others"
    elif unknown:
        fault = f"gives its attention an option that is not known here: {', '.join(unknown)}"
    elif (key.shape[1], key.shape[3], value.shape[3]) != (heads, head_dim(config), head_dim(config)):
        fault = f"has keys and values of {list(key.shape[1:])} and {list(value.shape[1:])}, unlike the cache"
    call: dict[str, Any] = {"sliding_window": options.get("sliding_window"), "fault": fault}
    vars(module).setdefault(_TRACE, []).append((module.layer_idx, call))
    return query.new_zeros(query.shape[0], query.shape[2], query.shape[1], value.shape[3]), None


AttentionInterface.register(_TRACE, _trace)
