"""Logged metrics of a step, and their definitions.

n and m are the numbers of tokens and sequences of the step, over all updates and ranks; each row of a trajectory of
several is a sequence here. b, p, theta, rho = p/b,
R = theta/p and A are defined in rl.objective. The tokens were drawn from b. A share is a share of all tokens unless
stated otherwise. With metrics_only, the metrics of a correction describe what it would do.

mismatch between engine and learner (b against p)
    mismatch/kl                 Σ (rho - 1 - log rho) / n     k3 estimate of KL(b‖p), nats per token
    mismatch/kl_k1              Σ -log rho / n                k1 estimate of the same; may be negative
    mismatch/mean_rho           Σ rho / n                     1 in expectation
    mismatch/max_rho            max rho
    mismatch/truncated          share with a raw weight above C
    mismatch/ess                (Σ rho)² / (n Σ rho²)         effective sample size as a share of the tokens
    mismatch/weight_ess         (Σ w)² / (n Σ w²)             the same for the weights
    mismatch/chi2               Σ rho² / n - 1                χ² divergence of p from b
    mismatch/perplexity_gap     mean over sequences of exp(mean_t -log p) - exp(mean_t -log b)
    mismatch/abs_logprob_gap    Σ |log rho| / n
    mismatch/exp_abs_gap        Σ exp(|log rho|) / n          healthy below 1.03 to 1.05 (NeMo-RL)
    mismatch/strength           λ, by which the weights are mixed with 1
    mismatch/dropped            share whose weight is 0 because of a band, a rejection or a veto
    mismatch/rejected           share of sequences dropped as a whole
    mismatch/vetoed             share of sequences dropped by the veto
movement of the policy by the step's updates (p against theta; the tokens are b's, not reweighted)
    policy/kl                   Σ (R - 1 - log R) / n         k3 estimate of KL(p‖theta)
    policy/kl_k1                Σ -log R / n
    policy/max_ratio            max R
    policy/entropy              mean entropy of theta at the tokens, nats
    policy/kl_reference         mean of the configured estimate of KL(theta‖reference)
routers of a mixture of experts (answer tokens; learner.routers; means over layers but for the load)
    router/balance              E Σ_i f_i P_i                 1 if tokens are spread evenly
    router/entropy              mean entropy of the router, nats
    router/z                    mean (log Σ exp logits)²
    router/load                 E max_i f_i                   of the busiest expert of all layers; 1 if all are alike
    router/idle_experts         share of experts that no token chose
answers (all that a step drew; computed in training/coordinator/figures.py)
    rollout/mean_length         tokens per answer
    rollout/truncated_share     share of answers that reached the length limit
    rollout/garbage_share       share of tokens in repetitions (rl.repetition)
effect of the clip
    clip/upper                  share with A > 0 whose ratio is above its bound: no gradient (cispo: a full weight)
    clip/lower                  share with A < 0 whose ratio is below 1-εl: likewise
    clip/upper_negative         share with A < 0 whose ratio is above the bound: gradient grows with the ratio
    clip/lower_positive         share with A > 0 whose ratio is below 1-εl: gradient remains
    clip/dual                   share with A < 0 where dual clip applies: no gradient
    acr_active_tokens           tokens with A > 0 and 1+εh < R <= (1+εh)·max(1, rho/C): TIS cuts them off, ACR does not
    clip/calibrated_low, _high  εl and εh in use, if they are calibrated
    quantization/factors_moved  share of equalization's factors that moved after this step, where they were looked at
    mismatch/routes_differing   share of tokens and layers that would take other experts than those replayed
    adapter/noise               standard deviation of the noise on the gains of norms, in this step
    clip/admitted_gradient      share of the ACR-active tokens in Σ |d value / d log theta|, the gradient's total size
"""

from collections.abc import Mapping

import torch

from qurl_ray.rl.ratios import MAX_LOG_RATIO, Sums, kl_estimate, sequence_mean
from qurl_ray.rl.surrogate import Bounds, Surrogate


@torch.no_grad()
def mismatch_sums(
    prox_BT: torch.Tensor, behavior_BT: torch.Tensor, log_rho_BT: torch.Tensor, mask_BT: torch.Tensor
) -> Sums:
    """Compute metric sums of b against p. `log_rho_BT` is bounded, and 0 where masked."""
    log_rho_N = log_rho_BT[mask_BT].double()
    rho_N = log_rho_N.exp()
    surprise = [(-sequence_mean(x_BT.double(), mask_BT)).clamp(max=MAX_LOG_RATIO) for x_BT in (prox_BT, behavior_BT)]
    real_B = mask_BT.any(dim=1)
    return {
        "tokens": mask_BT.sum(),
        "sequences": real_B.sum(),
        "rho": rho_N.sum(),
        "rho_squared": rho_N.square().sum(),
        "log_rho": log_rho_N.sum(),
        "kl": kl_estimate(-log_rho_N, "k3").sum(),
        "abs_log_rho": log_rho_N.abs().sum(),
        "exp_abs_log_rho": log_rho_N.abs().exp().sum(),
        "perplexity_gap": torch.where(real_B, surprise[0].exp() - surprise[1].exp(), 0.0).sum(),
        "max_rho": _largest(rho_N),
    }


