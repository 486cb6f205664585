"""Trajectories of several turns: the policy draws a turn, its environment answers, and the policy continues the row.

    reset ─► prompt ─► turn ─► step ─► turn ─► step ─► … ─► one Played trajectory

A TrajectoryState decides what comes next, and a TrajectoryRunner does it.

A turn is a request whose prompt is the whole row so far. What was drawn is never encoded again, and what the
environment says is encoded once (data.turns). A trajectory that waits for its environment is nowhere in an engine.

With rewritten_history=new_row, a new row begins where the chat template writes the conversation otherwise than the row
has it. Its prompt is part of the answer, too, as tokens that no policy drew: what was drawn before stays as it is.
"""

import asyncio
import time
from collections.abc import Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import asdict, dataclass, field, replace
from typing import Any, Protocol

import numpy as np

from qurl_ray.actors.environments import EnvironmentPool, EnvironmentReply, Input
from qurl_ray.config import RunConfig
from qurl_ray.config.environment import EnvironmentConfig
from qurl_ray.data.answers import answer_text
from qurl_ray.data.turns import History, TurnEncoder
from qurl_ray.engines.requests import continued, joined
from qurl_ray.environments.process import CallFailed
from qurl_ray.environments.protocol import EnvironmentMessage, Step
from qurl_ray.errors import DataError
from qurl_ray.rewards.judge import failure
from qurl_ray.types import Completion, Problem, Request, Status, TurnCredit, Verdict

NOT_DRAWN = -1
"""Version of tokens that no policy drew."""
_STATUS: dict[str, Status] = {"timeout": "timeout", "invalid": "invalid"}
"""Status of a verdict by the kind of failure; "error" otherwise."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PolicyTurn:
    """Record of one turn of the policy, for logs."""

    at: int
    """Number of tokens of the answer before it."""
    tokens: int
    text: str
    """The turn as an environment is given it, without its end token."""
    asked: float
    """Time of its request, in seconds since the trajectory began."""
    waited: float
    """Seconds until it was drawn."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EnvironmentTurn:
    """Record of one call of an environment, for logs. The first is its reset."""

    at: int
    """Number of tokens of the answer before it."""
    messages: Sequence[EnvironmentMessage]
    reward: float | None
    calls: int
    failed_calls: int
    state: dict[str, Any] = field(default_factory=dict)
    """The rest of what the step's info says."""
    asked: float
    """Time of the call, in seconds since the trajectory began."""
    seconds: float
    """Seconds that the environment worked."""
    waited: float
    """Seconds until its reply was there."""


@dataclass(slots=True, kw_only=True)
class Played:
    """A trajectory that has ended."""

    completion: Completion
    """All its tokens after the prompt; none if the environment failed before the first turn."""
    prompt_ids: np.ndarray
    last_turn: np.ndarray
    """Tokens of the last turn."""
    reward: float | None = None
    """Sum of the environment's rewards; None if it gave none."""
    limit: str = ""
    """Limit that ended it, as its setting; "" if none did."""
    failure: CallFailed | None = None
    """Failure of the last call of the environment; its reply may also be one that cannot be used."""
    drew: list[PolicyTurn] = field(default_factory=list)
    said: list[EnvironmentTurn] = field(default_factory=list)
    queued: float = 0.0
    """Seconds that it waited for a place beside an environment."""
    began: float = 0.0
    """Unix time at which it had one, in seconds."""
    seconds: float = 0.0
    """Seconds from then to its end."""
    replays: int = 0

    @property
    def turns(self) -> int:
        """Number of turns of the policy."""
        return len(self.drew)

    @property
    def ends(self) -> list[int]:
        """Number of tokens of the answer up to the end of each turn."""
        return [drew.at + drew.tokens for drew in self.drew]

    def verdict(self) -> Verdict | None:
        """Return the environment's verdict; None if the last turn is to be judged by the reward function."""
        if self.failure:
            kind, detail = self.failure.kind, self.failure.detail
            return failure(_STATUS.get(kind, "error"), f"environment {kind}: {detail}")
        return None if self.reward is None else Verdict(reward=self.reward)

    def credit(self, verdict: Verdict) -> TurnCredit:
        """Return the turns with their rewards. Without rewards of the environment, the verdict is that of the last
        turn."""
        rewards, steps = np.zeros(self.turns), self.said[1:]  # a last turn that was cut off may have none
        rewards[: len(steps)] = [step.reward or 0.0 for step in steps]
        if self.reward is None:
            rewards[-1] = verdict.reward
        return TurnCredit(ends=np.array(self.ends, dtype=np.int32), rewards=rewards)

    def log(self) -> dict[str, Any]:
        """Return its times, the policy's turns and what the environment said, for samples.jsonl."""
        said = [_rounded(asdict(turn)) for turn in self.said]
        if self.failure and said:
            said[-1]["failed"] = f"{self.failure.kind}: {self.failure.detail}"
        times = _rounded({"began": self.began, "queued": self.queued, "seconds": self.seconds})
        return {**times, "turns": [_rounded(asdict(turn)) for turn in self.drew], "said": said}


