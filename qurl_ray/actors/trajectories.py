"""Trajectories of several turns: the policy draws a turn, its environment answers, and the policy continues the row.

    reset ─► prompt ─► turn ─► step ─► turn ─► step ─► … ─► one Played trajectory

A turn is a request whose prompt is the whole row so far. What was drawn is never encoded again, and what the
environment says is encoded once (data.turns). A trajectory that waits for its environment is nowhere in an engine.
"""

import asyncio
import time
from collections.abc import Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import asdict, dataclass, field, replace
from typing import Any, Protocol

import numpy as np

from qurl_ray.actors.environments import EnvironmentPool, EnvironmentReply, Input, Seat
from qurl_ray.config import RunConfig
from qurl_ray.data.answers import answer_text
from qurl_ray.data.turns import TurnEncoder
from qurl_ray.environments.process import CallFailed
from qurl_ray.environments.protocol import EnvironmentMessage, Step
from qurl_ray.errors import DataError
from qurl_ray.rewards.judge import failure
from qurl_ray.rollout.requests import continued, joined
from qurl_ray.types import Completion, Problem, Request, Status, TurnCredit, Verdict

NOT_DRAWN = -1
"""Version of tokens that no policy drew."""
_STATUS: dict[str, Status] = {"timeout": "timeout", "invalid": "invalid"}
"""Status of a verdict by the kind of failure; "error" otherwise."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Drew:
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
class Said:
    """Record of one call of an environment, for logs. The first is its reset."""

    at: int
    """Number of tokens of the answer before it."""
    messages: Sequence[EnvironmentMessage]
    reward: float | None
    calls: int
    failed_calls: int
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
    failure: CallFailed | None = None
    """Failure of the last call of the environment; its reply may also be one that cannot be used."""
    drew: list[Drew] = field(default_factory=list)
    said: list[Said] = field(default_factory=list)
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
        said = [_rounded(asdict(one)) for one in self.said]
        if self.failure and said:
            said[-1]["failed"] = f"{self.failure.kind}: {self.failure.detail}"
        times = _rounded({"began": self.began, "queued": self.queued, "seconds": self.seconds})
        return {**times, "turns": [_rounded(asdict(one)) for one in self.drew], "said": said}


class GeneratesTurns(Protocol):
    """Access to what draws turns, requested one by one."""

    async def generate(self, request: Request) -> Completion: ...


class DrawsTurns(Protocol):
    """A fleet, or an engine in its place."""

    def turns(self) -> AbstractAsyncContextManager[GeneratesTurns]: ...


class Player:
    """Player of trajectories, with an environment each.

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
        self._config, self._fleet, self._pool = config.environment, fleet, pool
        self._tokenizer, self._stop_ids, self._context = tokenizer, stop_ids, context
        self._turns = TurnEncoder(tokenizer, config.task, stop_ids)

    async def play(self, requests: Sequence[Request], problems: Sequence[Problem]) -> list[Played]:
        """Play a trajectory for each request, which is that of its first turn, in their order.

        Raises:
            QurlError: an engine failed, or the environment cannot be imported.
        """
        try:
            async with self._fleet.turns() as work, asyncio.TaskGroup() as group:
                tasks = [
                    group.create_task(self._play(work, request, problem, request.uid))
                    for request, problem in zip(requests, problems, strict=True)
                ]
        except BaseExceptionGroup as errors:  # callers tell errors by their types
            raise errors.exceptions[0] from None
        return [task.result() for task in tasks]

    async def _play(self, work: GeneratesTurns, first: Request, problem: Problem, name: str) -> Played:
        came = time.monotonic()
        async with self._pool.seat(name) as seat:
            began, began_at = time.monotonic(), time.time()
            played = await self._turns_of(work, first, problem, seat)
            played.queued, played.began, played.seconds = began - came, began_at, time.monotonic() - began
            played.replays = seat.replays
            return played

    async def _turns_of(self, work: GeneratesTurns, first: Request, problem: Problem, seat: Seat) -> Played:
        row, parts = first, [_told(first.uid, np.zeros(0, dtype=np.int32))]
        played = Played(completion=parts[0], prompt_ids=first.prompt_ids, last_turn=parts[0].token_ids)
        began = time.monotonic()

        async def give(given: Input) -> Sequence[EnvironmentMessage] | Step | CallFailed:
            asked, at = time.monotonic(), sum(len(one.token_ids) for one in parts)
            reply = await seat.give(given)
            played.said.append(_said(reply, at, asked - began, time.monotonic() - asked))
            return reply.outcome

        opening = await give(problem)
        if isinstance(opening, CallFailed):
            played.failure = opening
            return played
        assert not isinstance(opening, Step)
        if opening:
            try:
                played.prompt_ids = self._turns.opening(problem, opening)
            except DataError as error:
                played.failure = CallFailed(kind="invalid", detail=str(error))
                return played
            row = replace(first, prompt_ids=played.prompt_ids)
            if not self._room(row):
                detail = f"what it says first leaves no room in the context of {self._context} tokens"
                played.failure = CallFailed(kind="invalid", detail=detail)
                return played
        while True:
            last = played.turns + 1 == self._config.max_turns
            asked, at = time.monotonic(), sum(len(one.token_ids) for one in parts)
            part = await work.generate(replace(self._turn(row), continues=not last))
            waited = time.monotonic() - asked
            text, _ = answer_text(part.token_ids, self._tokenizer, self._stop_ids)
            played.drew.append(Drew(at=at, tokens=len(part.token_ids), text=text, asked=asked - began, waited=waited))
            row = continued(row, part)
            parts.append(part)
            played.last_turn = part.token_ids
            if part.finish == "length" and self._config.cut_turns == "end":
                break
            step = await give(text)
            if isinstance(step, CallFailed):
                played.failure = step
                break
            assert isinstance(step, Step)
            if step.reward is not None:
                played.reward = (played.reward or 0.0) + step.reward
            if step.done or not step.messages or played.turns == self._config.max_turns:
                break
            try:
                told = self._turns.after(problem, part.token_ids, step.messages)
            except DataError as error:  # the template does not take what this environment said
                played.failure = CallFailed(kind="invalid", detail=str(error))
                break
            row = replace(row, prompt_ids=np.concatenate([row.prompt_ids, told]))
            if not self._room(row):
                parts[-1] = replace(part, finish="length")
                break
            parts.append(_told(first.uid, told))
        played.completion = joined(parts)
        return played

    def _room(self, row: Request) -> int:
        """Number of tokens that the policy may still draw after this row."""
        return max(0, min(row.sampling.max_new_tokens, self._context - len(row.prompt_ids)))

    def _turn(self, row: Request) -> Request:
        most = min(self._room(row), self._config.turn_tokens or row.sampling.max_new_tokens)
        return replace(row, sampling=replace(row.sampling, max_new_tokens=most))


def _said(reply: EnvironmentReply, at: int, asked: float, waited: float) -> Said:
    match reply.outcome:
        case Step() as step:
            pass
        case CallFailed():
            step = Step()
        case messages:
            step = Step(messages=messages)
    calls, failed = (step.info.get(name, 0) for name in ("calls", "failed_calls"))
    return Said(
        at=at,
        messages=step.messages,
        reward=step.reward,
        calls=calls if isinstance(calls, int) else 0,
        failed_calls=failed if isinstance(failed, int) else 0,
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
    return [one.verdict() or next(rest) for one in played]


def unjudged(played: Sequence[Played], problems: Sequence[Problem]) -> tuple[list[Completion], list[Problem]]:
    """Return what the reward function is to judge: the last turns of trajectories without a reward."""
    rest = [(one, problem) for one, problem in zip(played, problems, strict=True) if one.verdict() is None]
    return [replace(one.completion, token_ids=one.last_turn) for one, _ in rest], [problem for _, problem in rest]
