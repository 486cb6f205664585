"""The states of a rollout worker, and what may follow what. Pure.

    HEALTHY ─silent─► SUSPECT ─silent for longer─► DEAD ─► RESTARTING ─answers─► STALE ─verified refit─► HEALTHY
       │  ▲              │                           ▲                            │ ▲
       │  └───answers────┘                           └───── its process ended ────┘ │
       └──────────────────── refused weights, or failed the probe ──────────────────┘

OUT is for good: a worker that failed to take the same weights twice, or that cannot be started.
"""

import time
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any


class Health(StrEnum):
    HEALTHY = "healthy"
    SUSPECT = "suspect"
    DEAD = "dead"
    RESTARTING = "restarting"
    STALE = "stale"
    OUT = "left out"


_AFTER = {
    Health.HEALTHY: {Health.SUSPECT, Health.DEAD, Health.STALE},
    Health.SUSPECT: {Health.HEALTHY, Health.STALE, Health.DEAD},
    Health.DEAD: {Health.RESTARTING},
    Health.RESTARTING: {Health.STALE, Health.DEAD, Health.OUT},
    Health.STALE: {Health.HEALTHY, Health.SUSPECT, Health.DEAD, Health.OUT},
    Health.OUT: set(),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Pulse:
    """What a worker answers when it is asked whether it lives."""

    boot: str
    """Of its process: another one after a restart."""
    pid: int
    node: str
    """Id of the node it runs on."""
    version: int | None
    """Of the weights it holds and has verified; None is STALE."""
    log: str
    """File that its process writes to, on that node."""


@dataclass(slots=True, kw_only=True, eq=False)
class Member:
    """A rollout worker as the fleet sees it."""

    index: int
    actor: Any
    health: Health = Health.RESTARTING
    pulse: Pulse | None = None
    """The last."""
    heard: float = field(default_factory=time.monotonic)
    """When that was."""
    doing: str = "starting"
    awake: bool = True
    """Whether it may hold the memory that `sleep` gives back."""
    refusals: int = 0
    """Times that it failed to take the version it is to hold."""

    def turn(self, health: Health) -> None:
        """To another state, or stay; ValueError if that may not follow."""
        if health is self.health:
            return
        if health not in _AFTER[self.health]:
            raise ValueError(f"rollout worker {self.index} is {self.health}: it cannot become {health}")
        self.health = health

    @property
    def alive(self) -> bool:
        """Answers, as far as is known."""
        return self.health in (Health.HEALTHY, Health.STALE)

    def where(self) -> str:
        """For messages: "rollout worker 1 (pid 4711, generate; log /tmp/…)"."""
        place = f"pid {self.pulse.pid}, {self.doing}; log {self.pulse.log}" if self.pulse else self.doing
        return f"rollout worker {self.index} ({place})"