@dataclass(frozen=True, slots=True, kw_only=True)
class Rules:
    """Settings of trajectories, and what turns their text into tokens."""

    config: EnvironmentConfig
    tokenizer: Any
    stop_ids: tuple[int, ...]
    context: int
    """Most tokens of a row."""
    encoder: TurnEncoder


class TrajectoryState:
    """State of one trajectory: what is to be done next, and what comes of it. Pure.

    Example:
        trajectory = TrajectoryState(rules, request, problem)
        while (todo := trajectory.todo) is not None:
            if isinstance(todo, Request):
                trajectory.add_policy_turn(generate(todo), asked, waited)
            else:
                trajectory.add_environment_turn(environment(todo), asked, waited)
        played = trajectory.played

    Args:
        first: request of the first turn.
    """

    def __init__(self, rules: Rules, first: Request, problem: Problem) -> None:
        self._rules, self._problem, self._row = rules, problem, first
        self._parts = [_told(first.uid, np.zeros(0, dtype=np.int32))]
        self._history: History | None = None  # None if nothing is rewritten
        self._new_rows: list[int] = []
        self._limit_of_turn = ""
        self.played = Played(completion=self._parts[0], prompt_ids=first.prompt_ids, last_turn=self._parts[0].token_ids)
        self.todo: Request | Input | None = problem
        """Turn to be drawn, or what the environment is to be given; None once the trajectory has ended."""

    def add_policy_turn(self, part: Completion, asked: float, waited: float) -> None:
        """Take the turn that was to be drawn; see PolicyTurn for the times."""
        text, _ = answer_text(part.token_ids, self._rules.tokenizer, self._rules.stop_ids)
        self.played.drew.append(
            PolicyTurn(at=self._length(), tokens=len(part.token_ids), text=text, asked=asked, waited=waited)
        )
        self.played.last_turn = part.token_ids
        self._row = continued(self._row, part)
        self._parts.append(part)
        if part.finish == "length" and self._rules.config.cut_turns == "end":
            self.played.limit = self._limit_of_turn
            self._end()
        else:
            self.todo = text

    def add_environment_turn(self, reply: EnvironmentReply, asked: float, waited: float) -> None:
        """Take the environment's reply to what it was to be given; see EnvironmentTurn for the times."""
        self.played.said.append(_environment_turn(reply, self._length(), asked, waited))
        try:
            match reply.outcome:
                case CallFailed() as failed:
                    self._end(failed)
                case Step() as step:
                    self._stepped(step)
                case opening:
                    self._opened(opening)
        except DataError as error:  # the template does not take what this environment said
            self._end(CallFailed(kind="invalid", detail=str(error)))

    def _opened(self, said: Sequence[EnvironmentMessage]) -> None:
        if said:
            self.played.prompt_ids = self._rules.encoder.opening(self._problem, said)
            self._row = replace(self._row, prompt_ids=self.played.prompt_ids)
            if not self._room():
                raise DataError(f"what it says first leaves no room in the context of {self._rules.context} tokens")
        if self._rules.config.rewritten_history == "new_row":
            self._history = self._rules.encoder.history(self._problem, said)
        self._draw()

    def _stepped(self, step: Step) -> None:
        played, last = self.played, self._parts[-1]
        if step.reward is not None:
            played.reward = (played.reward or 0.0) + step.reward
        if step.done or not step.messages or played.turns == self._rules.config.max_turns:
            if not step.done and step.messages:
                played.limit = f"environment.max_turns={self._rules.config.max_turns}"
            self._end()
            return
        encoder, rewritten = self._rules.encoder, None
        told = encoder.after(self._problem, last.token_ids, step.messages)
        if self._history:
            text = played.drew[-1].text
            self._history, rewritten = encoder.follow(self._problem, self._history, last.token_ids, text, step.messages)
        if rewritten is None:
            self._row = replace(self._row, prompt_ids=np.concatenate([self._row.prompt_ids, told]))
        else:
            self._row = replace(self._row, prompt_ids=rewritten, elsewhere=self._row.drawn)
        if not self._room():
            self._parts[-1] = replace(last, finish="length")
            played.limit = self._limit_of_row()
            self._end()
            return
        if rewritten is not None:
            self._new_rows.append(self._length())
        self._parts.append(_told(last.uid, told if rewritten is None else rewritten))
        self._draw()

    def _draw(self) -> None:
        config, sampling = self._rules.config, self._row.sampling
        most = min(self._room(), config.turn_tokens or sampling.max_new_tokens)
        by_turn = most == config.turn_tokens
        self._limit_of_turn = f"environment.turn_tokens={most}" if by_turn else self._limit_of_row()
        last = self.played.turns + 1 == config.max_turns
        self.todo = replace(self._row, sampling=replace(sampling, max_new_tokens=most), continues=not last)

    def _end(self, failure: CallFailed | None = None) -> None:
        whole = replace(joined(self._parts), rows=tuple(self._new_rows))
        self.played.failure, self.played.completion, self.todo = failure, whole, None

    def _length(self) -> int:
        """Number of tokens of the answer so far."""
        return sum(len(part.token_ids) for part in self._parts)

    def _limit_of_row(self) -> str:
        """Return the setting that bounds what the policy may still draw in the row."""
        context = self._rules.context
        if context - len(self._row.prompt_ids) < self._row.sampling.max_new_tokens:
            return f"context of {context} tokens"
        return "rollout.max_new_tokens"

    def _room(self) -> int:
        """Number of tokens that the policy may still draw."""
        return max(0, min(self._row.sampling.max_new_tokens, self._rules.context - len(self._row.prompt_ids)))


