"""Totals of a run, from which its summary is computed. They are part of every checkpoint."""

from dataclasses import asdict, dataclass, field
from typing import Any

from qurl_ray.runs.values import number, plain
from qurl_ray.spans import PHASES
from qurl_ray.types import Event

TRAINED_SHARE = "adapter/share"
"""Value of the event that announces adapters: their share of all parameters."""
_SUMMED = (
    "time/step",
    *(f"time/{phase}" for phase in PHASES),
    "rollout/samples",
    "rollout/tokens",
    "acr_active_tokens",
)


@dataclass(slots=True)
class RunTotals:
    """Figures of all steps and evaluations so far.

    Example:
        totals = RunTotals()
        totals.add(Event(kind="step", step=1, values={"time/step": 2.0}))
        assert RunTotals.of(totals.state()) == totals
    """

    steps: int = 0
    """Number of steps done."""
    reached_at: int | None = None
    """Step at which the held-out reward reached its target; None before."""
    evaluations: dict[str, dict[str, Any]] = field(default_factory=dict)
    """Values of the last evaluation of each label."""
    sums: dict[str, float] = field(default_factory=lambda: dict.fromkeys(_SUMMED, 0.0))
    """Sum of a figure over all steps."""
    max_rho: float | None = None
    guard_level: float | None = None
    """The guard's level after the last step."""
    trained_share: float | None = None
    """Share of the parameters that adapters are; None without adapters."""

    def add(self, event: Event) -> None:
        """Count a step or an evaluation, and note the share of the parameters that is trained; other events change
        nothing."""
        values = event.values
        self.trained_share = values.get(TRAINED_SHARE, self.trained_share)
        if event.kind == "evaluation":
            self.evaluations[event.message] = values
            if values.get("target_reached"):
                self.reached_at = event.step
        elif event.kind == "step":
            self.steps = event.step
            for key in _SUMMED:
                self.sums[key] += number(values.get(key)) or 0.0  # None stands for a number that JSON cannot hold
            self.max_rho = max(self.max_rho or 0.0, number(values.get("mismatch/max_rho")) or 0.0)
            self.guard_level = number(values.get("guard/level"))

    def state(self) -> dict[str, Any]:
        """Return the totals for JSON."""
        return plain(asdict(self))

    @classmethod
    def of(cls, state: dict[str, Any]) -> "RunTotals":
        """Return the totals that `state` returned, without the evaluations after the last step: a run that was asked to
        stop made them then, and they are not the final ones once it resumes."""
        totals = cls(**state)
        during = {label: values for label, values in totals.evaluations.items() if not label.startswith("after")}
        totals.evaluations = during
        return totals
