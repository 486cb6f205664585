"""Float32 products on a CPU whose rows depend on themselves alone, by the rules of numerics.selfcheck.

Engine and learner call these in place of torch's. Elsewhere, and in other types, they are torch's.
"""

from typing import Any

import torch
from torch import nn
from torch.autograd.function import once_differentiable
from torch.nn import functional
from torch.nn.functional import pad

from qurl_ray.numerics.rules import Rule
from qurl_ray.numerics.selfcheck import linear_rule, onednn_product


def linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """x · weightᵀ + bias, [..., K] to [..., N]. On a CPU and in float32, each row's bits depend on that row alone."""
    kind = x.device.type
    if kind != "cpu" or x.dtype != torch.float32 or weight.dtype != torch.float32 or torch.is_autocast_enabled(kind):
        return functional.linear(x, weight, bias)
    rule = linear_rule(weight.shape[1], weight.shape[0])
    if rule is None or not x.numel():
        return functional.linear(x, weight, bias)
    rows = x.numel() // x.shape[-1]
    missing, narrow = rule.padded(rows) - rows, max(0, rule.outputs - weight.shape[0])
    if rule.kernel == "mkl" and not missing and not narrow:
        return functional.linear(x, weight, bias)
    x_MK = x.reshape(-1, x.shape[-1])
    if missing:
        x_MK = pad(x_MK, (0, 0, 0, missing))
    if narrow:
        weight = pad(weight, (0, 0, 0, narrow))
        bias = None if bias is None else pad(bias, (0, narrow))
    multiply = _onednn if rule.kernel == "onednn" else functional.linear
    y_MN = multiply(x_MK, weight, bias)
    return y_MN[:rows, : y_MN.shape[1] - narrow].view(*x.shape[:-1], -1)


def _onednn(x_MK: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    if torch.is_grad_enabled() and any(part is not None and part.requires_grad for part in (x_MK, weight, bias)):
        return _OneDnnLinear.apply(x_MK, weight, bias)
    return onednn_product(x_MK, weight, bias)


class _OneDnnLinear(torch.autograd.Function):
    """oneDNN's product with a gradient by oneDNN: on AMD about twice as fast as MKL's (docs/results.md)."""

    @staticmethod
    def forward(ctx: Any, x_MK: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        # The parameter itself and not a copy: a sharded one is freed after the forward and gathered for the backward.
        ctx.save_for_backward(x_MK, weight)
        return onednn_product(x_MK, weight, bias)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy_MN: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        x_MK, weight = ctx.saved_tensors
        needs_dx, needs_dw, needs_db = ctx.needs_input_grad
        dx = onednn_product(dy_MN, weight.t()) if needs_dx else None
        dw = onednn_product(dy_MN.t(), x_MK.t()) if needs_dw else None
        return dx, dw, dy_MN.sum(dim=0) if needs_db else None


class Linear(nn.Linear):
    """An nn.Linear that computes by `linear`."""

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        return linear(input, self.weight, self.bias)


def queries_to_add(rule: Rule | None, queries: int, heads_per_key: int) -> int:
    """Queries that a sequence lacks, so that the rows of its products satisfy the rule.

    Args:
        heads_per_key: query heads that share a key head, which are rows of one product.
    """
    if rule is None:
        return 0
    added = 0
    while rule.padded(heads_per_key * (queries + added)) != heads_per_key * (queries + added):
        added += 1
    return added
