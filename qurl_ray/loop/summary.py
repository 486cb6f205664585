"""What a run came to, added up from its events."""

from collections.abc import Iterable
from typing import Any

from qurl_ray.config import RunConfig
from qurl_ray.evaluation.statistics import paired_test
from qurl_ray.loop.guard import Level
from qurl_ray.types import Event

_PHASES = ("rollout", "reward", "logprob", "update", "sync")


class RunSummary:
    """Collects events; `finish` gives the contents of summary.json.

    Args:
        events: of the part before an interruption.
    """

    def __init__(self, config: RunConfig, events: Iterable[Event] = ()) -> None:
        self._config = config
        self._accuracy: dict[str, float] = {}
        self._outcomes: dict[str, list[bool]] = {}
        self._problems = 0
        self._reached_at: int | None = None
        self._steps: list[dict[str, float]] = []
        for event in events:
            self.add(event)

    def add(self, event: Event) -> None:
        if event.kind == "evaluation":
            self._accuracy[event.message] = event.values["eval/accuracy"]
            self._outcomes[event.message] = [outcome == "1" for outcome in event.values["outcomes"]]
            self._problems = event.values["eval/problems"]
            if event.values.get("target_reached"):
                self._reached_at = event.step
        elif event.kind == "step":
            self._steps.append(event.values)

    def finish(self) -> dict[str, Any]:
        """Seconds are of wall time; `train_seconds` is the sum of the steps, evaluation and start-up left out.

        samples_per_second counts every generated sample over that time; rollout_tokens_per_second counts generated
        tokens over the rollout phase. accuracy_after_quantized is of `quantized_format`:
        the export's, else the rollouts'; if that is full precision, it is the accuracy.
        target_reached_at_step is None where evaluation.target_reward was not reached, or is not set.
        accuracy_p_value is of the exact paired test between the first and the last full-precision evaluation.
        """
        config = self._config
        exported = config.export.format(config.rollout.quantization)
        train_seconds = self._sum("time/step")
        rollout_seconds = self._sum("time/rollout")
        after = self._accuracy.get("after")
        return {
            "name": config.name,
            "accuracy_before": self._accuracy.get("before"),
            "accuracy_after": after,
            "accuracy_after_quantized": self._accuracy.get("after, quantized", after),
            "accuracy_p_value": self._p_value(),
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

    def _p_value(self) -> float | None:
        if not {"before", "after"} <= set(self._outcomes):
            return None
        return paired_test(self._outcomes["before"], self._outcomes["after"]).p_value

    def _sum(self, key: str) -> float:
        return sum(step.get(key) or 0.0 for step in self._steps)  # null is a number that JSON cannot hold
