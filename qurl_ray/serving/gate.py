"""ASGI middleware in the process of Ray Serve's HTTP proxy, which every request passes before the proxy sees it.

Ray Serve tells its routes to anybody, answers a request whose replica dies with a bare 500, and fails on headers that
are no text. It loads `middlewares` if ENVIRONMENT says so. Light: there is a proxy on each node.
"""

import logging

from starlette.middleware import Middleware
from starlette.responses import JSONResponse, Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from qurl_ray.serving.protocol import ApiError, error_event, overloaded, unavailable

logger = logging.getLogger(__name__)

ENVIRONMENT = {"RAY_SERVE_HTTP_PROXY_CALLBACK_IMPORT_PATH": f"{__name__}:middlewares"}
"""Variables of the proxies' environment with which they load the gate."""
_OWN = "/-/"  # prefix of Ray Serve's own paths
_HEALTH = "/-/healthz"
_TO_SERVE = {b"serve-multiplexed-model-id", b"x-request-timeout-seconds", b"x-request-disconnect-disabled"}
"""Headers by which clients would change how Ray Serve treats their requests. They are dropped."""


def middlewares() -> list[Middleware]:
    """Return what Ray Serve puts before its proxy."""
    return [Middleware(Gate)]


def error_response(error: ApiError) -> Response:
    """Return an error as clients get it."""
    headers = {"retry-after": str(error.retry_after_s)} if error.retry_after_s else {}
    if error.status in (408, 413):  # the rest of the body may still come
        headers["connection"] = "close"
    return JSONResponse(error.body(), status_code=error.status, headers=headers)


class Gate:
    """ASGI middleware that asks another replica, once, if one ends before it has begun to answer: to generate has no
    side effects. A second one that ends may have done so because of the request."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "websocket":
            await send({"type": "websocket.close"})
            return
        error = _refusal(scope)
        if error is None:
            headers = [(name, value) for name, value in scope["headers"] if name.replace(b"_", b"-") not in _TO_SERVE]
            error = await self._pass_on(dict(scope, headers=headers), receive, send)
        if error:
            await error_response(error)(scope, receive, send)

    async def _pass_on(self, scope: Scope, receive: Receive, send: Send) -> ApiError | None:
        """Answer, or return an error to answer with."""
        request = _Request(receive)
        for _ in range(2):
            reply = _Reply(send)
            await self._app(dict(scope, headers=list(scope["headers"])), request.again(), reply)
            if reply.streams and not reply.ended and not request.gone:
                await send({"type": "http.response.body", "body": error_event(unavailable())})
            if reply.began or reply.error or request.gone:
                return reply.error
            logger.warning("%s: a replica has ended before it answered", scope["path"])
        return unavailable()


def _refusal(scope: Scope) -> ApiError | None:
    path = scope["path"]
    if not path.startswith("/") or (path.startswith(_OWN) and path != _HEALTH):  # OPTIONS * has no route
        return ApiError(404, "unknown path")
    for name, value in scope["headers"]:
        try:
            value.decode()
        except UnicodeDecodeError:  # the proxy reads some as text
            return ApiError(400, f"the header {name.decode('latin-1')} is not valid UTF-8")
    return None


class _Request:
    """A request that can be read again from its beginning."""

    def __init__(self, receive: Receive) -> None:
        self._receive = receive
        self._messages: list[Message] = []
        self.gone = False
        """True if the client has disconnected."""

    def again(self) -> Receive:
        known = iter(list(self._messages))

        async def receive() -> Message:
            if message := next(known, None):
                return message
            message = await self._receive()
            self._messages.append(message)
            self.gone = message["type"] == "http.disconnect"
            return message

        return receive


class _Reply:
    """A reply on its way to the client; an error of Ray Serve's own is held back."""

    def __init__(self, send: Send) -> None:
        self._send = send
        self.began = self.streams = self.ended = False
        self.error: ApiError | None = None

    async def __call__(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            headers = dict(map(tuple, message["headers"]))
            kind = headers.get(b"content-type", b"")
            if message["status"] >= 400 and not kind.startswith(b"application/json"):  # replicas' errors are JSON
                wait = headers.get(b"retry-after", b"1")
                self.error = overloaded(int(wait)) if message["status"] == 429 else unavailable()
            self.began, self.streams = self.error is None, kind.startswith(b"text/event-stream")
        elif message["type"] == "http.response.body":
            self.ended = not message.get("more_body", False)
        if self.began:
            await self._send(message)
