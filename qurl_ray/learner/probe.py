"""The learner's forward pass with the codes that the engines hold: the reference for a probe of an engine.

The codes are computed again from the learner's parameters, module by module: quantization is deterministic, and a
sharded parameter exists only while its module computes. This detects errors that fingerprints of resident codes cannot:
a kernel that multiplies wrongly, and an engine that attends to keys of the previous weights.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from qurl_ray.learner.protocol import EnginePrecision
from qurl_ray.policy.adapters import plus_adapter
from qurl_ray.policy.attention import stored_as
from qurl_ray.policy.forward import Forward, computing_with
from qurl_ray.policy.kv import MaximaRecorder, calibration_ids, rounded
from qurl_ray.quant.equalize import Factors
from qurl_ray.quant.formats import Format
from qurl_ray.quant.linear import reference_linear
from qurl_ray.quant.quantize import QTensor, quantize


@contextmanager
def through_codes(
    model: PreTrainedModel,
    precision: EnginePrecision,
    pass_over: Callable[[Sequence[int]], object],
    frozen: Mapping[str, QTensor] | None = None,
) -> Iterator[None]:
    """Context in which `model` computes like an engine of this precision. No gradients; no parameter is changed.

    Args:
        pass_over: callback by which the model's owner runs it on one sequence of token ids. It is used to measure the
            scales of an fp8 cache.
        frozen: codes that take the place of weights for good, by the names of the parameters.
    """
    units = {unit.module: unit for unit in precision.quantized.values()} if precision.fmt else {}
    dtype = getattr(torch, precision.unquantized)
    forwards: list[tuple[nn.Module, Forward]] = []
    for name, module in model.named_modules():
        if precision.fmt and name in units:
            codes = (frozen or {}).get(units[name].weight)
            own = precision.factors.get(name, Factors())
            forwards.append((module, _quantized(precision.fmt, dtype, own, codes)))
        elif dtype != torch.float32 and {f"{name}.{leaf}" for leaf, _ in module.named_parameters(recurse=False)} - (
            precision.exact
        ):
            # Factors are powers of two, and make no difference here.
            forwards.append((module, _rounded(module.forward, dtype)))
    with computing_with(forwards):
        if precision.kv_cache == "full":
            yield
            return
        ids = calibration_ids(model.config)
        recorder = MaximaRecorder(ids, per_layer=precision.kv_scales == "layer")
        with stored_as(recorder.update):
            pass_over(ids)
        scales = recorder.scales()
        with stored_as(lambda key, value, layer: rounded(key, value, scales[layer])):
            yield


def _quantized(fmt: Format, unquantized: torch.dtype, factors: Factors, frozen: QTensor | None) -> Forward:
    def forward(linear: nn.Linear, x: torch.Tensor) -> torch.Tensor:
        bias = None if linear.bias is None else factors.bias(linear.bias).to(unquantized).float()
        with torch.autocast(x.device.type, enabled=False):
            q = frozen or quantize(factors.weight(linear.weight), fmt)
            y = factors.outputs(reference_linear(factors.inputs(x.float()), q, bias))
            return plus_adapter(linear, x.float(), y)

    return forward


def _rounded(original: Callable, dtype: torch.dtype) -> Forward:
    def forward(module: nn.Module, *args: Any, **options: Any) -> Any:
        if type(module) is nn.Embedding:  # a lookup: only the rows looked up have to be rounded
            return original(*args).to(dtype).float()
        kept = {name: parameter.data for name, parameter in module.named_parameters(recurse=False)}
        for name, data in kept.items():
            getattr(module, name).data = data.to(dtype).float()
        try:
            return original(*args, **options)
        finally:
            for name, data in kept.items():
                getattr(module, name).data = data

    return forward
