"""Environments in Ray actors: each trajectory has one of its own, from its first turn to its last.

    EnvironmentPool (coordinator) ── submit, collect ──► EnvironmentHost (actor) ─► a thread per process ─► environments

Calls of many trajectories travel together, and replies as soon as some are there: nobody waits for a slow environment
but its own trajectory.
"""

import asyncio
import queue
import threading
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING

from ray.exceptions import RayActorError, RayTaskError

from qurl_ray.config.environment import EnvironmentConfig
from qurl_ray.environments.process import CallFailed, EnvironmentProcess
from qurl_ray.environments.protocol import EnvironmentMessage, Step
from qurl_ray.errors import DeadlineExceeded, QurlError
from qurl_ray.types import Problem

if TYPE_CHECKING:
    from ray.actor import ActorHandle

_SHARED = 64  # deterministic environments of a process
_COLLECT_S = 1.0  # longest time without a reply for which `collect` waits
_RETRY_S = 0.2
_MARGIN_S = 180.0  # for a host that restarts, or a process that is ended and started
_CLOSE_S = 5.0
_MOST_REPLAYS = 8

Input = Problem | str
"""Input of a trajectory's environment: the problem at its reset, then the text of each turn."""
_Outcome = Sequence[EnvironmentMessage] | Step | CallFailed
_HOST_ENDED = CallFailed(kind="lost", detail="the process of its host ended")


