"""Are an engine's log-probs as far from the learner's as they usually are? Plain statistics, without an engine.

An engine that computes in bfloat16 differs from a learner in float32 by nature: by 0.22 nats with SmolLM2-135M in FP8
(benchmarks/results/probe.md). No limit in nats tells such noise from a fault. A change does: the mean gap of a probe is
compared with those of the same engine before, on the same hardware and in the same number format.

The logarithm of a probe's mean gap is taken as normally distributed. Deviations from the median, in standard deviations
less an allowance, are added up and never fall below zero (CUSUM: E. S. Page, Biometrika 41, 1954). A gap
that grows by half is seen within three probes of 512 tokens, one that grows by a tenth within three of 8192
(benchmarks/results/probe.md).
"""

import math
import statistics
from collections.abc import Mapping
from dataclasses import dataclass, field

_FIRST = 16
"""Probes from which the usual gap is known."""
_LAST = 64
"""Latest probes that it is taken from: training moves it, slowly."""
_LEAST = 0.005
"""Smaller gaps count as this many nats."""
_SPREAD = 0.02
"""Least standard deviation of a logarithm."""
_ALLOWANCE, _LIMIT, _MOST = 1.5, 7.0, 9.0
"""In standard deviations: the amount subtracted from a deviation, the sum that counts as a change, and the most that
one deviation adds."""
_OUTLIER, _CONFIRMED = 3.0, 2.5
"""In standard deviations: least deviation that is no longer taken for usual, and least one that confirms a change."""


@dataclass(kw_only=True)
class ProbeFloor:
    """Usual gaps of probes, by engine, and how far engines are from them.

    Example:
        floor = ProbeFloor()
        if floor.add("worker 3, fp8 on NVIDIA H100", gap=0.41):
            ...  # worker 3 is not as it was
    """

    logs: dict[str, list[float]] = field(default_factory=dict)
    """Logarithms of gaps in nats, oldest first, by engine."""
    excess: dict[str, float] = field(default_factory=dict)
    """Sum of an engine's deviations, in standard deviations."""

    def known(self, engine: str) -> bool:
        """Return True if the usual gap is known: after 16 probes, or one without any gap."""
        logs = self.logs.get(engine, [])
        return len(logs) >= _FIRST or (bool(logs) and max(logs) == math.log(_LEAST))

    def usual(self, engine: str) -> float:
        """Return the usual mean gap in nats; nan before the first probe."""
        logs = self.logs.get(engine)
        return math.exp(statistics.median(logs)) if logs else math.nan

    def deviation(self, engine: str, gap: float) -> float:
        """Return how many standard deviations a mean gap in nats is above the usual one; 0 while that is not known."""
        if not self.known(engine):
            return 0.0
        logs = self.logs[engine]
        # The standard deviation of few values is itself uncertain.
        spread = max(_SPREAD, statistics.stdev(logs) * (1 + 2 / len(logs)) if len(logs) > 1 else 0.0)
        return (math.log(max(gap, _LEAST)) - statistics.median(logs)) / spread

    def add(self, engine: str, gap: float) -> bool:
        """Take a probe's mean gap in nats into account. Returns True if this engine's gaps have changed; the sum of its
        deviations then begins again."""
        deviation = self.deviation(engine, gap)
        excess = max(0.0, self.excess.get(engine, 0.0) + min(deviation, _MOST) - _ALLOWANCE)
        changed = excess > _LIMIT
        self.excess[engine] = 0.0 if changed else excess
        if deviation < _OUTLIER:
            self.logs[engine] = [*self.logs.get(engine, []), math.log(max(gap, _LEAST))][-_LAST:]
        return changed

    def persists(self, engine: str, gap: float) -> bool:
        """Return True if a mean gap confirms a change, after the weights were sent again. The usual gap is then
        learned again."""
        if self.deviation(engine, gap) < _CONFIRMED:
            return False
        del self.logs[engine]
        return True

    def state(self) -> dict:
        """Return the state for JSON."""
        return {"logs": self.logs, "excess": self.excess}

    @classmethod
    def of(cls, state: Mapping) -> "ProbeFloor":
        """Return the floor of a state."""
        return cls(logs={engine: list(logs) for engine, logs in state["logs"].items()}, excess=dict(state["excess"]))
