"""The actor between rollout side and learner side: the state that lives as long as its process.

    ranks ── begin ──► a Session for this group of ranks, from the latest checkpoint
          ── all else ──► that session
    driver ── drain, join, leave, stop ──► events, rollout workers

`begin` is a rendezvous of ranks that start, or restart: it cancels and replaces the session of the ranks before them.
"""

import asyncio
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import cloudpickle
import numpy as np
import ray
from ray import ObjectRef
from ray.actor import ActorHandle

from qurl_ray.actors.cluster import own_log
from qurl_ray.actors.environments import EnvironmentPool
from qurl_ray.actors.fleet import Fleet
from qurl_ray.actors.placement import GpuAssignment
from qurl_ray.actors.trajectories import TrajectoryRunner
from qurl_ray.actors.verifier import VerifierPool
from qurl_ray.config import RunConfig
from qurl_ray.errors import DeadlineExceeded, QurlError
from qurl_ray.learner.batching import MiniBatch
from qurl_ray.learner.protocol import StepResult
from qurl_ray.rendezvous import Rendezvous
from qurl_ray.runs.checkpoint import Checkpoint, latest
from qurl_ray.training.coordinator.collect import Collector
from qurl_ray.training.coordinator.events import EventBuffer
from qurl_ray.training.coordinator.session import Session
from qurl_ray.training.messages import Directive, Drained, Start, TaskInputs, WeightsWanted
from qurl_ray.types import Event
from qurl_ray.weights.messages import WeightMessage

_POLL_S = 0.02


def packed_handles(
    workers: Sequence[ActorHandle], verifiers: VerifierPool, environments: Sequence[ActorHandle] = ()
) -> bytes:
    """Return rollout workers, verifiers and hosts of environments for a Coordinator. As arguments of their own, Ray
    takes them for objects that a restart may not find, and prints an error at every start."""
    return cloudpickle.dumps((workers, verifiers, environments))


