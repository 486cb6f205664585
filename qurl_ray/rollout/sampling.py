"""Drawing tokens. Row by row: what is drawn depends on a request's own logits, seed and token index alone."""

import numpy as np
import torch

from qurl_ray.policy.logprobs import log_softmax
from qurl_ray.quant.fingerprint import splitmix64
from qurl_ray.types import SamplingParams


def uniforms(seeds: np.ndarray, token_index: np.ndarray) -> torch.Tensor:
    """One number in [0, 1) per row from (seed, token index): float64 [B]. Counter-based, so no state travels."""
    bits = splitmix64(splitmix64(seeds.astype(np.uint64)) ^ token_index.astype(np.uint64))
    return torch.from_numpy((bits >> np.uint64(11)).astype(np.float64) * 2.0**-53)


def sample(
    logits_BV: torch.Tensor, params: SamplingParams, uniform_B: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Tokens [B] by inversion of the cumulative distribution, and their log-probs [B].

    The log-prob is that of the distribution really drawn from: after temperature, top-k and top-p. Greedy draws
    (temperature 0) are certain: 0.
    """
    if params.temperature == 0:
        return logits_BV.argmax(dim=-1), torch.zeros(len(logits_BV))
    logprobs_BV = log_softmax(logits_BV, params.temperature)
    if params.top_k or params.top_p < 1:
        logprobs_BV = torch.log_softmax(_truncate(logprobs_BV, params.top_k, params.top_p), dim=-1)
    cumulative_BV = logprobs_BV.double().exp_().cumsum(dim=-1)
    # Scaled by the total, which rounding leaves near 1. right=True never lands on a token of probability 0.
    points_B1 = uniform_B[:, None] * cumulative_BV[:, -1:]
    tokens_B1 = torch.searchsorted(cumulative_BV, points_B1, right=True).clamp_(max=logits_BV.shape[-1] - 1)
    return tokens_B1[:, 0], logprobs_BV.gather(1, tokens_B1)[:, 0]


def _truncate(logprobs_BV: torch.Tensor, top_k: int, top_p: float) -> torch.Tensor:
    """-inf outside the top_k likeliest tokens and the smallest set of them whose probability reaches top_p."""
    ordered_BV, index_BV = logprobs_BV.sort(dim=-1, descending=True, stable=True)
    before_BV = ordered_BV.exp().cumsum(dim=-1) - ordered_BV.exp()
    drop_BV = before_BV >= top_p
    drop_BV[:, 0] = False
    if top_k:
        drop_BV[:, top_k:] = True
    return logprobs_BV.masked_fill(drop_BV.gather(1, index_BV.argsort(dim=-1)), -torch.inf)
