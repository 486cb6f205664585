"""Server of environments, which runs the user's code below a keeper (sandbox.keeper); it loads neither torch nor ray.

Its calls are (operation, trajectory, payload): "reset" with a problem, "step" with an answer, "close". A result is
["ok", value] or [failure, detail]. It announces the fields of Traits.
"""

import asyncio
import inspect
import json
import numbers
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict
from typing import Any

import numpy as np

from qurl_ray.environments.protocol import EnvironmentMessage, Step, traits_of
from qurl_ray.errors import DataError, EnvironmentFailed
from qurl_ray.extensions import described, printable
from qurl_ray.rewards.judge import LARGEST
from qurl_ray.sandbox.keeper import ServerCall
from qurl_ray.tables import ENVIRONMENTS
from qurl_ray.tools.messages import check_text, read_message
from qurl_ray.types import Problem

_DETAIL_CHARS = 1000


class _InvalidError(Exception):
    """An environment returned something else than it should."""


def load_environments(spec: str) -> tuple[dict[str, Any], ServerCall]:
    """Resolve environments of one type. Return their traits, and the function that answers calls.

    Args:
        spec: JSON of {"type", "params"}.
    """
    settings = json.loads(spec)
    make = ENVIRONMENTS.load(settings["type"])
    try:
        traits = traits_of(make, settings["params"])
    except EnvironmentFailed:
        raise
    except Exception as error:  # such as a parameter that the environment does not have
        message = f"environment {settings['type']!r}: environment.params: {described(error)}"
        raise EnvironmentFailed(message) from error
    return asdict(traits), _Served(make, settings["params"]).call


class _Served:
    """The environments of this process, by trajectory."""

    def __init__(self, make: Any, params: dict[str, Any]) -> None:
        self._make, self._params = make, params
        self._environments: dict[str, Any] = {}
        self._loop = asyncio.new_event_loop()

    def call(self, operation: str, trajectory: str, payload: Any) -> tuple[str, Any]:
        """Return ("ok", result) or (failure, detail). A failed trajectory is forgotten."""
        try:
            match operation:
                case "reset":
                    self._environments[trajectory] = environment = self._make(**self._params)
                    return "ok", _sendable(_messages(self._finished(environment.reset(Problem(**payload)))))
                case "step":
                    return "ok", _sendable(_plain(self._finished(self._environments[trajectory].step(payload))))
            self._close(trajectory)
            return "ok", None
        except (_InvalidError, DataError) as error:
            kind, detail = "invalid", str(error)
        except (Exception, SystemExit) as error:  # user code: any failure is a reply
            kind, detail = "error", described(error)
        with suppress(Exception):
            self._close(trajectory)
        return kind, printable(detail, _DETAIL_CHARS)

    def _close(self, trajectory: str) -> None:
        close = getattr(self._environments.pop(trajectory, None), "close", None)
        if close:
            self._finished(close())

    def _finished(self, returned: Any) -> Any:
        return self._loop.run_until_complete(returned) if inspect.isawaitable(returned) else returned


def _messages(returned: Any) -> list[EnvironmentMessage]:
    if not isinstance(returned, Sequence) or isinstance(returned, str | bytes):
        raise _InvalidError(f"it returned {type(returned).__name__} for messages, expected a list")
    return [read_message(message, f"message {number}", "messages") for number, message in enumerate(returned, start=1)]


def _plain(step: Any) -> dict[str, Any]:
    if not isinstance(step, Step):
        raise _InvalidError(f"step returned {type(step).__name__}, expected a Step")
    reward = step.reward
    if reward is not None:
        if not isinstance(reward, (numbers.Real, np.bool_)) or not abs(float(reward)) <= LARGEST:  # also nan
            raise _InvalidError(f"the reward is {reward!r}, expected a finite number up to {LARGEST:g}, or None")
        reward = float(reward)
    if not isinstance(step.info, dict):
        raise _InvalidError(f"info is {type(step.info).__name__}, expected a mapping")
    return {"messages": _messages(step.messages), "reward": reward, "done": bool(step.done), "info": step.info}


def _sendable(result: Any) -> Any:
    """Return the result, if it is plain JSON, and its text can be encoded."""
    try:
        json.dumps(result, allow_nan=False)
    except (TypeError, ValueError, RecursionError) as error:
        raise _InvalidError(f"it is no plain JSON: {error}") from None
    check_text(result, "its result")
    return result