class Coordinator:
    """Owner of the fleet and the events. It replaces the session, and passes the ranks' calls on to it.

    Args:
        handles: see packed_handles; or its arguments, unpacked, within one process.
        resume: checkpoint that the run resumes from; after a failure, the latest one in `run_dir` is used instead.
    """

    def __init__(
        self,
        config: RunConfig,
        handles: bytes | tuple[Sequence[ActorHandle], VerifierPool, Sequence[ActorHandle]],
        run_dir: Path,
        resume: Checkpoint | None,
    ) -> None:
        workers: Sequence[ActorHandle]
        self._verifiers: VerifierPool
        hosts: Sequence[ActorHandle]
        workers, self._verifiers, hosts = cloudpickle.loads(handles) if isinstance(handles, bytes) else handles
        self._config, self._run_dir = config, run_dir
        self._events = EventBuffer()
        self._fleet = Fleet(workers, config.rollout, self._events.tell)
        self._environments = EnvironmentPool(hosts, config.environment) if hosts else None
        self._beginnings = Rendezvous(config.learner.workers)
        self._session: Session | None = None
        self._max_codes: dict[str, int] = {}
        self._failure: QurlError | None = None
        self._crashes: set[tuple[int, int, str]] = set()
        """Rank, step and cause of the errors that are not ours."""
        self._stop = asyncio.Event()
        """Set if no further step is to start."""
        self._ranks_at: tuple[GpuAssignment, ...] | None = None
        self._workers_at: tuple[GpuAssignment, ...] | None = None
        # Ray restarts a coordinator whose process was killed, with the same arguments.
        self._restarted = ray.get_runtime_context().was_current_actor_reconstructed
        self._resume = None if self._restarted else (resume,)

    @property
    def session(self) -> Session:
        """Session of the ranks that started last."""
        assert self._session, "ranks begin before they ask for anything"
        return self._session

    # --- ranks: start -------------------------------------------------------------------------------------------

    async def begin(self, rank: int, group: str, inputs: tuple[ObjectRef], assignment: GpuAssignment) -> Start:
        """Start the session of a group of ranks, once all of them have called this; cancel the session before it.

        Colocated engines are placed with the ranks, started and put to sleep, before a rank puts anything on its GPU.

        Args:
            inputs: reference to a TaskInputs, in a tuple, or Ray would replace the reference by the object. The ranks
                send it, because a restarted coordinator has only the arguments that Ray keeps, and Ray keeps no large
                objects.
        """
        start = await self._beginnings.arrive(group, rank, (inputs, assignment), self._begin)
        if self._config.placement == "disaggregated" or start.over:
            return start
        version = await self._beginnings.arrive((group, "engines"), rank, None, self._bring_engines)
        return replace(start, version=max(version, start.version))

    async def _begin(self, brought: list[tuple[tuple[ObjectRef], GpuAssignment]]) -> Start:
        notes: list[str] = []
        resume = None
        (reference, _), self._ranks_at = brought[0], tuple(assignment for _, assignment in brought)
        if self._resume:
            (resume,) = self._resume
        else:
            resume, notes = await asyncio.to_thread(latest, self._run_dir)
            where = f"from the checkpoint of step {resume.step}" if resume else "from the beginning"
            notes = [*notes, f"the learner restarted and continues {where}"]
        again, self._resume = self._resume is None, None
        inputs: TaskInputs = await reference[0]
        runner = None
        if self._environments:
            runner = TrajectoryRunner(
                self._config,
                self._fleet,
                self._environments,
                tokenizer=inputs.tokenizer,
                stop_ids=inputs.stop_ids,
                context=inputs.context,
            )
        collector = Collector(
            self._config, inputs.task, inputs.tokenizer, inputs.stop_ids, self._fleet, self._verifiers, runner
        )
        done, state = (resume.step, resume.state()) if resume else (0, None)
        if self._session:  # from here on nothing is awaited: no call may reach a session that was cancelled
            self._session.cancel()
        self._session = Session(self._config, collector, self._fleet, self._events, self._stop, done=done, state=state)
        version = self._fleet.restart()
        if again:
            self._events.add(Event(kind="rewind", step=done, values={"totals": state and state["totals"]}))
            for note in notes:
                self._events.tell("warning", note)
        directive = self._session.directive
        return Start(resume=resume, version=version, directive=directive, over=self._failure is not None)

    async def _bring_engines(self, _: list[None]) -> int:
        limit = self._config.rollout.start_limit_s
        try:
            async with asyncio.timeout(limit):
                while self._workers_at != self._ranks_at:  # the driver starts them
                    await asyncio.sleep(_POLL_S)
        except TimeoutError:
            assignments = "; ".join(map(str, self._ranks_at or ()))
            raise DeadlineExceeded(
                f"waited {limit:g} s for the driver to put rollout workers on {assignments}"
            ) from None
        await self._some_engines()
        await self.rest()
        return self._fleet.highest()  # only now are all versions known

    async def _some_engines(self) -> None:
        """Return when all engines are up, or after a restart of the coordinator, when one is."""
        await (self._fleet.some_alive() if self._restarted else self._fleet.started())

    async def weight_max_code(self, format_name: str) -> int:
        """Return the largest weight code that every engine can take in a format. At the start of a run, wait until all
        are up."""
        if format_name not in self._max_codes:
            await self._some_engines()
            self._max_codes[format_name] = await self._fleet.weight_max_code(format_name)
        return self._max_codes[format_name]

    # --- ranks: the session's work ------------------------------------------------------------------------------

    async def probe_prompt(self) -> np.ndarray | None:
        """See Session.probe_prompt."""
        return self.session.probe_prompt

    async def share(self, step: int, rank: int, sent: int) -> list[MiniBatch] | WeightsWanted | None:
        """See Session.share."""
        return await self.session.share(step, rank, sent)

    async def certify(self, step: int, rank: int, format_name: str, sent: int) -> list[MiniBatch] | WeightsWanted:
        """See Session.certify."""
        return await self.session.certify(step, rank, format_name, sent)

    async def evaluate(self, label: str, step: int, sent: int) -> float | WeightsWanted:
        """See Session.evaluate."""
        return await self.session.evaluate(label, step, sent)

    async def weights(self, message: WeightMessage) -> Any:
        """Pass a message about weights to the session's gate; see WeightGate.receive."""
        return await self.session.gate.receive(message)

    async def report(self, step: int, rank: int, result: StepResult) -> Directive:
        """See Session.report."""
        return await self.session.report(step, rank, result)

    async def close(
        self, step: int, rank: int, seconds: dict[str, float], figures: dict[str, float], spans: list[Event]
    ) -> None:
        """See Session.close."""
        await self.session.close(step, rank, seconds, figures, spans)

    async def state(self, step: int) -> dict:
        """Return Session.state, once the driver has written all events up to here: the files of a run that resumes
        from it then lack nothing."""
        await self._events.written()
        return self.session.state(step)

    # --- ranks: everything else ---------------------------------------------------------------------------------

    async def rest(self) -> None:
        """Put all engines to sleep, so that they release their memory for the learner's turn."""
        await self._fleet.rest(self._config.sync.timeout_s)

    async def tell(self, event: Event) -> None:
        """Pass an event on to the driver."""
        self._events.add(event)

    async def fail(self, error: QurlError) -> None:
        """Record a rank's error that no restart can fix. The first one is kept."""
        self._failure = self._failure or error

    async def crashed(self, rank: int, cause: str, told: str) -> QurlError | None:
        """Announce a rank's error that is not ours. Return the error that ends the run if the rank had it before, in
        the same step.

        Args:
            cause: kind and place of the error: equal for equal errors.
            told: the error for the user.
        """
        step = self._session.asked if self._session else 0
        self._events.tell("warning", f"rank {rank} of the learner failed in step {step}: {told}")
        if (rank, step, cause) in self._crashes:
            return QurlError(f"rank {rank} of the learner failed twice in the same way, in step {step}: {told}")
        self._crashes.add((rank, step, cause))
        return None

    # --- driver -------------------------------------------------------------------------------------------------

    async def drain(self) -> Drained:
        """Return the events since the last call, and the data that the driver needs to keep the fleet complete."""
        return Drained(
            events=self._events.take() + self._fleet.spans.events(),
            workers=len(self._fleet.members),
            ranks_at=self._ranks_at,
            workers_at=self._workers_at,
            failure=self._failure,
            log=own_log(),
        )

    async def join(self, workers: Sequence[ActorHandle], assignments: tuple[GpuAssignment, ...] | None) -> None:
        """Make these the fleet's workers.

        Args:
            assignments: GPU assignments of the ranks, for which colocated workers were placed; else None.
        """
        members = self._fleet.members
        for index, actor in enumerate(workers):
            if index == len(members):
                self._fleet.join(actor)
                self._events.tell("info", f"rollout worker {index} joins the fleet")
            elif members[index].actor != actor:
                self._fleet.replace(index, actor)
                message = f"rollout worker {index} moves to where the learner's ranks are now"
                self._events.tell("info", message)
        self._workers_at = assignments

    async def leave(self, stay: int) -> None:
        """Keep only the first `stay` workers of the fleet: the learner's ranks need the resources."""
        while len(self._fleet.members) > stay:
            self._fleet.leave()
            message = f"rollout worker {len(self._fleet.members)} leaves, as the learner needs its room"
            self._events.tell("warning", message)

    async def stop(self) -> None:
        """Start no further step."""
        self._stop.set()
