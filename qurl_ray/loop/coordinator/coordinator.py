"""The actor between rollout side and learner side: what lives as long as its process.

    ranks ── begin ──► a Session for this group of ranks, from the latest checkpoint
          ── all else ──► that session
    driver ── drain, join, leave, stop ──► events, rollout workers

Ranks that start, or restart, meet in `begin`: the session of the ranks before them is cancelled and replaced.
"""

import asyncio
import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import ray
from ray import ObjectRef
from ray.actor import ActorHandle

from qurl_ray.actors.fleet import Fleet
from qurl_ray.actors.placement import Seat
from qurl_ray.actors.rollout_worker import own_log
from qurl_ray.actors.verifier import VerifierPool
from qurl_ray.config import RunConfig
from qurl_ray.errors import DeadlineExceeded, QurlError
from qurl_ray.learner.batching import MiniBatch
from qurl_ray.learner.protocol import StepResult
from qurl_ray.loop.checkpoint import Checkpoint, latest
from qurl_ray.loop.coordinator.collect import Collector
from qurl_ray.loop.coordinator.events import EventBuffer
from qurl_ray.loop.coordinator.rendezvous import Rendezvous
from qurl_ray.loop.coordinator.session import Session
from qurl_ray.loop.messages import Directive, Drained, Gap, Offer, Start, WeightsWanted
from qurl_ray.policy.load import load_tokenizer, stop_ids
from qurl_ray.types import Completion, Event, PolicySpec

_POLL_S = 0.02


