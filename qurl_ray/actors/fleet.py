"""The fleet of rollout workers: it distributes requests and weights, detects dead workers and readmits them.

Each worker is served by its own asyncio task, which sends it one chunk of requests at a time. Ray restarts a dead
worker's process; it generates again once it has verified the current weights. An answer does not depend on the worker
that gives it, so the unanswered requests of a dead worker go to others.
"""

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Iterable, Sequence
from contextlib import asynccontextmanager, suppress
from typing import Any, Literal

import ray
from ray import ObjectRef
from ray.actor import ActorHandle
from ray.exceptions import ActorDiedError, ActorUnschedulableError, RayActorError, RayTaskError

from qurl_ray.actors.health import Health, Heartbeat, Member
from qurl_ray.actors.rollout_worker import control
from qurl_ray.actors.turn_requests import TurnsWork
from qurl_ray.actors.work import Chunk, FleetCounts, Work
from qurl_ray.config.rollout import RolloutConfig
from qurl_ray.errors import DeadlineExceeded, EngineError, QurlError, StaleWeights
from qurl_ray.spans import Spans, worker_lane
from qurl_ray.types import Completion, Manifest, Request, StagedBucket
from qurl_ray.weights.messages import LoadReport

_MARGIN_S = 30.0  # engines check their deadline between two tokens
_TICK_S = 0.25  # between two calls to a worker that restarts, or that is being interrupted
_HEARTBEAT_S = 0.002  # between any two heartbeats: those of thousands of workers must not overload the coordinator
_LOAD_FAILURES = 3  # in a row: a worker that dies or hangs whenever it loads weights would do so forever
_SLOTFULS = 4  # requests of a chunk, per slot of an engine: enough to keep slots filled, few enough to repeat
_DIED_FOR_GOOD = (ActorDiedError, ActorUnschedulableError)  # it cannot be created at all, or not where it should be
_DIED = (RayActorError, ActorUnschedulableError)

LogCallback = Callable[[Literal["info", "warning"], str], None]
"""Callback that takes the kind and the text of a message."""


