"""Causal attention, in two implementations that transformers models can be loaded with: `NAME` and `VARLEN`.

`NAME`, invariant_attention: the result of a query depends on its own sequence alone. It has the same bits in a batch of
one or of five hundred, packed or padded, one token at a time or all at once. Three rules ensure this on CPUs:
- each product has the number of rows that this machine's rule requires (numerics.selfcheck.attention_rule);
- the key length is a multiple of 16, and padded keys have probability exactly 0;
- values are accumulated over fixed chunks of 128 keys (a library splits longer products depending on their length).
docs/LOG.md has measurements of what breaks without these rules. Query heads that share a key head are rows of one
product, so keys are never repeated. Long sequences are computed in chunks of queries, so that memory grows linearly
with their length, not quadratically.

`VARLEN`, varlen_attention: torch's fused kernels, for training on a GPU. Not batch-invariant.
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from functools import partial, reduce, wraps
from inspect import signature
from typing import Any, cast

import torch
from torch import nn
from torch.autograd.function import once_differentiable
from torch.nn.attention.varlen import varlen_attn
from torch.nn.functional import pad, scaled_dot_product_attention
from torch.utils.checkpoint import checkpoint
from transformers import AttentionInterface

from qurl_ray.numerics.products import queries_to_add
from qurl_ray.numerics.rules import Rule
from qurl_ray.numerics.selfcheck import attention_rule
from qurl_ray.policy.sequence import Division
from qurl_ray.policy.sharing import Sharing

NAME = "qurl_invariant"
VARLEN = "qurl_varlen"
_FEWER_KEY_HEADS: dict[str, Any] = {"enable_gqa": True} if "enable_gqa" in signature(varlen_attn).parameters else {}
"""torch 2.11 lacks this argument: it takes fewer key heads as they are."""
KEY_MULTIPLE = 16
KEY_CHUNK = 128
_IDLE = {"output_router_logits", "is_causal", "output_attentions", "position_ids", "use_cache"}
"""Options that models pass on to their attention, and that change nothing in one that is causal by positions."""
QUERY_CHUNK = 256  # queries whose scores exist at a time

AsStored = Callable[[torch.Tensor, torch.Tensor, int], tuple[torch.Tensor, torch.Tensor]]
"""A function of keys, values [B, key heads, T, d] and the index of a layer. It returns both as a cache would."""
_STORED: ContextVar[AsStored | None] = ContextVar("stored", default=None)


@dataclass(frozen=True, slots=True, kw_only=True)
class Packing:
    """Layout of sequences that are packed one after the other in the row of a batch of one.

    Example:
        Packing(lengths=(3, 5), bounds=torch.tensor([0, 3, 8], dtype=torch.int32))
    """

    lengths: tuple[int, ...]
    """Tokens of each sequence, at least 1."""
    bounds: torch.Tensor
    """int32 [sequences + 1]: 0, then the end of each sequence. On the device of the tokens, where kernels read it."""


def round_up(length: int, multiple: int = KEY_MULTIPLE) -> int:
    """Return the smallest multiple of `multiple` that is not below `length`."""
    return -(-length // multiple) * multiple


def _over_ranks(attention: Callable[..., tuple[torch.Tensor, None]]) -> Callable[..., tuple[torch.Tensor, None]]:
    """Give an attention the option `division`, with which the ranks of a sequence group share its heads: it then takes
    and returns the tokens of one rank (policy.sequence)."""

    @wraps(attention)
    def divided(
        module: nn.Module | None,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        *args: Any,
        division: Division | None = None,
        **options: Any,
    ) -> tuple[torch.Tensor, None]:
        if division is None:
            return attention(module, query, key, value, *args, **options)
        of_heads = division.to_heads(query, key, value)
        if (sinks := options.get("s_aux")) is not None:
            options["s_aux"] = sinks[division.heads(len(sinks))]
        out, _ = attention(module, *of_heads, *args, **options | {"position_ids": division.positions_1N})
        return division.to_tokens(out, query.shape[1]), None

    return divided


@_over_ranks
def invariant_attention(
    module: nn.Module | None,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None = None,
    *,
    scaling: float,
    position_ids: torch.Tensor,
    sliding_window: int | None = None,
    s_aux: torch.Tensor | None = None,
    dropout: float = 0.0,
    packing: Packing | None = None,
    sharing: Sharing | None = None,
    **others: object,
) -> tuple[torch.Tensor, None]:
    """Return softmax(scaling · query · keyᵀ, over keys j ≤ position) · value.

    With sinks, as gpt-oss has them, each head has one key more, of a learned score, and without a value.

    The signature is that of a transformers attention function. Key j of a sequence must be its token at position j.

    Args:
        query: [B, heads, T, d].
        key, value: [B, key heads, S, d].
        position_ids: [B, T] or [1, T], position of each query in its sequence.
        s_aux: score of each head's sink, [heads].
        packing: layout of the sequences, if the row (B = 1, S = T) holds several; none sees another.
        sharing: layout of the sequences, if they share their prompts.

    Returns:
        [B, T, heads, d], and no attention weights.

    Raises:
        ValueError: a mask, dropout, or an option that is not known was given.
    """
    _refuse(attention_mask, dropout, others)
    key, value = _as_stored(module, key, value)
    attend = partial(_one_sequence, scaling=scaling, sliding_window=sliding_window, sinks=s_aux)
    if sharing is not None:
        return sharing.attend(attend, query, key, value), None
    if packing is None:
        return attend(query, key, value, position_ids), None
    heads = (part.split(packing.lengths, dim=2) for part in (query, key, value))
    positions = position_ids.split(packing.lengths, dim=1)
    return torch.cat([attend(*parts) for parts in zip(*heads, positions, strict=True)], dim=1), None


def _one_sequence(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    position_ids: torch.Tensor,
    *,
    scaling: float,
    sliding_window: int | None,
    sinks: torch.Tensor | None,
) -> torch.Tensor:
    """Compute invariant_attention without packing, in chunks of queries that are recomputed in the backward pass."""
    length = key.shape[2]
    if length % KEY_MULTIPLE:
        padding = (0, 0, 0, round_up(length) - length)
        key, value = pad(key, padding), pad(value, padding)
    attend = partial(_scores_at_once, scaling=scaling, sliding_window=sliding_window, sinks=sinks)
    if query.shape[2] <= QUERY_CHUNK:
        return attend(query, key, value, position_ids)
    if torch.is_grad_enabled():
        attend = partial(checkpoint, attend, use_reentrant=False, preserve_rng_state=False)
    chunks = []
    for rows, positions in zip(query.split(QUERY_CHUNK, dim=2), position_ids.split(QUERY_CHUNK, dim=1), strict=True):
        # Keys after the chunk's last position would have probability 0: to leave them out changes no bit.
        visible = round_up(int(positions.max()) + 1)
        chunks.append(attend(rows, key[:, :, :visible], value[:, :, :visible], positions))
    return torch.cat(chunks, dim=1)


def _scores_at_once(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    position_ids: torch.Tensor,
    *,
    scaling: float,
    sliding_window: int | None,
    sinks: torch.Tensor | None,
) -> torch.Tensor:
    """Return [B, T, heads, d] from [B, heads, T, d] and a multiple of KEY_MULTIPLE keys, by the module's rules."""
    B, H, T, d = query.shape
    KV, S = key.shape[1:3]
    groups = H // KV
    rule = _rule(query)
    positions = position_ids.expand(B, T)
    if added := queries_to_add(rule, T, groups, B * KV):
        query, positions = pad(query, (0, 0, 0, added)), pad(positions, (0, added))
    rows = (query * scaling).reshape(B * KV, groups * (T + added), d)
    scores = _bmm(rows, key.reshape(B * KV, S, d).transpose(1, 2), rule)
    hidden = hidden_keys(positions, S, sliding_window)
    sinks = None if sinks is None else sinks.to(scores.dtype).view(KV, groups, 1, 1)
    weights = _Visible.apply(scores.view(B, KV, groups, -1, S), hidden[:, None, None], sinks).view(B * KV, -1, S)
    out = _weighted(weights, value.reshape(B * KV, S, d), rule)
    return out.view(B, H, -1, d)[:, :, :T].transpose(1, 2).contiguous()


