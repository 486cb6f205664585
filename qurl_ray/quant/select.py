"""The only list of what is quantized. Learner, sync and engines all use it."""

import re
from collections.abc import Sequence

from torch import nn

from qurl_ray.errors import QuantizationError
from qurl_ray.quant.linear import QuantizedLinear


def quantized_linears(model: nn.Module, keep: Sequence[str]) -> list[str]:
    """Return names of the linears to quantize, in the model's order: all but those that a pattern of `keep` matches.

    Patterns are searched in "<module name>.weight".

    Raises:
        QuantizationError: nothing is left to quantize.
    """
    kept = re.compile("|".join(f"(?:{pattern})" for pattern in keep)) if keep else None
    names = [
        name
        for name, module in model.named_modules()
        if isinstance(module, nn.Linear | QuantizedLinear) and not (kept and kept.search(f"{name}.weight"))
    ]
    if not names:
        raise QuantizationError(
            f"{type(model).__name__} has no linear to quantize outside quantization.keep={list(keep)}"
        )
    return names


def quantized_parameters(model: nn.Module, keep: Sequence[str]) -> set[str]:
    """Return the same selection as names of parameters, which a sync sends."""
    return {f"{name}.weight" for name in quantized_linears(model, keep)}
