"""Which linears a norm feeds, for the architectures that are known here.

A norm can be rescaled only together with all modules that read it. These are known by name. A layer with any other part
is refused: that part may read the norm too (the router of a mixture of experts), or indicate another structure (one
norm for attention and MLP, norms after them).
"""

import copy
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import nn

from qurl_ray.errors import QuantizationError

# The norms of a layer, and the part that reads each: None for norms that end a branch.
_LLAMA = {"input_layernorm": "self_attn", "post_attention_layernorm": "mlp"}
_GEMMA2 = {
    "input_layernorm": "self_attn",
    "post_attention_layernorm": None,
    "pre_feedforward_layernorm": "mlp",
    "post_feedforward_layernorm": None,
}
# For each reader, its linears next to the norm (Phi-3 and GLM fuse them), and the parts after these.
_FIRST = {"self_attn": {"q_proj", "k_proj", "v_proj", "qkv_proj"}, "mlp": {"gate_proj", "up_proj", "gate_up_proj"}}
_LATER = {"self_attn": {"q_norm", "k_norm", "o_proj"}, "mlp": {"down_proj"}}
_GATED = {"gate_proj", "up_proj", "down_proj"}


@dataclass(frozen=True, slots=True, kw_only=True)
class NormFed:
    """A norm and all the linears that read it, by their names in the model."""

    name: str
    norm: nn.Module
    linears: Mapping[str, nn.Linear]


def norm_fed(model: nn.Module, readers: tuple[str, ...] = ("self_attn", "mlp")) -> list[NormFed]:
    """Return the norms of the decoder layers that feed one of `readers`, in the model's order.

    Raises:
        QuantizationError: the architecture is not known.
    """
    names = {module: name for name, module in model.named_modules()}
    found = [one for block in _blocks(model) for one in _norm_fed(names, block, readers)]
    if not found:
        raise QuantizationError(f"{type(model).__name__} has no decoder layers of a known kind")
    return found


def gated_mlps(model: nn.Module) -> list[str]:
    """Return the names of the MLPs that compute down_proj(act(gate_proj(x)) · up_proj(x)) with plain linears."""
    names = {module: name for name, module in model.named_modules()}
    mlps = [child for block in _blocks(model) for part, child in block.named_children() if part == "mlp"]
    return [
        names[mlp]
        for mlp in mlps
        if _parts(mlp) == _GATED and all(isinstance(getattr(mlp, part), nn.Linear) for part in _GATED)
    ]


@torch.no_grad()
def gain_offset(norm: nn.Module) -> int:
    """Return, by trial, 0 if a norm multiplies by its weight w, 1 if it multiplies by 1 + w (Gemma).

    The trial is made with other parameters: the norm's own may be sharded, or not there yet.

    Raises:
        QuantizationError: it multiplies by neither.
    """
    weight = nn.Parameter(torch.linspace(-0.5, 2.0, norm.get_parameter("weight").numel()))
    trial = copy.copy(norm)
    trial._parameters = {
        name: None if own is None else nn.Parameter(torch.zeros(own.shape)) for name, own in norm._parameters.items()
    } | {"weight": weight}
    gain = trial.forward(torch.full_like(weight, 1e3))  # normalized to 1, being large compared to the norm's epsilon
    offset = next((o for o in (0, 1) if torch.allclose(gain, weight + o)), None)
    if offset is None:
        raise QuantizationError(f"{type(norm).__name__} multiplies neither by w nor by 1 + w")
    return offset


def _blocks(model: nn.Module) -> Iterator[nn.Module]:
    yield from getattr(getattr(model, "base_model", model), "layers", ())


def _norm_fed(names: Mapping[nn.Module, str], block: nn.Module, readers: tuple[str, ...]) -> Iterator[NormFed]:
    found, name = _parts(block), names[block]
    norms = next((norms for norms in (_LLAMA, _GEMMA2) if {*norms, "self_attn", "mlp"} == found), None)
    if norms is None:
        raise QuantizationError(f"{name} has an unknown set of parts: {', '.join(sorted(found))}")
    for norm_name, reader_name in norms.items():
        if reader_name not in readers:
            continue
        norm, reader = block.get_submodule(norm_name), block.get_submodule(reader_name)
        unknown = _parts(reader) - _FIRST[reader_name] - _LATER[reader_name]
        parts = [child for part, child in reader.named_children() if part in _FIRST[reader_name]]
        linears = {names[part]: part for part in parts if isinstance(part, nn.Linear)}
        if unknown or not linears or len(linears) < len(parts):
            listed = ", ".join(f"{reader_name}.{part}" for part in sorted(unknown or _parts(reader)))
            raise QuantizationError(
                f"{name}.{norm_name} may feed parts that are not known or no plain linears: {listed}"
            )
        if _parts(norm) != {"weight"}:
            raise QuantizationError(f"{name}.{norm_name} has more than a gain: {', '.join(sorted(_parts(norm)))}")
        yield NormFed(name=names[norm], norm=norm, linears=linears)


def _parts(module: nn.Module) -> set[str]:
    """Return the names of the direct parts of a module that hold parameters."""
    return {name.partition(".")[0] for name, _ in module.named_parameters()}
