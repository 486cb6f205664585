"""Quantizable units: the weights that become codes, and the channels between them.

These records are the only list of quantized weights. Learner, syncs, engines, probes and exports read them, and nothing
else asks which module is a linear or how its tensors are named. The module that feeds a unit comes from one table of
architectures: a norm can be rescaled only together with all modules that read it, and these are known by name. A layer
with any other part is refused: that part may read the norm too, or indicate another structure (one norm for attention
and MLP, norms after them). In a mixture of experts, the norm feeds the first linears of all experts, and the router.
"""

import copy
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import nn

from qurl_ray.errors import QuantizationError
from qurl_ray.numerics.products import ExactLinear
from qurl_ray.quant.linear import QuantizedLinear

Reader = Literal["self_attn", "mlp", "down"]
"""Part of a decoder layer that reads channels: attention's and the MLP's first linears, and the MLP's last one."""

# The norms of a layer, and the part that reads each: None for norms that end a branch.
_LLAMA: dict[str, Reader | None] = {"input_layernorm": "self_attn", "post_attention_layernorm": "mlp"}
_GEMMA2: dict[str, Reader | None] = {
    "input_layernorm": "self_attn",
    "post_attention_layernorm": None,
    "pre_feedforward_layernorm": "mlp",
    "post_feedforward_layernorm": None,
}
# For each reader, its linears next to the norm (Phi-3 and GLM fuse them), and the parts after these.
_FIRST = {"self_attn": {"q_proj", "k_proj", "v_proj", "qkv_proj"}, "mlp": {"gate_proj", "up_proj", "gate_up_proj"}}
_LATER = {"self_attn": {"q_norm", "k_norm", "o_proj", "sinks"}, "mlp": {"down_proj"}}
_GATED = {"gate_proj", "up_proj", "down_proj"}
_MIXTURE = {"gate", "experts"}
_SHARED = {"shared_expert", "shared_expert_gate"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Unit:
    """A weight that is quantized as one."""

    module: str
    """Name of the module that multiplies with it."""
    weight: str
    """Name of its parameter."""
    shape: tuple[int, ...]
    """Shape of the whole weight, also if it is sharded: outputs, then the values that a product sums over."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Site:
    """Channels that one module writes, and all units that read them."""

    writer: str
    """Name of a norm, or of the up_proj of a gated MLP, act(gate) · up."""
    readers: tuple[Unit, ...]
    kind: Reader
    offset: int | None
    """A norm multiplies by its weight plus this; None for an up_proj."""
    input_of: str
    """Name of the module whose input is these channels, of all tokens."""
    exact: tuple[str, ...] = ()
    """Names of modules that read the channels, too, and are never quantized: a router."""


def units(model: nn.Module, keep: Sequence[str] = ()) -> dict[str, Unit]:
    """Return the units to quantize by the names of their parameters, in the model's order: all linears but those that a
    pattern of `keep`, searched in the parameter's name, matches.

    Raises:
        QuantizationError: nothing is left to quantize.
    """
    kept = re.compile("|".join(f"(?:{pattern})" for pattern in keep)) if keep else None
    linears = (
        _unit(name, module)
        for name, module in model.named_modules()
        if isinstance(module, nn.Linear | QuantizedLinear) and not isinstance(module, ExactLinear)
    )
    chosen = {unit.weight: unit for unit in linears if not (kept and kept.search(unit.weight))}
    if not chosen:
        raise QuantizationError(
            f"{type(model).__name__} has no linear to quantize outside quantization.keep={list(keep)}"
        )
    return chosen


def find_sites(model: nn.Module, kinds: tuple[Reader, ...] = ("self_attn", "mlp", "down")) -> list[Site]:
    """Return the channels of the decoder layers that readers of these kinds read: those of norms in the model's order,
    then those of gated MLPs.

    Raises:
        QuantizationError: the architecture is not known.
    """
    names = {module: name for name, module in model.named_modules()}
    blocks = list(getattr(getattr(model, "base_model", model), "layers", ()))
    normed = [site for block in blocks for site in _of_norms(names, block, kinds)]
    if not normed:
        raise QuantizationError(f"{type(model).__name__} has no decoder layers of a known kind")
    return normed + [site for block in blocks if "down" in kinds for site in _of_gated_mlps(names, block)]


def _unit(name: str, linear: nn.Linear | QuantizedLinear) -> Unit:
    return Unit(module=name, weight=f"{name}.weight", shape=(linear.out_features, linear.in_features))


def _of_norms(names: Mapping[nn.Module, str], block: nn.Module, kinds: tuple[Reader, ...]) -> Iterator[Site]:
    parts, name = _parts(block), names[block]
    norms = next((norms for norms in (_LLAMA, _GEMMA2) if {*norms, "self_attn", "mlp"} == parts), None)
    if norms is None:
        raise QuantizationError(f"{name} has an unknown set of parts: {', '.join(sorted(parts))}")
    for norm_name, kind in norms.items():
        if kind is None or kind not in kinds:
            continue
        norm, reader = block.get_submodule(norm_name), block.get_submodule(kind)
        unknown, inner, exact = _parts(reader) - _FIRST[kind] - _LATER[kind], [reader], list[str]()
        if _is_mixture(reader):
            unknown, inner = set(), list(reader.get_submodule("experts").children())
            exact = [f"{names[reader]}.gate"]
            if _parts(reader) >= _SHARED:
                inner.append(reader.get_submodule("shared_expert"))
                exact.append(f"{names[reader]}.shared_expert_gate")
        first = [child for module in inner for part, child in module.named_children() if part in _FIRST[kind]]
        readers = tuple(_unit(names[child], child) for child in first if isinstance(child, nn.Linear))
        if unknown or not readers or len(readers) < len(first):
            listed = ", ".join(f"{kind}.{part}" for part in sorted(unknown or _parts(reader)))
            raise QuantizationError(
                f"{name}.{norm_name} may feed parts that are not known or no plain linears: {listed}"
            )
        if _parts(norm) != {"weight"}:
            raise QuantizationError(f"{name}.{norm_name} has more than a gain: {', '.join(sorted(_parts(norm)))}")
        yield Site(
            writer=names[norm],
            readers=readers,
            kind=kind,
            offset=_gain_offset(norm),
            exact=tuple(exact),
            input_of=names[reader] if exact else readers[0].module,
        )


def _of_gated_mlps(names: Mapping[nn.Module, str], block: nn.Module) -> Iterator[Site]:
    """Yield the channels of an MLP that computes down_proj(act(gate_proj(x)) · up_proj(x)) with plain linears."""
    mlp = block.get_submodule("mlp")
    linears = {part: child for part, child in mlp.named_children() if isinstance(child, nn.Linear)}
    if _parts(mlp) == _GATED == linears.keys():
        up, down = names[linears["up_proj"]], linears["down_proj"]
        yield Site(writer=up, readers=(_unit(names[down], down),), kind="down", offset=None, input_of=names[down])


def _is_mixture(mlp: nn.Module) -> bool:
    """Return True for a router of its own kind beside experts that are gated MLPs, and maybe one for all tokens."""
    shared = _parts(mlp) - _MIXTURE
    if not (_parts(mlp) >= _MIXTURE and shared in (set(), _SHARED)):
        return False
    experts, gates = list(mlp.get_submodule("experts").children()), [mlp.get_submodule("gate")]
    if shared:
        experts.append(mlp.get_submodule("shared_expert"))
        gates.append(mlp.get_submodule("shared_expert_gate"))
    return all(isinstance(gate, ExactLinear) for gate in gates) and all(_parts(e) == _GATED for e in experts)


@torch.no_grad()
def _gain_offset(norm: nn.Module) -> int:
    """Return, by trial, 0 if a norm multiplies by its weight w, 1 if it multiplies by 1 + w (Gemma).

    The trial is made with other parameters: the norm's own may be sharded, or not there yet.

    Raises:
        QuantizationError: it multiplies by neither.
    """
    weight = nn.Parameter(torch.linspace(-0.5, 2.0, norm.get_parameter("weight").numel()))
    trial = copy.copy(norm)
    trial._parameters = dict.fromkeys(norm._parameters) | {"weight": weight}
    gain = trial.forward(torch.full_like(weight, 1e3))  # normalized to 1, being large compared to the norm's epsilon
    offset = next((o for o in (0, 1) if torch.allclose(gain, weight + o)), None)
    if offset is None:
        raise QuantizationError(f"{type(norm).__name__} multiplies neither by w nor by 1 + w")
    return offset


def _parts(module: nn.Module) -> set[str]:
    """Return the names of the direct parts of a module that hold parameters."""
    return {name.partition(".")[0] for name, _ in module.named_parameters()}
