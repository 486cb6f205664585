"""What a run came to, added up from its events."""

from collections.abc import Iterable
from typing import Any

from qurl_ray.config import RunConfig
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
        self._problems = 0
        self._steps: list[dict[str, float]] = []
        for event in events:
            self.add(event)

    def add(self, event: Event) -> None:
        if event.kind == "evaluation":
            self._accuracy[event.message] = event.values["eval/accuracy"]
            self._problems = event.values["eval/problems"]
        elif event.kind == "step":
            self._steps.append(event.values)

    def finish(self) -> dict[str, Any]:
        """Seconds are of wall time; `train_seconds` is the sum of the steps, evaluation and start-up left out.

        samples_per_second counts every generated sample over that time; rollout_tokens_per_second counts generated
        tokens over the rollout phase. With full-precision rollouts, the rollout format's accuracy is the accuracy.
        """
        config = self._config
        train_seconds = self._sum("time/step")
        rollout_seconds = self._sum("time/rollout")
        after = self._accuracy.get("after")
        return {
            "name": config.name,
            "accuracy_before": self._accuracy.get("before"),
            "accuracy_after": after,
            "accuracy_after_quantized": self._accuracy.get("after, quantized", after),
            "eval_problems": self._problems,
            "steps": len(self._steps),
            "train_seconds": train_seconds,
            "samples_per_second": self._sum("rollout/samples") / train_seconds if train_seconds else None,
            "rollout_tokens_per_second": self._sum("rollout/tokens") / rollout_seconds if rollout_seconds else None,
            "phase_seconds": {phase: self._sum(f"time/{phase}") for phase in _PHASES},
            "quantization": config.rollout.quantization,
            "correction": config.algorithm.correction.type,
            "uaq_scale": config.quantization.uaq_scale,
            "acr_active_tokens": int(self._sum("acr_active_tokens"))
            if config.algorithm.correction.type == "acr"
            else 0,
            "max_rho": max((step.get("mismatch/max_rho", 0.0) for step in self._steps), default=None),
        }

    def _sum(self, key: str) -> float:
        return sum(step.get(key, 0.0) for step in self._steps)
