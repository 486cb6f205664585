"""Unified precision flows: the learner's forward goes through the codes that the engines compute with, gradients and
all, so that what is trained is what generates (quant/unified.py)."""

from collections.abc import Iterator, Set
from contextlib import contextmanager
from dataclasses import dataclass
from types import MethodType

import torch
from torch import nn

from qurl_ray.numerics.products import linear as product
from qurl_ray.quant.formats import Format
from qurl_ray.quant.unified import Backward, unified_linear


@dataclass(frozen=True, slots=True, kw_only=True)
class UnifiedFlow:
    """How a learner computes its linears."""

    fmt: Format
    """As the engines multiply it: its weight codes bounded by what their kernel takes."""
    quantized: Set[str]
    """Names of the parameters that become codes, as the model names them."""
    backward: Backward
    emulate: bool = False
    """Whether the engines do."""


class FlowSwitch:
    """Puts the linears of `model` into a flow, for good: those of a module that a backend wraps later, too."""

    def __init__(self, model: nn.Module, flow: UnifiedFlow) -> None:
        self._flow, self._on = flow, True
        for name, module in model.named_modules():
            if f"{name}.weight" in flow.quantized:
                # On the object, so that its hooks, with which ZeRO-3 gathers the weight, still run around it.
                module.forward = MethodType(self._forward, module)

    @contextmanager
    def full_precision(self) -> Iterator[None]:
        """Inside, they compute in full precision: the shadow pass of calibrated clipping."""
        self._on = False
        try:
            yield
        finally:
            self._on = True

    def _forward(self, linear: nn.Linear, x: torch.Tensor) -> torch.Tensor:
        if not self._on:
            return product(x, linear.weight, linear.bias)
        kind = x.device.type
        if torch.is_autocast_enabled(kind):  # which does not reach into the flow: as it would do with a linear
            x = x.to(torch.get_autocast_dtype(kind))
        flow = self._flow
        return unified_linear(x, linear.weight, linear.bias, fmt=flow.fmt, backward=flow.backward, emulate=flow.emulate)
