"""Coordinator's work for one group of learner ranks. A restart of the ranks replaces the whole session.

    collected groups ─► one share per rank          weights of all ranks ─► every engine, verified

The first rank that asks for its share of a step starts the collection of that step, and of as many steps after it as
rollouts may run ahead. Weights come back the same way: each rank offers its part of a version, the last part completes
it, and all engines load and verify it. Waits for other actors have a deadline.
"""

import asyncio
import math
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np

from qurl_ray.actors.fleet import Fleet
from qurl_ray.actors.health import Health
from qurl_ray.config import RunConfig
from qurl_ray.engines.requests import derive_seed
from qurl_ray.errors import QurlError
from qurl_ray.evaluation.certificate import CostSequence, certificate_figures, certificate_sentence
from qurl_ray.learner.batching import MiniBatch, plan
from qurl_ray.learner.protocol import StepResult
from qurl_ray.rendezvous import Rendezvous
from qurl_ray.training.coordinator.collect import CertificateAnswers, Collected, Collector
from qurl_ray.training.coordinator.events import EventBuffer
from qurl_ray.training.coordinator.figures import evaluation_figures, step_figures
from qurl_ray.training.coordinator.guard import Guard
from qurl_ray.training.messages import Directive, WeightsWanted
from qurl_ray.training.totals import RunTotals
from qurl_ray.types import Event, Trajectory, row_uid
from qurl_ray.weights.floor import ProbeFloor
from qurl_ray.weights.gate import WeightGate

_FIRST_STEPS = 3
_NO_ENDS = 0.95  # share of truncated answers in one of the first steps that is announced
_LOST_STEPS = 10  # steps in a row without a finite gradient that end the run
_LOOK_S = 0.25  # between two looks at the engines, while ranks wait

_Shares = list[list[MiniBatch]]
"""Mini-batches of a step, by rank."""


@dataclass(slots=True, kw_only=True)
class _Step:
    """A step from the start of its collection on."""

    shares: asyncio.Task[_Shares]
    collected: Collected | None = None
    collector: dict | None = None
    """The collector's state after this step's prompts were drawn."""
    reported: tuple[list[StepResult], dict[str, Any]] | None = None
    """Updates of all ranks, and the step's figures so far."""
    certificate: dict[str, asyncio.Task[CertificateAnswers]] = field(default_factory=dict)
    """Answers of the step's certificate, by the format of the weights that drew them; none without a certificate."""


