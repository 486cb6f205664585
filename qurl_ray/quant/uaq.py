"""Update-aware quantization (QuRL, https://arxiv.org/abs/2602.13953): W X = (W / s)(s X).

The columns of every linear that a norm feeds are divided by s, the norm's gain is multiplied by s: the network computes
the same, but one optimizer step moves the smaller weights, and so their codes, s times as far. Done once before
training, on float32 masters only (rounding W / s to bfloat16 would flip many codes), and undone at export.
"""

from torch import nn

from qurl_ray.errors import QuantizationError

# norm → the linears that read its output, as named in Llama, Mistral, Qwen2 and Qwen3 decoder layers.
_CONSUMERS = {
    "input_layernorm": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    "post_attention_layernorm": ("mlp.gate_proj", "mlp.up_proj"),
}
_NORMS = {"qkv": ("input_layernorm",), "qkv+mlp": ("input_layernorm", "post_attention_layernorm")}


def norm_fed_linears(model: nn.Module, layers: str) -> list[tuple[nn.Module, list[nn.Linear]]]:
    """Each norm of the decoder layers with all the linears that it feeds.

    Raises:
        QuantizationError: the architecture has none that is known, or a norm feeds something that is no plain linear.
    """
    pairs = []
    for name, norm in model.named_modules():
        path, _, leaf = name.rpartition(".")
        if leaf not in _NORMS[layers]:
            continue
        block = model.get_submodule(path)
        if hasattr(block, "pre_feedforward_layernorm") or "Gemma" in type(norm).__name__:
            raise QuantizationError(f"{type(model).__name__}: gains of the form 1 + w are not supported by UAQ")
        try:
            linears = [block.get_submodule(consumer) for consumer in _CONSUMERS[leaf]]
        except AttributeError:
            raise QuantizationError(f"{name} does not feed {', '.join(_CONSUMERS[leaf])}: UAQ cannot fold it") from None
        if not all(isinstance(linear, nn.Linear) for linear in linears):
            raise QuantizationError(f"{name} feeds something that is not a plain linear: UAQ cannot fold it")
        pairs.append((norm, linears))
    if not pairs:
        raise QuantizationError(
            f"{type(model).__name__} has no linear that a norm feeds (looked for {', '.join(_NORMS[layers])}): "
            "set quantization.uaq_scale=1"
        )
    return pairs


def fold(model: nn.Module, scale: float, layers: str = "qkv+mlp") -> None:
    """Divide the norm-fed weights by `scale` and multiply their norms' gains by it, in place. Biases stay."""
    for norm, linears in norm_fed_linears(model, layers):
        norm.weight.data.mul_(scale)
        for linear in linears:
            linear.weight.data.div_(scale)


def unfold(model: nn.Module, scale: float, layers: str = "qkv+mlp") -> None:
    """Undo `fold` with the same arguments: bit for bit if s is a power of two, else within 1 ulp."""
    for norm, linears in norm_fed_linears(model, layers):
        norm.weight.data.div_(scale)
        for linear in linears:
            linear.weight.data.mul_(scale)
