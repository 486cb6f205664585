"""The forward pass of Llama-like models, operation by operation.

transformers spreads it over some fifteen module calls per layer, which on a CPU take as long as the products of a
decode step. Here the same operations are in one loop: in place where nothing else reads a result, with activations
quantized once for q, k and v and once for gate and up. The result has the same bits as the learner's forward pass
through transformers (tests/engines/test_decoder.py).
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from transformers import PreTrainedModel

from qurl_ray.engines.torch.adapters import RowAdapters
from qurl_ray.engines.torch.slots import Cache
from qurl_ray.engines.torch.weights import RowsOf
from qurl_ray.numerics.activations import silu
from qurl_ray.numerics.products import bound
from qurl_ray.policy.attention import attend_last, invariant_attention
from qurl_ray.policy.experts import MixtureMlp, each_by_itself
from qurl_ray.policy.logprobs import textless, without_text
from qurl_ray.policy.settings import head_dim
from qurl_ray.quant.linear import QuantizedLinear

Apply = Callable[[torch.Tensor], torch.Tensor]
ForwardPass = Callable[[torch.Tensor, torch.Tensor, Cache], torch.Tensor]
"""Function of ids, their positions and a cache that returns final states."""

_KNOWN = {"LlamaForCausalLM", "MistralForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM"}
_KNOWN |= {"MixtralForCausalLM", "Qwen3MoeForCausalLM"}


def knows(model: PreTrainedModel) -> bool:
    """Return True if this module computes the model's forward pass; other models run through transformers."""
    config = model.config
    plain = getattr(config, "hidden_act", None) == "silu" and not getattr(config, "use_sliding_window", False)
    sliding = config.model_type in ("mistral", "mixtral") and config.sliding_window
    return type(model).__name__ in _KNOWN and plain and not sliding


