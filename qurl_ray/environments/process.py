"""Environments of some trajectories in one process, which is killed when a call takes too long."""

import json
import secrets
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

from qurl_ray.config.environment import EnvironmentConfig
from qurl_ray.environments.protocol import FAILURES, EnvironmentMessage, Failure, Step, Traits
from qurl_ray.errors import EnvironmentFailed
from qurl_ray.sandbox.process import DeathError, LateError, SandboxedProcess
from qurl_ray.types import Problem


@dataclass(frozen=True, slots=True, kw_only=True)
class CallFailed:
    """Outcome of a call of an environment that failed. Its trajectory is over."""

    kind: Failure
    detail: str


class EnvironmentProcess:
    """Environments of one type, one for each trajectory, in a child process. Calls come one at a time.

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
        self.name, self._spec = name, json.dumps({"type": name, "params": params})
        self._timeout_s, self._memory_gb, self._log = timeout_s, memory_gb, log
        self._child: SandboxedProcess | None = None
        self.there: set[str] = set()
        """Trajectories that have an environment in the process."""
        self.traits = Traits()
        """Known after `check`."""

    @classmethod
    def of(cls, settings: EnvironmentConfig, log: Path | None = None) -> "EnvironmentProcess":
        """Return the process of the environment that the settings name; there must be one."""
        assert settings.type
        return cls(settings.type, settings.params, timeout_s=settings.timeout_s, memory_gb=settings.memory_gb, log=log)

    def check(self) -> None:
        """Start the process if none runs.

        Raises:
            EnvironmentFailed: the environment cannot be imported.
        """
        if self._child and self._child.alive():
            return
        self.close()
        server = "qurl_ray.environments.child:run_environments"
        self._child = SandboxedProcess(server, self._spec, self._memory_gb, self._log)
        try:
            ready = self._child.wait_until_ready(f"environment {self.name!r}", EnvironmentFailed)
        except BaseException:
            self.close()
            raise
        self.traits = Traits(**{field.name: ready[field.name] for field in fields(Traits)})

    def reset(self, trajectory: str, problem: Problem) -> list[EnvironmentMessage] | CallFailed:
        """Make the environment of a trajectory. Return what it says before the first turn."""
        self.check()
        self.there.add(trajectory)
        return self._call("reset", trajectory, asdict(problem))

    def step(self, trajectory: str, answer: str) -> Step | CallFailed:
        """Return what the environment makes of a turn."""
        if trajectory not in self.there:
            return CallFailed(kind="lost", detail="the process of the environment ended because of another trajectory")
        found = self._call("step", trajectory, answer)
        return found if isinstance(found, CallFailed) else Step(**found)

    def forget(self, trajectory: str) -> None:
        """Release the environment of a trajectory, if it is there."""
        if trajectory in self.there:
            self._call("close", trajectory, None)
            self.there.discard(trajectory)

    def close(self) -> None:
        """End the process and all that it started."""
        child, self._child = self._child, None
        self.there.clear()
        if child:
            child.end()

    def __enter__(self) -> "EnvironmentProcess":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _call(self, operation: str, trajectory: str, payload: Any) -> Any:
        """Return the result of a call, or CallFailed; after "timeout" and "died" the process has ended."""
        child, mark = self._child, secrets.token_hex(8)
        assert child
        try:
            child.send([mark, operation, trajectory, payload], self._timeout_s)
            reply = child.receive(self._timeout_s)
            match reply:
                case [str(found), "ok", result] if found == mark:
                    return result
                case [str(found), str(kind), str(detail)] if found == mark and kind in FAILURES:
                    self.there.discard(trajectory)
                    return CallFailed(kind=kind, detail=detail)
            raise DeathError
        except LateError:
            self.close()
            return CallFailed(kind="timeout", detail=f"no reply within {self._timeout_s:g} s; the process was killed")
        except DeathError as death:
            self.close()
            return CallFailed(kind="died", detail=f"the process of the environment {death}")