class Session:
    """Collections, evaluations and syncs for one group of ranks, with the guard that watches them.

    Args:
        collector: a new one, not used before.
        events: buffer for everything that the user is to see.
        stop: set if no further step is to start. It outlives the session.
        done: number of steps that were made before: 0, or the resumed checkpoint's.
        state: state that `state` returned for that step; None for 0.
    """

    def __init__(
        self,
        config: RunConfig,
        collector: Collector,
        fleet: Fleet,
        events: EventBuffer,
        stop: asyncio.Event,
        *,
        done: int = 0,
        state: dict | None = None,
    ) -> None:
        self._config, self._collector, self._fleet = config, collector, fleet
        self._events, self._stop = events, stop
        probe = collector.probe() if config.probe_tokens else []
        self.probe_prompt: np.ndarray | None = probe[0].prompt_ids if probe else None
        """Token ids that the engines' probes answer; None without probes."""
        self.gate = WeightGate(
            fleet,
            ranks=config.learner.workers,
            timeout_s=config.sync.timeout_s,
            probe=probe,
            tolerance=config.probe_tolerance,
            floor=ProbeFloor.of(state["probe_floor"]) if state else ProbeFloor(),
            warn=lambda message: events.tell("warning", message),
            verified=self._verified,
        )
        """Taker of the ranks' messages about weights."""
        changeable = config.rollout.quantization != "none" and not config.trains_through_codes
        self._guard = Guard(config.guard, can_change_precision=changeable)
        self._costs = CostSequence.of(state["costs"]) if state else CostSequence()
        """Certificates since rollouts were last in full precision."""
        self._totals = RunTotals.of(state["totals"]) if state else RunTotals()
        if state:
            collector.restore(state["collector"])
            self._guard.restore(state["guard"])
        events.step = done
        self._rendezvous = Rendezvous(config.learner.workers)
        self._stale = _StaleEngines(fleet)
        self._steps: dict[int, _Step] = {}
        self._evaluations: dict[tuple[str, int], asyncio.Task[float]] = {}
        self._begun = self.asked = done
        """Two step numbers: the last whose collection was started, and the last whose shares a rank has requested."""
        self._last: int | None = None
        """Last step of the run, once an end was requested; None before."""
        self._drawn_at: dict[int, int] = {}
        """Number of steps that each weight version has learned from, by version."""
        self._dropping = False
        """True if the correction dropped most tokens of the step before."""
        self._endless = False
        """True if it was announced that hardly any answer ends."""
        self._lost_steps = 0
        """Number of steps up to the last one in which no gradient was finite."""
        self._kernels: list[str] = []

    @property
    def directive(self) -> Directive:
        """The guard's directive for the next step."""
        return self._guard.directive

    def cancel(self) -> None:
        """Cancel all work under way, for ranks that are gone."""
        steps = self._steps.values()
        answers = (task for step in steps for task in step.certificate.values())
        for task in (*(step.shares for step in steps), *answers, *self._evaluations.values()):
            task.cancel()

    def state(self, step: int) -> dict:
        """Return the state that a session needs to continue after this step, for JSON. Rollouts that run ahead are
        drawn again."""
        return {
            "collector": self._steps[step].collector,
            "guard": self._guard.state(),
            "costs": self._costs.state(),
            "probe_floor": self.gate.floor.state(),
            "totals": self._totals.state(),
        }

    # --- rollouts -----------------------------------------------------------------------------------------------

    async def share(self, step: int, rank: int, sent: int) -> list[MiniBatch] | WeightsWanted | None:
        """Return this rank's mini-batches of a step; None on every rank if the run ends before it.

        Args:
            sent: number of WeightsWanted answers that this rank has got.
        """
        if step > self.asked:
            self.asked = step
            if (self._stop.is_set() or self._totals.reached_at is not None) and self._last is None:
                self._last = step - 1
                for later in range(step, self._begun + 1):
                    self._steps[later].shares.cancel()
        if self._last is not None and step > self._last:
            return None
        while self._begun < min(step + self._config.rollout.max_staleness, self._config.steps):
            before = self._steps.get(self._begun)
            self._begun += 1
            shares = asyncio.ensure_future(self._collect(self._begun, before.shares if before else None))
            self._steps[self._begun] = _Step(shares=shares)
        # The step before stays: a skipped step is no barrier, and a late rank may still ask for it.
        self._steps.pop(step - 2, None)
        answer = await self._stale.result_of(self._steps[step].shares, sent)
        return answer if isinstance(answer, WeightsWanted) else answer[rank]

    async def _collect(self, number: int, before: asyncio.Task[_Shares] | None) -> _Shares:
        if before:
            await before
        config, step = self._config, self._steps[number]
        collected = step.collected = await self._collector.collect(number)
        step.collector = self._collector.state()
        wanted = config.rollout.prompts_per_step
        if 0 < len(collected.groups) < wanted:
            self._events.warn(number, f"{len(collected.groups)} of {wanted} groups after {collected.rounds} round(s)")
        for status, count in collected.failed.items():
            message = f"{count} of {collected.samples} rewards ended in {status}; these samples are left out"
            self._events.warn(number, f"{message}. The first: {collected.details[status]}")
        if not collected.groups:
            self._events.warn(
                number,
                f"no group is left to learn from: of {collected.all_groups} groups in {collected.rounds} round(s), "
                f"{collected.uniform_groups} have equal rewards, the others failed; the step is skipped",
            )
            return [[] for _ in range(config.learner.workers)]
        return self._planned(number, collected.groups, config.algorithm.updates_per_rollout)

    def _planned(self, number: int, groups: list[list[Trajectory]], updates: int) -> _Shares:
        config = self._config
        each = config.learner.sequence_parallel
        shares = plan(
            groups,
            updates=updates,
            ranks=config.learner.workers // each,
            token_budget=config.learner.tokens_per_micro_batch * each,
            seed=derive_seed(config.seed, number, "plan"),
            packed=config.learner.packing,
        )
        return [share for share in shares for _ in range(each)]  # ranks of a sequence group have the same samples

    async def certify(self, step: int, rank: int, format_name: str, sent: int) -> list[MiniBatch] | WeightsWanted:
        """Return this rank's share of the answers to the problems of a step's certificate, as one mini-batch, or none
        if an update could learn nothing from them.

        Args:
            format_name: format of the weights that the engines hold, and draw the answers with.
            sent: as in `share`.
        """
        answers = self._steps[step].certificate
        if format_name not in answers:
            words = "full precision" if format_name == "none" else format_name
            self._events.add(Event(kind="phase", step=step, message=f"certificate: answers in {words}"))
            answers[format_name] = asyncio.ensure_future(self._collector.certificate_answers(step))
        drawn = await self._stale.result_of(answers[format_name], sent)
        if isinstance(drawn, WeightsWanted):
            return drawn
        return self._planned(step, drawn.groups, 1)[rank] if drawn.groups else []

    async def evaluate(self, label: str, step: int, sent: int) -> float | WeightsWanted:
        """Return the mean reward of greedy answers to the held-out problems, with the weights that the engines hold.

        Every rank calls this, so that all wait with the same deadline; the first call starts the evaluation. `sent` as
        in `share`.
        """
        key = (label, step)
        if key not in self._evaluations:
            self._evaluations[key] = asyncio.ensure_future(self._evaluate(label, step))
        return await self._stale.result_of(self._evaluations[key], sent)

    async def _evaluate(self, label: str, step: int) -> float:
        problems = len(self._collector.held_out_sets)
        self._events.add(Event(kind="phase", step=step, message=f"evaluating {problems} problems"))
        verdicts = await self._collector.judge_held_out()
        # An interval may take a second to bootstrap.
        values = await asyncio.to_thread(evaluation_figures, verdicts, self._collector.held_out_sets)
        if failed := values["eval/failed"]:
            first = next(verdict for verdict in verdicts if verdict.status != "ok")
            message = (
                f"evaluation {label!r}: {failed} of {values['eval/problems']} rewards failed and count as 0. The first "
                f"({first.status}): {first.detail}"
            )
            self._events.warn(step, message)
        reward, target = values["eval/reward"], self._config.evaluation.target_reward
        if label == "during" and target is not None and reward >= target:
            values["target_reached"] = True
        self._count(Event(kind="evaluation", step=step, message=label, values={"label": label} | values))
        if "target_reached" in values:
            message = f"the held-out reward, {reward:.3f}, has reached its target of {target:g}: the run ends"
            self._events.tell("info", message)
        return reward

    # --- weights ------------------------------------------------------------------------------------------------

    def _verified(self, version: int) -> None:
        """Take note of a version that engines generate with from now on."""
        self._drawn_at.setdefault(version, self._events.step)
        if self.gate.kernels not in ([], self._kernels):
            self._kernels = self.gate.kernels
            self._events.tell("info", f"rollout linears run on: {', '.join(self._kernels)}", step=0)

    # --- the end of a step --------------------------------------------------------------------------------------

    async def report(self, step: int, rank: int, result: StepResult) -> Directive:
        """Report one rank's update. Returns the guard's decision on all of them."""
        return await self._rendezvous.arrive(("report", step), rank, result, partial(self._judge, step))

    async def _judge(self, number: int, results: list[StepResult]) -> Directive:
        self._events.step, step = number, self._steps[number]
        assert step.collected, "its shares were handed out"
        self._check_gradients(number, results[0])
        values = step_figures(number, step.collected, results, self._drawn_at)
        directive = self._guard.judge(number, values | self._costs.bounds(width=self._reward_width))
        for message in directive.messages:
            self._events.warn(number, message)
        if directive.stop:
            self._stop.set()
        if directive.full_precision:
            self._costs = CostSequence()
        step.reported = results, values | directive.metrics
        return directive

    def _check_gradients(self, number: int, result: StepResult) -> None:
        """Raise QurlError if no step of the last ones, or of a shorter run, had an update with a finite gradient."""
        if not math.isnan(result.grad_norm):
            self._lost_steps = 0
        elif result.skipped_updates:  # else there was nothing to learn from
            self._lost_steps += 1
        short = self._config.learner.compute != "float16"  # whose scale of losses has to be found first
        if self._lost_steps == (min(_LOST_STEPS, self._config.steps) if short else _LOST_STEPS):
            raise QurlError(
                f"nothing is learned: the gradient of every update was not finite in {self._lost_steps} steps, up to "
                f"step {number}. Look for infinite values in algorithm.objective={self._config.algorithm.objective} "
                "and in the rewards; learner.compute=float32 has the widest range"
            )

    async def close(
        self, step: int, rank: int, seconds: dict[str, float], figures: dict[str, float], spans: list[Event]
    ) -> None:
        """Report a rank's seconds by phase, its figures of the certificate, and its spans; the last rank completes the
        step's event."""
        self._events.add(*spans)
        await self._rendezvous.arrive(("close", step), rank, (seconds, figures), partial(self._finish, step))

    async def _finish(self, number: int, closed: list[tuple[dict[str, float], dict[str, float]]]) -> None:
        step = self._steps[number]
        assert step.collected, "its shares were handed out"
        assert step.reported, "every rank has reported"
        times, of_certificate = [seconds for seconds, _ in closed], closed[0][1]
        collected, (results, values) = step.collected, step.reported
        seconds = {key: max(rank.get(key, 0.0) for rank in times) for key in times[0]}
        seconds |= {key: max(r.seconds[key] for r in results) for key in ("logprob", "update")}
        seconds |= {"rollout": collected.rollout_seconds, "reward": collected.reward_seconds}
        values |= self.gate.metrics
        values |= {
            "fleet/healthy": len(self._fleet.those(Health.HEALTHY)),
            "fleet/deaths": self._fleet.counts.deaths,
            "fleet/repeated_requests": self._fleet.counts.repeated,
            "fleet/hedged": self._fleet.counts.hedged,
        }
        values |= {f"time/{name}": value for name, value in seconds.items()}
        dropped_before, self._dropping = self._dropping, values.get("mismatch/dropped", 0.0) > 0.5
        if self._dropping and not dropped_before:
            drops = "would drop" if self._config.algorithm.correction.metrics_only else "drops"
            kl, share = values["mismatch/kl"], f"{values['mismatch/dropped']:.0%} of the tokens"
            message = f"the correction {drops} {share}: its bounds do not fit a KL(b‖p) of {kl:.1e}"
            self._events.warn(number, message)
        self._warn_of_no_ends(number, values)
        if results[0].skipped_updates:
            message = f"{results[0].skipped_updates} update(s) skipped: the gradient was not finite"
            self._events.warn(number, message)
        if step.certificate:
            answers = [await task for task in step.certificate.values()]
            certificate = await asyncio.to_thread(self._certificate, *answers) | of_certificate
            values |= certificate
        self._count(Event(kind="step", step=number, values=values))
        if step.certificate:
            self._events.tell("info", certificate_sentence(certificate), step=number)
        self._events.add(Event(kind="prompts", step=number, values={"uids": collected.prompts}))
        if collected.shown:
            proximal = {uid: logprobs for result in results for uid, logprobs in result.proximal.items()}
            for sample in collected.shown:
                names = [row_uid(sample["uid"], number) for number in range(len(sample.get("rows", ())) + 1)]
                rows = [proximal[name] for name in names if name in proximal]
                sample["proximal_logprobs"] = _placed(np.concatenate(rows), sample["logprobs"]) if rows else None
            self._events.add(Event(kind="samples", step=number, values={"samples": collected.shown}))
        step.collected = step.reported = None  # only the collector's state is still needed

    def _certificate(self, full: CertificateAnswers, rolled: CertificateAnswers) -> dict[str, float]:
        """Add the answers in full precision and those as rolled out to the sequence. Return the certificate's
        figures."""
        limits = self._config.evaluation.certificate.reward_range
        costs_PG = np.clip(full.rewards_PG, *limits) - np.clip(rolled.rewards_PG, *limits)
        self._costs = self._costs.add(costs_PG[~np.isnan(costs_PG)], width=self._reward_width)
        figures = certificate_figures(costs_PG, list(zip(full.token_ids, rolled.token_ids, strict=True)))
        return figures | self._costs.bounds(width=self._reward_width) | {"certificate/pairs": self._costs.pairs}

    @property
    def _reward_width(self) -> float:
        least, most = self._config.evaluation.certificate.reward_range
        return most - least

    def _count(self, event: Event) -> None:
        """Add a step or an evaluation to the totals and to the events."""
        self._totals.add(event)
        self._events.add(event)

    def _warn_of_no_ends(self, number: int, values: dict[str, Any]) -> None:
        """Announce once that hardly any answer of the first steps ends by itself."""
        share, most = values["rollout/truncated_share"], self._config.rollout.max_new_tokens
        if number > _FIRST_STEPS or self._endless or self._config.rollout.ignore_eos or share < _NO_ENDS:
            return
        self._endless = True
        turn = self._config.environment.turn_tokens
        of_a_turn = f", or a turn within environment.turn_tokens={turn}" if turn else ""
        message = (
            f"{share:.0%} of the answers do not end within rollout.max_new_tokens={most}{of_a_turn}: the policy may "
            "end them with a token that does not count as an end (--dry-run shows those that do; list it as "
            "eos_token_id in generation_config.json), or it needs more tokens"
        )
        self._events.warn(number, message)


