"""The meeting point of rollout side and learner side, one actor.

    collected groups ─► one share per learner rank        weights from all ranks ─► every engine, verified

The learner's ranks ask for their share of a step; the first to ask sets the collection off. Weights come back the same
way: each rank offers its part of a version, the last part completes it, and all engines load and verify it. Whoever
waits here waits on another actor with a deadline.
"""

import asyncio
from collections.abc import Sequence

import numpy as np
from ray import ObjectRef
from ray.actor import ActorHandle

from qurl_ray.actors.fleet import Fleet
from qurl_ray.config import RunConfig
from qurl_ray.data.tasks import Task
from qurl_ray.evaluation.statistics import wilson_interval
from qurl_ray.learner.batching import MiniBatch, plan
from qurl_ray.learner.protocol import StepResult
from qurl_ray.loop.collect import Collected, Collector
from qurl_ray.loop.refit import Gap, Offer, Refit
from qurl_ray.policy.load import load_tokenizer, stop_ids
from qurl_ray.rl.diagnostics import policy_metrics
from qurl_ray.rl.reduce import merge
from qurl_ray.rl.value import value_metrics
from qurl_ray.rollout.requests import derive_seed
from qurl_ray.types import Completion, Event, PolicySpec

_POLL_S = 0.02


class Coordinator:
    """Draws prompts, has them answered and judged, hands out shares; passes weights on; gathers what is to be seen."""

    def __init__(
        self, config: RunConfig, spec: PolicySpec, task: Task, fleet: Fleet, verifiers: Sequence[ActorHandle]
    ) -> None:
        self._config, self._fleet = config, fleet
        tokenizer = load_tokenizer(spec)
        self._collector = Collector(config, task, tokenizer, stop_ids(spec, tokenizer), fleet, verifiers)
        probe = self._collector.probe() if config.sync.probe_tokens else []
        self._probe_ids = probe[0].prompt_ids if probe else None
        self._refit = Refit(
            fleet,
            ranks=config.learner.workers,
            timeout_s=config.sync.timeout_s,
            probe=probe,
            tolerance=config.sync.probe_tolerance,
            warn=lambda message: self._warn(0, message),
        )
        self._stop = False
        self._shares: dict[int, asyncio.Task] = {}
        self._collected: dict[int, Collected] = {}
        self._reports: dict[int, list[tuple[StepResult, dict[str, float]]]] = {}
        self._dropped = False
        self._kernels: list[str] = []
        self._max_codes: dict[str, int] = {}
        self._evaluations: dict[tuple[str, int], asyncio.Task] = {}
        self._drains = 0
        self._events: list[Event] = []

    # --- learner's side -----------------------------------------------------------------------------------------

    async def weight_max_code(self, format_name: str) -> int:
        """Largest weight code that every engine can take in a format; waits until all are up."""
        if format_name not in self._max_codes:
            limit = self._config.rollout.start_timeout_s
            self._max_codes[format_name] = await self._fleet.weight_max_code(format_name, limit)
        return self._max_codes[format_name]

    async def probe_prompt(self) -> np.ndarray | None:
        """Token ids that the engines' probes answer; None without probes."""
        return self._probe_ids

    async def share(self, step: int, rank: int) -> list[MiniBatch] | None:
        """This rank's mini-batches of a step; None on every rank if the run was asked to stop before it."""
        if step not in self._shares:
            # The step before stays: a skipped step is no barrier, and a late rank may still ask for it.
            self._shares.pop(step - 2, None)
            self._shares[step] = asyncio.ensure_future(self._make_shares(step))
        shares = await asyncio.shield(self._shares[step])
        return shares[rank] if shares is not None else None

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
        if self._refit.kernels not in ([], self._kernels):
            self._kernels = self._refit.kernels
            message = f"rollout linears run on: {', '.join(self._kernels)}"
            self._events.append(Event(kind="info", step=0, message=message))
        return again

    async def report(self, step: int, result: StepResult, seconds: dict[str, float]) -> None:
        """One rank's account of a step; the last one completes the step's event."""
        reports = self._reports.setdefault(step, [])
        reports.append((result, seconds))
        if len(reports) == self._config.learner.workers:
            self._finish_step(step, self._reports.pop(step))

    async def evaluate(self, label: str, step: int) -> float:
        """Greedy accuracy on the held-out problems with the weights that the engines hold. Every rank asks, so that all
        wait with the same deadline; the first one sets it off."""
        key = (label, step)
        if key not in self._evaluations:
            self._evaluations[key] = asyncio.ensure_future(self._evaluate(label, step))
        return await asyncio.shield(self._evaluations[key])

    async def _evaluate(self, label: str, step: int) -> float:
        verdicts = await self._collector.judge_held_out(self._refit.version)
        right = [verdict.reward > 0.5 for verdict in verdicts]
        failed = sum(verdict.status != "ok" for verdict in verdicts)
        if failed:
            self._warn(step, f"evaluation {label!r}: {failed} of {len(right)} rewards failed and count as wrong")
        low, high = wilson_interval(sum(right), len(right))
        accuracy = sum(right) / len(right)
        values = {"label": label, "eval/accuracy": accuracy, "eval/low": low, "eval/high": high}
        values |= {"eval/problems": len(right), "eval/failed": failed}
        # Problem by problem, for paired tests between evaluations.
        values["outcomes"] = "".join("01"[solved] for solved in right)
        self._events.append(Event(kind="evaluation", step=step, message=label, values=values))
        return accuracy

    async def state(self) -> dict:
        """Where the rollout side stands between two steps, for JSON. Returns when the driver has written all events up
        to here: a resumed run adds up its summary from what is on disk."""
        drains = self._drains + 2  # the driver asks again only after it has written what it got
        while self._drains < drains:
            await asyncio.sleep(_POLL_S)
        return self._collector.state()

    async def restore(self, state: dict) -> None:
        """Go on from what `state` gave."""
        self._collector.restore(state)

    # --- driver's side ------------------------------------------------------------------------------------------

    async def drain(self) -> list[Event]:
        """Events since the last call; the driver is the only caller."""
        events, self._events = self._events, []
        self._drains += 1
        return events

    async def tell(self, event: Event) -> None:
        """Pass an event on to the driver."""
        self._events.append(event)

    async def stop(self) -> None:
        """No further step begins."""
        self._stop = True

    # --- steps ---------------------------------------------------------------------------------------------

    async def _make_shares(self, step: int) -> list[list[MiniBatch]] | None:
        if self._stop:
            return None
        config = self._config
        collected = self._collected[step] = await self._collector.collect(step, self._refit.version)
        wanted = config.rollout.prompts_per_step
        if 0 < len(collected.groups) < wanted:
            self._warn(step, f"{len(collected.groups)} of {wanted} groups after {collected.rounds} round(s)")
        for status, count in collected.failed.items():
            self._warn(step, f"{count} of {collected.samples} rewards ended in {status}; their groups are left out")
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

    def _finish_step(self, step: int, reports: list[tuple[StepResult, dict[str, float]]]) -> None:
        collected = self._collected.pop(step)
        results = [result for result, _ in reports]
        sums = merge(result.sums for result in results)
        seconds = {key: max(s.get(key, 0.0) for _, s in reports) for key in reports[0][1]}
        seconds |= {key: max(r.seconds[key] for r in results) for key in ("logprob", "update")}
        seconds |= {"rollout": collected.rollout_seconds, "reward": collected.reward_seconds}
        rewards = np.array(collected.rewards)
        values = {
            "reward/mean": float(rewards.mean()),
            "reward/solved_share": float((rewards > 0.5).mean()),
            "reward/failed": sum(collected.failed.values()),
            "rollout/samples": collected.samples,
            "rollout/trained_samples": sum(len(group) for group in collected.groups),
            "rollout/tokens": collected.tokens,
            "rollout/tokens_per_second": collected.tokens / collected.rollout_seconds,
            "rollout/mean_length": float(np.mean(collected.lengths)),
            "rollout/truncated_share": collected.truncated / collected.samples,
            "rollout/garbage_share": collected.garbage / collected.tokens,
            "rollout/uniform_groups": collected.uniform_groups / collected.all_groups,
            "rollout/rounds": collected.rounds,
            "loss": sums.get("loss", 0.0),
            "lr": results[0].lr,
            "grad_norm": results[0].grad_norm,
            "skipped_updates": results[0].skipped_updates,
        }
        values |= self._refit.metrics
        values |= (policy_metrics(sums) | value_metrics(sums)) if sums else {}
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
        if collected.shown:
            proximal = {uid: logprobs for result in results for uid, logprobs in result.proximal.items()}
            for sample in collected.shown:
                found = proximal.get(sample["uid"])
                sample["proximal_logprobs"] = None if found is None else [round(float(value), 4) for value in found]
            self._events.append(Event(kind="samples", step=step, values={"samples": collected.shown}))

    def _warn(self, step: int, message: str) -> None:
        self._events.append(Event(kind="warning", step=step, message=message))