class _Visible(torch.autograd.Function):
    """Softmax of scores [B, KV, groups, T, S] over their last axis, without the hidden ones. These are overwritten:
    nothing else reads them. Hidden keys have probability 0, and so a gradient of 0 without another mask.

    Sinks [KV, groups, 1, 1] are scores of keys that take part, and that the result lacks. They come first, in
    KEY_MULTIPLE places, so that a sum's order does not depend on S."""

    @staticmethod
    def forward(ctx: Any, scores: torch.Tensor, hidden: torch.Tensor, sinks: torch.Tensor | None) -> torch.Tensor:
        scores.masked_fill_(hidden, -torch.inf)
        first = 0
        if sinks is not None:
            first = KEY_MULTIPLE
            before = pad(sinks, (0, first - 1), value=-torch.inf).expand(*scores.shape[:-1], first)
            scores = torch.cat((before, scores), dim=-1)
        weights = torch.softmax(scores, dim=-1)
        ctx.save_for_backward(weights)
        return weights[..., first:]

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None, torch.Tensor | None]:
        (weights,) = ctx.saved_tensors
        first = weights.shape[-1] - grad.shape[-1]
        if first:
            grad = pad(grad, (first, 0))
        grad = torch.ops.aten._softmax_backward_data(grad, weights, -1, weights.dtype)
        return grad[..., first:], None, grad[..., :1].sum(dim=(0, 3))[..., None] if first else None


