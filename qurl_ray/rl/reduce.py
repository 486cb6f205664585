"""Metric sums to metrics: merge over micro-batches, updates and ranks, then divide once."""

from collections.abc import Iterable, Mapping


def merge(parts: Iterable[Mapping[str, float]]) -> dict[str, float]:
    """Key by key: the sum, or the maximum for keys that begin with "max_". Missing keys count as absent, not as 0."""
    merged: dict[str, float] = {}
    for part in parts:
        for key, value in part.items():
            if key not in merged:
                merged[key] = value
            elif key.startswith("max_"):
                merged[key] = max(merged[key], value)
            else:
                merged[key] += value
    return merged


def mismatch_metrics(sums: Mapping[str, float]) -> dict[str, float]:
    """From merged sums of rl.objective to what is logged.

    ess = (Σρ)² / (n Σρ²), the effective sample size as a share of the tokens; kl is the k3 estimate of KL(b||p) in nats
    per token; clip shares are of all tokens, upper for positive advantages, lower for negative ones.
    """
    n = sums["tokens"]
    if n == 0:
        return {}
    return {
        "mismatch/kl": sums["kl"] / n,
        "mismatch/mean_rho": sums["rho"] / n,
        "mismatch/max_rho": sums["max_rho"],
        "mismatch/ess": sums["rho"] ** 2 / (n * sums["rho_squared"]),
        "mismatch/abs_logprob_gap": sums["abs_log_rho"] / n,
        "mismatch/truncated": sums["truncated"] / n,
        "clip/upper": sums["clipped_upper"] / n,
        "clip/lower": sums["clipped_lower"] / n,
        "clip/dual": sums["dual_clipped"] / n,
        "acr_active_tokens": sums["acr_active"],
    }


def value_metrics(sums: Mapping[str, float]) -> dict[str, float]:
    """From merged sums of rl.value: explained_variance = 1 - E[(V - G)²] / Var[G], of the values before the update."""
    n = sums.get("tokens", 0)
    if not n or "value_error" not in sums:
        return {}
    variance = sums["returns_squared"] / n - (sums["returns"] / n) ** 2
    error = sums["value_error"] / n
    return {
        "value/error": error,
        "value/explained_variance": 1 - error / variance if variance > 0 else float("nan"),
        "value/clipped": sums["value_clipped"] / n,
        "value/skipped_updates": sums["value_skipped"],
    }