def _placed(logprobs: np.ndarray, drawn_by: list[float | None]) -> list[float | None] | None:
    """Return the log-probs of the tokens that the policy drew, for a log, among None for others; None if they belong
    to another sample with this uid."""
    if len(logprobs) != sum(b is not None for b in drawn_by):
        return None
    values = iter(logprobs.tolist())
    return [None if b is None else round(next(values), 4) for b in drawn_by]


class _StaleEngines:
    """Watcher of engines that wait for weights. It interrupts ranks that wait for engines, because only ranks can send
    the weights."""

    def __init__(self, fleet: Fleet) -> None:
        self._fleet = fleet
        self._wanted = 0
        """Number of times that engines were found to wait for weights while ranks waited here."""
        self._look: asyncio.Task | None = None

    async def result_of(self, task: asyncio.Task, sent: int) -> Any:
        """Return the task's result, or WeightsWanted if engines wait for weights before it is done.

        All ranks get the same answer: none has the result of a task that is not done. `sent` as in Session.share.
        """
        while self._wanted <= sent and not task.done():
            if self._look is None or self._look.done():
                self._look = asyncio.ensure_future(self._look_until(task))
            await asyncio.wait({task, self._look}, return_when=asyncio.FIRST_COMPLETED)
        return WeightsWanted() if self._wanted > sent else task.result()

    async def _look_until(self, task: asyncio.Task) -> None:
        """Look once for all ranks that wait: thousands of ranks would otherwise each look at thousands of engines."""
        while not task.done():
            if self._fleet.those(Health.STALE):
                self._wanted += 1
                return
            await asyncio.wait({task}, timeout=_LOOK_S)
