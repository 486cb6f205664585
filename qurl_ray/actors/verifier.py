"""Judging as a Ray actor. The reward function runs in a process below the actor, which it cannot take down."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

from qurl_ray.rewards.process import VerifierProcess
from qurl_ray.rewards.resolve import BUILT_IN
from qurl_ray.types import Problem, Verdict

if TYPE_CHECKING:
    from ray.actor import ActorProxy

_BUILT_IN_MEMORY_GB = 4.0  # sympy on a hostile answer takes what it gets; a user's own reward may need more


class Verifier:
    """Owns one VerifierProcess."""

    def __init__(self, spec: str, timeout_s: float) -> None:
        memory_gb = _BUILT_IN_MEMORY_GB if spec in BUILT_IN else None
        self._process = VerifierProcess(spec, timeout_s, memory_gb=memory_gb)

    def check(self) -> None:
        """RewardError if the reward cannot be used."""
        self._process.check()

    def judge_many(self, items: Sequence[tuple[str, Problem]]) -> list[Verdict]:
        """One verdict per (answer, problem), in order."""
        return self._process.judge_many(items)

    def close(self) -> None:
        self._process.close()


def spawn_verifiers(count: int, spec: str, timeout_s: float) -> "list[ActorProxy[Verifier]]":
    """`count` verifier actors. Calls are not retried: the caller knows best what an answer is worth."""
    import ray

    actor = ray.remote(num_cpus=0, max_restarts=-1, max_task_retries=0)(Verifier)
    return [actor.remote(spec, timeout_s) for _ in range(count)]
