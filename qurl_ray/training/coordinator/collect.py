"""Collection of samples, from prompts to groups with rewards and advantages: the inner half of the rollout side.

    prompts ─► requests ─► completions ─► verdicts ─► groups

Nothing here depends on the learner. Groups are accepted in the order of their prompts, never of their arrival: first
come, first served would favour short answers.
"""

import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from itertools import groupby
from typing import Any

import numpy as np
from transformers import PreTrainedTokenizerBase

from qurl_ray.actors.fleet import Fleet
from qurl_ray.actors.trajectories import Played, TrajectoryRunner, unjudged, verdicts_of
from qurl_ray.actors.verifier import VerifierPool
from qurl_ray.config import RunConfig
from qurl_ray.config.algorithm import PPO
from qurl_ray.data.answers import answer_text, items_to_judge
from qurl_ray.data.cursor import PromptCursor
from qurl_ray.data.prompts import encode_prompt
from qurl_ray.data.tasks import Task
from qurl_ray.engines.requests import check_logprobs, derive_seed, make_requests, probe_requests
from qurl_ray.rl.advantages import all_equal, overlong_penalty
from qurl_ray.rl.credit import CreditMode, compare_turns, credited, returns_of, turn_returns, without_signal
from qurl_ray.rl.repetition import garbage_tokens
from qurl_ray.spans import ENVIRONMENTS, EVALUATION, ROLLOUTS
from qurl_ray.tables import ADVANTAGES
from qurl_ray.training.coordinator.levels import trajectory_levels
from qurl_ray.training.deadlines import judging_deadline
from qurl_ray.types import Completion, Problem, Request, SamplingParams, Trajectory, TurnCredit, Verdict


@dataclass(slots=True)
class Collected:
    """Result of one step's rollouts."""

    groups: list[list[Trajectory]] = field(default_factory=list)
    rounds: int = 0
    samples: int = 0
    tokens: int = 0
    rollout_seconds: float = 0.0
    reward_seconds: float = 0.0
    rewards: list[float] = field(default_factory=list)
    lengths: list[int] = field(default_factory=list)
    truncated: int = 0
    garbage: int = 0
    drafted: int = 0
    """Drafts that were compared with the token drawn in their place, and those that were this token."""
    agreed: int = 0
    uniform_groups: int = 0
    all_groups: int = 0
    failed: dict[str, int] = field(default_factory=dict)
    """Number of failed rewards, by status."""
    details: dict[str, str] = field(default_factory=dict)
    """Detail of the first failed reward of each status."""
    shown: list[dict] = field(default_factory=list)
    prompts: list[str] = field(default_factory=list)
    """Uids of the prompts, in the order in which they were drawn."""
    played: list[Played] = field(default_factory=list)
    """Trajectories with an environment."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CertificateAnswers:
    """Answers to the problems of a certificate, in one format."""

    rewards_PG: np.ndarray
    """Reward of each answer, by problem and sample; nan where it failed."""
    token_ids: list[np.ndarray]
    """Tokens of each answer that the policy drew."""
    groups: list[list[Trajectory]]
    """Groups of the answers to training problems that an update could learn from."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Answered:
    """Answers to requests, in their order, with verdicts."""

    prompts: list[np.ndarray]
    completions: list[Completion]
    verdicts: list[Verdict]
    played: list[Played]
    """Trajectories of the answers; none without an environment."""
    turns: list[TurnCredit | None]
    """Turns of the answers; None without an environment, and without a reward."""
    rollout_seconds: float
    reward_seconds: float


