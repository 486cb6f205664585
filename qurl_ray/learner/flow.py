"""Unified precision flows: the learner computes its forward pass, and its gradients, with the codes of the engines.

The network that is trained is then the network that generates (quant/unified.py). With adapters, codes may also be made
once and for good.
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
from torch import nn
from torch.autograd.function import once_differentiable

from qurl_ray.learner.noise import NoiseSchedule
from qurl_ray.numerics.products import linear as product
from qurl_ray.numerics.products import product_with
from qurl_ray.policy.adapters import CodedBase, plus_adapter
from qurl_ray.policy.forward import set_forward
from qurl_ray.quant.equalize import Factors, write_factors
from qurl_ray.quant.fingerprint import fingerprint, total_fingerprint
from qurl_ray.quant.formats import Format
from qurl_ray.quant.linear import QuantizedLinear
from qurl_ray.quant.quantize import QTensor, dequantize, quantize
from qurl_ray.quant.unified import Backward, unified_linear
from qurl_ray.quant.units import Unit
from qurl_ray.types import Adapters

EQUALIZATION = "equalization.safetensors"
"""File of a checkpoint with the factors of codes that are made once."""


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
            return unified_linear(
                as_for_a_linear(x),
                linear.weight,
                linear.bias,
                fmt=flow.fmt,
                backward=flow.backward,
                factors=self._factors.get(name, none),
                emulate=flow.emulate,
            )

        return forward


class FrozenCodes:
    """Codes in the place of the weights of `model`, made once: its linears compute with them as engines do, and have no
    gradient, but that for their inputs. An adapter of a linear stays.

    The gradient is straight-through: that of the dequantized weight, as if nothing else were rounded.

    Args:
        flow: format, units and kernels; its backward is not used.
        factors: factors of equalization with which the codes are made, by module.
        device: where the codes are held and multiplied.
    """

    def __init__(self, model: nn.Module, flow: UnifiedFlow, factors: Mapping[str, Factors], device: str) -> None:
        self.factors = factors
        self._linears: dict[str, QuantizedLinear] = {}
        none = Factors()
        for unit in flow.quantized.values():
            module, own = model.get_submodule(unit.module), factors.get(unit.module, none)
            weight = own.weight(module.get_parameter("weight").detach()).to(device)
            bias = None if module.bias is None else own.bias(module.get_parameter("bias").detach()).to(device)
            frozen = QuantizedLinear(quantize(weight, flow.fmt), bias, emulate=flow.emulate)
            self._linears[unit.weight] = frozen
            module.register_parameter("weight", None)  # frees it
            set_forward(module, partial(_frozen, codes=frozen, factors=own))
        self.record = CodedBase(
            format=flow.fmt.name,
            weight_max_code=flow.fmt.weight_max,
            names=tuple(self._linears),
            fingerprint=total_fingerprint(fingerprint(*q.parts) for _, q in self.named_codes()),
            factors=factors,
        )
        """Record of the codes, for files."""

    @property
    def parameters(self) -> int:
        """Number of weights that are codes."""
        return sum(linear.out_features * linear.in_features for linear in self._linears.values())

    def named_codes(self) -> Iterator[tuple[str, QTensor]]:
        """Yield the codes by the names of the parameters whose places they take."""
        for name, frozen in self._linears.items():
            yield name, frozen.resident()

    def save(self, folder: Path) -> None:
        """Write the factors, with which the same codes can be made again."""
        write_factors(folder / EQUALIZATION, self.factors)


@dataclass(frozen=True, slots=True, kw_only=True)
class Adaptation:
    """Training of a model's adapters alone."""

    adapters: Adapters
    base: str
    """Digest of what is not trained, which must be that of a checkpoint."""
    frozen: FrozenCodes | None = None
    """Codes that take the place of the model's weights for good; None if these are in full precision."""
    noise: NoiseSchedule | None = None
    """Noise on the gains of norms; None for none."""


def _frozen(module: nn.Module, x: torch.Tensor, *, codes: QuantizedLinear, factors: Factors) -> torch.Tensor:
    x = as_for_a_linear(x)
    with torch.autocast(x.device.type, enabled=False):
        y = factors.outputs(_FrozenProduct.apply(factors.inputs(x), codes))
    return plus_adapter(module, x, y)


def as_for_a_linear(x: torch.Tensor) -> torch.Tensor:
    """Return x in the type to which autocast, which has no effect on these products, would cast it for a linear."""
    kind = x.device.type
    return x.to(torch.get_autocast_dtype(kind)) if torch.is_autocast_enabled(kind) else x


class _FrozenProduct(torch.autograd.Function):
    """The engines' product with codes, and its gradient for x."""

    @staticmethod
    def forward(ctx, x, codes):
        ctx.codes, ctx.dtype = codes, x.dtype
        return codes(x)

    @staticmethod
    @once_differentiable
    def backward(ctx, dy):
        with torch.autocast(dy.device.type, enabled=False):
            return product_with(dy.float(), dequantize(ctx.codes.resident())).to(ctx.dtype), None
