"""Summary of a run, computed from its events."""

from collections.abc import Callable, Iterable
from typing import Any

from qurl_ray.config import RunConfig
from qurl_ray.evaluation.statistics import paired_p_value
from qurl_ray.loop.messages import Level
from qurl_ray.types import Event

_PHASES = ("rollout", "reward", "logprob", "update", "sync")


class RunSummary:
    """Collector of events; `finish` returns the contents of summary.json.

    Args:
        events: events of the part before an interruption.
    """

    def __init__(self, config: RunConfig, events: Iterable[Event] = ()) -> None:
        self._config = config
        self._evaluations: dict[str, dict[str, Any]] = {}
        """Values of the last evaluation of each label."""
        self._problems = 0
        self._reached_at: int | None = None
        self._steps: list[dict[str, float]] = []
        for event in events:
            self.add(event)

    def add(self, event: Event) -> None:
        if event.kind == "evaluation":
            self._evaluations[event.message] = event.values
            self._problems = event.values["eval/problems"]
            if event.values.get("target_reached"):
                self._reached_at = event.step
        elif event.kind == "step":
            self._steps.append(event.values)

    def finish(self) -> dict[str, Any]:
        """Return the contents of summary.json.

        Seconds are wall time; `train_seconds` is the sum of the steps, without evaluation and start-up.
        samples_per_second counts every generated sample over that time; rollout_tokens_per_second counts generated
        tokens over the rollout phase.

        `reward_…` is the mean held-out reward, `accuracy_…` the share of held-out problems solved, by a reward above
        0.5. `…_after_quantized` is measured in `quantized_format`: the export's, else the rollouts'; if that is full
        precision, it equals `…_after`. `…_p_value` is the p-value of the paired test between the first and the last
        full-precision evaluation.

        target_reached_at_step is None where evaluation.target_reward was not reached, or is not set.
        """
        config = self._config
        exported = config.export.format(config.rollout.quantization)
        train_seconds = self._sum("time/step")
        rollout_seconds = self._sum("time/rollout")
        return {
            "name": config.name,
            **self._held_out("reward", _rewards),
            **self._held_out("accuracy", _outcomes),
            "eval_problems": self._problems,
            "steps": len(self._steps),
            "target_reached_at_step": self._reached_at,
            "train_seconds": train_seconds,
            "samples_per_second": self._sum("rollout/samples") / train_seconds if train_seconds else None,
            "rollout_tokens_per_second": self._sum("rollout/tokens") / rollout_seconds if rollout_seconds else None,
            "phase_seconds": {phase: self._sum(f"time/{phase}") for phase in _PHASES},
            "precision_flow": config.precision_flow,
            "quantization": config.rollout.quantization,
            "quantized_format": exported if exported != "none" else config.rollout.quantization,
            "correction": config.algorithm.correction.type,
            "uaq_scale": config.quantization.uaq_scale,
            "acr_active_tokens": int(self._sum("acr_active_tokens"))
            if config.algorithm.correction.type == "acr"
            else 0,
            "stopped_by_guard": bool(self._steps) and self._steps[-1].get("guard/level") == Level.STOP,
            "max_rho": max((step.get("mismatch/max_rho") or 0.0 for step in self._steps), default=None),
        }

    def _held_out(self, name: str, per_problem: Callable[[dict[str, Any]], list[float]]) -> dict[str, Any]:
        """A figure of the evaluations before and after training, and the p-value of their difference, paired by
        problem."""
        before, after = self._evaluations.get("before", {}), self._evaluations.get("after", {})
        first, second = per_problem(before), per_problem(after)
        return {
            f"{name}_before": before.get(f"eval/{name}"),
            f"{name}_after": after.get(f"eval/{name}"),
            f"{name}_after_quantized": self._evaluations.get("after, quantized", after).get(f"eval/{name}"),
            f"{name}_p_value": paired_p_value(first, second) if first and second else None,
        }

    def _sum(self, key: str) -> float:
        return sum(step.get(key) or 0.0 for step in self._steps)  # null stands for a number that JSON cannot hold


def _outcomes(evaluation: dict[str, Any]) -> list[float]:
    """1 for each problem that was solved, else 0; empty if there was no evaluation."""
    return [float(outcome == "1") for outcome in evaluation.get("outcomes", "")]


def _rewards(evaluation: dict[str, Any]) -> list[float]:
    """Reward of each problem; empty if there was no evaluation, or one by a version that recorded no rewards."""
    return evaluation.get("rewards") or (_outcomes(evaluation) if "eval/reward" in evaluation else [])
