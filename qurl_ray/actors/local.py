"""A fleet and a pool of environments in this process, without Ray: their actors are objects here.

fleet_here ─► Fleet ─► LocalActor ─► EngineHere ─► engine
pool_here ─► EnvironmentPool ─► LocalActor ─► EnvironmentHost
"""

import asyncio
import math
from collections.abc import Callable, Collection, Sequence
from typing import Any, cast

from ray.actor import ActorHandle
from ray.exceptions import RayTaskError

from qurl_ray.actors.environments import EnvironmentHost, EnvironmentPool
from qurl_ray.actors.fleet import Fleet
from qurl_ray.actors.health import Heartbeat
from qurl_ray.config.environment import EnvironmentConfig
from qurl_ray.config.rollout import RolloutConfig
from qurl_ray.engines.protocol import Engine
from qurl_ray.errors import QurlError
from qurl_ray.types import Completion, Request


class LocalActor:
    """Object in the place of an actor's handle: a call of its methods is a task of the caller's event loop.

    Args:
        threaded: calls run in threads.
    """

    def __init__(self, target: Any, *, threaded: bool = False) -> None:
        self.target, self._threaded = target, threaded

    def __getattr__(self, name: str) -> "LocalMethod":
        return LocalMethod(getattr(self.target, name), self._threaded)


class LocalMethod:
    """Method of a LocalActor, which may be a coroutine function. Our errors arrive in a RayTaskError, as with Ray."""

    def __init__(self, function: Callable[..., Any], threaded: bool) -> None:
        self._function, self._threaded = function, threaded

    def options(self, **_: Any) -> "LocalMethod":
        return self

    def remote(self, *arguments: Any) -> asyncio.Future:
        return asyncio.ensure_future(self._run(arguments))

    async def _run(self, arguments: tuple) -> Any:
        try:
            if self._threaded:
                return await asyncio.to_thread(self._function, *arguments)
            result = self._function(*arguments)
            return await result if asyncio.iscoroutine(result) else result
        except QurlError as error:
            raise RayTaskError("a local actor", "", error) from None


class EngineHere:
    """Worker of a fleet around an engine of this process, whose weights stay."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine

    def heartbeat(self) -> Heartbeat:
        return Heartbeat(boot="", pid=0, node="", version=self._engine.version, log="")

    def generate(self, requests: Sequence[Request], version: int, deadline_s: float) -> list[Completion]:
        return self._engine.generate(requests, version=version, deadline_s=deadline_s)

    def cancel(self, uids: Collection[str]) -> None:
        self._engine.cancel(uids)


async def fleet_here(engines: Sequence[Engine], config: RolloutConfig) -> Fleet:
    """Return a fleet of engines in this process, all of which hold the same version. It has no deadline, and ends with
    the event loop."""
    handles = [LocalActor(EngineHere(engine), threaded=True) for engine in engines]
    unhurried = config.model_copy(update={"timeout_s": math.inf})
    fleet = Fleet(cast("Sequence[ActorHandle]", handles), unhurried, lambda *_: None)
    await fleet.started()
    for member, engine in zip(fleet.members, engines, strict=True):
        assert engine.version is not None, "it has been loaded"
        fleet.holds(member, engine.version)
    return fleet


def pool_here(host: EnvironmentHost, config: EnvironmentConfig) -> EnvironmentPool:
    """Return a pool of a host in this process. The caller closes the host."""
    return EnvironmentPool(cast("Sequence[ActorHandle]", [LocalActor(host, threaded=True)]), config)