class Collector:
    """Collector of samples: draws prompts, has the fleet answer them and the verifiers judge the answers."""

    def __init__(
        self,
        config: RunConfig,
        task: Task,
        tokenizer: PreTrainedTokenizerBase,
        stop_ids: tuple[int, ...],
        fleet: Fleet,
        verifiers: VerifierPool,
        runner: TrajectoryRunner | None = None,
    ) -> None:
        self._config, self._task, self._tokenizer, self._stop_ids = config, task, tokenizer, stop_ids
        self._fleet, self._verifiers, self._runner = fleet, verifiers, runner
        self._cursor = PromptCursor(task.train, seed=config.seed)
        self._problems = task.digest()
        algorithm = config.algorithm
        self._compare = None if isinstance(algorithm, PPO) else ADVANTAGES.load(algorithm.advantage)
        self._mode: CreditMode = "trajectory" if isinstance(algorithm, PPO) else algorithm.turn_credit
        self._text: dict[int, str] = {}
        """Text of each token, by token id."""

    def state(self) -> dict:
        """Return the collector's state between two steps, for JSON."""
        return {"cursor": self._cursor.state(), "problems": self._problems}

    def restore(self, state: dict) -> None:
        """Continue from a state that `state` returned. The driver has checked that the problems are the same."""
        self._cursor.load_state(state["cursor"])

    def probe(self) -> list[Request]:
        """Return the requests that engines answer after every sync: see engines.requests.probe_requests."""
        rollout = self._config.rollout
        return probe_requests(
            self._task.train[0],
            self._encode,
            tokens=self._config.probe_tokens,
            longest=rollout.max_new_tokens,
            temperature=rollout.temperature,
            seed=self._config.seed,
        )

    @property
    def held_out_sets(self) -> list[str]:
        """Name of the set of each held-out problem."""
        return [problem.held_out_set for problem in self._task.held_out]

    async def judge_held_out(self) -> list[Verdict]:
        """Return verdicts on the greedy answers to the held-out problems."""
        problems = self._task.held_out
        sampling = SamplingParams(
            temperature=0.0, max_new_tokens=self._config.rollout.max_new_tokens, stop_ids=self._stop_ids
        )
        requests = self._requests(problems, 1, "evaluation", sampling)
        with self._fleet.spans.during(EVALUATION, "evaluation", problems=len(problems)):
            return (await self._answer(requests, problems)).verdicts

    async def collect(self, step: int) -> Collected:
        """Collect rounds of prompts until the step is full. Groups count in prompt order, never in the order of
        arrival."""
        algorithm, wanted = self._config.algorithm, self._config.rollout.prompts_per_step
        rounds = algorithm.max_refill_rounds if algorithm.dynamic_sampling else 1
        collected, self._fleet.spans.step = Collected(), step
        while len(collected.groups) < wanted and collected.rounds < rounds:
            missing = wanted - len(collected.groups)
            # Ask for as many as will probably survive the filter, so that few rounds are needed.
            survival = 1 - collected.uniform_groups / max(1, collected.all_groups)
            ask = min(wanted, int(np.ceil(missing / max(survival, 0.1)))) if algorithm.dynamic_sampling else missing
            await self._round(step, self._cursor.take(ask), collected)
        collected.groups = self._credited(collected.groups[:wanted])
        learned = {s.uid: s for group in collected.groups for s in group if s.watched}
        for entry in collected.shown:
            sample = learned.get(entry["uid"])
            # A value model gives every token its own advantage, later.
            whole = self._compare and self._mode == "trajectory"
            entry["advantage"] = round(sample.advantage, 4) if sample and whole else None
            if sample and sample.turns:
                entry["credit"] = _credit_log(sample.turns)
        return collected

    async def certificate_answers(self, step: int) -> CertificateAnswers:
        """Answer the problems of a step's certificate with the weights that the engines hold. All answers of one step
        are drawn with the same noise: a token depends on its logits, the request's seed and its place alone."""
        rng = np.random.default_rng(derive_seed(self._config.seed, step, "certificate"))
        count = self._config.evaluation.certificate.prompts
        train, held_out = (
            [known[place] for place in rng.choice(len(known), min(count, len(known)), replace=False)]
            for known in (self._task.train, self._task.held_out)
        )
        problems = [*train, *held_out]
        with self._fleet.spans.during(EVALUATION, "certificate", problems=len(problems)):
            answered = await self._draw(problems, f"certificate {step}")
        # An update learns from training problems alone, and so does a gradient here.
        part, collected = slice(len(train) * self._config.rollout.samples_per_prompt), Collected()
        lists = ("prompts", "completions", "verdicts", "turns")
        self._group(replace(answered, **{name: getattr(answered, name)[part] for name in lists}), set(), collected)
        rewards = [v.reward if v.status == "ok" else np.nan for v in answered.verdicts]
        return CertificateAnswers(
            rewards_PG=np.array(rewards).reshape(len(problems), -1),
            token_ids=[completion.drawn_ids for completion in answered.completions],
            groups=self._credited(collected.groups),
        )

    def _credited(self, groups: list[list[Trajectory]]) -> list[list[Trajectory]]:
        """Return groups with the advantages of their samples, or of their turns."""
        if self._compare is None or not groups:  # a value model gives credit, in the learner
            return groups
        returns_PG = [[returns_of(sample, self._mode) for sample in group] for group in groups]
        worth_PGK = compare_turns(returns_PG, self._compare, self._mode)
        return [
            [credited(sample, worth_K, self._mode) for sample, worth_K in zip(group, worth_GK, strict=True)]
            for group, worth_GK in zip(groups, worth_PGK, strict=True)
        ]

    async def _draw(self, problems: Sequence[Problem], salt: str) -> _Answered:
        """Answer problems as the run's rollouts do, with `samples_per_prompt` answers each."""
        rollout = self._config.rollout
        sampling = SamplingParams(
            temperature=rollout.temperature,
            top_p=rollout.top_p,
            top_k=rollout.top_k,
            max_new_tokens=rollout.max_new_tokens,
            stop_ids=self._stop_ids,
            ignore_eos=rollout.ignore_eos,
        )
        G = rollout.samples_per_prompt
        requests = self._requests(problems, G, salt, sampling)
        return await self._answer(requests, [problem for problem in problems for _ in range(G)])

    async def _round(self, step: int, problems: list[Problem], collected: Collected) -> None:
        answered = await self._draw(problems, f"{step}.{collected.rounds}")
        seconds = {"rollout": answered.rollout_seconds, "reward": answered.reward_seconds}
        self._fleet.spans.phases(ROLLOUTS, seconds)
        collected.rollout_seconds += answered.rollout_seconds
        collected.reward_seconds += answered.reward_seconds
        collected.rounds += 1
        collected.prompts += [problem.uid for problem in problems]
        collected.played += answered.played
        watched = self._watch(problems, answered, collected)
        self._group(answered, watched, collected)

    async def _answer(self, requests: list[Request], problems: Sequence[Problem]) -> _Answered:
        """Have the fleet answer requests, in turns with an environment if there is one, and judge the answers."""
        started = time.perf_counter()
        played = await self._runner.play(requests, problems) if self._runner else []
        for start, seconds, figures in trajectory_levels(played):
            self._fleet.spans.at(ENVIRONMENTS, "trajectories", start, seconds, **figures)
        if played:
            completions = [trajectory.completion for trajectory in played]
        else:
            completions = await self._fleet.generate(requests)
        check_logprobs(completions)
        judged_from = time.perf_counter()
        turns: list[TurnCredit | None] = [None] * len(completions)
        if played:  # an environment judges; where it gives no reward, the reward function judges the last turn
            last_turns, owners = unjudged(played, problems)
            verdicts = verdicts_of(played, await self._judge(last_turns, owners) if owners else [])
            pairs = zip(played, verdicts, strict=True)
            turns = [trajectory.credit(verdict) if verdict.status == "ok" else None for trajectory, verdict in pairs]
        else:
            verdicts = await self._judge(completions, problems)
        return _Answered(
            prompts=[item.prompt_ids for item in played or requests],
            completions=completions,
            verdicts=verdicts,
            played=played,
            turns=turns,
            rollout_seconds=judged_from - started,
            reward_seconds=time.perf_counter() - judged_from,
        )

    def _group(self, answered: _Answered, watched: set[int], collected: Collected) -> None:
        """Add groups to `collected`, without samples that have no reward, and without uniform groups if the algorithm
        says so."""
        algorithm, rollout = self._config.algorithm, self._config.rollout
        completions, verdicts = answered.completions, answered.verdicts
        G = rollout.samples_per_prompt
        lengths = np.array([c.drawn for c in completions])
        penalty = overlong_penalty(lengths, max_length=rollout.max_new_tokens, buffer=algorithm.overlong_buffer)
        judged_PG = np.array([v.reward if v.status == "ok" else np.nan for v in verdicts]).reshape(-1, G)
        rewards_PG = judged_PG + penalty.reshape(-1, G)
        uniform_P = self._uniform(judged_PG, answered.turns)
        for verdict in verdicts:
            if verdict.status != "ok":
                collected.failed[verdict.status] = collected.failed.get(verdict.status, 0) + 1
                collected.details.setdefault(verdict.status, verdict.detail)
        collected.samples += len(completions)
        collected.tokens += int(lengths.sum())
        collected.rewards += [v.reward for v in verdicts if v.status == "ok"]
        collected.lengths += lengths.tolist()
        collected.garbage += garbage_tokens([c.drawn_ids for c in completions])
        collected.drafted += sum(c.drafted for c in completions)
        collected.agreed += sum(c.agreed for c in completions)
        collected.truncated += sum(c.finish == "length" for c in completions)
        collected.all_groups += len(rewards_PG)
        collected.uniform_groups += int(uniform_P.sum())
        empty_P = np.isnan(judged_PG).all(axis=1)
        for p in np.flatnonzero(~empty_P & ~(uniform_P & algorithm.dynamic_sampling)):
            collected.groups.append(
                [
                    Trajectory(
                        uid=completions[i].uid,
                        prompt_ids=answered.prompts[i],
                        token_ids=completions[i].token_ids,
                        logprobs=completions[i].logprobs,
                        reward=float(rewards_PG[p, i - p * G]),
                        advantage=0.0,
                        turns=turns.plus(float(penalty[i])) if (turns := answered.turns[i]) else None,
                        versions=completions[i].versions,
                        mask=completions[i].mask,
                        rows=completions[i].rows,
                        routes=completions[i].routes,
                        group=len(collected.groups),
                        watched=i in watched,
                    )
                    for i in range(p * G, (p + 1) * G)
                    if verdicts[i].status == "ok"
                ]
            )

    def _uniform(self, judged_PG: np.ndarray, turns: Sequence[TurnCredit | None]) -> np.ndarray:
        """Return bool [P]: True for groups without a signal. By the verdicts alone, as in DAPO: a length penalty does
        not make a group of wrong answers instructive."""
        if self._mode != "turn":
            return all_equal(judged_PG)
        returns = [
            [] if np.isnan(reward) else turn_returns(reward, of_sample, self._mode)
            for reward, of_sample in zip(judged_PG.flat, turns, strict=True)
        ]
        G = judged_PG.shape[1]
        return without_signal([returns[at : at + G] for at in range(0, len(returns), G)])

    def _requests(
        self, problems: Sequence[Problem], samples: int, salt: str, sampling: SamplingParams
    ) -> list[Request]:
        seed = self._config.seed
        return make_requests(problems, self._encode, samples=samples, sampling=sampling, seed=seed, salt=salt)

    def _encode(self, problem: Problem) -> np.ndarray:
        return encode_prompt(problem, self._tokenizer, self._config.task)

    async def _judge(self, completions: Sequence[Completion], problems: Sequence[Problem]) -> list[Verdict]:
        items = items_to_judge(completions, problems, self._tokenizer, self._stop_ids, self._config.task)
        return await self._verifiers.judge(items, judging_deadline(self._config, len(items)))

    def _watch(self, problems: list[Problem], answered: _Answered, collected: Collected) -> set[int]:
        """Choose samples to be shown to the user and add their text to `collected`. First samples of groups come before
        second ones, and groups whose answers differ before others. Returns the indices of the samples."""
        G = self._config.rollout.samples_per_prompt
        completions, verdicts = answered.completions, answered.verdicts
        rewards_PG = np.array([v.reward for v in verdicts]).reshape(-1, G)
        order = np.argsort(all_equal(rewards_PG), kind="stable")  # the learner learns from groups that differ
        free = self._config.tracking.samples_per_step - len(collected.shown)
        chosen = [int(p) * G + g for g in range(G) for p in order][: max(0, free)]
        if not chosen:
            return set()
        for i in chosen:
            problem, completion, verdict = problems[i // G], completions[i], verdicts[i]
            played = answered.played[i] if answered.played else None
            # All turns of an answer with several, else the text before the end token.
            end_ids = self._stop_ids if completion.mask is None else ()
            answer, _ = answer_text(completion.token_ids, self._tokenizer, end_ids)
            longest = self._config.rollout.max_new_tokens
            limit = f"rollout.max_new_tokens={longest}" if completion.finish == "length" else ""
            ids = completion.token_ids.tolist()
            self._text |= {token: self._tokenizer.decode([token]) for token in set(ids) - self._text.keys()}
            entry: dict[str, Any] = {
                "uid": completion.uid,
                "prompt": problem.prompt,
                "answer": answer,
                "expected": problem.answer,
                "reward": verdict.reward,
                "status": verdict.status,
                "finish": completion.finish,
                "limit": played.limit if played else limit,
                # Run lengths: an answer has few versions and many tokens.
                "versions": [[version, len(list(run))] for version, run in groupby(completion.versions.tolist())],
                "tokens": [self._text[token] for token in ids],
                "logprobs": drawn_only(completion.logprobs, completion.mask),
            }
            rendered = self._tokenizer.decode(answered.prompts[i].tolist(), skip_special_tokens=False)
            optional = {
                "rendered": rendered if rendered != problem.prompt else "",
                "meta": problem.meta,
                "detail": verdict.detail,
                "rows": list(completion.rows),
            }
            entry |= {name: value for name, value in optional.items() if value}
            if played:
                entry |= played.log()
            if turns := answered.turns[i]:
                entry["credit"] = _credit_log(turns)
            collected.shown.append(entry)
        return set(chosen)


def _credit_log(turns: TurnCredit) -> list[dict[str, float | None]]:
    """Return the turns for samples.jsonl; their advantages are None where they have none of their own."""
    rewards = turns.rewards.tolist()
    advantages = [None] * len(rewards) if turns.advantages is None else turns.advantages.round(4).tolist()
    return [
        {"end": end, "reward": reward, "advantage": advantage}
        for end, reward, advantage in zip(turns.ends.tolist(), rewards, advantages, strict=True)
    ]


def drawn_only(logprobs: np.ndarray, mask: np.ndarray | None) -> list[float | None]:
    """Return log-probs for a log, and None for tokens that the policy did not draw."""
    drawn = np.ones(len(logprobs), dtype=bool) if mask is None else mask
    return [round(float(value), 4) if kept else None for value, kept in zip(logprobs, drawn, strict=True)]
