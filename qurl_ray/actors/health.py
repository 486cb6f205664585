"""States of a rollout worker and the transitions between them. Pure.

    HEALTHY ─silent─► SUSPECT ─silent for longer─► DEAD ─► RESTARTING ─answers─► STALE ─verified refit─► HEALTHY
       │  ▲              │                           ▲                            │ ▲
       │  └───answers────┘                           └───── its process ended ────┘ │
       └──────────────────── refused weights, or failed the probe ──────────────────┘

OUT is final: the worker failed to take the same weights twice, was lost in several loads in a row, or cannot be
started.
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
class Heartbeat:
    """Heartbeat: a rollout worker's answer to the question whether it is alive."""

    boot: str
    """Random id of its process; a restart changes it."""
    pid: int
    node: str
    """Ray's id of the node that it runs on."""
    version: int | None
    """Version of the weights that it holds and has verified; None means STALE."""
    log: str
    """Log file of its process, on that node."""


@dataclass(slots=True, kw_only=True, eq=False)
class Member:
    """A rollout worker as the fleet sees it."""

    index: int
    actor: Any
    health: Health = Health.RESTARTING
    heartbeat: Heartbeat | None = None
    """Last heartbeat; None before the first."""
    ended: str | None = None
    """`boot` of the process that the fleet ended last."""
    heard: float = field(default_factory=time.monotonic)
    """Time of the last heartbeat, start or death, in seconds of the monotonic clock."""
    doing: str = "starting"
    awake: bool = True
    """True if it may hold the memory that `sleep` releases."""
    refusals: int = 0
    """Number of times that it failed to take the version that it is to hold."""
    failed_loads: int = 0
    """Number of loads of weights, since the last that was verified, in which it died or was late."""

    def turn(self, health: Health) -> None:
        """Change to another state, or stay; ValueError if the transition is not allowed."""
        if health is self.health:
            return
        if health not in _AFTER[self.health]:
            raise ValueError(f"rollout worker {self.index} is {self.health}: it cannot become {health}")
        self.health = health

    @property
    def alive(self) -> bool:
        """True if it answers, as far as is known."""
        return self.health in (Health.HEALTHY, Health.STALE)

    def where(self) -> str:
        """Name, process and log for messages: "rollout worker 1 (pid 4711, generate; log /tmp/…)"."""
        place = f"pid {self.heartbeat.pid}, {self.doing}; log {self.heartbeat.log}" if self.heartbeat else self.doing
        return f"rollout worker {self.index} ({place})"
