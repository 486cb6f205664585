"""Calibrated clipping: bounds for a noisy ratio that clip as much of it as the nominal bounds clip of the exact ratio.

Noise pushes tokens with A < 0 below 1-εl, where their gradient is cut off, although the policy has not moved. At a
fixed interval of steps, the bounds [L, H] are computed again from both ratios of the same tokens
(https://arxiv.org/abs/2609.22870, read from summaries: there is no public code):

    L   the same quantile of the noisy ratio, over tokens with A < 0, as 1-εl is of the exact ratio
    H   such that Σ_{A>0} A·min(R, H) / Σ_{A<0} |A|·max(R, L) has the same value for the noisy ratio as for the exact
        ratio with the nominal bounds

The distance of both bounds from 1 stays between half and four times the nominal distance. Without this limit, the
second rule could put H anywhere if few ratios lie near a bound.

If only rollouts are quantized, the noisy ratio is theta/b (naive importance sampling) and the exact ratio is theta/p.
In a unified flow, the noisy ratio is theta/p with both policies quantized, and the exact ratio comes from shadow passes
of the same policies in full precision.
"""

import numpy as np
import torch

_REACH, _BINS, _COARSE = 2.0, 4000, 10
_RANGE = 2.0, 4.0
_EDGES = np.exp(np.linspace(-_REACH, _REACH, _BINS + 1))


@torch.no_grad()
def clip_histogram(log_ratio_BT: torch.Tensor, adv_BT: torch.Tensor, mask_BT: torch.Tensor) -> torch.Tensor:
    """float64 [2, 3, bins]: number of tokens, Σ|A| and Σ|A|·R by log ratio within ±2, for A > 0 and for A < 0.

    Histograms of batches and ranks can be added. Without tokens, all entries are 0.
    """
    mask_BT = mask_BT & log_ratio_BT.isfinite()
    bins_BT = ((log_ratio_BT.double() + _REACH) / (2 * _REACH) * _BINS).long().clamp(0, _BINS - 1)
    histogram = torch.zeros(2, 3, _BINS, dtype=torch.float64, device=log_ratio_BT.device)
    for sign, chosen_BT in enumerate(((adv_BT > 0) & mask_BT, (adv_BT < 0) & mask_BT)):
        bins, size = bins_BT[chosen_BT], adv_BT[chosen_BT].double().abs()
        for row, values in enumerate((torch.ones_like(size), size, size * log_ratio_BT[chosen_BT].double().exp())):
            histogram[sign, row].index_add_(0, bins, values)
    return histogram


def calibrated(noisy: torch.Tensor, exact: torch.Tensor, clip_low: float, clip_high: float) -> tuple[float, float]:
    """(clip_low, clip_high) for the noisy ratio; the nominal values if there are no tokens with A > 0 or with A < 0.

    Args:
        noisy, exact: `clip_histogram` of the two ratios of the same tokens, on the CPU.
    """
    noisy_np, exact_np = noisy.numpy(), exact.numpy()
    if not exact_np[0, 0].sum() or not exact_np[1, 0].sum():
        return clip_low, clip_high
    lower, upper = 1 - clip_low, 1 + clip_high
    below_exact, below_noisy = (np.append(0.0, h[1, 0].cumsum()) for h in (exact_np, noisy_np))
    noisy_lower = 1 - clip_low
    if lower > _EDGES[0]:  # else there is no bound
        noisy_lower = _solve(np.interp(lower, _EDGES, below_exact), below_noisy, _EDGES, lower)
        noisy_lower = 1 - float(np.clip(1 - noisy_lower, clip_low / _RANGE[0], min(1.0, clip_low * _RANGE[1])))
    balance = _gained(exact_np, upper) / _lost(exact_np, lower)
    gains = np.array([_gained(noisy_np, edge) for edge in _EDGES[::_COARSE]])
    noisy_upper = _solve(balance * _lost(noisy_np, noisy_lower), gains, _EDGES[::_COARSE], upper)
    return 1 - noisy_lower, float(np.clip(noisy_upper - 1, clip_high / _RANGE[0], clip_high * _RANGE[1]))


def _solve(wanted: float, rising: np.ndarray, edges: np.ndarray, nominal: float) -> float:
    """Edge where `rising` reaches `wanted`. If it is flat there (no ratios), the edge nearest to `nominal`."""
    slack = 1e-9 * rising[-1]
    first, last = np.interp([wanted - slack, wanted + slack], rising, edges)
    return float(np.clip(nominal, first, last))


def _gained(histogram: np.ndarray, upper: float) -> float:
    """Σ_{A>0} A·min(R, upper)."""
    _, mass, moment = histogram[0]
    return float(np.minimum(moment, upper * mass).sum())


def _lost(histogram: np.ndarray, lower: float) -> float:
    """Σ_{A<0} |A|·max(R, lower)."""
    _, mass, moment = histogram[1]
    return float(np.maximum(moment, lower * mass).sum())