class Coordinator:
    """Owns the fleet and the events, replaces the session, and passes the ranks' calls on to it.

    Args:
        workers: handles of the rollout workers.
        resume: checkpoint that the run resumes from; after a failure it is looked for in `run_dir`.
    """

    def __init__(
        self,
        config: RunConfig,
        spec: PolicySpec,
        workers: Sequence[ActorHandle],
        verifiers: VerifierPool,
        run_dir: Path,
        resume: Checkpoint | None,
    ) -> None:
        self._config, self._spec, self._run_dir = config, spec, run_dir
        self._tokenizer, self._verifiers = load_tokenizer(spec), verifiers
        self._events = EventBuffer()
        self._fleet = Fleet(workers, config.rollout, self._events.tell)
        self._beginnings = Rendezvous(config.learner.workers)
        self._session: Session | None = None
        self._max_codes: dict[str, int] = {}
        self._failure: QurlError | None = None
        self._stop = asyncio.Event()
        """Set if no further step is to start."""
        self._seats: tuple[Seat, ...] | None = None
        self._seated: tuple[Seat, ...] | None = None
        # Ray restarts a coordinator whose process was killed, with the same arguments.
        self._restarted = ray.get_runtime_context().was_current_actor_reconstructed
        self._resume = None if self._restarted else (resume,)

    @property
    def session(self) -> Session:
        """The one of the ranks that began last."""
        assert self._session, "ranks begin before they ask for anything"
        return self._session

    # --- ranks: start -------------------------------------------------------------------------------------------

    async def begin(self, rank: int, group: str, task: tuple[ObjectRef], seat: Seat) -> Start:
        """All ranks of a group meet here before anything else; the work of another group's session is cancelled.

        Colocated engines are brought to where the ranks are, started and put to sleep, before a rank puts anything on
        its GPU.

        Args:
            task: prompts to train on. The ranks bring it, as a restarted coordinator has nothing but what Ray keeps of
                its arguments, and no large object; in a tuple, or Ray would put the object in its place.
        """
        start = await self._beginnings.arrive(group, rank, (task, seat), self._begin)
        if self._config.placement == "disaggregated" or start.over:
            return start
        version = await self._beginnings.arrive((group, "engines"), rank, None, self._bring_engines)
        return replace(start, version=max(version, start.version))

    async def _begin(self, brought: list[tuple[tuple[ObjectRef], Seat]]) -> Start:
        notes: list[str] = []
        resume = None
        (task, _), self._seats = brought[0], tuple(seat for _, seat in brought)
        if self._resume:
            (resume,) = self._resume
        else:
            resume, notes = await asyncio.to_thread(latest, self._run_dir)
            where = f"from the checkpoint of step {resume.step}" if resume else "from the beginning"
            notes = [*notes, f"the learner was started anew and goes on {where}"]
        again, self._resume = self._resume is None, None
        if self._session:
            self._session.cancel()
        stops = stop_ids(self._spec, self._tokenizer)
        collector = Collector(self._config, await task[0], self._tokenizer, stops, self._fleet, self._verifiers)
        self._session = Session(
            self._config,
            collector,
            self._fleet,
            self._events,
            self._stop,
            done=resume.step if resume else 0,
            state=json.loads(resume.loop.read_text()) if resume else None,
        )
        version = self._fleet.begin_anew()
        if again:
            self._events.add(Event(kind="rewind", step=self._events.step))
            for note in notes:
                self._events.tell("warning", note)
        directive = self._session.directive
        return Start(resume=resume, version=version, directive=directive, over=self._failure is not None)

    async def _bring_engines(self, _: list[None]) -> int:
        limit = self._config.rollout.start_timeout_s
        try:
            async with asyncio.timeout(limit):
                while self._seated != self._seats:  # the driver hires them
                    await asyncio.sleep(_POLL_S)
        except TimeoutError:
            seats = "; ".join(map(str, self._seats or ()))
            raise DeadlineExceeded(f"waited {limit:g} s for the driver to put rollout workers on {seats}") from None
        await self._some_engines()
        await self.rest()
        return self._fleet.highest()  # now that all are known

    async def _some_engines(self) -> None:
        """Return when all engines are up, or after the coordinator was restarted, some."""
        await (self._fleet.some_alive() if self._restarted else self._fleet.started())

    async def weight_max_code(self, format_name: str) -> int:
        """Largest weight code that every engine can take in a format; waits until all are up at the start of a run."""
        if format_name not in self._max_codes:
            await self._some_engines()
            self._max_codes[format_name] = await self._fleet.weight_max_code(format_name)
        return self._max_codes[format_name]

    # --- ranks: the session's work ------------------------------------------------------------------------------

    async def probe_prompt(self) -> np.ndarray | None:
        """Session.probe_prompt."""
        return self.session.probe_prompt

    async def share(self, step: int, rank: int, sent: int) -> list[MiniBatch] | WeightsWanted | None:
        """Session.share."""
        return await self.session.share(step, rank, sent)

    async def evaluate(self, label: str, step: int, sent: int) -> float | WeightsWanted:
        """Session.evaluate."""
        return await self.session.evaluate(label, step, sent)

    async def expect(self, offer: Offer, scales: list[ObjectRef]) -> None:
        """Session.expect."""
        await self.session.expect(offer, scales)

    async def offer(self, offer: Offer, buckets: list[ObjectRef]) -> list[list[Completion]]:
        """Session.offer."""
        return await self.session.offer(offer, buckets)

    async def conclude(self, version: int, attempt: int, rank: int, gaps: list[Gap]) -> bool:
        """Session.conclude."""
        return await self.session.conclude(version, attempt, rank, gaps)

    async def report(self, step: int, rank: int, result: StepResult) -> Directive:
        """Session.report."""
        return await self.session.report(step, rank, result)

    async def close(self, step: int, rank: int, seconds: dict[str, float], spans: list[Event]) -> None:
        """Session.close."""
        await self.session.close(step, rank, seconds, spans)

    async def state(self, step: int) -> dict:
        """Session.state, once the driver has written all events up to here: a resumed run adds up its summary from what
        is on disk."""
        await self._events.written()
        return self.session.state(step)

    # --- ranks: everything else ---------------------------------------------------------------------------------

    async def transfer(self, method: str, arguments: dict) -> None:
        """Take a step of vLLM's own weight transfer, on all engines."""
        await self._fleet.transfer(method, arguments, self._config.sync.timeout_s)

    async def rest(self) -> None:
        """Have all engines give their memory back, for the learner's turn."""
        await self._fleet.rest(self._config.sync.timeout_s)

    async def tell(self, event: Event) -> None:
        """Pass an event on to the driver."""
        self._events.add(event)

    async def fail(self, error: QurlError) -> None:
        """A rank met an error that no restart mends."""
        self._failure = self._failure or error

    # --- driver -------------------------------------------------------------------------------------------------

    async def drain(self) -> Drained:
        """Return events since the last call, and what the driver must know to keep the fleet complete."""
        return Drained(
            events=self._events.take() + self._fleet.spans.events(),
            workers=len(self._fleet.members),
            seats=self._seats,
            seated=self._seated,
            failure=self._failure,
            log=own_log(),
        )

    async def join(self, workers: Sequence[ActorHandle], seats: tuple[Seat, ...] | None) -> None:
        """The fleet's workers are now these, with the ranks on these seats if they are colocated."""
        members = self._fleet.members
        for index, actor in enumerate(workers):
            if index == len(members):
                self._fleet.join(actor)
                self._events.tell("info", f"rollout worker {index} joins the fleet")
            elif members[index].actor != actor:
                self._fleet.replace(index, actor)
                message = f"rollout worker {index} moves to where the learner's ranks are now"
                self._events.tell("info", message)
        self._seated = seats

    async def leave(self, stay: int) -> None:
        """The fleet's workers are now the first `stay` of them: the learner's ranks need the room."""
        while len(self._fleet.members) > stay:
            self._fleet.leave()
            message = f"rollout worker {len(self._fleet.members)} leaves, as the learner needs its room"
            self._events.tell("warning", message)

    async def stop(self) -> None:
        """Start no further step."""
        self._stop.set()
