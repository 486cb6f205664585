"""The learner's forward pass with the codes that the engines hold: the reference for a probe of an engine.

The codes are computed again from the learner's parameters, module by module: quantization is deterministic, and a
sharded parameter exists only while its module computes. This detects errors that fingerprints of resident codes cannot:
a kernel that multiplies wrongly, and an engine that attends to keys of the previous weights.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from types import MethodType
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from qurl_ray.learner.protocol import EnginePrecision
from qurl_ray.policy.kv import MaximaRecorder, calibration_ids, rounded
from qurl_ray.quant.equalize import Factors
from qurl_ray.quant.formats import Format
from qurl_ray.quant.linear import reference_linear
from qurl_ray.quant.quantize import quantize


@contextmanager
def through_codes(
    model: PreTrainedModel, precision: EnginePrecision, pass_over: Callable[[Sequence[int]], object]
) -> Iterator[None]:
    """Context in which `model` computes like an engine of this precision. No gradients; no parameter is changed.

    Args:
        pass_over: callback by which the model's owner runs it on one sequence of token ids. It is used to measure the
            scales of an fp8 cache.
    """
    with _through_weights(model, precision):
        if precision.kv_cache == "full":
            yield
            return
        ids = calibration_ids(model.config)
        recorder = MaximaRecorder(ids)
        with _attending(model, lambda layer: partial(recorder.update, layer_idx=layer)):
            pass_over(ids)
        scales = recorder.scales()
        with _attending(model, lambda layer: partial(rounded, scales=scales[layer])):
            yield


@contextmanager
def _attending(model: nn.Module, as_stored: Callable[[int], Callable]) -> Iterator[None]:
    """Context in which attention of layer i passes keys and values through as_stored(i) (policy.attention)."""
    layers: list[Any] = [module for module in model.modules() if isinstance(getattr(module, "layer_idx", None), int)]
    for module in layers:  # some are whole blocks, which do not compute attention themselves
        module.as_stored = as_stored(module.layer_idx)
    try:
        yield
    finally:
        for module in layers:
            del module.as_stored


@contextmanager
def _through_weights(model: nn.Module, precision: EnginePrecision) -> Iterator[None]:
    changed = []
    for name, module in model.named_modules():
        if not any(True for _ in module.parameters(recurse=False)):
            continue
        if precision.fmt and f"{name}.weight" in precision.quantized:
            factors = precision.factors.get(name, Factors())
            forward = _quantized(precision.fmt, getattr(torch, precision.unquantized), factors)
        elif precision.unquantized != "float32":  # factors are powers of two, and make no difference here
            forward = _rounded(module.forward, getattr(torch, precision.unquantized))
        else:
            continue
        changed.append((module, module.__dict__.get("forward")))
        module.forward = MethodType(forward, module)  # set on the instance: its hooks still run around it
    try:
        yield
    finally:
        for module, before in changed:
            del module.forward
            if before is not None:  # it was set by a backend
                module.forward = before


def _quantized(fmt: Format, unquantized: torch.dtype, factors: Factors) -> Callable:
    def forward(linear: nn.Linear, x: torch.Tensor) -> torch.Tensor:
        bias = None if linear.bias is None else factors.bias(linear.bias).to(unquantized).float()
        with torch.autocast(x.device.type, enabled=False):
            q = quantize(factors.weight(linear.weight), fmt)
            return factors.outputs(reference_linear(factors.inputs(x.float()), q, bias))

    return forward


def _rounded(original: Callable, dtype: torch.dtype) -> Callable:
    def forward(module: nn.Module, *args: torch.Tensor) -> torch.Tensor:
        if type(module) is nn.Embedding:  # a lookup: only the rows looked up have to be rounded
            return original(*args).to(dtype).float()
        kept = {name: parameter.data for name, parameter in module.named_parameters(recurse=False)}
        for name, data in kept.items():
            getattr(module, name).data = data.to(dtype).float()
        try:
            return original(*args)
        finally:
            for name, data in kept.items():
                getattr(module, name).data = data

    return forward
