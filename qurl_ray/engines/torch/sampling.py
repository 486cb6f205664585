"""Sampling of tokens, row by row: a draw depends on a request's own logits, seed and token index alone."""

import numpy as np
import torch
from torch.nn.functional import pad

from qurl_ray.numerics.splitmix import splitmix64
from qurl_ray.policy.logprobs import log_softmax
from qurl_ray.types import SamplingParams

_BLOCK = 128


def uniforms(seeds: np.ndarray, token_index: np.ndarray) -> torch.Tensor:
    """Return one number in [0, 1) per row from (seed, token index), float64 [B]. Counter-based, without state."""
    bits = splitmix64(splitmix64(seeds.astype(np.uint64)) ^ token_index.astype(np.uint64))
    return torch.from_numpy((bits >> np.uint64(11)).astype(np.float64) * 2.0**-53)


def sample(
    logits_BV: torch.Tensor, params: SamplingParams, uniform_B: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Draw tokens [B] by inversion of the cumulative distribution. Return them and their log-probs [B].

    Log-probs are those of the distribution actually drawn from: after temperature, top-k and top-p. Greedy draws
    (temperature 0) are certain: their log-prob is 0, or nan where the logits are not finite.
    """
    if params.temperature == 0:
        largest_B, tokens_B = logits_BV.float().max(dim=-1)
        return tokens_B, torch.where(largest_B.isfinite(), 0.0, torch.nan)
    logprobs_BV = log_softmax(logits_BV, params.temperature)
    if params.top_k or params.top_p < 1:
        logprobs_BV = torch.log_softmax(_truncate(logprobs_BV, params.top_k, params.top_p), dim=-1)
    tokens_B = _invert(logprobs_BV.exp(), uniform_B.to(logits_BV.device))
    return tokens_B, logprobs_BV.gather(1, tokens_B[:, None])[:, 0]


def _invert(weights_BV: torch.Tensor, uniform_B: torch.Tensor) -> torch.Tensor:
    """Return the tokens [B] at which the cumulative weights, divided by their total, exceed the uniform numbers.

    There are two steps, because a cumulative sum over the whole vocabulary is slow: first find the block of tokens,
    then the token in it. Weight 0 is never drawn: right=True skips tokens of weight 0, and blocks of zeros too.
    """
    B, V = weights_BV.shape
    blocks_BNn = pad(weights_BV, (0, -V % _BLOCK)).view(B, -1, _BLOCK)
    sums_BN = blocks_BNn.sum(dim=2).double().cumsum(dim=1)
    points_B1 = _below(uniform_B[:, None] * sums_BN[:, -1:], sums_BN[:, -1:])
    block_B1 = torch.searchsorted(sums_BN, points_B1, right=True).clamp_(max=sums_BN.shape[1] - 1)
    before_B1 = pad(sums_BN, (1, 0)).gather(1, block_B1)
    share_B1 = (points_B1 - before_B1) / (sums_BN.gather(1, block_B1) - before_B1)
    # Relative to the block's sum token by token, which differs from its sum above by rounding.
    inside_Bn = blocks_BNn[torch.arange(B), block_B1[:, 0]].double().cumsum(dim=1)
    points_B1 = _below(share_B1 * inside_Bn[:, -1:], inside_Bn[:, -1:])
    token_B1 = torch.searchsorted(inside_Bn, points_B1, right=True)
    return (block_B1 * _BLOCK + token_B1)[:, 0].clamp_(max=V - 1)  # out of range only where weights are nan


def _below(points: torch.Tensor, bound: torch.Tensor) -> torch.Tensor:
    """Return the points, limited to the largest number below the bound."""
    return torch.minimum(points, bound.nextafter(torch.zeros_like(bound)))


def _truncate(logprobs_BV: torch.Tensor, top_k: int, top_p: float) -> torch.Tensor:
    """Set to -inf what is outside the top_k likeliest tokens, or outside the smallest set that reaches top_p."""
    ordered_BV, index_BV = logprobs_BV.sort(dim=-1, descending=True, stable=True)
    before_BV = ordered_BV.exp().cumsum(dim=-1) - ordered_BV.exp()
    drop_BV = before_BV >= top_p
    drop_BV[:, 0] = False
    if top_k:
        drop_BV[:, top_k:] = True
    return logprobs_BV.masked_fill(drop_BV.gather(1, index_BV.argsort(dim=-1)), -torch.inf)
