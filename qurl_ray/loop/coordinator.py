"""The meeting point of rollout side and learner side, one actor.

    collected groups ─► one share per learner rank        weights from all ranks ─► every engine, verified

The learner's ranks ask for their share of a step; the first to ask sets the collection off, and that of as many steps
after it as rollouts may run ahead. Weights come back the same way: each rank offers its part of a version, the last
part completes it, and all engines load and verify it. Whoever waits here waits on another actor with a deadline.

What a rank waits for may take engines that have just come back without weights: then it is told so (`WeightsWanted`),
sends them, and asks once more. Ranks that begin (again) meet in `begin`: whatever was under way for the ranks before
them is dropped, and everything goes on from the latest checkpoint.
"""

import asyncio
import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import numpy as np
import ray
from ray import ObjectRef
from ray.actor import ActorHandle

from qurl_ray.actors.fleet import Fleet
from qurl_ray.actors.health import Health
from qurl_ray.actors.placement import Seat
from qurl_ray.actors.rollout_worker import own_log
from qurl_ray.actors.verifier import VerifierPool
from qurl_ray.config import RunConfig
from qurl_ray.data.tasks import Task
from qurl_ray.errors import DeadlineExceeded, QurlError
from qurl_ray.learner.batching import MiniBatch, plan
from qurl_ray.learner.protocol import StepResult
from qurl_ray.loop.checkpoint import Checkpoint, latest
from qurl_ray.loop.collect import Collected, Collector
from qurl_ray.loop.figures import evaluation_figures, step_figures
from qurl_ray.loop.guard import Directive, Guard
from qurl_ray.loop.meeting import Meeting
from qurl_ray.loop.refit import Gap, Offer, Refit
from qurl_ray.policy.load import load_tokenizer, stop_ids
from qurl_ray.rollout.requests import derive_seed
from qurl_ray.types import Completion, Event, PolicySpec

_POLL_S = 0.02
_STALE_S = 0.25  # how often it is asked, while ranks wait, whether an engine waits for weights


@dataclass(frozen=True, slots=True, kw_only=True)
class Start:
    """What ranks that begin are told."""

    resume: Checkpoint | None
    """To go on from, its files verified."""
    version: int
    """The highest that an engine may hold; theirs are to be above it."""
    directive: Directive
    """Of the guard, for the first step."""
    over: bool
    """The run has ended with an error: there is nothing to do."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Drained:
    """What the driver is told."""

    events: list[Event]
    workers: int
    """Rollout workers that the fleet knows."""
    seats: tuple[Seat, ...] | None
    """Of the ranks, where a colocated run's workers are to be; None until they have begun."""
    seated: tuple[Seat, ...] | None
    """Where these are."""
    failure: QurlError | None
    """What ended the run."""
    log: str
    """The coordinator's."""


@dataclass(frozen=True, slots=True)
class WeightsWanted:
    """In place of an answer: engines wait for the weights sent last. Send them, and ask again."""


