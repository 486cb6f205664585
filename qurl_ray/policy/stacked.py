"""Experts of gpt-oss as its checkpoints hold them: one tensor for all of a layer, as floats or as MXFP4.

| tensor | shape, E experts, states of d values, hidden layers of f | of expert e |
|---|---|---|
| gate_up_proj | [E, d, 2 f] | columns 2 i: row i of gate_proj; columns 2 i + 1: of up_proj |
| gate_up_proj_bias | [E, 2 f] | likewise |
| down_proj, down_proj_bias | [E, f, d], [E, d] | the transposed weight; the bias |

In MXFP4 (OCP Microscaling Formats 1.0), a weight is two tensors of bytes: `…_blocks` [E, outputs, inputs / 32, 16], two
codes of E2M1 in a byte, the first in the lower half, and `…_scales` [E, outputs, inputs / 32], the exponents of powers
of two with a bias of 127. It is dequantized when it is read: exactly, as each value has two bits of mantissa.
"""

import re
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass

import torch
from transformers import PreTrainedConfig

from qurl_ray.policy.experts import GPT_OSS, mixture_of, stored_name
from qurl_ray.quant.elements import E2M1

BLOCKS, SCALES = "_blocks", "_scales"
"""Added to the name of a weight for the two tensors of MXFP4."""
_BLOCK = 32
_NAME = re.compile(r"(.*\.mlp\.experts\.)(\d+)\.(gate|up|down)_proj\.(weight|bias)")


@dataclass(frozen=True, slots=True, kw_only=True)
class StackedPart:
    """Where a parameter of one expert lies in the tensor of all experts of its layer."""

    key: str
    """Name of that tensor."""
    expert: int
    first: int
    step: int
    """Its rows are every `step`-th of the transposed tensor, from this one on."""
    transposed: bool
    """False for a bias."""

    def of(self, whole: torch.Tensor) -> torch.Tensor:
        """Return the parameter as a view of the whole tensor."""
        own = whole[self.expert]
        return (own.t() if self.transposed else own)[self.first :: self.step]

    def within(self, first: int, end: int) -> slice:
        """Return the outputs of the whole tensor among which rows `first` to `end` of the parameter lie; these are
        every `step`-th of them, from `self.first` on."""
        return slice(first * self.step, end * self.step)


def place_of(config: PreTrainedConfig, name: str) -> StackedPart | None:
    """Return the place of a parameter; None if the checkpoints of its architecture hold it by itself."""
    found = _NAME.fullmatch(name) if config.model_type == GPT_OSS else None
    if found is None:
        return None
    experts, number, part, leaf = found.groups()
    tensor = "down_proj" if part == "down" else "gate_up_proj"
    return StackedPart(
        key=f"{experts}{tensor}{'_bias' if leaf == 'bias' else ''}",
        expert=int(number),
        first=1 if part == "up" else 0,
        step=1 if part == "down" else 2,
        transposed=leaf == "weight",
    )


def stored_shapes(
    config: PreTrainedConfig, name: str, shape: Sequence[int], stored: Collection[str]
) -> dict[str, tuple[int, ...]]:
    """Return the tensors of a checkpoint in which a parameter lies, and their shapes.

    Args:
        shape: of the parameter.
        stored: names of the checkpoint's tensors, which say if a weight is in MXFP4.
    """
    place, mixture = place_of(config, name), mixture_of(config)
    if place is None or mixture is None:
        return {stored_name(config, name): tuple(shape)}
    outputs, inputs = shape[0] * place.step, tuple(shape[1:])
    if not inputs:
        return {place.key: (mixture.experts, outputs)}
    if not {place.key + BLOCKS, place.key + SCALES} & set(stored):
        return {place.key: (mixture.experts, *inputs, outputs)}
    scales = (mixture.experts, outputs, inputs[0] // _BLOCK)
    return {place.key + BLOCKS: (*scales, _BLOCK // 2), place.key + SCALES: scales}


def mxfp4_values(blocks: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """Return the values of MXFP4, float32 [..., 32 G], from uint8 [..., G, 16] and [..., G]: inf or nan where they are
    beyond float32's."""
    values = E2M1.values(blocks.flatten(end_dim=-2)).view(*scales.shape, _BLOCK)
    return torch.ldexp(values, scales.int()[..., None] - 127).flatten(-2)


class Stacker:
    """Hands the parameters of a policy on under the names of the hub's checkpoints, those of experts once a tensor of
    all of them is whole.

    Args:
        take: callback that takes (name, values).
    """

    def __init__(self, config: PreTrainedConfig, take: Callable[[str, torch.Tensor], None]) -> None:
        self._config, self._take = config, take
        self._begun: dict[str, tuple[torch.Tensor, int]] = {}
        """Tensors of experts, and the number of parameters that they lack."""

    def add(self, name: str, tensor: torch.Tensor) -> None:
        """Take a parameter, which may change or be freed afterwards."""
        place = place_of(self._config, name)
        if place is None:
            self._take(stored_name(self._config, name), tensor)
            return
        if place.key not in self._begun:
            ((_, shape),) = stored_shapes(self._config, name, tensor.shape, ()).items()
            self._begun[place.key] = tensor.new_empty(shape, device="cpu"), shape[0] * place.step
        whole, lacking = self._begun.pop(place.key)
        place.of(whole).copy_(tensor.detach())
        if lacking == 1:
            self._take(place.key, whole)
        else:
            self._begun[place.key] = whole, lacking - 1

    def close(self) -> None:
        """Check that nothing is left: a checkpoint without some experts would be damaged."""
        assert not self._begun, f"{next(iter(self._begun))} lacks experts"
