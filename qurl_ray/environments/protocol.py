"""The interface of an environment, with the names of Gymnasium. An environment holds the state of one trajectory."""

import hashlib
from collections.abc import Awaitable, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

from qurl_ray.tools.calls import ToolFormat
from qurl_ray.types import Problem

EnvironmentMessage = dict[str, Any]
"""A message with `role` ("user", "tool", …) and `content`, which is text, as chat templates take it."""

Failure = Literal["timeout", "died", "error", "invalid", "lost"]
"""How a call of an environment failed: it took too long; its process ended; it raised; it returned something else than
a Step; its process ended because of another trajectory, or with the machine."""
FAILURES: tuple[Failure, ...] = ("timeout", "died", "error", "invalid", "lost")


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """Result of one turn of the policy, from its environment.

    Example:
        Step(messages=[{"role": "user", "content": "too high"}])
        Step(reward=1.0, done=True)
    """

    messages: Sequence[EnvironmentMessage] = ()
    """Messages of the environment. After the last turn there may be none."""
    reward: float | None = None
    """Reward of this turn. Rewards of a trajectory are added up, and `algorithm.turn_credit` says which turns get the
    credit. If all are None, `task.reward` judges the last turn's answer."""
    done: bool = False
    """True if the trajectory ends here."""
    info: dict[str, Any] = field(default_factory=dict)
    """Plain JSON values for logs. `calls` and `failed_calls` are counts of tool calls, for metrics."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Traits:
    """Traits of all environments of a type, known before one is made."""

    deterministic: bool = False
    """True if the same answers lead to the same steps. Such environments share processes, and a trajectory whose
    process ended because of another one is replayed."""
    tools: Sequence[dict[str, Any]] = ()
    """Descriptions of the tools that the policy may call, in OpenAI's format."""
    described: bool = True
    """True if the chat template gets the tools; False if prompts describe them."""
    tool_format: ToolFormat | None = None
    """Format of calls that it reads; None if it reads none."""


def traits_of(make: Any, params: dict[str, Any]) -> Traits:
    """Return the traits of a class of environments: those of its class method `traits`, which takes the parameters of
    the environment, or else its attribute `deterministic`."""
    if hasattr(make, "traits"):
        return make.traits(**params)
    return Traits(deterministic=bool(getattr(make, "deterministic", False)))


class Environment(Protocol):
    """An environment of one trajectory. Both methods may be coroutines.

    A class attribute `deterministic = True` says that the same answers lead to the same steps; a class method `traits`
    says this and more (Traits).

    Example:
        class Guess:
            deterministic = True

            def reset(self, problem):
                self.secret = problem.meta["secret"]
                return []

            def step(self, answer):
                won = answer.strip() == str(self.secret)
                says = "right" if won else "wrong, again"
                return Step(messages=[{"role": "user", "content": says}], reward=float(won), done=won)
    """

    def reset(self, problem: Problem) -> Sequence[EnvironmentMessage] | Awaitable[Sequence[EnvironmentMessage]]:
        """Begin a trajectory. Return what the environment says after the problem's own prompt, before the first
        turn; often nothing."""
        ...

    def step(self, answer: str) -> Step | Awaitable[Step]:
        """Take the text of one turn of the policy, without its end token."""
        ...


def seed_of(problem: Problem) -> int:
    """Return the seed that a problem has in its `meta`, or one of 32 bits that its uid determines."""
    given = problem.meta.get("seed")
    if given is not None:
        return int(given)
    return int.from_bytes(hashlib.blake2b(problem.uid.encode(), digest_size=4).digest(), "little")