def hidden_keys(positions_BT: torch.Tensor, keys: int, sliding_window: int | None = None) -> torch.Tensor:
    """Return bool [B, T, keys]: True for keys that the query must not see."""
    places = torch.arange(keys, device=positions_BT.device)
    hidden = places > positions_BT[:, :, None]
    if sliding_window:
        hidden |= places <= positions_BT[:, :, None] - sliding_window
    return hidden


def attend_last(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, hidden: torch.Tensor, *, scaling: float
) -> torch.Tensor:
    """Compute invariant_attention for one query per sequence: the same bits, by in-place operations, no gradient.

    Args:
        query: [B, heads, 1, d].
        key, value: [B, key heads, S, d], S a multiple of KEY_MULTIPLE.
        hidden: float32 [B, 1, 1, S], -inf at hidden keys, 0 elsewhere; the same for all layers.

    Returns:
        [B, 1, heads, d].
    """
    B, H, _, d = query.shape
    KV, S = key.shape[1:3]
    groups = H // KV
    rule = _rule(query)
    rows = (query * scaling).reshape(B * KV, groups, d)
    if rule and (missing := rule.padded(groups) - groups):
        rows = pad(rows, (0, 0, 0, missing))
    scores = _bmm(rows, key.reshape(B * KV, S, d).transpose(1, 2), rule)
    scores.view(B, KV, -1, S).add_(hidden)
    out = _weighted(torch.softmax(scores, dim=-1), value.reshape(B * KV, S, d), rule)
    return out[:, :groups].reshape(B, 1, H, d)


def _rule(query: torch.Tensor) -> Rule | None:
    return attention_rule(query.shape[-1]) if query.device.type == "cpu" and query.dtype == torch.float32 else None


def _bmm(rows: torch.Tensor, factors: torch.Tensor, rule: Rule | None) -> torch.Tensor:
    """Return rows · factors, [B, M, K] and [B, K, N] to [B, M, N]; M must satisfy the rule."""
    batch, M, K = rows.shape
    if not rule or batch >= rule.batch:
        return torch.bmm(rows, factors)
    each = M // rule.batch
    if batch == 1 and M % rule.batch == 0 and each and rule.padded(each) == each:
        pieces = rows.reshape(rule.batch, each, K)  # in place of the same product several times
        return torch.bmm(pieces, factors.expand(rule.batch, -1, -1)).view(1, M, -1)
    rows, factors = (part.expand(rule.batch, -1, -1) for part in (rows, factors))
    return torch.bmm(rows, factors)[:batch]


def _weighted(weights: torch.Tensor, values: torch.Tensor, rule: Rule | None) -> torch.Tensor:
    """Return weights · values, added up over chunks of KEY_CHUNK keys, from the first chunk on."""
    if weights.shape[2] <= KEY_CHUNK:
        return _bmm(weights, values, rule)
    # split() and not slices: the gradient of a slice is as large as the tensor that it was cut from.
    chunks = zip(weights.split(KEY_CHUNK, dim=2), values.split(KEY_CHUNK, dim=1), strict=True)
    return reduce(torch.add, (_bmm(*chunk, rule) for chunk in chunks))


