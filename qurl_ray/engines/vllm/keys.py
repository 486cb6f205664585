"""Scales of FP8 keys and values in vLLM: measured in its attention layers, and written where its kernels read them.

vLLM has one scale for the keys of a layer and one for its values. Caches hold E4M3(x / scale). Where attention takes
queries in E4M3, too (FlashAttention 3), these have a scale of their own.
"""

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
from torch import nn
from vllm.model_executor.layers.attention import Attention

from qurl_ray.errors import EngineError
from qurl_ray.policy.kv import E4M3_MAX

Triples = dict[str, list[float]]
"""A number for the queries, keys and values of each layer, by vLLM's name of it."""

_KINDS = ("q", "k", "v")

_BACKENDS = ("CPU_ATTN", "FLASH_ATTN", "TRITON_ATTN")
"""Backends that read scales from tensors at each step: others have them as numbers in captured graphs."""


def attention_layers(model: nn.Module) -> dict[str, Any]:
    """Return the attention layers of a model by name.

    Raises:
        EngineError: one has a backend that may compute with scales of an earlier version.
    """
    layers = {name: module for name, module in model.named_modules() if isinstance(module, Attention)}
    for name, layer in layers.items():
        if (backend := layer.attn_backend.get_name()) not in _BACKENDS:
            raise EngineError(
                f"rollout.kv_cache=fp8 needs one of vLLM's backends {', '.join(_BACKENDS)}; {name} has {backend}"
            )
    return layers


def store_nearest(layers: Mapping[str, Any]) -> None:
    """Have caches on a CPU hold the nearest E4M3 values, ties to even, as those on CUDA do: vLLM's operation for CPUs
    cuts off the bits that are too many, which leaves rounded values as they are."""

    def nearest(x: torch.Tensor, scale: float) -> torch.Tensor:
        codes = (x.float() / scale).clamp_(-E4M3_MAX, E4M3_MAX).to(torch.float8_e4m3fn)
        return (codes.float() * scale).to(x.dtype)

    def update(store: Callable, layer: Any, key: torch.Tensor, value: torch.Tensor, *rest: Any) -> None:
        store(layer, nearest(key, layer._k_scale_float), nearest(value, layer._v_scale_float), *rest)

    for layer in layers.values():
        if layer.attn_backend.get_name() == "CPU_ATTN":
            layer.impl.do_kv_cache_update = partial(update, layer.impl.do_kv_cache_update)


def watch(layers: Mapping[str, Any], tokens: int) -> Callable[[], Triples]:
    """Note the largest absolute queries, keys and values of the first tokens of the next pass. Return a function that
    ends this and returns them. Scales are 1 meanwhile, whatever earlier versions had."""
    write_scales(layers, {name: [1.0, 1.0, 1.0] for name in layers})
    largest: Triples = {}

    def noting(forward: Callable, name: str, *given: Any, **named: Any) -> Any:
        if name not in largest:  # given are the layer, queries, keys, values, ...
            largest[name] = [float(part[:tokens].float().abs().max()) for part in given[1:4]]
        return forward(*given, **named)

    for name, layer in layers.items():
        layer.impl.forward = partial(noting, layer.impl.forward, name)

    def end() -> Triples:
        for layer in layers.values():
            del layer.impl.forward
        return largest

    return end


def write_scales(layers: Mapping[str, Any], scales: Triples) -> None:
    """Set the scales of these layers, in place."""
    for name, of_layer in scales.items():
        layer = layers[name]
        for kind, scale in zip(_KINDS, of_layer, strict=True):
            getattr(layer, f"_{kind}_scale").fill_(scale)
            setattr(layer, f"_{kind}_scale_float", scale)


def read_scales(layers: Mapping[str, Any]) -> Triples:
    """Return the scales with which each layer computes, from its buffers; nan where its copies of one differ."""
    scales = {}
    for name, layer in layers.items():
        copies = [(float(getattr(layer, f"_{kind}_scale")), getattr(layer, f"_{kind}_scale_float")) for kind in _KINDS]
        scales[name] = [first if first == second else float("nan") for first, second in copies]
    return scales
