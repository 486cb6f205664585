"""Update-aware quantization (QuRL, https://arxiv.org/abs/2602.13953): W X = (W / s)(s X).

The weights of every linear that a norm feeds are divided by s, and the norm's gain is multiplied by s. The network
computes the same, but one optimizer step moves the smaller weights, and so their codes, s times as far. This is done
once before training, on float32 masters only, and undone when the policy is saved in full precision.
"""

from collections.abc import Iterable, Iterator, Mapping

import torch
from torch import nn

from qurl_ray.errors import QuantizationError
from qurl_ray.quant.units import Reader, find_sites

_FOLDED: dict[str, tuple[Reader, ...]] = {"qkv": ("self_attn",), "qkv+mlp": ("self_attn", "mlp")}


@torch.no_grad()
def fold(model: nn.Module, scale: float, layers: str = "qkv+mlp") -> None:
    """Divide the norm-fed weights W by s = `scale` and multiply their norms' gains by it, in place. Biases are kept.

    A norm that multiplies by w gets s·w; one that multiplies by 1 + w (Gemma) gets s·(1 + w) − 1 = s·w + (s − 1).
    """
    for name, offset in folded_offsets(model, layers).items():
        weight = model.get_parameter(name).data
        if offset is None:
            weight.div_(scale)
        else:
            weight.mul_(scale).add_(offset * (scale - 1))


def folded_offsets(model: nn.Module, layers: str = "qkv+mlp") -> dict[str, int | None]:
    """Return the parameters that `fold` changes, by name, in the model's order: the offset of a norm's gain, None for a
    linear's weight. The model may be without weights.

    Raises:
        QuantizationError: the architecture is not known, or the weights are in less than float32.
    """
    try:
        sites = find_sites(model, _FOLDED[layers])
    except QuantizationError as error:
        raise _refusal(str(error)) from None
    offsets: dict[str, int | None] = {}
    for site in sites:
        offsets[f"{site.writer}.weight"] = site.offset
        offsets |= {unit.weight: None for unit in site.readers} | {f"{name}.weight": None for name in site.exact}
    dtypes = {model.get_parameter(name).dtype for name in offsets}
    if not dtypes <= {torch.float32, torch.float64}:
        raise _refusal(
            f"its weights are {', '.join(map(str, dtypes))}, but W / s must not be rounded below float32 "
            "(bfloat16 would change 5 % of the INT8 codes): load float32 masters"
        )
    return offsets


def unfolded(
    parameters: Iterable[tuple[str, torch.Tensor]], offsets: Mapping[str, int | None], scale: float
) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield parameters as they were before `fold`: bit for bit if s is a power of two, else within 1 ulp.

    A gain of Gemma's is restored within 1 ulp of 1 + w for any s: its small w loses bits while it contains s − 1.

    Args:
        offsets: result of `folded_offsets`.
    """
    for name, parameter in parameters:
        if name in offsets:
            offset = offsets[name]
            value = parameter.detach()
            parameter = value * scale if offset is None else (value - offset * (scale - 1)) / scale
        yield name, parameter


def _refusal(reason: str) -> QuantizationError:
    return QuantizationError(f"UAQ cannot fold this model (set quantization.uaq_scale=1 to go without): {reason}")
