"""Mixtures of experts: one forward pass for engines and learner, in which each row depends on that row alone.

    p = softmax(router(x))        e_1 … e_k = the k largest of p, the lower index first where two are equal
    y = Σ_j w_j · expert_{e_j}(x)    w = p at e_1 … e_k, divided by their sum in most architectures
      + sigmoid(gate(x)) · shared_expert(x)    where there is an expert for all tokens

gpt-oss takes the k largest logits, and w is the softmax of these alone; its router and its experts have biases, and its
experts compute down(g · sigmoid(α g) · (u + 1)) with g = min(gate(x), limit) and u = up(x) between ±limit.

transformers holds all experts of a layer in two three-dimensional parameters, and multiplies with them in ways whose
bits depend on the batch. Here each expert is three linears of its own, under the names of the hub's checkpoints. So
codes, equalization, deltas, adapters and exports treat an expert as they treat any linear, and none can be left out.
Rows are sorted by expert, and each expert multiplies its own by the products of numerics.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.activations import ACT2FN

from qurl_ray.errors import ConfigError
from qurl_ray.numerics.activations import sigmoid
from qurl_ray.numerics.products import ExactLinear, Linear, linear

GPT_OSS = "gpt_oss"
_COUNTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")
"""Settings with which architectures count their experts."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Kind:
    """How an architecture names what a mixture consists of."""

    experts: str
    width: str
    normalizes: str | bool
    """Setting that says if the weights of a token's experts add up to 1, or that they always do."""
    shared: str = ""
    """Setting with the width of the expert for all tokens; "" if there is none."""
    stored: Mapping[str, str]
    """Parts of the names in a module tree, and in the hub's checkpoints, where they differ."""


_KINDS = {
    "qwen3_moe": _Kind(experts="num_experts", width="moe_intermediate_size", normalizes="norm_topk_prob", stored={}),
    "qwen2_moe": _Kind(
        experts="num_experts",
        width="moe_intermediate_size",
        normalizes="norm_topk_prob",
        shared="shared_expert_intermediate_size",
        stored={},
    ),
    "olmoe": _Kind(experts="num_experts", width="intermediate_size", normalizes="norm_topk_prob", stored={}),
    "mixtral": _Kind(
        experts="num_local_experts",
        width="intermediate_size",
        normalizes=True,
        stored={".mlp.": ".block_sparse_moe.", ".gate_proj.": ".w1.", ".up_proj.": ".w3.", ".down_proj.": ".w2."},
    ),
    GPT_OSS: _Kind(
        experts="num_local_experts",
        width="intermediate_size",
        normalizes=True,
        stored={".mlp.gate.": ".mlp.router."},  # experts: policy.stacked
    ),
}


