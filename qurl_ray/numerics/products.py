"""Float32 products on a CPU, in which each row depends on that row alone, by the rules of numerics.selfcheck.

Engine and learner call these functions in place of torch's. On other devices and for other types, they call torch's.
"""

from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from torch import nn
from torch.autograd.function import once_differentiable
from torch.nn import functional
from torch.nn.functional import pad

from qurl_ray.errors import StaleWeights
from qurl_ray.numerics.processor import cpuinfo
from qurl_ray.numerics.rules import Rule
from qurl_ray.numerics.selfcheck import Multiply, linear_rule, onednn_packed, onednn_product

PACK_FLOATS_AFTER = 48
"""Calls after which a weight is packed for oneDNN: packing it and reading it back takes as long as that many calls save
(docs/LOG.md)."""
_ZEN_4 = "25"
"""Family of AMD's Zen 3, which has no AVX-512, and Zen 4."""
_NOTHING = Rule(kernel="mkl")
"""Rule of a product that needs no special treatment."""


def linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """Return x · weightᵀ + bias, [..., K] to [..., N]. In float32 on a CPU, a row's bits depend on that row alone."""
    rule = _rule(x, weight)
    if rule is None or rule == _NOTHING or not x.numel():
        return functional.linear(x, weight, bias)
    outputs = len(weight)
    multiply = _onednn if rule.kernel == "onednn" else functional.linear
    weight, bias = _widened(weight, bias, rule)
    return _of_enough_rows(x, rule, lambda x_MK: multiply(x_MK, weight, bias))[..., :outputs]


def bound(weight: torch.Tensor, bias: torch.Tensor | None) -> Callable[[torch.Tensor], torch.Tensor]:
    """Return `linear` with this weight, as a function: the same bits, no gradient, faster if it is called often.

    It holds a copy of a float32 weight on a CPU: from the first call on, if the rule asks for a wider one, and from
    the PACK_FLOATS_AFTER-th on in oneDNN's order. Calls raise StaleWeights if that copy differs from the weight, or a
    product with it has other bits.
    """
    rule = _rule(weight, weight)
    if rule is None or rule == _NOTHING:
        return lambda x: functional.linear(x, weight, bias)
    outputs = len(weight)
    wide, wide_bias = _widened(weight, bias, rule)
    if rule.kernel == "mkl":
        return lambda x: _of_enough_rows(x, rule, lambda rows: functional.linear(rows, wide, wide_bias))[..., :outputs]
    once = _PackedLater(wide, wide_bias)
    return lambda x: _of_enough_rows(x, rule, once)[..., :outputs]


class _PackedLater:
    """oneDNN's product with a weight that is brought into oneDNN's order once it was used often enough."""

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None) -> None:
        self._weight, self._bias, self._calls = weight, bias, 0

    def __call__(self, x_MK: torch.Tensor) -> torch.Tensor:
        y_MN = onednn_product(x_MK, self._weight, self._bias)
        self._calls += 1
        if self._calls == PACK_FLOATS_AFTER:
            packed = onednn_packed(self._weight)
            alike = torch.equal(packed.to_dense(), self._weight)
            if not (alike and torch.equal(onednn_product(x_MK, packed, self._bias), y_MN)):
                shape = tuple(self._weight.shape)
                raise StaleWeights(f"a weight of {shape} is another one, or gives other products, in oneDNN's order")
            self._weight = packed
        return y_MN


def _rule(x: torch.Tensor, weight: torch.Tensor) -> Rule | None:
    """Return the product's rule; None if there is none or torch's own product is to be used."""
    if torch.compiler.is_compiling():  # the compiler chooses the product, and no bits are promised
        return None
    kind = x.device.type
    if kind != "cpu" or x.dtype != torch.float32 or weight.dtype != torch.float32 or torch.is_autocast_enabled(kind):
        return None
    return linear_rule(weight.shape[1], weight.shape[0])


