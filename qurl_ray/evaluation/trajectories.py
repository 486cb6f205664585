"""Trajectories of several turns in one process, without Ray, with the runner and the environments of a run."""

import asyncio
from collections.abc import Sequence
from typing import Any

from qurl_ray.actors.environments import EnvironmentHost
from qurl_ray.actors.local import fleet_here, pool_here
from qurl_ray.actors.trajectories import Played, TrajectoryRunner, unjudged, verdicts_of
from qurl_ray.config import RunConfig
from qurl_ray.data.answers import items_to_judge
from qurl_ray.engines.torch.engine import TorchEngine
from qurl_ray.rewards.process import VerifierProcess
from qurl_ray.types import Problem, Request, Verdict


class TurnsHere:
    """Runner of trajectories with an engine of this process.

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

        async def play() -> list[Played]:
            runner = TrajectoryRunner(
                self._config,
                await fleet_here([self._engine], self._config.rollout),
                pool_here(self._host, self._config.environment),
                tokenizer=self._tokenizer,
                stop_ids=self._stop_ids,
                context=self._context,
            )
            return await runner.play(requests, problems)

        played = asyncio.run(play())
        items = items_to_judge(*unjudged(played, problems), self._tokenizer, self._stop_ids, self._config.task)
        return verdicts_of(played, verifier.judge_many(items))
