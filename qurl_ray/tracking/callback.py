"""Functions of a user that are called during a run, in the process that called `train` or `run`."""

from pathlib import Path
from typing import Any

from qurl_ray.tracking.sink import Sink
from qurl_ray.types import Event, Outcome


class Callback:
    """Base class of callbacks: override the methods that you need. A callback that raises is reported once, and does
    not stop the run; it is called between events, so it should be quick.

    Example:
        class Show(Callback):
            def on_step(self, step, metrics):
                print(step, metrics["reward/mean"])
    """

    def on_step(self, step: int, metrics: dict[str, Any]) -> None:
        """Called after each step, with its metrics by name, as in metrics.jsonl."""

    def on_evaluation(self, step: int, label: str, metrics: dict[str, Any]) -> None:
        """Called after each evaluation. `label` is before, during, after, or "after, quantized"."""

    def on_checkpoint(self, step: int, folder: Path) -> None:
        """Called when a checkpoint is complete."""

    def on_end(self, outcome: Outcome) -> None:
        """Called at the end: finished, interrupted, or failed."""


class CallbackSink(Sink):
    """Sink that calls a callback."""

    def __init__(self, callback: Callback) -> None:
        self._callback = callback
        self.name = f"callback {type(callback).__name__}"

    def handle(self, event: Event, at: float) -> None:
        match event.kind:
            case "step":
                self._callback.on_step(event.step, dict(event.values))
            case "evaluation":
                self._callback.on_evaluation(event.step, event.message, dict(event.values))
            case "checkpoint":
                self._callback.on_checkpoint(event.step, Path(event.values["folder"]))

    def close(self, outcome: Outcome) -> None:
        self._callback.on_end(outcome)