class Fleet:
    """All rollout workers of a run. The fleet lives in the coordinator's event loop.

    Membership, weights, generation and health are one class, because each of them changes the states of the same
    members and waits for the same event that one has changed.

    Args:
        actors: handles of RolloutWorker. The driver creates and ends them.
        log: called with each message that the user must see.
    """

    def __init__(self, actors: Sequence[ActorHandle], config: RolloutConfig, log: LogCallback) -> None:
        self._config, self._log = config, log
        self.members: list[Member] = []
        self.version = -1
        """Version of the weights that healthy workers hold; -1 before the first."""
        self._format: str = config.quantization
        """Number format of the weights that were loaded last, or with which engines start."""
        self.counts, self.spans = FleetCounts(), Spans()
        self.recovery_seconds: list[float] = []
        """Seconds from the death of a worker to its verified refit, one per recovery."""
        self._lost_at: dict[int, float] = {}
        self._fatal: EngineError | None = None
        """Error of a worker that can never start."""
        self._works: list[Work] = []
        self._busy: dict[int, tuple[Work, Chunk]] = {}
        self._paused = False
        self._changed, self._offered = asyncio.Event(), asyncio.Event()
        self._tasks: set[asyncio.Task] = set()
        self._tending: dict[int, tuple[asyncio.Task, ...]] = {}
        """Tasks that watch and serve each worker, by worker index."""
        self._resting = asyncio.Lock()
        for actor in actors:
            self.join(actor)

    # --- membership ---------------------------------------------------------------------------------------------

    def join(self, actor: ActorHandle) -> None:
        """Add a worker."""
        self.members.append(Member(index=len(self.members), actor=actor))
        self._tend(self.members[-1])

    def replace(self, index: int, actor: ActorHandle) -> None:
        """Put another worker in the place of one that was ended on purpose, such as an engine of a colocated run that
        moves."""
        for task in self._tending.pop(index):
            task.cancel()
        self._fatal = None
        self.members[index] = Member(index=index, actor=actor)
        self._tend(self.members[index])
        self._notify()

    def leave(self) -> None:
        """Remove the last worker, which is ended on purpose; its unanswered requests go to others."""
        member = self.members.pop()
        for task in self._tending.pop(member.index):
            task.cancel()
        if busy := self._busy.pop(member.index, None):
            work, chunk = busy
            work.give_back(chunk, member.index)
        self._notify()
        self._offer()

    def _tend(self, member: Member) -> None:
        self._tending[member.index] = (self._spawn(self._watch(member)), self._spawn(self._serve(member)))

    def those(self, *states: Health) -> list[Member]:
        """Workers in one of these states."""
        return [member for member in self.members if member.health in states]

    def restart(self) -> int:
        """Fail all work under way and trust no worker's weights, because the learner restarts. Returns the highest
        version that a worker may hold."""
        for work in self._works:
            work.error = EngineError("the learner restarted")
        for member in self.those(Health.HEALTHY):
            member.turn(Health.STALE)
        for member in self.members:
            member.refusals = 0
        highest = self.highest()
        self._paused, self.version = False, -1
        self._notify()
        return highest

    def highest(self) -> int:
        """Return the highest weight version that a worker may hold."""
        return max([0, self.version, *(m.heartbeat.version or 0 for m in self.members if m.heartbeat)])

    async def started(self) -> None:
        """Return when all workers are up.

        Raises:
            DeadlineExceeded: some are not up within `start_timeout_s`.
            EngineError: one cannot be created.
        """
        await self._until(lambda: not self.those(Health.RESTARTING, Health.DEAD), "all rollout workers to start")
        if self._fatal:
            raise self._fatal

    async def some_alive(self) -> None:
        """Return when at least one worker is up that can take weights.

        Raises:
            DeadlineExceeded: none is up within `start_timeout_s`.
            EngineError: none ever will be.
        """
        await self._until(
            lambda: any(m.alive for m in self.members) or self.hopeless, "any rollout worker to come back"
        )
        if not any(member.alive for member in self.members):
            raise self._fatal or EngineError(f"no rollout worker is left: {self.roster()}")

    @property
    def hopeless(self) -> bool:
        """True if all workers are left out for good."""
        return all(member.health is Health.OUT for member in self.members)

    async def _until(self, condition: Callable[[], bool], goal: str) -> None:
        try:
            async with asyncio.timeout(self._config.start_limit_s):
                while not condition():
                    await self._changed.wait()
        except TimeoutError:
            message = f"waited {self._config.start_limit_s:g} s for {goal}: {self.roster()}"
            raise DeadlineExceeded(message) from None

    def roster(self) -> str:
        """All workers and their states, as text for messages."""
        return "; ".join(f"{member.where()} is {member.health}" for member in self.members)

    # --- weights ------------------------------------------------------------------------------------------------

    def takers(self) -> list[Member]:
        """Workers that can take weights."""
        return self.those(Health.HEALTHY, Health.STALE)

    def stale(self) -> list[Member]:
        """Workers that wait for weights."""
        return self.those(Health.STALE)

    @property
    def serving(self) -> bool:
        """True if a worker generates, or may again without new weights."""
        return bool(self.those(Health.HEALTHY, Health.SUSPECT))

    def distrust(self, member: Member) -> None:
        """Keep the worker from generating until `holds`."""
        member.turn(Health.STALE)

    def leave_out(self, member: Member) -> None:
        """Leave the worker out for good."""
        member.turn(Health.OUT)

    async def weight_max_code(self, format_name: str) -> int:
        """Return the largest weight code that every worker that is up can take.

        Raises:
            QurlError: none of them has answered.
        """
        calls = {m.index: m.actor.weight_max_code.remote(format_name) for m in self.members if m.alive}
        codes = await self._gather(calls, self._config.start_limit_s, "say what codes they take", "ask")
        if taken := [code for code in codes.values() if isinstance(code, int)]:
            return min(taken)
        raise next(iter(codes.values()), EngineError(f"no rollout worker is up: {self.roster()}"))

    async def commit(
        self,
        members: Sequence[Member],
        manifest: Manifest,
        tickets: Sequence[Any] | None,
        probe: Sequence[Request],
        timeout_s: float,
    ) -> dict[int, LoadReport | QurlError]:
        """Have these workers load and verify the weights and draw the probe. Without tickets, they have got the weights
        through a direct transport.

        Returns each worker's result by index, or an error if it refused the weights, died or was late. All of them are
        STALE until `holds` is called. Engines that hold one number format at a time may take as long as a start.
        """
        if self._config.restarts_for_formats and {self._format, self._config.quantization} != {manifest.precision}:
            timeout_s += self._config.start_limit_s
            if self._format != manifest.precision:
                self._log("info", f"engines restart, as planned: from format {self._format} to {manifest.precision}")
        self._format = manifest.precision
        for member in members:
            member.turn(Health.STALE)
            member.doing, member.awake = "load", True
        calls = {m.index: m.actor.commit.remote(manifest, tickets, list(probe)) for m in members}
        try:
            return await self._gather(calls, timeout_s, f"load and verify weights {manifest.version}", "load")
        finally:
            for member in members:
                member.doing = "idle"

    def holds(self, member: Member, version: int) -> None:
        """Mark the worker as healthy: it has verified the version and passed the probe, so it may generate."""
        self.version = version
        if not member.alive:  # it died meanwhile
            return
        member.turn(Health.HEALTHY)
        member.refusals = member.failed_loads = 0
        if (lost := self._lost_at.pop(member.index, None)) is not None:
            self.recovery_seconds.append(time.monotonic() - lost)
            seconds = self.recovery_seconds[-1]
            self._log("info", f"{member.where()} is back after {seconds:.1f} s, with verified weights {version}")
        self._notify()
        self._offer()

    async def begin(
        self, members: Sequence[Member], version: int, format_name: str, timeout_s: float
    ) -> dict[int, tuple[str, int] | QurlError]:
        """Have these workers, while the fleet pauses, prepare for a version that comes through a direct transport.
        Returns identity and number of processes of each worker's engine by index, or an error if it cannot take part.
        """
        for member in members:
            member.doing, member.awake = "load", True
        calls = {m.index: m.actor.begin.remote(version, format_name) for m in members}
        return await self._gather(calls, timeout_s, f"expect weights {version}", "load")

    async def put(self, indices: Iterable[int], bucket: StagedBucket, timeout_s: float) -> dict[int, QurlError]:
        """Have the workers of these indices take a bucket of that version. Returns the errors of those that did not, by
        index."""
        calls = {index: self.members[index].actor.put.remote(bucket, index) for index in indices}
        results = await self._gather(calls, timeout_s, f"take bucket {bucket.number}", "load")
        return {index: result for index, result in results.items() if isinstance(result, QurlError)}

    # --- generation ---------------------------------------------------------------------------------------------

    async def generate(self, requests: Sequence[Request]) -> list[Completion]:
        """Return completions in the order of the requests. Each request is answered once, even if workers die.

        Raises:
            DeadlineExceeded: some answers were not finished in time; the engines have stopped working on them.
            EngineError: an engine cannot answer one of them.
        """
        if not requests:
            return []
        healthy = max(1, len(self.those(Health.HEALTHY)))
        work = Work(requests, size=min(-(-len(requests) // healthy), _SLOTFULS * self._config.slots))
        async with self._working(work):
            began = time.monotonic()
            while not work.over:
                await _wait(self._changed, 1.0)
                self._check_time(work, began)
            if work.error:
                raise work.error
        return work.answers()

    @asynccontextmanager
    async def turns(self) -> AsyncIterator[TurnsWork]:
        """Yield a way to request turns one by one.

        Raises:
            QurlError: see generate. It ends the work of all who wait for turns.
        """
        # Shares of all workers, not of the healthy: each of thousands would count all others.
        work = TurnsWork(
            size=self._config.slots, workers=lambda: len(self.members), free=self._is_free, offer=self._offer
        )
        async with self._working(work):
            watch = self._spawn(self._watch_turns(work))
            try:
                yield work
            finally:
                watch.cancel()

    async def _watch_turns(self, work: TurnsWork) -> None:
        """Fail all who wait for turns when one of them fails, or takes too long."""
        while not work.error:
            await _wait(self._changed, 1.0)
            self._check_time(work, work.heard)
        work.fail(work.error)

    @asynccontextmanager
    async def _working(self, work: Work) -> AsyncIterator[None]:
        self._works.append(work)
        self._offer()
        try:
            yield
        finally:
            self._works.remove(work)
            self._spawn(self._interrupt(lambda w, _: w is work))  # nothing waits for those answers any more
            self.counts.repeated += work.repeated
            self.counts.hedged += work.hedged

    def _check_time(self, work: Work, began: float) -> None:
        """Give the work an error if it has open requests for too long."""
        # Repeated requests may take twice as long, and wait for a worker to start.
        again = self._config.start_limit_s + self._config.timeout_s if work.repeated else 0.0
        limit = self._config.timeout_s + again
        if work.open and time.monotonic() - began > limit + _MARGIN_S:
            work.error = DeadlineExceeded(
                f"waited {limit:g} s for rollouts: {work.open} of {work.asked} requests are unanswered with "
                f"weights {self.version}; {self.roster()}"
            )

    async def pause(self) -> None:
        """Interrupt all generation, so that weights can be loaded; tokens drawn so far are kept. Returns when no engine
        generates."""
        self._paused = True
        await self._interrupt(lambda *_: True)

    async def rest(self, timeout_s: float) -> None:
        """Put all awake workers to sleep: they release their memory until the next request. Returns when they have.
        Generation that this interrupts resumes with that request.

        Raises:
            EngineError: one cannot sleep. A worker that dies meanwhile has released its memory.
        """
        async with self._resting:
            awake = [member for member in self.takers() if member.awake]
            if not awake:
                return
            await self.pause()
            results = await self._gather({m.index: m.actor.sleep.remote() for m in awake}, timeout_s, "sleep", "sleep")
            for member in awake:
                if member.alive and isinstance(results[member.index], QurlError):
                    raise results[member.index]
            for member in awake:
                member.awake = False
            self.resume()

    def resume(self) -> None:
        """Resume generation, with the weights that the workers hold now."""
        self._paused = False
        self._offer()

    async def _interrupt(self, which: Callable[[Work, Chunk], bool]) -> None:
        """Cancel the selected chunks until none of them runs. Repeats, because a cancel that overtakes its call has no
        effect."""
        while targets := [index for index, busy in self._busy.items() if which(*busy)]:
            for index in targets:
                work, chunk = self._busy[index]
                control(self.members[index].actor.cancel).remote([request.uid for request in work.requests(chunk)])
            with suppress(TimeoutError):
                async with asyncio.timeout(_TICK_S):
                    while any(which(*busy) for busy in self._busy.values()):
                        await self._changed.wait()

    async def _serve(self, member: Member) -> None:
        """Send a worker one chunk of requests after the other."""
        while True:
            job = None if self._paused or member.health is not Health.HEALTHY else self._next(member)
            if job is None:
                # By polling, stragglers are found, and what was left to a worker that is not healthy any more.
                polls = any(work.running or work.waiting for work in self._works)
                await _wait(self._offered, 1.0 if polls else None)
                continue
            self._busy[member.index] = job
            member.doing, member.awake = "generate", True
            try:
                with self.spans.during(worker_lane(member.index), "generate", version=self.version) as figures:
                    figures |= await self._answer(member, *job)
            finally:
                self._busy.pop(member.index, None)
                member.doing = "idle"
                self._notify()
                if job[0].waiting:  # includes requests that this worker left unanswered
                    self._offer()

    def _next(self, member: Member) -> tuple[Work, Chunk] | None:
        for work in self._works:
            if chunk := work.next(member.index, time.monotonic(), self._config.hedge_after):
                return work, chunk
        return None

    def _is_free(self, index: int) -> bool:
        """True if the worker of this index will look for work when `_offer` is called."""
        healthy = index < len(self.members) and self.members[index].health is Health.HEALTHY
        return healthy and index not in self._busy

    async def _answer(self, member: Member, work: Work, chunk: Chunk) -> dict[str, float]:
        """Have a worker answer one chunk. Returns figures for its span."""
        limit = self._config.timeout_s
        try:
            completions = await member.actor.generate.remote(work.requests(chunk), self.version, limit)
        except _DIED as error:
            had = work.requests(chunk)
            where = "go to others" if work.give_back(chunk, member.index) else "are with another one already"
            self._lost(member, f"its {len(had)} requests ({had[0].uid} to {had[-1].uid}) {where}", error)
            return {}
        except RayTaskError as error:
            work.give_back(chunk, member.index)
            if isinstance(error.cause, StaleWeights):  # its process has restarted, which was not noticed yet
                self._lost(member, f"{error.cause}; its requests go to others", error)
            else:
                work.error = error.cause if isinstance(error.cause, QurlError) else EngineError(str(error))
            return {}
        late = [c for c in completions if c.finish == "deadline"]
        if late:
            drawn = max(len(c.token_ids) for c in late)
            unfinished = f"{len(late)} of {len(completions)} answers are unfinished, after up to {drawn} tokens"
            work.error = DeadlineExceeded(f"waited {limit:g} s for rollouts by {member.where()}: {unfinished}")
        others = [index for index in chunk.runners if index != member.index]
        work.take(chunk, member.index, completions, time.monotonic())
        if others and not late:  # two workers had this chunk: the slower one may stop
            self._spawn(self._interrupt(lambda _, running: running is chunk))
        return {"requests": len(completions), "tokens": sum(len(c.token_ids) for c in completions)}

    # --- health -------------------------------------------------------------------------------------------------

    async def _watch(self, member: Member) -> None:
        """Request heartbeats from a worker until it is left out."""
        while member.health is not Health.OUT:
            starting = member.health in (Health.DEAD, Health.RESTARTING)
            try:
                async with asyncio.timeout(None if starting else self._config.silent_s / 4):
                    heartbeat = await control(member.actor.heartbeat).remote()
            except TimeoutError:
                self._silent(member)
                continue
            except _DIED_FOR_GOOD as error:
                self._lost(member, "it cannot be restarted", error)
                member.turn(Health.OUT)
                self._fatal = EngineError(f"{member.where()} cannot start: {error}")
                self._notify()
                return
            except _DIED as error:
                self._lost(member, "it is being restarted", error)
                await asyncio.sleep(_TICK_S)
                continue
            self._heard(member, heartbeat)
            await asyncio.sleep(max(self._config.heartbeat_s, _HEARTBEAT_S * len(self.members)))

    def _heard(self, member: Member, heartbeat: Heartbeat) -> None:
        if heartbeat.boot == member.ended:  # the last answer of a process that was ended meanwhile
            return
        silent, member.heard = time.monotonic() - member.heard, time.monotonic()
        if (
            member.heartbeat
            and member.heartbeat.boot != heartbeat.boot
            and member.health not in (Health.DEAD, Health.RESTARTING)
        ):
            self._lost(member, "it was restarted", None)
        before, member.heartbeat = member.heartbeat, heartbeat
        if member.health is Health.SUSPECT:
            fit = heartbeat.version == self.version
            self._log("info", f"{member.where()} answers again")
            member.turn(Health.HEALTHY if fit else Health.STALE)
            self._offer()
        elif member.health in (Health.DEAD, Health.RESTARTING):
            member.turn(Health.RESTARTING)
            member.turn(Health.STALE)
            member.doing = "idle"
            self.spans.past(worker_lane(member.index), "dead" if before else "start", silent)
            if before:
                self._log("info", f"{member.where()} has restarted and needs weights")
        self._notify()

    def _silent(self, member: Member) -> None:
        """Handle a heartbeat that is late: suspect the worker, and end it if the silence lasts."""
        seconds = time.monotonic() - member.heard
        if member.alive:
            member.turn(Health.SUSPECT)
            self._log("warning", f"{member.where()} has not answered for {seconds:.0f} s")
        elif member.health is Health.SUSPECT and seconds > self._config.silent_s:
            self._end(member, f"it did not answer for {seconds:.0f} s and is ended")
        self._notify()

    def _end(self, member: Member, reason: str) -> None:
        """End a worker's process; Ray starts another one."""
        if member.heartbeat:
            member.ended = member.heartbeat.boot
        ray.kill(member.actor, no_restart=False)
        self._lost(member, reason, None)

    def _lost(self, member: Member, consequence: str, error: Exception | None) -> None:
        """Record that a worker's process is gone; Ray starts another one."""
        if member.health in (Health.DEAD, Health.RESTARTING, Health.OUT):
            return
        cause = f" ({type(error).__name__})" if error else ""
        self._log("warning", f"{member.where()} died{cause}: {consequence}")
        self.counts.deaths += 1
        self._lost_at.setdefault(member.index, time.monotonic())
        member.turn(Health.DEAD)
        member.turn(Health.RESTARTING)
        member.heard = time.monotonic()
        self._notify()

    def _failed_load(self, member: Member) -> None:
        """Count that a worker was lost while it loaded weights, and leave it out if that happens each time."""
        member.failed_loads += 1
        if member.failed_loads == _LOAD_FAILURES and member.health is not Health.OUT:
            self.leave_out(member)
            self._log("warning", f"{member.where()} is left out: lost in {_LOAD_FAILURES} loads of weights in a row")
            self._notify()

    # --- waiting ------------------------------------------------------------------------------------------------

    async def _gather(self, calls: dict[int, ObjectRef], timeout_s: float, task: str, span: str) -> dict[int, Any]:
        """Return each worker's result, or the error (QurlError) that explains why it has none. `task` follows "to" in
        errors, and `span` is the name of the call in the timeline."""

        async def outcome(index: int, call: ObjectRef) -> Any:
            member = self.members[index]
            try:
                with self.spans.during(worker_lane(index), span):
                    async with asyncio.timeout(timeout_s):
                        return await call
            except TimeoutError:
                self._end(member, f"it was not done within {timeout_s:g} s and is ended")
                lost: QurlError = DeadlineExceeded(f"waited {timeout_s:g} s for {member.where()} to {task}")
            except _DIED as error:
                self._lost(member, "it is being restarted", error)
                lost = EngineError(f"{member.where()} died while it was to {task}")
            except RayTaskError as error:
                if isinstance(error.cause, QurlError):
                    return error.cause
                raise
            if span == "load":
                self._failed_load(member)
            return lost

        outcomes = await asyncio.gather(*(outcome(index, call) for index, call in calls.items()))
        return dict(zip(calls, outcomes, strict=True))

    def _notify(self) -> None:
        """Wake up all tasks that wait for a condition: it may hold now."""
        self._changed.set()
        self._changed = asyncio.Event()

    def _offer(self) -> None:
        """Wake up the tasks of idle workers: there may be work. Not called at every change: with thousands of workers,
        each change would wake up all others."""
        self._offered.set()
        self._offered = asyncio.Event()

    def _spawn(self, coroutine: Coroutine) -> asyncio.Task:
        task = asyncio.ensure_future(coroutine)
        self._tasks.add(task)
        task.add_done_callback(self._ended)
        return task

    def _ended(self, task: asyncio.Task) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()):
            for work in self._works:
                work.error = error if isinstance(error, QurlError) else EngineError(f"the fleet failed: {error!r}")
            self._log("warning", f"the fleet failed: {error!r}")
            self._notify()


async def _wait(event: asyncio.Event, timeout_s: float | None) -> None:
    with suppress(TimeoutError):
        async with asyncio.timeout(timeout_s):
            await event.wait()
