"""Gaps between the log-probs of engine and learner of a sampled rollout, and their colours."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

GAP_BOUNDS = (0.003, 0.01, 0.03, 0.1, 0.3, 1.0)
"""Bounds of gaps, in nats. A gap of at least the i-th bound has the i-th colour; fixed, so that runs are comparable."""
PROBABILITY_BOUNDS = (0.9, 0.5, 0.1, 0.01)
"""Bounds of probabilities. A probability below the i-th bound has the i-th colour."""
_MAX_LOG_RHO = 20.0
"""Limit of |log rho|, the same as in the objective (rl.ratios)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Mismatch:
    """Mismatch between the log-probs of engine and learner for the tokens of one answer."""

    gap: float
    """Gap with the largest absolute value, engine's log-prob minus the learner's, in nats."""
    max_rho: float
    ess: float
    """Effective sample size (Σ rho)² / (n Σ rho²), as a share of the n tokens with log-probs of both."""


def mismatch(engine: Sequence[float | None], learner: Sequence[float | None]) -> Mismatch | None:
    """Compute the mismatch from both log-probs of each token. Return None if no token has both."""
    gaps = [b - p for b, p in zip(engine, learner, strict=False) if b is not None and p is not None]
    if not gaps:
        return None
    rhos = [math.exp(min(_MAX_LOG_RHO, max(-_MAX_LOG_RHO, -gap))) for gap in gaps]
    ess = math.fsum(rhos) ** 2 / (len(rhos) * math.fsum(rho * rho for rho in rhos))
    return Mismatch(gap=max(gaps, key=abs), max_rho=max(rhos), ess=ess)


def gap_class(gap: float) -> str:
    """Style class: `e1` … `e6` if the engine's log-prob is larger, `l1` … `l6` if the learner's, "" for a small gap."""
    level = sum(abs(gap) >= bound for bound in GAP_BOUNDS)
    return f"{'e' if gap > 0 else 'l'}{level}" if level else ""