def _widened(weight: torch.Tensor, bias: torch.Tensor | None, rule: Rule) -> tuple[torch.Tensor, torch.Tensor | None]:
    narrow = rule.outputs - len(weight)
    if narrow <= 0:
        return weight, bias
    return pad(weight, (0, 0, 0, narrow)), None if bias is None else pad(bias, (0, narrow))


def _of_enough_rows(x: torch.Tensor, rule: Rule, multiply: Callable[[torch.Tensor], torch.Tensor]) -> torch.Tensor:
    """Return multiply(x), [..., K] to [..., N], with rows of zeros added as the rule requires."""
    x_MK = x.reshape(-1, x.shape[-1])
    rows = len(x_MK)
    if missing := rule.padded(rows) - rows:
        x_MK = pad(x_MK, (0, 0, 0, missing))
    y_MN = multiply(x_MK)[:rows]
    return y_MN.view(*x.shape[:-1], y_MN.shape[1])


def _onednn(x_MK: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    if torch.is_grad_enabled() and any(part is not None and part.requires_grad for part in (x_MK, weight, bias)):
        return _OneDnnLinear.apply(x_MK, weight, bias)
    return onednn_product(x_MK, weight, bias)


@cache
def _gradient_products() -> tuple[Multiply, Multiply]:
    """Return the products for the gradients of inputs and of weights. On AMD, MKL has vectors of 256 bits alone: oneDNN
    is twice as fast where 512 are computed at once, and on Zen 4, which does so in two steps, 1.1 times for inputs; for
    weights MKL is 1.1 times as fast there, and 1.4 to 2 times with AVX2, as it copies no factor (docs/LOG.md). The
    processor decides, not a measurement: a resumed run has the same gradients."""
    if torch.backends.cpu.get_cpu_capability() != "AVX512":
        return functional.linear, functional.linear
    in_two_steps = cpuinfo().get("cpu family") == _ZEN_4
    return onednn_product, (functional.linear if in_two_steps else onednn_product)


def product_with(dy: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """Return dy · weight, [..., N] and [N, K] to [..., K], as gradients of inputs are computed: by the faster library.
    Both are float32."""
    if dy.device.type != "cpu":
        return dy @ weight
    of_inputs, _ = _gradient_products()
    return of_inputs(dy, weight.t())


class _OneDnnLinear(torch.autograd.Function):
    """oneDNN's product, with a gradient by the faster library."""

    @staticmethod
    def forward(ctx: Any, x_MK: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        # The parameter itself, not a copy: a sharded one is freed after the forward and gathered for the backward pass.
        ctx.save_for_backward(x_MK, weight)
        return onednn_product(x_MK, weight, bias)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy_MN: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        x_MK, weight = ctx.saved_tensors
        needs_dx, needs_dw, needs_db = ctx.needs_input_grad
        of_inputs, of_weights = _gradient_products()
        dx = of_inputs(dy_MN, weight.t()) if needs_dx else None
        dw = of_weights(dy_MN.t(), x_MK.t()) if needs_dw else None
        return dx, dw, dy_MN.sum(dim=0) if needs_db else None


class Linear(nn.Linear):
    """An nn.Linear that computes with the function `linear`."""

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        return linear(input, self.weight, self.bias)


class ExactLinear(Linear):
    """A linear that is never quantized."""


ADAPTER_FACTORS = ("lora_A", "lora_B")
"""Names of an adapter's matrices in their linear, as PEFT has them."""


class AdapterFactor(ExactLinear):
    """One of the two matrices of a LoRA adapter."""

    scaling: float
    """Factor on the adapter's result, of the second matrix."""


def queries_to_add(rule: Rule | None, queries: int, heads_per_key: int, products: int) -> int:
    """Number of queries to add to a sequence, so that the rows of its products satisfy the rule.

    Args:
        heads_per_key: number of query heads that share a key head; they are rows of one product.
        products: number of products of a call. A single product is computed in as many equal pieces as the rule asks.
    """
    if rule is None:
        return 0
    added, pieces = 0, rule.batch if products == 1 else 1
    while (rows := heads_per_key * (queries + added)) % pieces or rule.padded(rows // pieces) != rows // pieces:
        added += 1
    return added
