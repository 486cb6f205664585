"""What stands for ranks and workers where only their places matter. Light, as each is a process."""

import os
from dataclasses import dataclass
from typing import Any

from qurl_ray.actors.cluster import own_assignment
from qurl_ray.actors.placement import GpuAssignment


@dataclass(frozen=True)
class Report:
    own: GpuAssignment
    """What Ray has given to it."""
    visible: str | None
    """What CUDA would show it."""
    made: dict[str, Any]


class Reporter:
    """Takes what a RolloutWorker takes."""

    def __init__(self, *_: Any, **made: Any) -> None:
        self._made = made

    def report(self) -> Report:
        return Report(own=own_assignment(), visible=os.environ.get("CUDA_VISIBLE_DEVICES"), made=self._made)

    def close(self) -> None:
        pass
