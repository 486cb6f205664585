"""An environment of tools: calls in a turn are answered with their results, and a turn without a call ends it."""

from collections.abc import Sequence
from typing import Any

from qurl_ray.environments.protocol import EnvironmentMessage, Step, Traits
from qurl_ray.tools.calls import FORMATS, BadCall, ToolCall, ToolFormat, read_turn
from qurl_ray.tools.registry import CallError, FunctionName, Registry
from qurl_ray.types import Problem


class Tools:
    """Functions that the policy may call (docs/agents.md). `task.reward` judges the turn without a call.

    A call that is no JSON, names no tool, does not fit its schema, or whose function raises is answered with `error:`
    and a sentence, and counted as failed.

    Args:
        functions: see tools.registry.
        format: format of calls, which must be that of the chat template.
        described: True passes the tools to the chat template; False if the prompt describes them itself.
        deterministic: True says that the functions return the same for the same arguments, and keep no state.
        most_characters: length to which a result is cut.
    """

    def __init__(
        self,
        *,
        functions: Sequence[FunctionName],
        format: ToolFormat = "hermes",
        described: bool = True,
        deterministic: bool = False,
        most_characters: int = 4000,
    ) -> None:
        if format not in FORMATS:
            raise ValueError(f"unknown format {format!r}; known: {', '.join(FORMATS)}")
        self._registry, self._format, self._most = Registry(functions), format, most_characters
        self._traits = Traits(
            deterministic=deterministic, tools=self._registry.schemas(), described=described, tool_format=format
        )

    @classmethod
    def traits(cls, **params: Any) -> Traits:
        """Return what the parameters say of all environments."""
        return cls(**params)._traits

    async def reset(self, problem: Problem) -> list[EnvironmentMessage]:
        await self._registry.reset(problem)
        return []

    async def step(self, answer: str) -> Step:
        calls = [part for part in read_turn(answer, self._format) if not isinstance(part, str)]
        if not calls:
            return Step(done=True)
        told = [await self._told(call) for call in calls]
        failed = sum(not right for _, right in told)
        return Step(messages=[message for message, _ in told], info={"calls": len(calls), "failed_calls": failed})

    async def _told(self, call: ToolCall | BadCall) -> tuple[EnvironmentMessage, bool]:
        """Return the message with the result of a call, and True if it did not fail."""
        message = {"role": "tool"} | ({"name": call.name} if isinstance(call, ToolCall) else {})
        if isinstance(call, BadCall):
            return message | {"content": f"error: {call.problem}"}, False
        try:
            result = await self._registry.call(call)
        except CallError as error:
            return message | {"content": f"error: {error}"[: self._most]}, False
        cut = "" if len(result) <= self._most else "… (cut here)"
        return message | {"content": result[: self._most] + cut}, True
