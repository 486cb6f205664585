"""Environments behind a server of OpenEnv (https://github.com/meta-pytorch/OpenEnv), without its package.

Protocol, of openenv 0.10 and openenv-core 0.3: a WebSocket at /ws is a session, with an environment of its own. Its
messages are JSON:

    {"type": "reset", "data": {"seed": 3}}             ─► {"type": "observation", "data": {"observation": {…},
    {"type": "step", "data": {"message": "[5]"}}       ─►      "reward": null, "done": false}}
    {"type": "close"}                                     or {"type": "error", "data": {"code": "…", "message": "…"}}

The server's /reset and /step over HTTP keep no state from call to call.
"""

import json
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from typing import Any
from urllib.parse import urlsplit, urlunsplit

from websockets.exceptions import ConnectionClosed, WebSocketException
from websockets.sync.client import ClientConnection, connect

from qurl_ray.environments.protocol import EnvironmentMessage, Step, seed_of
from qurl_ray.errors import EnvironmentFailed
from qurl_ray.types import Problem

_CONNECT_S, _CLOSE_S = 10.0, 1.0
_LOCAL = ("localhost", "127.0.0.1", "::1")
_TEXT, _JSON = "{answer}", "{json}"
_SCHEMES = {"http": "ws", "https": "wss", "ws": "ws", "wss": "wss"}


class OpenEnv:
    """A session of an OpenEnv server.

    Its reset gets a seed: the one in the problem's `meta`, or one that the problem's uid determines. If the first
    observation is not part of the problem's prompt, it follows the prompt.

    Args:
        url: address of the server, such as "http://127.0.0.1:8000".
        action: the action that a turn becomes. In all its texts `{answer}` is the text of the turn. A text that is
            `{json}` becomes what the turn says as JSON; then a turn that is no JSON, or that the server does not take
            as an action, is answered with the error.
        text: field of an observation that is its text, or a field of a field, `messages.0.content`; None shows the
            whole observation as JSON.
        reset: further data for the reset, beside `reset` in the problem's `meta`.
    """

    def __init__(
        self, *, url: str, action: Any = None, text: str | None = None, reset: dict[str, Any] | None = None
    ) -> None:
        self._url, self._text, self._reset = url, text, reset or {}
        self._action = {"message": _TEXT} if action is None else action
        self._open = ExitStack()

    def reset(self, problem: Problem) -> list[EnvironmentMessage]:
        self._socket = self._open.enter_context(_session(self._url))
        data = {"seed": seed_of(problem)} | self._reset | problem.meta.get("reset", {})
        result = self._ask("reset", data)
        if result.get("done"):
            raise EnvironmentFailed(f"{self._url}: the episode is over before its first turn")
        said = self._said(result)
        return [] if said in problem.prompt else [{"role": "user", "content": said}]

    def step(self, answer: str) -> Step:
        try:
            action = _filled(self._action, answer)
        except (ValueError, RecursionError) as error:
            return _refusal(f"no JSON: {error}")
        try:
            result = self._ask("step", action)
        except _RefusedError as error:
            if _JSON not in json.dumps(self._action):  # the fault of the settings, not of the policy
                raise
            return _refusal(error.faults)
        said = [{"role": "user", "content": self._said(result)}]
        return Step(messages=said, reward=result.get("reward"), done=bool(result.get("done")), info={"calls": 1})

    def close(self) -> None:
        self._open.close()

    def _ask(self, kind: str, data: Any) -> dict[str, Any]:
        """Send a message. Return the data of the observation that answers it.

        Raises:
            EnvironmentFailed: the server is gone, or answered with an error or something else.
        """
        with suppress(ConnectionClosed):  # what it said before it closed tells why
            self._socket.send(json.dumps({"type": kind, "data": data}))
        try:
            reply = self._socket.recv()
        except ConnectionClosed as error:
            raise EnvironmentFailed(f"{self._url} closed the session: {error}") from error
        message: Any = None
        with suppress(ValueError, RecursionError):
            message = json.loads(reply)
        match message:
            case {"type": "observation", "data": {"observation": dict()} as result}:
                return result
            case {"type": "error", "data": {"code": "VALIDATION_ERROR", "errors": [*faults]}}:
                raise _RefusedError(self._url, faults)
            case {"type": "error", "data": {"code": code, "message": text}}:
                raise EnvironmentFailed(f"{self._url} answered {code}: {text}")
        raise EnvironmentFailed(f"{self._url} answered no message of OpenEnv: {reply[:200]!r}")

    def _said(self, result: dict[str, Any]) -> str:
        """Return the text of an observation."""
        observation = result["observation"]
        if self._text is None:
            shown = {name: value for name, value in observation.items() if name != "metadata"}
            return json.dumps(shown, ensure_ascii=False)
        said: Any = observation
        for part in self._text.split("."):
            try:
                said = said[int(part) if isinstance(said, list) else part]
            except (KeyError, IndexError, TypeError, ValueError) as error:
                message = f"an observation of {self._url} has no {self._text}: it has {', '.join(observation)}"
                raise EnvironmentFailed(message) from error
        return said if isinstance(said, str) else json.dumps(said, ensure_ascii=False)


class _RefusedError(EnvironmentFailed):
    """The server does not take the data of a message.

    Args:
        faults: of the data, as pydantic lists them.
    """

    def __init__(self, url: str, faults: list[Any]) -> None:
        self.faults = "; ".join(f"{'.'.join(map(str, fault['loc']))}: {fault['msg']}" for fault in faults)
        super().__init__(f"{url} does not take the action or the reset: {self.faults}")


@contextmanager
def _session(url: str) -> Iterator[ClientConnection]:
    """Connect to a server, and end the session afterwards.

    A thread of the connection answers the server's pings while the policy draws: a server ends a session that does not.

    Raises:
        EnvironmentFailed: no such server is there.
    """
    parts = urlsplit(url if "://" in url else f"http://{url}")
    if parts.scheme not in _SCHEMES:
        raise EnvironmentFailed(f"openenv: {url!r} is no address of a server, such as http://127.0.0.1:8000")
    address = urlunsplit((_SCHEMES[parts.scheme], parts.netloc, f"{parts.path.rstrip('/')}/ws", parts.query, ""))
    with ExitStack() as stack:
        try:
            # As OpenEnv's own client, which uses no proxy for this machine.
            proxy: dict[str, Any] = {"proxy": None} if parts.hostname in _LOCAL else {}
            opened = connect(address, **proxy, open_timeout=_CONNECT_S, close_timeout=_CLOSE_S)
            socket = stack.enter_context(opened)
        except (OSError, WebSocketException) as error:
            raise EnvironmentFailed(f"no OpenEnv server at {url}: {type(error).__name__}: {error}") from error
        yield socket
        with suppress(ConnectionClosed):
            socket.send(json.dumps({"type": "close"}))


def _refusal(error: str) -> Step:
    return Step(
        messages=[{"role": "user", "content": f"No valid action: {error}"}], info={"calls": 1, "failed_calls": 1}
    )


def _filled(template: Any, answer: str) -> Any:
    """Return the template with the text of a turn in its places.

    Raises:
        ValueError, RecursionError: the text is no JSON, and a place is for JSON.
    """
    if isinstance(template, dict):
        return {name: _filled(value, answer) for name, value in template.items()}
    if isinstance(template, list):
        return [_filled(value, answer) for value in template]
    if template == _JSON:
        return json.loads(answer)
    return template.replace(_TEXT, answer) if isinstance(template, str) else template