class GeneratesTurns(Protocol):
    """Access to what draws turns, requested one by one."""

    async def generate(self, request: Request) -> Completion: ...


class DrawsTurns(Protocol):
    """A fleet, or an engine in its place."""

    def turns(self) -> AbstractAsyncContextManager[GeneratesTurns]: ...


class TrajectoryRunner:
    """Runner of trajectories, with an environment each.

    Args:
        fleet: draws the turns.
        context: most tokens of a row.
    """

    def __init__(
        self,
        config: RunConfig,
        fleet: DrawsTurns,
        pool: EnvironmentPool,
        *,
        tokenizer: Any,
        stop_ids: tuple[int, ...],
        context: int,
    ) -> None:
        self._fleet, self._pool = fleet, pool
        self._rules = Rules(
            config=config.environment,
            tokenizer=tokenizer,
            stop_ids=stop_ids,
            context=context,
            encoder=TurnEncoder(tokenizer, config.task, stop_ids),
        )

    async def play(self, requests: Sequence[Request], problems: Sequence[Problem]) -> list[Played]:
        """Play a trajectory for each request, which is that of its first turn, in their order.

        Raises:
            QurlError: an engine failed, or the environment cannot be imported.
        """
        try:
            async with self._fleet.turns() as work, asyncio.TaskGroup() as group:
                tasks = [
                    group.create_task(self._play(work, request, problem))
                    for request, problem in zip(requests, problems, strict=True)
                ]
        except BaseExceptionGroup as errors:  # callers tell errors by their types
            raise errors.exceptions[0] from None
        return [task.result() for task in tasks]

    async def _play(self, work: GeneratesTurns, first: Request, problem: Problem) -> Played:
        came, trajectory = time.monotonic(), TrajectoryState(self._rules, first, problem)
        async with self._pool.lease(first.uid) as lease:
            began, played = time.monotonic(), trajectory.played
            played.queued, played.began = began - came, time.time()
            while (todo := trajectory.todo) is not None:
                asked = time.monotonic()
                if isinstance(todo, Request):
                    part = await work.generate(todo)
                    trajectory.add_policy_turn(part, asked - began, time.monotonic() - asked)
                else:
                    reply = await lease.give(todo)
                    trajectory.add_environment_turn(reply, asked - began, time.monotonic() - asked)
            played.seconds, played.replays = time.monotonic() - began, lease.replays
            return played


def _environment_turn(reply: EnvironmentReply, at: int, asked: float, waited: float) -> EnvironmentTurn:
    match reply.outcome:
        case Step() as step:
            pass
        case CallFailed():
            step = Step()
        case messages:
            step = Step(messages=messages)
    calls, failed = (step.info.get(name, 0) for name in ("calls", "failed_calls"))
    return EnvironmentTurn(
        at=at,
        messages=step.messages,
        reward=step.reward,
        calls=calls if isinstance(calls, int) else 0,
        failed_calls=failed if isinstance(failed, int) else 0,
        state={name: value for name, value in step.info.items() if name not in ("calls", "failed_calls")},
        asked=asked,
        seconds=reply.seconds,
        waited=waited,
    )


def _rounded(record: dict[str, Any]) -> dict[str, Any]:
    """Return the record with floats to microseconds."""
    return {key: round(value, 6) if isinstance(value, float) else value for key, value in record.items()}


def _told(uid: str, ids: np.ndarray) -> Completion:
    """Return what an environment said as a part of an answer."""
    return Completion(
        uid=uid,
        token_ids=ids,
        logprobs=np.zeros(len(ids), dtype=np.float32),
        versions=np.full(len(ids), NOT_DRAWN, dtype=np.int32),
        mask=np.zeros(len(ids), dtype=bool),
        finish="stop",
    )


def verdicts_of(played: Sequence[Played], judged: Sequence[Verdict]) -> list[Verdict]:
    """Return the verdict of each trajectory: the environment's, or that on what `unjudged` returned."""
    rest = iter(judged)
    return [trajectory.verdict() or next(rest) for trajectory in played]


def unjudged(played: Sequence[Played], problems: Sequence[Problem]) -> tuple[list[Completion], list[Problem]]:
    """Return what the reward function is to judge: the last turns of trajectories without a reward."""
    pairs = zip(played, problems, strict=True)
    rest = [(trajectory, problem) for trajectory, problem in pairs if trajectory.verdict() is None]
    answers = [replace(trajectory.completion, token_ids=trajectory.last_turn) for trajectory, _ in rest]
    return answers, [problem for _, problem in rest]
