"""Sampling of tokens, row by row: a draw depends on a request's own logits, seed and token index alone.

A token is drawn by a race: of weights w and exponential noise e, the largest w / e wins, with probability w / Σ w.
With the same noise, nearly equal weights mostly have the same winner: two distributions at a total variation distance
of TV draw different tokens with a probability of at most 2 TV / (1 + TV) (https://arxiv.org/abs/2408.07978). The
inversion of a cumulative sum would add up the differences of all tokens before. Drafts need that
(engines.torch.drafts).

There are two races, because noise for a whole vocabulary is slow: the first between blocks of tokens, the second
between the tokens of the winner.
"""

import numpy as np
import torch
from torch.nn.functional import pad

from qurl_ray.numerics.splitmix import splitmix64
from qurl_ray.policy.attention import round_up
from qurl_ray.policy.logprobs import log_softmax
from qurl_ray.types import SamplingParams

_BLOCK = 256
_VECTOR = 16
"""Rows of noise are a multiple of this: where a number lies in a vector, which may matter to the last bit of a
logarithm, does not depend on the row."""


def noise_keys(seeds: np.ndarray, token_index: np.ndarray) -> np.ndarray:
    """Return the key of each row's noise from (seed, token index), uint64 [B]. Counter-based, without state."""
    return splitmix64(splitmix64(seeds.astype(np.uint64)) ^ token_index.astype(np.uint64))


def exponentials(keys_B: np.ndarray, count: int) -> np.ndarray:
    """Return independent numbers above 0 with an exponential distribution, float64 [B, count]."""
    bits = splitmix64(keys_B[:, None] ^ np.arange(count, dtype=np.uint64))
    return -np.log(((bits >> np.uint64(12)).astype(np.float64) + 0.5) * 2.0**-52)


def sample(logits_BV: torch.Tensor, params: SamplingParams, keys_B: np.ndarray) -> tuple[torch.Tensor, torch.Tensor]:
    """Draw tokens [B] with the noise of these keys. Return them and their log-probs [B].

    Log-probs are those of the distribution actually drawn from: after temperature, top-k and top-p. Greedy draws
    (temperature 0) are certain: their log-prob is 0, or nan where the logits are not finite.
    """
    if params.temperature == 0:
        largest_B, tokens_B = logits_BV.float().max(dim=-1)
        return tokens_B, torch.where(largest_B.isfinite(), 0.0, torch.nan)
    logprobs_BV = log_softmax(logits_BV, params.temperature)
    if params.top_k or params.top_p < 1:
        logprobs_BV = torch.log_softmax(_truncate(logprobs_BV, params.top_k, params.top_p), dim=-1)
    tokens_B = _race(logprobs_BV.exp(), keys_B)
    return tokens_B, logprobs_BV.gather(1, tokens_B[:, None])[:, 0]


def _race(weights_BV: torch.Tensor, keys_B: np.ndarray) -> torch.Tensor:
    """Return tokens [B] with the probabilities of their weights; weight 0 is never drawn."""
    B, V = weights_BV.shape
    block = min(_BLOCK, round_up(V, _VECTOR))
    blocks_BNn = pad(weights_BV, (0, -V % block)).view(B, -1, block)
    count = blocks_BNn.shape[1]
    noise = torch.from_numpy(exponentials(keys_B, block + round_up(count, _VECTOR))).to(weights_BV.device)
    block_B = (blocks_BNn.sum(dim=2).double() / noise[:, block : block + count]).argmax(dim=1)
    inside_Bn = blocks_BNn[torch.arange(B), block_B].double() / noise[:, :block]
    return (block_B * block + inside_Bn.argmax(dim=1)).clamp_(max=V - 1)  # out of range only where weights are nan


def _truncate(logprobs_BV: torch.Tensor, top_k: int, top_p: float) -> torch.Tensor:
    """Set to -inf what is outside the top_k likeliest tokens, or outside the smallest set that reaches top_p."""
    ordered_BV, index_BV = logprobs_BV.sort(dim=-1, descending=True, stable=True)
    before_BV = ordered_BV.exp().cumsum(dim=-1) - ordered_BV.exp()
    drop_BV = before_BV >= top_p
    drop_BV[:, 0] = False
    if top_k:
        drop_BV[:, top_k:] = True
    return logprobs_BV.masked_fill(drop_BV.gather(1, index_BV.argsort(dim=-1)), -torch.inf)
