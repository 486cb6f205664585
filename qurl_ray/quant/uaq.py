"""Update-aware quantization (QuRL, https://arxiv.org/abs/2602.13953): W X = (W / s)(s X).

The weights of every linear that a norm feeds are divided by s, and the norm's gain is multiplied by s. The network
computes the same, but one optimizer step moves the smaller weights, and so their codes, s times as far. This is done
once before training, on float32 masters only, and undone when the policy is saved in full precision.

A norm can be folded only together with all modules that read it. These are known by name. A layer with any other part
is refused: that part may read the norm too (the router of a mixture of experts), or indicate another structure (one
norm for attention and MLP, norms after them).
"""

from collections.abc import Iterator

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
_FOLDED = {"qkv": ("self_attn",), "qkv+mlp": ("self_attn", "mlp")}


def norm_fed_linears(model: nn.Module, layers: str) -> list[tuple[nn.Module, list[nn.Linear]]]:
    """Return each norm of the decoder layers that `layers` names, with all the linears that it feeds.

    Raises:
        QuantizationError: the architecture is not known, or the weights are in less than float32.
    """
    blocks = getattr(getattr(model, "base_model", model), "layers", ())
    pairs = [pair for i, block in enumerate(blocks) for pair in _pairs(f"layers.{i}", block, _FOLDED[layers])]
    if not pairs:
        raise _refusal(f"{type(model).__name__} has no decoder layers of a known kind")
    dtypes = {module.weight.dtype for norm, linears in pairs for module in (norm, *linears)}
    if not dtypes <= {torch.float32, torch.float64}:
        raise _refusal(
            f"its weights are {', '.join(map(str, dtypes))}, but W / s must not be rounded below float32 "
            "(bfloat16 would change 5 % of the INT8 codes): load float32 masters"
        )
    return pairs


def fold(model: nn.Module, scale: float, layers: str = "qkv+mlp") -> None:
    """Divide the norm-fed weights W by s = `scale` and multiply their norms' gains by it, in place. Biases are kept.

    A norm that multiplies by w gets s·w; one that multiplies by 1 + w (Gemma) gets s·(1 + w) − 1 = s·w + (s − 1).
    """
    for norm, offset, linears in _with_offsets(model, layers):
        norm.get_parameter("weight").data.mul_(scale).add_(offset * (scale - 1))
        for linear in linears:
            linear.weight.data.div_(scale)


def unfold(model: nn.Module, scale: float, layers: str = "qkv+mlp") -> None:
    """Undo `fold` with the same arguments: bit for bit if s is a power of two, else within 1 ulp.

    A gain of Gemma's is restored within 1 ulp of 1 + w for any s: its small w loses bits while it contains s − 1.
    """
    for norm, offset, linears in _with_offsets(model, layers):
        norm.get_parameter("weight").data.sub_(offset * (scale - 1)).div_(scale)
        for linear in linears:
            linear.weight.data.mul_(scale)


def _pairs(name: str, block: nn.Module, folded: tuple[str, ...]) -> Iterator[tuple[nn.Module, list[nn.Linear]]]:
    found = _parts(block)
    norms = next((norms for norms in (_LLAMA, _GEMMA2) if {*norms, "self_attn", "mlp"} == found), None)
    if norms is None:
        raise _refusal(f"{name} has an unknown set of parts: {', '.join(sorted(found))}")
    for norm_name, reader_name in norms.items():
        if reader_name not in folded:
            continue
        norm, reader = block.get_submodule(norm_name), block.get_submodule(reader_name)
        unknown = _parts(reader) - _FIRST[reader_name] - _LATER[reader_name]
        linears = [child for part, child in reader.named_children() if part in _FIRST[reader_name]]
        plain = [linear for linear in linears if isinstance(linear, nn.Linear)]
        if unknown or not plain or len(plain) < len(linears):
            parts = ", ".join(f"{reader_name}.{part}" for part in sorted(unknown or _parts(reader)))
            raise _refusal(f"{name}.{norm_name} may feed parts that are not known or no plain linears: {parts}")
        if _parts(norm) != {"weight"}:
            raise _refusal(f"{name}.{norm_name} has more than a gain: {', '.join(sorted(_parts(norm)))}")
        yield norm, plain


def _parts(module: nn.Module) -> set[str]:
    """Return the names of the direct parts of a module that hold parameters."""
    return {name.partition(".")[0] for name, _ in module.named_parameters()}


@torch.no_grad()
def _with_offsets(model: nn.Module, layers: str) -> list[tuple[nn.Module, int, list[nn.Linear]]]:
    """Return norm_fed_linears with each norm's offset, found by trial: 0 if it multiplies by w, 1 if by 1 + w."""
    found = []
    for norm, linears in norm_fed_linears(model, layers):
        weight = norm.get_parameter("weight")
        gain = norm(torch.full_like(weight, 1e3))  # normalized to 1, being large compared to the norm's epsilon
        offset = next((o for o in (0, 1) if torch.allclose(gain, weight + o, equal_nan=True)), None)
        if offset is None:
            raise _refusal(f"{type(norm).__name__} multiplies neither by w nor by 1 + w")
        found.append((norm, offset, linears))
    return found


def _refusal(reason: str) -> QuantizationError:
    return QuantizationError(f"UAQ cannot fold this model (set quantization.uaq_scale=1 to go without): {reason}")
