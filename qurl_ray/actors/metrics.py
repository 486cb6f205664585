"""Training metrics in Ray's own metrics, which Prometheus collects from every node: `tracking.sinks=[ray]`."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ray.util.metrics import Gauge

from qurl_ray.tracking.numbers import event_numbers, gauge_name
from qurl_ray.tracking.sink import Sink
from qurl_ray.types import Event, Outcome


class RayMetrics(Sink):
    """Sink that shows the last value of every number as a gauge `ray_qurl_<name>` with the label `run`."""

    name = "Ray's metrics"

    def __init__(self, run_dir: Path, settings: Mapping[str, Any]) -> None:
        self._run = str(settings["name"])
        self._gauges: dict[str, Gauge] = {}
        self._step = 0

    def handle(self, event: Event, at: float) -> None:
        """Set the gauges of a step or an evaluation."""
        if event.kind not in ("step", "evaluation"):
            return
        self._step = max(self._step, event.step)
        for name, value in {**event_numbers(event), "step": float(self._step)}.items():
            if name not in self._gauges:
                self._gauges[name] = Gauge(gauge_name(name), description=name, tag_keys=("run",))
            self._gauges[name].set(value, {"run": self._run})

    def close(self, outcome: Outcome) -> None:
        """Leave the last values: they end with the driver's process."""
