"""Reward that quantization costs at a run's weights: answers to the same requests in both formats, with the same noise.

The cost d_i of pair i is the reward in full precision minus the reward as rolled out, both cut to the range of rewards.

    certificate/cost                mean over the step's problems of their mean d_i
    certificate/cost_low, _high     95 % interval of the cost, bootstrapped over problems
    certificate/cost_most           upper bound on M, at 95 % (UpperSequence)
    certificate/cost_least          lower bound on M, at 95 %
    certificate/pairs               n, the number of pairs of all certificates so far
    certificate/equal_tokens        Σ length of the common prefix / Σ length of the longer answer
    certificate/gradient_cosine     cosine of the objective's gradients on both sets of answers to training problems
    certificate/gradient_ratio      norm of the gradient as rolled out over that in full precision

M = Σ E[d_i] / n is the mean expected cost of all pairs so far, each at the weights of its certificate and for the
problem that was chosen. Each bound holds with probability 0.95 at all looks together. They say nothing on the weights
that training in full precision would have led to.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np

from qurl_ray.evaluation.statistics import mean_with_bootstrap_interval

_MISS = 0.05
"""Probability with which a bound may ever be wrong."""
_ORDER = np.arange(20)
_BETS = 0.99 * 0.7**_ORDER
"""λ: large ones are best as long as few pairs differ, small ones later."""
_LOG_WEIGHTS = -np.log((_ORDER + 1) * (_ORDER + 2))
"""Logarithms of the weights 1/2, 1/6, 1/12, … of the bets, whose sum is below 1."""


@dataclass(frozen=True, slots=True, kw_only=True)
class UpperSequence:
    """Upper bound on a mean, valid at every look: an empirical-Bernstein confidence sequence.

    Example:
        sequence = UpperSequence().add(np.array([0.0, 1.0, 0.0]), width=1.0)
        assert sequence.bound(width=1.0) == 1.0  # three pairs show nothing
    """

    count: int = 0
    total: float = 0.0
    """Σ x_i, where x_i is a value over the width."""
    spread: float = 0.0
    """V = Σ (x_i - y_i)²; y_i is the mean of the looks before, and 0 if that is negative or there is none."""

    def add(self, values: np.ndarray, *, width: float) -> "UpperSequence":
        """Return the sequence after one more look at values in [-width, width]. Each has an expectation given all
        before it, which may be another every time."""
        x = values / width
        expected = max(0.0, self.total / self.count) if self.count else 0.0
        return UpperSequence(
            count=self.count + len(x),
            total=self.total + float(x.sum()),
            spread=self.spread + float(np.square(x - expected).sum()),
        )

    def bound(self, *, width: float) -> float:
        """Return the bound on μ_1 + … + μ_n over n, where μ_i is the expectation of value i given those before it.
        With probability 0.95, no bound that is ever returned is below its mean.

        With S = Σ (μ_i - x_i), ψ(λ) = -log(1 - λ) - λ, bets λ_k in (0, 1) and their weights w_k,

            Σ_k w_k exp(λ_k S - ψ(λ_k) V)

        is a nonnegative supermartingale that starts below 1, so it ever reaches 1/0.05 with probability 0.05 at most
        (Ville's inequality). The bound is Σ x_i plus the S at which it does, over n. Each pair's factor is expected to
        be at most 1, whatever the μ_i are, because exp(λξ - ψ(λ)ξ²) <= 1 + λξ for ξ = y_i - x_i >= -1 (Fan, Grama, Liu
        2015, Electron. J. Probab. 20:1, lemma 4.1). This is theorem 4 of Howard, Ramdas, McAuliffe, Sekhon 2021, Ann.
        Statist. 49:1055, with a mixture of bets in place of its boundary.
        """
        if not self.count:
            return width
        needed = (-np.log1p(-_BETS) - _BETS) * self.spread - np.log(_MISS)
        low, high = (needed / _BETS).min(), ((needed - _LOG_WEIGHTS) / _BETS).min()
        for _ in range(60):
            middle = (low + high) / 2
            reached = np.logaddexp.reduce(_LOG_WEIGHTS + _BETS * middle - needed) >= 0
            low, high = (low, middle) if reached else (middle, high)
        return width * min(1.0, (self.total + float(high)) / self.count)


@dataclass(frozen=True, slots=True, kw_only=True)
class CostSequence:
    """Bounds on the mean cost of quantization over all certificates so far, from above and from below."""

    cost: UpperSequence = field(default_factory=UpperSequence)
    gain: UpperSequence = field(default_factory=UpperSequence)
    """The same of costs with the other sign."""

    def add(self, costs: np.ndarray, *, width: float) -> "CostSequence":
        """Return the sequence after one more certificate."""
        return CostSequence(cost=self.cost.add(costs, width=width), gain=self.gain.add(-costs, width=width))

    @property
    def pairs(self) -> int:
        """Number of pairs of all certificates."""
        return self.cost.count

    def bounds(self, *, width: float) -> dict[str, float]:
        """Return the bounds as metrics; none before the first certificate."""
        if not self.pairs:
            return {}
        least, most = -self.gain.bound(width=width), self.cost.bound(width=width)
        return {"certificate/cost_least": least, "certificate/cost_most": most}

    def state(self) -> dict[str, Any]:
        """Return the state for a checkpoint, in types that JSON has."""
        return asdict(self)

    @classmethod
    def of(cls, state: dict[str, Any]) -> "CostSequence":
        """Return the sequence whose `state` this is."""
        return cls(**{name: UpperSequence(**part) for name, part in state.items()})


def certificate_figures(costs_PG: np.ndarray, answers: Sequence[tuple[np.ndarray, np.ndarray]]) -> dict[str, float]:
    """Return the figures of one certificate that need no other.

    Args:
        costs_PG: cost of each pair, by problem and sample; nan where a reward failed.
        answers: token ids that the policy drew in full precision and as rolled out, pair by pair.
    """
    shared = [_common_prefix(full, rolled) for full, rolled in answers]
    longest = sum(max(len(full), len(rolled)) for full, rolled in answers)
    figures = {"certificate/equal_tokens": sum(shared) / max(1, longest)}
    known_PG = costs_PG[~np.isnan(costs_PG).all(axis=1)]
    if len(known_PG):
        cost = mean_with_bootstrap_interval(np.nanmean(known_PG, axis=1))
        figures |= {
            "certificate/cost": cost.value,
            "certificate/cost_low": cost.low,
            "certificate/cost_high": cost.high,
        }
    return figures


def certificate_sentence(figures: Mapping[str, float]) -> str:
    """Return a certificate in words, for the console."""
    most = figures.get("certificate/cost_most", math.nan)
    sentence = (
        f"certificate: at 95 %, quantization costs at most {most:.3g} of reward at the weights of the certificates so "
        f"far ({figures['certificate/pairs']:,} pairs)"
    )
    if "certificate/cost" in figures:
        cost, low, high = (figures[f"certificate/{name}"] for name in ("cost", "cost_low", "cost_high"))
        sentence += f"; in this one {cost:.3g} [{low:.3g}, {high:.3g}]"
    sentence += f", {figures['certificate/equal_tokens']:.1%} of the tokens equal"
    if "certificate/gradient_cosine" in figures:
        cosine, ratio = figures["certificate/gradient_cosine"], figures["certificate/gradient_ratio"]
        sentence += f", gradients with cosine {cosine:.3f} and ratio {ratio:.3f}"
    return sentence


def _common_prefix(first: np.ndarray, second: np.ndarray) -> int:
    length = min(len(first), len(second))
    differ = np.flatnonzero(first[:length] != second[:length])
    return int(differ[0]) if len(differ) else length
