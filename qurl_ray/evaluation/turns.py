"""Trajectories of several turns in one process, without Ray, with the player and the environments of a run."""

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Any

from qurl_ray.actors.environments import EnvironmentHost, pool_here
from qurl_ray.actors.trajectories import Played, Player, unjudged, verdicts_of
from qurl_ray.config import RunConfig
from qurl_ray.data.answers import items_to_judge
from qurl_ray.rewards.process import VerifierProcess
from qurl_ray.rollout.torch_engine import TorchEngine
from qurl_ray.types import Completion, Problem, Request, Verdict


class TurnsHere:
    """Player of trajectories with an engine of this process.

    Args:
        context: most tokens of a trajectory.
    """

    def __init__(
        self, config: RunConfig, engine: TorchEngine, tokenizer: Any, stop_ids: Sequence[int], *, context: int
    ) -> None:
        self._config, self._engine, self._tokenizer = config, engine, tokenizer
        self._stop_ids, self._context = tuple(stop_ids), context
        self._host = EnvironmentHost(config.environment)

    def __enter__(self) -> "TurnsHere":
        return self

    def __exit__(self, *_: object) -> None:
        self._host.close()

    def judged(
        self, requests: Sequence[Request], problems: Sequence[Problem], verifier: VerifierProcess
    ) -> list[Verdict]:
        """Play a trajectory for each request, and return its verdict: the environment's, or the reward function's."""
        played = asyncio.run(self._play(requests, problems))
        items = items_to_judge(*unjudged(played, problems), self._tokenizer, self._stop_ids)
        return verdicts_of(played, verifier.judge_many(items))

    async def _play(self, requests: Sequence[Request], problems: Sequence[Problem]) -> list[Played]:
        player = Player(
            self._config,
            _EngineHere(self._engine),
            pool_here(self._host, self._config.environment),
            tokenizer=self._tokenizer,
            stop_ids=self._stop_ids,
            context=self._context,
        )
        return await player.play(requests, problems)


class _EngineHere:
    """An engine that draws turns: those that wait together, in a thread."""

    def __init__(self, engine: TorchEngine) -> None:
        self._engine = engine
        self._waiting: list[tuple[Request, asyncio.Future[Completion]]] = []
        self._task: asyncio.Task | None = None

    @asynccontextmanager
    async def turns(self) -> AsyncIterator["_EngineHere"]:
        yield self

    async def generate(self, request: Request) -> Completion:
        answer: asyncio.Future[Completion] = asyncio.get_running_loop().create_future()
        self._waiting.append((request, answer))
        if self._task is None or self._task.done():
            self._task = asyncio.ensure_future(self._run())
        return await answer

    async def _run(self) -> None:
        while self._waiting:
            taken, self._waiting = self._waiting, []
            try:
                found = await asyncio.to_thread(self._engine.generate, [request for request, _ in taken], version=1)
            except Exception as error:  # all who wait must hear of it
                for _, answer in taken:
                    if not answer.done():
                        answer.set_exception(error)
                continue
            for (_, answer), completion in zip(taken, found, strict=True):
                if not answer.done():
                    answer.set_result(completion)
