"""Environments of some trajectories in one process, which is killed when a call takes too long."""

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from qurl_ray.config.environment import EnvironmentConfig
from qurl_ray.environments.protocol import FAILURES, EnvironmentMessage, Failure, Step, Traits
from qurl_ray.errors import EnvironmentFailed
from qurl_ray.sandbox.process import DeathError, SandboxedProcess
from qurl_ray.types import Problem


@dataclass(frozen=True, slots=True, kw_only=True)
class CallFailed:
    """Outcome of a call of an environment that failed. Its trajectory is over."""

    kind: Failure
    detail: str


class EnvironmentProcess(SandboxedProcess):
    """Environments of one type, one for each trajectory, in a process of their own. Calls come one at a time.

    Example:
        with EnvironmentProcess("calculator", {}, timeout_s=5.0, memory_gb=1.0) as process:
            process.reset("7/0", problem)
            step = process.step("7/0", "[37*48]")

    Args:
        timeout_s: deadline of one call.
        memory_gb, log: see sandbox.process.
    """

    def __init__(
        self, name: str, params: dict[str, Any], *, timeout_s: float, memory_gb: float, log: Path | None = None
    ) -> None:
        super().__init__(
            "qurl_ray.environments.child:load_environments",
            json.dumps({"type": name, "params": params}),
            title=f"environment {name!r}",
            error=EnvironmentFailed,
            memory_gb=memory_gb,
            log=log,
        )
        self.name, self._timeout_s = name, timeout_s
        self.there: set[str] = set()
        """Trajectories that have an environment in the process."""

    @classmethod
    def of(cls, settings: EnvironmentConfig, log: Path | None = None) -> "EnvironmentProcess":
        """Return the process of the environment that the settings name; there must be one."""
        assert settings.type
        return cls(settings.type, settings.params, timeout_s=settings.timeout_s, memory_gb=settings.memory_gb, log=log)

    @property
    def traits(self) -> Traits:
        """Traits of the environment, known after `check`."""
        return Traits(**self.announced)

    def reset(self, trajectory: str, problem: Problem) -> list[EnvironmentMessage] | CallFailed:
        """Make the environment of a trajectory. Return what it says before the first turn."""
        self.check()
        self.there.add(trajectory)
        return self._call("reset", trajectory, asdict(problem))

    def step(self, trajectory: str, answer: str) -> Step | CallFailed:
        """Return what the environment makes of a turn."""
        if trajectory not in self.there:
            return CallFailed(kind="lost", detail="the process of the environment ended because of another trajectory")
        step = self._call("step", trajectory, answer)
        return step if isinstance(step, CallFailed) else Step(**step)

    def forget(self, trajectory: str) -> None:
        """Release the environment of a trajectory, if it is there."""
        if trajectory in self.there:
            self._call("close", trajectory, None)
            self.there.discard(trajectory)

    def close(self) -> None:
        """End the process and all that it started."""
        self.there.clear()
        super().close()

    def _call(self, operation: str, trajectory: str, payload: Any) -> Any:
        """Return the value of a call, or CallFailed; after "timeout" and "died" the process has ended."""
        try:
            self.ask([(operation, trajectory, payload)], self._timeout_s)
            match self.result(self._timeout_s):
                case ["ok", value]:
                    return value
                case [str(kind), str(detail)] if kind in FAILURES:
                    self.there.discard(trajectory)
                    return CallFailed(kind=kind, detail=detail)
            raise DeathError
        except TimeoutError:
            self.close()
            return CallFailed(kind="timeout", detail=f"no reply within {self._timeout_s:g} s; the process was killed")
        except DeathError as death:
            self.close()
            return CallFailed(kind="died", detail=f"the process of the environment {death}")