def normalize(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """Return x / sqrt(mean(x²) + eps) · weight, over the last axis, in float32."""
    wide = x if x.dtype == torch.float32 else x.float()
    scale = wide.pow(2).mean(-1, keepdim=True).add_(eps).rsqrt_()
    return (wide * scale).to(x.dtype).mul_(weight)


def turn(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Return x * cos + rotate_half(x) * sin. `sin` already holds the minus sign of rotate_half."""
    return (x * cos).add_(x.roll(x.shape[-1] // 2, dims=-1).mul_(sin))


def gated(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    """Return silu(gate) · up."""
    return silu(gate).mul_(up)


@dataclass(frozen=True, slots=True)
class _Norm:
    weight: torch.Tensor
    eps: float

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return normalize(x, self.weight, self.eps)


@dataclass(frozen=True, slots=True)
class _Layer:
    attention_norm: _Norm
    qkv: Apply
    q_norm: _Norm | None
    k_norm: _Norm | None
    out: Apply
    mlp_norm: _Norm
    mlp: Apply


class Decoder:
    """ForwardPass pass of a model. It holds the weights it was built with, so it is rebuilt after each load.

    Args:
        adapters: added to the results of linears; the model's own alone if absent.
    """

    def __init__(self, model: PreTrainedModel, adapters: RowAdapters | None = None) -> None:
        base, config = model.base_model, model.config
        if adapters is None:
            adapters = RowAdapters()
            adapters.begin(model)
        self._adapters, self._names = adapters, {module: name for name, module in model.named_modules()}
        self._embed, self._rotary, self._norm = base.embed_tokens, base.rotary_emb, _norm(base.norm)
        self._heads, self._kv_heads = config.num_attention_heads, config.num_key_value_heads
        self._head_dim = head_dim(config)
        self._layers = [
            _Layer(
                attention_norm=_norm(layer.input_layernorm),
                qkv=self._adapted(
                    _next_to_each_other(layer.self_attn.q_proj, layer.self_attn.k_proj, layer.self_attn.v_proj),
                    layer.self_attn.q_proj,
                    layer.self_attn.k_proj,
                    layer.self_attn.v_proj,
                ),
                q_norm=_norm(layer.self_attn.q_norm) if hasattr(layer.self_attn, "q_norm") else None,
                k_norm=_norm(layer.self_attn.k_norm) if hasattr(layer.self_attn, "k_norm") else None,
                out=self._adapted(as_function(layer.self_attn.o_proj), layer.self_attn.o_proj),
                mlp_norm=_norm(layer.post_attention_layernorm),
                mlp=self._mixture(layer.mlp) if isinstance(layer.mlp, MixtureMlp) else self._mlp(layer.mlp),
            )
            for layer in base.layers
        ]

    def _mlp(self, mlp: Any) -> Apply:
        gate_up = self._adapted_pair(mlp.gate_proj, mlp.up_proj)
        down = self._adapted(as_function(mlp.down_proj), mlp.down_proj)
        return lambda x: down(gated(*gate_up(x)))

    def _mixture(self, mlp: MixtureMlp) -> Apply:
        compute = partial(each_by_itself, experts=[self._mlp(expert) for expert in mlp.experts])
        return lambda x: mlp.mix(x.flatten(0, 1), compute).view(x.shape)

    def _adapted(self, apply: Apply, *modules: Any) -> Apply:
        """Return a function that also adds the adapters of these modules, whose results are side by side."""
        sizes = [module.out_features for module in modules]
        names, adapters = tuple(self._names[module] for module in modules), self._adapters

        def with_adapters(x: torch.Tensor) -> torch.Tensor:
            y = apply(x)
            adapters.add(names, x, y.split(sizes, dim=-1))
            return y

        return with_adapters

    def _adapted_pair(self, first: Any, second: Any) -> Callable[[torch.Tensor], tuple[torch.Tensor, torch.Tensor]]:
        both, names, adapters = _pair(first, second), (self._names[first], self._names[second]), self._adapters

        def with_adapters(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            results = both(x)
            adapters.add(names, x, results)
            return results

        return with_adapters

    def __call__(self, ids_BT: torch.Tensor, positions_BT: torch.Tensor, cache: Cache) -> torch.Tensor:
        """Return final states [B, T, hidden]. The cache stores keys and values; it knows if they are whole prompts."""
        x = self._embed(ids_BT)
        cos, sin = (part[:, :, None] for part in self._rotary(x, positions_BT))  # [B or 1, T, 1, d]
        half = self._head_dim // 2
        sin = torch.cat((-sin[..., :half], sin[..., half:]), dim=-1)
        for index, layer in enumerate(self._layers):
            x.add_(self._attention(index, layer, layer.attention_norm(x), cos, sin, positions_BT, cache))
            x.add_(layer.mlp(layer.mlp_norm(x)))
        return self._norm(x)

    def _attention(
        self,
        index: int,
        layer: _Layer,
        x: torch.Tensor,
        cos: torch.Tensor,
        sin: torch.Tensor,
        positions_BT: torch.Tensor,
        cache: Cache,
    ) -> torch.Tensor:
        B, T, _ = x.shape
        H, KV, d = self._heads, self._kv_heads, self._head_dim
        projected = layer.qkv(x).view(B, T, H + 2 * KV, d)
        turned, value = projected.split((H + KV, KV), dim=2)
        if layer.q_norm and layer.k_norm:
            turned = torch.cat((layer.q_norm(turned[:, :, :H]), layer.k_norm(turned[:, :, H:])), dim=2)
        turned = turn(turned, cos, sin)
        query, key = (part.transpose(1, 2) for part in turned.split((H, KV), dim=2))
        keys, values = cache.update(key, value.transpose(1, 2), index)
        if cache.hidden is not None:
            out = attend_last(query, keys, values, cache.hidden, scaling=d**-0.5)
        else:
            out, _ = invariant_attention(None, query, keys, values, scaling=d**-0.5, position_ids=positions_BT)
        return layer.out(out.reshape(B, T, H * d).contiguous())  # a view only if there is one head


def through_transformers(
    model: PreTrainedModel, ids_BT: torch.Tensor, positions_BT: torch.Tensor, cache: Cache
) -> torch.Tensor:
    """Return final states [B, T, hidden] of a model that this module does not know."""
    return model.base_model(
        input_ids=ids_BT, position_ids=positions_BT, past_key_values=cache, use_cache=True
    ).last_hidden_state


def head_of(model: PreTrainedModel) -> Apply:
    """Return a function of final states that returns logits, of which ids without text have none."""
    head, hidden = as_function(model.get_output_embeddings()), textless(model)
    hidden = None if hidden is None else hidden.to(model.device)  # once: a captured step may copy nothing
    return lambda states: without_text(head(states), hidden)


def _norm(module: Any) -> _Norm:
    return _Norm(module.weight, module.variance_epsilon)


def as_function(module: Any) -> Apply:
    """Return a linear, quantized or not, as a function, with the weight that it holds now, and without its adapter."""
    if isinstance(module, QuantizedLinear):
        return partial(QuantizedLinear.forward, module)
    return bound(module.weight, module.bias)


def _next_to_each_other(*modules: Any) -> Apply:
    """Return a function that computes all outputs in one tensor; by one product if the linears are fused."""
    if isinstance(modules[0], RowsOf):
        return modules[0].whole.forward
    calls = [as_function(module) for module in modules]
    return lambda x: torch.cat([call(x) for call in calls], dim=-1)


def _pair(first: Any, second: Any) -> Callable[[torch.Tensor], tuple[torch.Tensor, torch.Tensor]]:
    """Return a function that computes both outputs; they are views of one product if the linears are fused."""
    if isinstance(first, RowsOf):
        whole = first.whole
        return lambda x: whole(x).chunk(2, dim=-1)
    calls = as_function(first), as_function(second)
    return lambda x: (calls[0](x), calls[1](x))