class Coordinator:
    """Draws prompts, has them answered and judged, hands out shares; passes weights on; gathers what is to be seen.

    Args:
        workers: handles of the rollout workers.
        resume: what the run goes on from; after a failure it is looked for in `run_dir`.
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
        self._events: list[Event] = []
        self._drains = 0
        self._step = 0
        """The last that was reported."""
        self._fleet = Fleet(workers, config.rollout, self._tell)
        self._beginnings = Meeting(config.learner.workers)
        self._shares: dict[int, asyncio.Task] = {}
        self._evaluations: dict[tuple[str, int], asyncio.Task] = {}
        self._max_codes: dict[str, int] = {}
        self._failure: QurlError | None = None
        self._stop = False
        self._seats: tuple[Seat, ...] | None = None
        self._seated: tuple[Seat, ...] | None = None
        # Ray makes a coordinator anew, with the same arguments, after its process was killed.
        self._made_anew = ray.get_runtime_context().was_current_actor_reconstructed
        self._resume = None if self._made_anew else (resume,)

    def _reset(self, task: Task) -> None:
        """As at the beginning of a run; the fleet stays."""
        config = self._config
        for begun in (*self._shares.values(), *self._evaluations.values()):
            begun.cancel()
        self._shares, self._evaluations = {}, {}
        self._meeting = Meeting(config.learner.workers)
        self._collector = Collector(
            config,
            task,
            self._tokenizer,
            stop_ids(self._spec, self._tokenizer),
            self._fleet,
            self._verifiers,
        )
        probe = self._collector.probe() if config.sync.probe_tokens else []
        self._probe_ids = probe[0].prompt_ids if probe else None
        self._refit = Refit(
            self._fleet,
            ranks=config.learner.workers,
            timeout_s=config.sync.timeout_s,
            probe=probe,
            tolerance=config.sync.probe_tolerance,
            warn=lambda message: self._tell("warning", message),
        )
        changeable = config.rollout.quantization != "none" and config.precision_flow == "rollout_only"
        self._guard = Guard(config.guard, can_change_precision=changeable)
        self._next = 1
        """The first step whose collection has not begun."""
        self._last: int | None = None
        """The last step that is handed out, once an end was asked for."""
        self._reached = False
        """Whether the held-out reward has reached its target. Unlike the wish to stop, this is lost on a return to an
        earlier checkpoint."""
        self._asked: set[int] = set()
        self._states: dict[int, dict] = {}
        """The collector's, after the collection of each step."""
        self._collected: dict[int, Collected] = {}
        self._results: dict[int, tuple[list[StepResult], dict[str, float]]] = {}
        self._wanted = 0
        """How often engines have waited for weights while ranks waited here."""
        self._look: asyncio.Task | None = None
        """For engines that wait so."""
        self._drawn_at: dict[int, int] = {}
        """By version of the weights: steps that they have learned from."""
        self._dropped = False
        self._kernels: list[str] = []

    # --- learner's side -----------------------------------------------------------------------------------------

    async def begin(self, rank: int, group: str, task: tuple[ObjectRef], seat: Seat) -> Start:
        """All ranks of a group meet here before anything else; what was under way for another group is dropped.
        Colocated engines are brought to where the ranks are, up and to sleep, before a rank puts anything on its GPU.

        Args:
            task: what is trained on. The ranks bring it, as a coordinator that is made anew has nothing but what Ray
                keeps of its arguments, which is no large object; in a tuple, as Ray would put it in its place.
        """
        start = await self._beginnings.attend(group, rank, (task, seat), self._begin)
        if self._config.placement == "disaggregated" or start.over:
            return start
        version = await self._beginnings.attend((group, "engines"), rank, None, self._bring_engines)
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
        self._reset(await task[0])
        version = self._fleet.begin_anew()
        self._step = resume.step if resume else 0
        self._next = self._step + 1
        if resume:
            state = json.loads(resume.loop.read_text())
            self._collector.restore(state["collector"])
            self._guard.restore(state["guard"])
            self._reached = state.get("reached", False)  # absent from checkpoints of before there were targets
        self._states[self._step] = self._collector.state()
        if again:
            self._events.append(Event(kind="rewind", step=self._step))
            for note in notes:
                self._tell("warning", note)
        return Start(resume=resume, version=version, directive=self._guard.directive, over=self._failure is not None)

    async def _bring_engines(self, _: list[None]) -> int:
        limit = self._config.rollout.start_timeout_s
        try:
            async with asyncio.timeout(limit):
                while self._seated != self._seats:  # the driver hires them
                    await asyncio.sleep(_POLL_S)
        except TimeoutError:
            seats = "; ".join(map(str, self._seats or ()))
            raise DeadlineExceeded(f"waited {limit:g} s for the driver to put rollout workers on {seats}") from None
        await (self._fleet.some_alive() if self._made_anew else self._fleet.started())
        await self.rest()
        return self._fleet.highest()  # now that all are known

    async def rest(self) -> None:
        """Have all engines give their memory back, for the learner's turn."""
        await self._fleet.rest(self._config.sync.timeout_s)

    async def fail(self, error: QurlError) -> None:
        """A rank met an error that no restart mends."""
        self._failure = self._failure or error

    async def weight_max_code(self, format_name: str) -> int:
        """Largest weight code that every engine can take in a format; waits until all are up at the start of a run."""
        if format_name not in self._max_codes:
            await (self._fleet.some_alive() if self._made_anew else self._fleet.started())
            self._max_codes[format_name] = await self._fleet.weight_max_code(format_name)
        return self._max_codes[format_name]

    async def probe_prompt(self) -> np.ndarray | None:
        """Token ids that the engines' probes answer; None without probes."""
        return self._probe_ids

    async def share(self, step: int, rank: int, sent: int) -> list[MiniBatch] | WeightsWanted | None:
        """This rank's mini-batches of a step; None on every rank if the run ends before it.

        Args:
            sent: how often this rank has been told that weights are wanted.
        """
        if step not in self._asked:
            self._asked.add(step)
            if (self._stop or self._reached) and self._last is None:
                self._last = step - 1
                for later, task in self._shares.items():
                    if later > self._last:
                        task.cancel()
        if self._last is not None and step > self._last:
            return None
        ahead = min(step + self._config.rollout.max_staleness, self._config.steps)
        while self._next <= ahead:
            self._shares[self._next] = asyncio.ensure_future(
                self._make_shares(self._next, self._shares.get(self._next - 1))
            )
            self._next += 1
        # The step before stays: a skipped step is no barrier, and a late rank may still ask for it.
        self._shares.pop(step - 2, None)
        shares = await self._or_wanted(self._shares[step], sent)
        return shares if isinstance(shares, WeightsWanted) else shares[rank]

    async def _or_wanted(self, task: asyncio.Task, sent: int) -> Any:
        """What the task returns, unless engines wait for weights before it does. All ranks hear the same: none has an
        answer of a task that is not done."""
        while self._wanted <= sent and not task.done():
            if self._look is None or self._look.done():
                self._look = asyncio.ensure_future(self._look_for_stale(task))
            await asyncio.wait({task, self._look}, return_when=asyncio.FIRST_COMPLETED)
        return WeightsWanted() if self._wanted > sent else task.result()

    async def _look_for_stale(self, task: asyncio.Task) -> None:
        """For all ranks that wait for the task: thousands would look at thousands of engines, each for itself."""
        while not task.done():
            if self._fleet.those(Health.STALE):
                self._wanted += 1
                return
            await asyncio.wait({task}, timeout=_STALE_S)

    async def offer(self, offer: Offer, buckets: list[ObjectRef]) -> list[list[Completion]]:
        """Add one rank's part of a version; see loop.refit.Refit."""
        return await self._refit.offer(offer, buckets)

    async def expect(self, offer: Offer, scales: list[ObjectRef]) -> None:
        """Announce one rank's part of a version that vLLM's own transfer brings; see loop.refit.Refit."""
        await self._refit.expect(offer, scales)

    async def transfer(self, method: str, arguments: dict) -> None:
        """A step of that, for all engines."""
        await self._fleet.transfer(method, arguments, self._config.sync.timeout_s)

    async def conclude(self, version: int, attempt: int, rank: int, gaps: list[Gap]) -> bool:
        """Tell how far the engines' probes are off. True: offer the version once more, in full."""
        again = await self._refit.conclude(version, attempt, rank, gaps)
        self._drawn_at.setdefault(version, self._step)
        if self._refit.kernels not in ([], self._kernels):
            self._kernels = self._refit.kernels
            message = f"rollout linears run on: {', '.join(self._kernels)}"
            self._events.append(Event(kind="info", step=0, message=message))
        return again

    async def report(self, step: int, rank: int, result: StepResult) -> Directive:
        """One rank's account of its update; what the guard makes of all of them."""
        return await self._meeting.attend(("report", step), rank, result, lambda found: self._judge(step, found))

    async def _judge(self, step: int, results: list[StepResult]) -> Directive:
        self._step = step
        values = step_figures(step, self._collected[step], results, self._drawn_at)
        directive = self._guard.judge(step, values)
        for message in directive.messages:
            self._warn(step, message)
        if directive.stop:
            self._stop = True
        self._results[step] = (results, values | directive.metrics)
        return directive

    async def close(self, step: int, rank: int, seconds: dict[str, float], spans: list[Event]) -> None:
        """A rank is done with a step, which took so long; the last one completes the step's event."""
        self._events += spans
        await self._meeting.attend(("close", step), rank, seconds, lambda found: self._finish_step(step, found))

    async def evaluate(self, label: str, step: int, sent: int) -> float | WeightsWanted:
        """Mean reward of greedy answers to the held-out problems with the weights that the engines hold. Every rank
        asks, so that all wait with the same deadline; the first one sets it off. `sent` as in `share`."""
        key = (label, step)
        if key not in self._evaluations:
            self._evaluations[key] = asyncio.ensure_future(self._evaluate(label, step))
        return await self._or_wanted(self._evaluations[key], sent)

    async def _evaluate(self, label: str, step: int) -> float:
        verdicts = await self._collector.judge_held_out()
        values = await asyncio.to_thread(evaluation_figures, verdicts)  # an interval may take a second to bootstrap
        if failed := values["eval/failed"]:
            self._warn(
                step, f"evaluation {label!r}: {failed} of {values['eval/problems']} rewards failed and count as 0"
            )
        reward, target = values["eval/reward"], self._config.evaluation.target_reward
        if label == "during" and target is not None and reward >= target:
            self._reached = values["target_reached"] = True
        self._events.append(Event(kind="evaluation", step=step, message=label, values={"label": label} | values))
        if "target_reached" in values:
            self._tell("info", f"the held-out reward, {reward:.3f}, has reached its target of {target:g}: the run ends")
        return reward

    async def state(self, step: int) -> dict:
        """Where the rollout side stands after a step, for JSON: rollouts that run ahead are drawn again. Returns when
        the driver has written all events up to here: a resumed run adds up its summary from what is on disk."""
        drains = self._drains + 2  # the driver asks again only after it has written what it got
        while self._drains < drains:
            await asyncio.sleep(_POLL_S)
        return {"collector": self._states[step], "guard": self._guard.state(), "reached": self._reached}

    # --- driver's side ------------------------------------------------------------------------------------------

    async def drain(self) -> Drained:
        """What there is to be told since the last call; the driver is the only caller."""
        events, self._events = self._events + self._fleet.spans.events(), []
        self._drains += 1
        return Drained(
            events=events,
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
                self._tell("info", f"rollout worker {index} joins the fleet")
            elif members[index].actor != actor:
                self._fleet.replace(index, actor)
                self._tell("info", f"rollout worker {index} moves to where the learner's ranks are now")
        self._seated = seats

    async def leave(self, stay: int) -> None:
        """The fleet's workers are now the first `stay` of them: the learner's ranks need the room."""
        while len(self._fleet.members) > stay:
            self._fleet.leave()
            self._tell("warning", f"rollout worker {len(self._fleet.members)} leaves, as the learner needs its room")

    async def tell(self, event: Event) -> None:
        """Pass an event on to the driver."""
        self._events.append(event)

    async def stop(self) -> None:
        """No further step begins."""
        self._stop = True

    # --- steps ---------------------------------------------------------------------------------------------

    async def _make_shares(self, step: int, before: asyncio.Task | None) -> list[list[MiniBatch]]:
        if before:
            await before
        config = self._config
        collected = self._collected[step] = await self._collector.collect(step)
        self._states[step] = self._collector.state()
        self._states.pop(step - 2 - config.rollout.max_staleness, None)
        wanted = config.rollout.prompts_per_step
        if 0 < len(collected.groups) < wanted:
            self._warn(step, f"{len(collected.groups)} of {wanted} groups after {collected.rounds} round(s)")
        for status, count in collected.failed.items():
            self._warn(step, f"{count} of {collected.samples} rewards ended in {status}; these samples are left out")
        if not collected.groups:
            self._warn(step, "no group is left to learn from (uniform or failed rewards): the step is skipped")
            return [[] for _ in range(config.learner.workers)]
        return plan(
            collected.groups,
            updates=config.algorithm.updates_per_rollout,
            ranks=config.learner.workers,
            token_budget=config.learner.tokens_per_micro_batch,
            seed=derive_seed(config.seed, step, "plan"),
            packed=config.learner.packing,
        )

    # --- metrics ------------------------------------------------------------------------------------------------

    async def _finish_step(self, step: int, times: list[dict[str, float]]) -> None:
        collected = self._collected.pop(step)
        results, values = self._results.pop(step)
        seconds = {key: max(rank.get(key, 0.0) for rank in times) for key in times[0]}
        seconds |= {key: max(r.seconds[key] for r in results) for key in ("logprob", "update")}
        seconds |= {"rollout": collected.rollout_seconds, "reward": collected.reward_seconds}
        values |= self._refit.metrics
        values |= {
            "fleet/healthy": len(self._fleet.those(Health.HEALTHY)),
            "fleet/deaths": self._fleet.counts.deaths,
            "fleet/repeated_requests": self._fleet.counts.repeated,
            "fleet/hedged": self._fleet.counts.hedged,
        }
        values |= {f"time/{name}": value for name, value in seconds.items()}
        dropped, self._dropped = self._dropped, values.get("mismatch/dropped", 0.0) > 0.5
        if self._dropped and not dropped:  # said where it begins
            drops = "would drop" if self._config.algorithm.correction.metrics_only else "drops"
            kl = values["mismatch/kl"]
            share = f"{values['mismatch/dropped']:.0%} of the tokens"
            self._warn(step, f"the correction {drops} {share}: its bounds do not fit a KL(b‖p) of {kl:.1e}")
        if results[0].skipped_updates:
            self._warn(step, f"{results[0].skipped_updates} update(s) skipped: the gradient was not finite")
        self._events.append(Event(kind="step", step=step, values=values))
        self._events.append(Event(kind="prompts", step=step, values={"uids": collected.prompts}))
        if collected.shown:
            proximal = {uid: logprobs for result in results for uid, logprobs in result.proximal.items()}
            for sample in collected.shown:
                found = proximal.get(sample["uid"])
                sample["proximal_logprobs"] = None if found is None else [round(float(value), 4) for value in found]
            self._events.append(Event(kind="samples", step=step, values={"samples": collected.shown}))

    def _tell(self, kind: Literal["info", "warning"], message: str) -> None:
        self._events.append(Event(kind=kind, step=self._step, message=message))

    def _warn(self, step: int, message: str) -> None:
        self._events.append(Event(kind="warning", step=step, message=message))