@_over_ranks
def varlen_attention(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None = None,
    *,
    scaling: float,
    sliding_window: int | None = None,
    dropout: float = 0.0,
    packing: Packing | None = None,
    **others: object,
) -> tuple[torch.Tensor, None]:
    """Compute invariant_attention, up to rounding, by fused kernels, for whole sequences (S = T, positions 0, 1, …).

    Packed bfloat16 and float16 (also from autocast) on a CUDA device use torch's variable-length flash attention, in
    one call. All other inputs use scaled_dot_product_attention, with one call per sequence of a packed row.

    Not batch-invariant: kernels choose how they split their sums. Tested on an H200.

    Args:
        query: [B, heads, T, d].
        key, value: [B, key heads, T, d].
        packing: layout of the sequences, if the row (B = 1) holds several; none sees another.

    Returns:
        [B, T, heads, d], and no attention weights.

    Raises:
        ValueError: a mask, dropout or an option that is not known was given, there are keys of a cache, or a sequence
            exceeds the sliding window.
    """
    _refuse(attention_mask, dropout, others)
    key, value = _as_stored(module, key, value)
    if key.shape[2] != query.shape[2]:
        raise ValueError(f"{VARLEN} takes whole sequences, got {query.shape[2]} queries and {key.shape[2]} keys")
    longest = max(packing.lengths) if packing else query.shape[2]
    if sliding_window and longest > sliding_window:
        raise ValueError(f"{VARLEN} has no sliding window: {longest} tokens exceed {sliding_window}; use {NAME}")
    kind = query.device.type
    if torch.is_autocast_enabled(kind):
        # Under autocast, rotary embeddings leave query and key in float32, and autocast does not handle varlen_attn.
        query, key, value = (part.to(torch.get_autocast_dtype(kind)) for part in (query, key, value))
    if packing is None:
        return _causal(query, key, value, scaling), None
    if kind == "cuda" and query.dtype in (torch.bfloat16, torch.float16):
        query, key, value = (part[0].transpose(0, 1) for part in (query, key, value))  # [T, heads, d]
        bounds = packing.bounds
        # A window of (all before, none after) makes this function causal.
        out = varlen_attn(
            query, key, value, bounds, bounds, longest, longest, scale=scaling, window_size=(-1, 0), **_FEWER_KEY_HEADS
        )
        return cast(torch.Tensor, out)[None], None
    heads = (part.split(packing.lengths, dim=2) for part in (query, key, value))
    return torch.cat([_causal(q, k, v, scaling) for q, k, v in zip(*heads, strict=True)], dim=1), None


def _causal(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scaling: float) -> torch.Tensor:
    out = scaled_dot_product_attention(query, key, value, is_causal=True, scale=scaling, enable_gqa=True)
    return out.transpose(1, 2).contiguous()


@contextmanager
def stored_as(as_stored: AsStored) -> Iterator[None]:
    """Context in which attention computes with the keys and values that a cache would return."""
    token = _STORED.set(as_stored)
    try:
        yield
    finally:
        _STORED.reset(token)


def _as_stored(module: Any | None, key: torch.Tensor, value: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    as_stored = _STORED.get()
    return as_stored(key, value, module.layer_idx) if as_stored and module is not None else (key, value)


def unknown_options(options: Mapping[str, object]) -> list[str]:
    """Return the names of options that a model gives its attention, and that would be left out here: caps, …"""
    return [name for name, given in options.items() if given is not None and name not in _IDLE]


def _refuse(attention_mask: torch.Tensor | None, dropout: float, others: Mapping[str, object]) -> None:
    if attention_mask is not None or dropout:
        raise ValueError("the shared attention is causal by position_ids: no mask, no dropout")
    if unknown := unknown_options(others):
        raise ValueError(f"the shared attention has no option {', '.join(unknown)}")


AttentionInterface.register(NAME, invariant_attention)
AttentionInterface.register(VARLEN, varlen_attention)