_MISSING = {
    "deepseek_v3": "shared experts, latent attention and routing by groups",
    "glm4_moe": "shared experts and routing by sigmoids",
    "qwen3_5_moe_text": "recurrent layers, for whose state caches and packed rows have no place, and shared experts",
    "qwen3_next": "recurrent layers, for whose state caches and packed rows have no place, and shared experts",
}
"""Parts of other architectures that are not here, by model_type."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Clamp:
    """Numbers of the activation of gpt-oss's experts."""

    alpha: float
    limit: float

    def __call__(self, gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
        """Return g · sigmoid(alpha · g) · (u + 1), g = min(gate, limit), u = up between ±limit."""
        gate, up = gate.clamp(max=self.limit), up.clamp(-self.limit, self.limit)
        return gate * sigmoid(gate * self.alpha) * (up + 1)


@dataclass(frozen=True, slots=True, kw_only=True)
class Mixture:
    """Sizes of a mixture of experts."""

    experts: int
    """Experts of a layer."""
    active: int
    """Experts that compute each token."""
    width: int
    """Width of an expert's hidden layer."""
    normalizes: bool
    """The weights of a token's experts add up to 1."""
    shared: int = 0
    """Width of the hidden layer of the expert for all tokens; 0 if there is none."""
    clamp: Clamp | None = None
    """The activation of gpt-oss, which comes with biases and a softmax over the chosen experts alone; None for an MLP
    without biases, and a softmax over all of them."""


def mixture_of(config: PreTrainedConfig) -> Mixture | None:
    """Return the sizes of a mixture of experts; None for a dense model.

    Raises:
        ConfigError: the architecture or an option of its router is not known, or the sizes contradict each other. The
            message begins with the setting.
    """
    if not any((getattr(config, count, None) or 0) > 1 for count in _COUNTS):
        return None
    kind = _KINDS.get(config.model_type)
    if kind is None:
        known, missing = ", ".join(_KINDS), _MISSING.get(config.model_type)
        raise ConfigError(
            f"model_type={config.model_type} is a mixture of experts that is not known here ({known} are)"
            + (f"; it has {missing}" if missing else "")
        )
    if jitter := getattr(config, "router_jitter_noise", 0):
        raise ConfigError(f"router_jitter_noise={jitter} is not supported: engine and learner would differ")
    normalizes = kind.normalizes if isinstance(kind.normalizes, bool) else bool(getattr(config, kind.normalizes))
    mixture = Mixture(
        experts=getattr(config, kind.experts),
        active=config.num_experts_per_tok,
        width=getattr(config, kind.width),
        normalizes=normalizes,
        shared=getattr(config, kind.shared) if kind.shared else 0,
        clamp=Clamp(alpha=config.swiglu_alpha, limit=config.swiglu_limit) if config.model_type == GPT_OSS else None,
    )
    if not 1 <= mixture.active <= mixture.experts:
        raise ConfigError(f"num_experts_per_tok={mixture.active}, and there are {mixture.experts} experts")
    return mixture


def stored_name(config: PreTrainedConfig, name: str) -> str:
    """Return the name of a parameter in the hub's checkpoints of this architecture, if they hold it by itself."""
    kind = _KINDS.get(config.model_type)
    if kind and ".mlp." in name:
        for own, stored in kind.stored.items():
            name = name.replace(own, stored)
    return name


def name_of_stored(architecture: str, stored_name: str) -> str:
    """Return the parameter that the hub's checkpoints of an architecture, by its model_type, hold under this name."""
    kind = _KINDS.get(architecture)
    for own, stored in kind.stored.items() if kind else ():
        stored_name = stored_name.replace(stored, own)
    return stored_name


class Router(ExactLinear):
    """Logits of the experts for each token [N, d], float32 [N, E]. Its parameters stay in float32 and are never
    quantized, as a last bit may change a route."""

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        with torch.autocast(input.device.type, enabled=False):
            bias = None if self.bias is None else self.bias.float()
            return linear(input.float(), self.weight.float(), bias)


def choose(
    logits_NE: torch.Tensor,
    active: int,
    *,
    normalizes: bool,
    of_chosen: bool = False,
    replayed_Nk: torch.Tensor | None = None,
    replayed_weights_Nk: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return (weights, experts, own experts): float32, int64 and int64 [N, k], the largest weight first.

    Args:
        logits_NE: a Router's, float32.
        normalizes: the weights of a token's experts add up to 1.
        of_chosen: the weights are the softmax over the logits of the token's experts alone.
        replayed_Nk: experts to take in place of the router's own; its own are taken for tokens with -1.
        replayed_weights_Nk: weights of these experts to take in place of the router's.
    """
    values_NE = logits_NE if of_chosen else logits_NE.softmax(dim=-1)
    # Not topk, which promises no order among equal ones.
    own_Nk = values_NE.sort(dim=-1, descending=True, stable=True).indices[:, :active]
    experts_Nk = own_Nk if replayed_Nk is None else torch.where(replayed_Nk < 0, own_Nk, replayed_Nk)
    weights_Nk = values_NE.gather(1, experts_Nk)
    if of_chosen:
        weights_Nk = weights_Nk.softmax(dim=-1)
    elif normalizes:
        weights_Nk = weights_Nk / weights_Nk.sum(dim=-1, keepdim=True)
    if replayed_Nk is not None and replayed_weights_Nk is not None:
        weights_Nk = torch.where(replayed_Nk < 0, weights_Nk, replayed_weights_Nk)
    return weights_Nk, experts_Nk, own_Nk


def route_dtype(experts: int, *, weights: bool) -> np.dtype:
    """Return the type of AnswerTokens.routes for layers with so many experts, with or without the experts' weights."""
    return np.dtype(np.float32 if weights else np.uint8 if experts <= 256 else np.uint16)


ExpertProducts = Callable[[torch.Tensor, Sequence[int]], torch.Tensor]
"""Function that takes rows [R, d], sorted by expert, and how many each expert has, and returns the results [R, d]."""


def each_by_itself(
    rows_Rd: torch.Tensor, counts: Sequence[int], experts: Sequence[Callable[[torch.Tensor], torch.Tensor]]
) -> torch.Tensor:
    """Return the results [R, d] of rows that are sorted by expert. Each expert is called once, for its rows."""
    computed = []
    for expert, part in zip(experts, rows_Rd.split(list(counts)), strict=True):
        if len(part):
            computed.append(expert(part))
        elif torch.is_grad_enabled():
            # A gradient of zeros, in its turn: ZeRO adds up gradients of ranks in the order in which they arrive.
            computed.append(expert(rows_Rd.new_zeros(1, rows_Rd.shape[1]))[:0])
    return torch.cat(computed) if computed else rows_Rd


def mixed(
    x_Nd: torch.Tensor, weights_Nk: torch.Tensor, experts_Nk: torch.Tensor, experts: int, compute: ExpertProducts
) -> torch.Tensor:
    """Return Σ_j weights[:, j] · y_j, [N, d], where y_j is the result of expert experts_Nk[:, j], of so many."""
    active = experts_Nk.shape[1]
    order = experts_Nk.flatten().argsort(stable=True)
    counts = torch.bincount(experts_Nk.flatten(), minlength=experts).tolist()
    back = torch.empty_like(order)
    back[order] = torch.arange(len(order), device=order.device)
    y_Nkd = compute(x_Nd[order // active], counts)[back].view(-1, active, x_Nd.shape[1])
    weighted_Nkd = y_Nkd * weights_Nk[:, :, None].to(y_Nkd.dtype)
    y_Nd = weighted_Nkd[:, 0]
    for place in range(1, active):  # one after the other: a sum's order is part of its bits
        y_Nd = y_Nd + weighted_Nkd[:, place]
    return y_Nd


class Expert(nn.Module):
    """One gated MLP, down(act(gate(x)) · up(x)), or gpt-oss's, with biases."""

    def __init__(self, hidden: int, width: int, activation: str, clamp: Clamp | None = None, **kind: Any) -> None:
        super().__init__()
        kind["bias"] = clamp is not None
        self.gate_proj = Linear(hidden, width, **kind)
        self.up_proj = Linear(hidden, width, **kind)
        self.down_proj = Linear(width, hidden, **kind)
        self.act_fn = ACT2FN[activation]
        self._clamp = clamp

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        gate, up = self.gate_proj(x), self.up_proj(x)
        return self.down_proj(self._clamp(gate, up) if self._clamp else self.act_fn(gate) * up)


class MixtureMlp(nn.Module):
    """The MLP of a layer with experts; see the module's text.

    Args:
        hidden: width of the states.
    """

    def __init__(self, hidden: int, mixture: Mixture, activation: str, **kind: Any) -> None:
        super().__init__()
        self._active, self._normalizes, self._of_chosen = mixture.active, mixture.normalizes, bool(mixture.clamp)
        self.gate = Router(hidden, mixture.experts, bias=bool(mixture.clamp), **kind | {"dtype": torch.float32})
        self.experts = nn.ModuleList(
            Expert(hidden, mixture.width, activation, mixture.clamp, **kind) for _ in range(mixture.experts)
        )
        self.replayed_Nk: torch.Tensor | None = None
        self.replayed_weights_Nk: torch.Tensor | None = None
        """Experts to take in the next pass, and their weights; see `choose`."""
        self.taken: tuple[torch.Tensor, torch.Tensor] | None = None
        """Experts that the last pass took, and their weights, [N, k]."""
        self.shared_expert = self.shared_expert_gate = None
        if mixture.shared:
            self.shared_expert = Expert(hidden, mixture.shared, activation, **kind)
            self.shared_expert_gate = Router(hidden, 1, bias=False, **kind | {"dtype": torch.float32})
        self.compute: ExpertProducts | None = None
        """Products of the experts; each multiplies by itself if absent."""
        self.watch: Callable[..., torch.Tensor] | None = None
        """Function of (logits_NE, experts_Nk, weights_Nk, counted_N) that is called in passes with a gradient, and
        returns the weights."""
        self.counted_N: torch.Tensor | None = None
        """Number of answer tokens that each state of the next pass predicts, float32; None if that is not known."""
        self.differing = self.compared = 0
        """Numbers of tokens whose own experts were others than those replayed, and of all that were replayed."""

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        if hidden_states.is_meta:
            return hidden_states  # without data there are no routes
        compute = self.compute or partial(each_by_itself, experts=list(self.experts))
        return self.mix(hidden_states.reshape(-1, hidden_states.shape[-1]), compute).view(hidden_states.shape)

    def mix(self, x_Nd: torch.Tensor, compute: ExpertProducts) -> torch.Tensor:
        """Return the result [N, d] for states [N, d], with these products of the router's experts."""
        logits_NE = self.gate(x_Nd)
        weights_Nk, experts_Nk, own_Nk = choose(
            logits_NE,
            self._active,
            normalizes=self._normalizes,
            of_chosen=self._of_chosen,
            replayed_Nk=self.replayed_Nk,
            replayed_weights_Nk=self.replayed_weights_Nk,
        )
        self.taken = experts_Nk, weights_Nk.detach()
        if self.watch and self.counted_N is not None and torch.is_grad_enabled():
            weights_Nk = self.watch(logits_NE, experts_Nk, weights_Nk, self.counted_N)
        if self.replayed_Nk is not None:
            real_N = self.replayed_Nk[:, 0] >= 0
            other_N = (experts_Nk.sort(dim=-1).values != own_Nk.sort(dim=-1).values).any(dim=-1)
            self.differing += int((other_N & real_N).sum())
            self.compared += int(real_N.sum())
        y_Nd = mixed(x_Nd, weights_Nk, experts_Nk, len(self.experts), compute)
        if self.shared_expert and self.shared_expert_gate:
            share_N1 = sigmoid(self.shared_expert_gate(x_Nd))
            y_Nd = y_Nd + share_N1.to(y_Nd.dtype) * self.shared_expert(x_Nd)
        return y_Nd


class _BesideScores(MixtureMlp):
    """The MLP of a layer that expects its router's scores beside the result, and leaves them out (gpt-oss)."""

    def forward(self, hidden_states: torch.Tensor) -> tuple[torch.Tensor, None]:  # type: ignore[override]
        return super().forward(hidden_states), None


def with_experts(model: PreTrainedModel) -> PreTrainedModel:
    """Replace transformers' mixtures of experts by those of this module, in place and without their values; return the
    model. A dense one stays as it is."""
    mixture = mixture_of(model.config)
    if mixture is None:
        return model
    model.config.output_router_logits = False  # transformers records them from modules that are gone
    hidden, activation = model.config.hidden_size, model.config.hidden_act
    kind = _BesideScores if mixture.clamp else MixtureMlp
    for layer in model.base_model.layers:
        if hasattr(layer.mlp, "experts"):  # some layers may be dense
            fused = next(layer.mlp.parameters())
            layer.mlp = kind(hidden, mixture, activation, device=fused.device, dtype=fused.dtype)
    return model


def mixtures(model: nn.Module) -> list[MixtureMlp]:
    """Return the mixtures of a model, in the order of its layers."""
    return [module for module in model.modules() if isinstance(module, MixtureMlp)]


def router_weights(model: nn.Module) -> frozenset[str]:
    """Return the names of the parameters of a model's routers, and of the gates of experts for all tokens."""
    return frozenset(
        f"{name}.{leaf}"
        for name, module in model.named_modules()
        if isinstance(module, Router)
        for leaf, _ in module.named_parameters()
    )


def replay_routes(model: nn.Module, routes_NLk: torch.Tensor | None, counted_N: torch.Tensor | None = None) -> None:
    """Let the next passes take these experts. They stay, as checkpointing computes a pass again.

    Args:
        routes_NLk: int64 [tokens, layers with experts, k], -1 for the model's own; None for its own everywhere.
            float32 [tokens, layers with experts, 2 k] if the weights of the experts follow them.
        counted_N: see MixtureMlp.
    """
    for layer, mixture in enumerate(mixtures(model)):
        mixture.replayed_Nk = None if routes_NLk is None else routes_NLk[:, layer]
        mixture.replayed_weights_Nk = None
        if mixture.replayed_Nk is not None and mixture.replayed_Nk.is_floating_point():
            experts_Nk, mixture.replayed_weights_Nk = mixture.replayed_Nk.chunk(2, dim=-1)
            mixture.replayed_Nk = experts_Nk.long()
        mixture.counted_N = counted_N


def count_differing(model: nn.Module) -> tuple[int, int]:
    """Return how many (token, layer) pairs would have taken other experts than those replayed, and how many were
    replayed, since the last call."""
    all_of_them = mixtures(model)
    counts = sum(m.differing for m in all_of_them), sum(m.compared for m in all_of_them)
    for mixture in all_of_them:
        mixture.differing = mixture.compared = 0
    return counts
