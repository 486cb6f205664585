"""Causal attention in which a query's result depends on its own sequence alone: the same bits in a batch of one or of
five hundred, one token at a time or all at once.

Three rules make it so, on CPUs with MKL in strict mode (qurl_ray/__init__.py):
- at least two rows in each product (one row takes the matrix-vector kernel, which sums in another order);
- the key length is a multiple of 16, padded keys having probability exactly 0;
- values are accumulated over fixed chunks of 128 keys (longer products are split where their length says).
What breaks without them is measured in docs/LOG.md. Query heads that share a key head are rows of one product, so keys
are never repeated.
"""

import torch
from torch import nn
from transformers import AttentionInterface

NAME = "qurl_invariant"
KEY_MULTIPLE = 16
KEY_CHUNK = 128


def round_up(length: int, multiple: int = KEY_MULTIPLE) -> int:
    """Smallest multiple that is not below `length`."""
    return -(-length // multiple) * multiple


def invariant_attention(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None = None,
    *,
    scaling: float,
    position_ids: torch.Tensor,
    sliding_window: int | None = None,
    dropout: float = 0.0,
    **_: object,
) -> tuple[torch.Tensor, None]:
    """softmax(query · keyᵀ · scaling, over keys j ≤ position) · value.

    The signature is that of a transformers attention function. Key j of a sequence must be its token at position j.

    Args:
        query: [B, heads, T, d].
        key, value: [B, key heads, S, d].
        position_ids: [B, T] or [1, T], position of each query in its sequence.

    Returns:
        [B, T, heads, d], and no attention weights.
    """
    if attention_mask is not None or dropout:
        raise ValueError("batch-invariant attention is causal by position_ids: no mask, no dropout")
    B, H, T, d = query.shape
    KV, S = key.shape[1:3]
    if S % KEY_MULTIPLE:
        pad = (0, 0, 0, round_up(S) - S)
        key, value = nn.functional.pad(key, pad), nn.functional.pad(value, pad)
        S = key.shape[2]
    groups = H // KV
    positions = position_ids.expand(B, T)
    rows = query.reshape(B * KV, groups * T, d)
    if groups * T == 1:
        rows = rows.expand(-1, 2, -1)
    scores = torch.bmm(rows, key.reshape(B * KV, S, d).transpose(1, 2)) * scaling
    hidden = torch.arange(S, device=query.device) > positions[:, :, None]
    if sliding_window:
        hidden |= torch.arange(S, device=query.device) <= positions[:, :, None] - sliding_window
    scores = scores.view(B, KV, -1, T, S).masked_fill(hidden[:, None, None], -torch.inf)
    weights = torch.softmax(scores, dim=-1).view(B * KV, -1, S)
    values = value.reshape(B * KV, S, d)
    out = torch.bmm(weights[:, :, :KEY_CHUNK], values[:, :KEY_CHUNK])
    for start in range(KEY_CHUNK, S, KEY_CHUNK):
        stop = start + KEY_CHUNK
        out = out + torch.bmm(weights[:, :, start:stop], values[:, start:stop])
    out = out[:, : groups * T].reshape(B, H, T, d)
    return out.transpose(1, 2).contiguous(), None


AttentionInterface.register(NAME, invariant_attention)
