"""Unified precision flows: the learner computes its forward pass, and its gradients, with the codes of the engines.

The network that is trained is then the network that generates (quant/unified.py).
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import nn

from qurl_ray.numerics.products import linear as product
from qurl_ray.policy.forward import set_forward
from qurl_ray.quant.equalize import Factors
from qurl_ray.quant.formats import Format
from qurl_ray.quant.unified import Backward, unified_linear
from qurl_ray.quant.units import Unit


@dataclass(frozen=True, slots=True, kw_only=True)
class UnifiedFlow:
    """Settings with which a learner computes its linear layers in a unified flow."""

    fmt: Format
    """Format of the codes, as the engines use it: weight codes are bounded by what their kernel takes."""
    quantized: Mapping[str, Unit]
    """Units that are quantized, by the names of their parameters."""
    backward: Backward
    emulate: bool = False
    """True if the engines emulate the quantized linear instead of using a kernel; the learner then does the same."""
    equalized: bool = False
    """True if these codes are made with the learner's factors of equalization."""


class FlowSwitch:
    """Makes the linears of `model` compute in a unified flow, permanently, also if a backend wraps the model later.

    Args:
        factors: present factors of equalization, by module; read at every call.
    """

    def __init__(self, model: nn.Module, flow: UnifiedFlow, factors: Mapping[str, Factors]) -> None:
        self._flow, self._factors, self._on = flow, factors, True
        for unit in flow.quantized.values():
            set_forward(model.get_submodule(unit.module), self._forward_of(unit.module))

    @contextmanager
    def full_precision(self) -> Iterator[None]:
        """Context in which the linears compute in full precision, as in the shadow pass of calibrated clipping."""
        self._on = False
        try:
            yield
        finally:
            self._on = True

    def _forward_of(self, name: str) -> Callable[[nn.Linear, torch.Tensor], torch.Tensor]:
        flow, none = self._flow, Factors()

        def forward(linear: nn.Linear, x: torch.Tensor) -> torch.Tensor:
            if not self._on:
                return product(x, linear.weight, linear.bias)
            kind = x.device.type
            if torch.is_autocast_enabled(kind):  # it has no effect in the flow: cast x as it would for a linear
                x = x.to(torch.get_autocast_dtype(kind))
            return unified_linear(
                x,
                linear.weight,
                linear.bias,
                fmt=flow.fmt,
                backward=flow.backward,
                factors=self._factors.get(name, none),
                emulate=flow.emulate,
            )

        return forward