@dataclass(frozen=True, slots=True, kw_only=True)
class Call:
    """One call of an environment."""

    number: int
    """Number of the call, unique in the pool."""
    trajectory: str
    given: Input | None
    """None releases the environment."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EnvironmentReply:
    """Reply to a call."""

    number: int
    outcome: _Outcome
    seconds: float
    """Seconds that the environment worked."""


class EnvironmentHost:
    """Holder of environments. A process serves one call at a time, in a thread of its own here.

    Args:
        logs: beginning of the paths of the processes' logs.
    """

    def __init__(self, config: EnvironmentConfig, logs: Path | None = None) -> None:
        self._config, self._logs = config, logs
        self._replies: queue.SimpleQueue[EnvironmentReply] = queue.SimpleQueue()
        self._lanes: list[_Lane] = []
        self._lane_of: dict[str, _Lane] = {}
        """Lane of each trajectory."""

    def submit(self, calls: Sequence[Call]) -> bool:
        """Start these calls; those of a trajectory are made in this order. Returns True if the environment is
        deterministic.

        Raises:
            EnvironmentFailed: it cannot be imported.
        """
        for call in calls:
            lane = self._lane_of.get(call.trajectory)
            if call.given is None:
                if lane:
                    del self._lane_of[call.trajectory]
                    lane.trajectories -= 1
                    lane.inbox.put(call)
                continue
            if lane is None and isinstance(call.given, Problem):
                lane = self._lane_of[call.trajectory] = self._free_lane()
                lane.trajectories += 1
            if lane:
                lane.inbox.put(call)
            else:
                self._replies.put(EnvironmentReply(number=call.number, outcome=_HOST_ENDED, seconds=0.0))
        return bool(self._lanes) and self._lanes[0].process.traits.deterministic

    def collect(self) -> list[EnvironmentReply]:
        """Return the replies that are there; wait a second for a first one."""
        replies = []
        with suppress(queue.Empty):
            replies.append(self._replies.get(timeout=_COLLECT_S))
            while True:
                replies.append(self._replies.get_nowait())
        return replies

    def close(self) -> None:
        """End all processes."""
        for lane in self._lanes:
            lane.process.close()

    def _free_lane(self) -> "_Lane":
        if not self._lanes:
            self._new_lane().process.check()
        most = _SHARED if self._lanes[0].process.traits.deterministic else 1
        lane = min(self._lanes, key=lambda lane: lane.trajectories)
        if lane.trajectories >= most:
            lane = self._new_lane()
        return lane

    def _new_lane(self) -> "_Lane":
        log = self._logs and self._logs.with_name(f"{self._logs.name}-{len(self._lanes)}.log")
        self._lanes.append(_Lane(self._config, self._replies, log))
        return self._lanes[-1]


class _Lane:
    """A process, and the thread that makes its calls."""

    def __init__(
        self, config: EnvironmentConfig, replies: "queue.SimpleQueue[EnvironmentReply]", log: Path | None
    ) -> None:
        self.process = EnvironmentProcess.of(config, log)
        self._replies = replies
        self.inbox: queue.SimpleQueue[Call] = queue.SimpleQueue()
        self.trajectories = 0
        """Number of trajectories that have or get an environment here."""
        threading.Thread(target=self._run, name="environments", daemon=True).start()

    def _run(self) -> None:
        while True:
            call, began = self.inbox.get(), time.monotonic()
            outcome: _Outcome | None = None
            try:
                if call.given is None:
                    self.process.forget(call.trajectory)
                elif isinstance(call.given, str):
                    outcome = self.process.step(call.trajectory, call.given)
                else:
                    outcome = self.process.reset(call.trajectory, call.given)
            except Exception as error:  # such as no room for a process; the next call may find some
                outcome = CallFailed(kind="error", detail=f"{type(error).__name__}: {error}")
            if outcome is not None:
                seconds = time.monotonic() - began
                self._replies.put(EnvironmentReply(number=call.number, outcome=outcome, seconds=seconds))


@dataclass(slots=True)
class _Host:
    actor: "ActorHandle"
    waiting: list[Call] = field(default_factory=list)
    """Calls that are to be sent."""
    open: dict[int, asyncio.Future[EnvironmentReply]] = field(default_factory=dict)
    """Calls without a reply, by number."""
    trajectories: int = 0
    tasks: dict[str, asyncio.Task] = field(default_factory=dict)
    """Tasks that submit and collect, while there is something to submit or to collect."""


class EnvironmentPool:
    """All environments of a run. It lives in the coordinator's event loop.

    Args:
        actors: handles of EnvironmentHost. The driver creates and ends them.
    """

    def __init__(self, actors: Sequence["ActorHandle"], config: EnvironmentConfig) -> None:
        self._hosts = [_Host(actor) for actor in actors]
        self._places = asyncio.Semaphore(config.concurrency)
        self._deadline_s = _SHARED * config.timeout_s + _MARGIN_S
        self._numbers = count()
        self.deterministic = False
        """True if the environments are; known once one has been made."""

    @asynccontextmanager
    async def lease(self, trajectory: str) -> AsyncIterator["EnvironmentLease"]:
        """Yield a place for the environment of a trajectory, once one is free.

        Args:
            trajectory: a name for messages; several may have it.
        """
        async with self._places:
            lease = EnvironmentLease(self, f"{next(self._numbers)}:{trajectory}")
            try:
                yield lease
            finally:
                lease.release()

    def host(self) -> _Host:
        """Return the host with the fewest trajectories."""
        return min(self._hosts, key=lambda host: host.trajectories)

    async def call(self, host: _Host, trajectory: str, given: Input) -> EnvironmentReply:
        """Make a call. A host whose process ended gives CallFailed.

        Raises:
            EnvironmentFailed: the environment cannot be imported.
            DeadlineExceeded: the host has not replied, though the call's own deadline has passed.
        """
        number = next(self._numbers)
        reply = host.open[number] = asyncio.get_running_loop().create_future()
        self.send(host, Call(number=number, trajectory=trajectory, given=given))
        try:
            async with asyncio.timeout(self._deadline_s):
                return await reply
        except TimeoutError:
            message = f"waited {self._deadline_s:g} s for the environment of {trajectory}"
            raise DeadlineExceeded(message) from None
        finally:
            host.open.pop(number, None)

    def send(self, host: _Host, call: Call) -> None:
        """Send a call as soon as possible, with others that are sent at the time."""
        host.waiting.append(call)
        for name, work in (("submit", self._submit), ("collect", self._collect)):
            if name not in host.tasks or host.tasks[name].done():
                host.tasks[name] = asyncio.ensure_future(work(host))

    async def _submit(self, host: _Host) -> None:
        while host.waiting:
            calls, host.waiting = host.waiting, []
            try:
                # A host that has restarted knows it only once it has made an environment.
                self.deterministic |= await host.actor.submit.remote(calls)
            except RayActorError:
                self._lost(host)
                await asyncio.sleep(_RETRY_S)  # Ray restarts it
            except Exception as error:
                self._failed(host, error)

    async def _collect(self, host: _Host) -> None:
        while host.open:
            try:
                for reply in await host.actor.collect.remote():
                    future = host.open.get(reply.number)
                    if future and not future.done():
                        future.set_result(reply)
            except RayActorError:
                self._lost(host)
                await asyncio.sleep(_RETRY_S)
            except Exception as error:
                self._failed(host, error)
                return  # the next call to the host starts this again

    def _failed(self, host: _Host, error: Exception) -> None:
        """Give the error to all who wait for the host: whatever it is, they must hear of it."""
        cause = error.cause if isinstance(error, RayTaskError) else None
        for future in host.open.values():
            if not future.done():
                future.set_exception(cause if isinstance(cause, QurlError) else error)

    def _lost(self, host: _Host) -> None:
        for number, future in host.open.items():
            if not future.done():
                future.set_result(EnvironmentReply(number=number, outcome=_HOST_ENDED, seconds=0.0))


class EnvironmentLease:
    """Place of one trajectory's environment. A deterministic one whose process ended because of another trajectory is
    made again, with what it was given so far."""

    def __init__(self, pool: EnvironmentPool, trajectory: str) -> None:
        self._pool, self._trajectory = pool, trajectory
        self._host: _Host | None = None
        self._given: list[Input] = []
        self._died = False
        self.replays = 0

    async def give(self, given: Input) -> EnvironmentReply:
        """Give the environment the problem, or after it the text of a turn. Return what it makes of it; see
        EnvironmentPool.call."""
        self._given.append(given)
        todo = self._given[-1:]
        while True:
            if self._host is None:
                self._host = self._pool.host()
                self._host.trajectories += 1
            for item in todo:
                reply = await self._pool.call(self._host, self._trajectory, item)
                if isinstance(reply.outcome, CallFailed):
                    break
            kind = reply.outcome.kind if isinstance(reply.outcome, CallFailed) else None
            # A shared process may also end because of another trajectory while it serves this one.
            lost = kind == "lost" or (kind == "died" and not self._died)
            self._died |= kind == "died"
            if not lost or not self._pool.deterministic or self.replays == _MOST_REPLAYS:
                return reply
            self.replays += 1
            self.release()
            todo = self._given

    def release(self) -> None:
        """Release the slot."""
        host, self._host = self._host, None
        if host:
            host.trajectories -= 1
            self._pool.send(host, Call(number=-1, trajectory=self._trajectory, given=None))


def start_environments(config: EnvironmentConfig, folder: Path | None = None) -> "tuple[ActorHandle, ...]":
    """Start the actors of an EnvironmentPool; none without an environment.

    Args:
        folder: for logs of what environments print.
    """
    import ray

    if config.type is None:
        return ()
    # A thread each for `submit`, `collect` and `close`.
    actor = ray.remote(num_cpus=0, max_restarts=-1, max_task_retries=0, max_concurrency=3)(EnvironmentHost)
    return tuple(actor.remote(config, folder and folder / f"environment-{number}") for number in range(config.hosts))


def end_environments(actors: "Sequence[ActorHandle]") -> None:
    """End hosts and everything that their environments started."""
    import ray

    if actors:
        ray.wait([actor.close.remote() for actor in actors], num_returns=len(actors), timeout=_CLOSE_S)
    for actor in actors:
        ray.kill(actor)