@torch.no_grad()
def update_sums(
    log_ratio_BT: torch.Tensor,
    adv_BT: torch.Tensor,
    mask_BT: torch.Tensor,
    weight_BT: torch.Tensor,
    term: Surrogate,
    bounds: Bounds,
    clip_high: float,
) -> Sums:
    """Compute metric sums of p against theta, and of the clip. `log_ratio_BT` is log(theta/p)."""
    log_ratio_N = log_ratio_BT[mask_BT].double()
    positive_BT, negative_BT = (adv_BT > 0) & mask_BT, (adv_BT < 0) & mask_BT
    above_BT, below_BT = term.ratio_BT > bounds.upper_BT, term.ratio_BT < bounds.lower
    # without ACR the bound is 1+εh, and no token lies between
    admitted_BT = positive_BT & (term.ratio_BT > 1 + clip_high) & ~above_BT & (weight_BT > 0)
    mass_BT = (weight_BT * term.slope_BT).double()
    return {
        "log_ratio": log_ratio_N.sum(),
        "policy_kl": kl_estimate(-log_ratio_N, "k3").sum(),
        "max_ratio": _largest(log_ratio_N.exp()),
        "clipped_upper": (positive_BT & above_BT).sum(),
        "clipped_lower": (negative_BT & below_BT).sum(),
        "upper_negative": (negative_BT & above_BT).sum(),
        "lower_positive": (positive_BT & below_BT).sum(),
        "dual_clipped": (term.bounded_BT & mask_BT).sum(),
        "acr_active": admitted_BT.sum(),
        "gradient_mass": torch.where(mask_BT, mass_BT, 0.0).sum(),
        "admitted_mass": torch.where(admitted_BT, mass_BT, 0.0).sum(),
    }


_STEP_WIDE = {
    "mismatch/strength": "max_strength",
    "clip/calibrated_low": "max_clip_low",
    "clip/calibrated_high": "max_clip_high",
    "quantization/factors_moved": "max_factors_moved",
    "adapter/noise": "max_noise",
    "router/balance": "max_router_balance",
    "router/entropy": "max_router_entropy",
    "router/z": "max_router_z",
    "router/load": "max_router_load",
    "router/idle_experts": "max_router_idle",
}


def policy_metrics(sums: Mapping[str, float]) -> dict[str, float]:
    """Convert merged sums of rl.objective to the logged metrics; return {} if there are no tokens."""
    n = sums["tokens"]
    if n == 0:
        return {}
    m = max(1, sums["sequences"])
    metrics = {
        "mismatch/kl": sums["kl"] / n,
        "mismatch/kl_k1": -sums["log_rho"] / n,
        "mismatch/mean_rho": sums["rho"] / n,
        "mismatch/max_rho": sums["max_rho"],
        "mismatch/truncated": sums["truncated"] / n,
        "mismatch/ess": sums["rho"] ** 2 / (n * sums["rho_squared"]),
        "mismatch/weight_ess": sums["weight"] ** 2 / (n * sums["weight_squared"]) if sums["weight"] else 0.0,
        "mismatch/chi2": sums["rho_squared"] / n - 1,
        "mismatch/perplexity_gap": sums["perplexity_gap"] / m,
        "mismatch/abs_logprob_gap": sums["abs_log_rho"] / n,
        "mismatch/exp_abs_gap": sums["exp_abs_log_rho"] / n,
        "mismatch/dropped": sums["dropped"] / n,
        "mismatch/rejected": sums["rejected_sequences"] / m,
        "mismatch/vetoed": sums["vetoed_sequences"] / m,
        "policy/kl": sums["policy_kl"] / n,
        "policy/kl_k1": -sums["log_ratio"] / n,
        "policy/max_ratio": sums["max_ratio"],
        "clip/upper": sums["clipped_upper"] / n,
        "clip/lower": sums["clipped_lower"] / n,
        "clip/upper_negative": sums["upper_negative"] / n,
        "clip/lower_positive": sums["lower_positive"] / n,
        "clip/dual": sums["dual_clipped"] / n,
        "acr_active_tokens": sums["acr_active"],
        "clip/admitted_gradient": sums["admitted_mass"] / sums["gradient_mass"] if sums["gradient_mass"] else 0.0,
    }
    for name, key in _STEP_WIDE.items():
        if key in sums:
            metrics[name] = sums[key]
    if sums.get("routes_replayed"):
        metrics["mismatch/routes_differing"] = sums["routes_differing"] / sums["routes_replayed"]
    for name in ("entropy", "kl_reference"):
        if name in sums:
            metrics[f"policy/{name}"] = sums[name] / n
    return metrics


def _largest(values_N: torch.Tensor) -> torch.Tensor:
    return values_N.max() if values_N.numel() else values_N.new_zeros(())
