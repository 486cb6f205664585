"""OpenAI's API over HTTP: access control, limits of requests, and errors in OpenAI's format. Plain Starlette.

FastAPI would check bodies before this code, with its own error messages, and describe the API to every client.
"""

import asyncio
import hashlib
import hmac
import logging
from collections.abc import AsyncGenerator, Callable, Mapping
from typing import Any, cast
from urllib.parse import urlsplit

from ray.exceptions import TaskCancelledError
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, PlainTextResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from qurl_ray.config.serving import is_loopback
from qurl_ray.errors import EngineError
from qurl_ray.serving.gate import error_response
from qurl_ray.serving.protocol import ApiError, ChatRequest, CompletionRequest, error_event, parse, unavailable
from qurl_ray.serving.replies import Reply
from qurl_ray.serving.served import Served
from qurl_ray.serving.service import Service

logger = logging.getLogger(__name__)

MOST_BODIES = 64
"""Bodies that may be arriving at a replica at a time with `body_timeout_s`; of more, the oldest have HURRIED_S."""
HURRIED_S = 2.0
"""More than any body takes of a client that is not slow, also when many come at once and the replica is busy."""
_OPEN = "/health"  # needs no key, because a load balancer has none; the page reveals nothing


Arriving = dict[asyncio.Timeout, float]
"""Deadlines of the bodies that are arriving, in the order of their requests, and when these began."""


def digest(key: str) -> str:
    """Return the SHA-256 digest of a key. Replicas get only this digest, and recognise the key by it."""
    return hashlib.sha256(key.encode()).hexdigest()


def http_app(service: Service, *, key_digest: str | None, exposition: Callable[[], str]) -> ASGIApp:
    """Return the ASGI app of the whole API.

    Args:
        key_digest: digest of the key that clients must send, on all paths but /health. None means that there is no key;
            then only clients on this machine are answered, unless `config.open`.
        exposition: function that returns the page /metrics. It may block.
    """

    arriving: Arriving = {}

    async def chat(request: Request) -> Response:
        return await _answered(request, service, ChatRequest, arriving)

    async def completions(request: Request) -> Response:
        return await _answered(request, service, CompletionRequest, arriving)

    async def models(_: Request) -> Response:
        served = service.current
        return JSONResponse({"object": "list", "data": [_model(name, served) for name in (served.name, served.model)]})

    async def model(request: Request) -> Response:
        served = service.current
        served.check_model(request.path_params["model"])
        return JSONResponse(_model(request.path_params["model"], served))

    async def health(_: Request) -> Response:
        try:
            service.check_health()
            assert service.current
        except EngineError:
            raise unavailable() from None
        return JSONResponse({"status": "ok"})

    async def metrics(_: Request) -> Response:
        return PlainTextResponse(await asyncio.to_thread(exposition))

    routes = [
        Route("/v1/chat/completions", chat, methods=["POST"]),
        Route("/v1/completions", completions, methods=["POST"]),
        Route("/v1/models", models),
        Route("/v1/models/{model:path}", model),
        Route("/health", health),
        Route("/metrics", metrics),
    ]
    handlers = {ApiError: _refused, HTTPException: _not_routed, EngineError: _broken, Exception: _unforeseen}
    app = Starlette(routes=routes, exception_handlers=cast(Any, handlers))
    return _Guard(app, service, key_digest)


def _model(name: str, served: Served) -> dict[str, object]:
    return {"id": name, "object": "model", "created": served.created, "owned_by": "qurl-ray"}


async def _answered(request: Request, service: Service, kind: type, arriving: Arriving) -> Response:
    limit, timeout_s = service.config.max_body_kb * 1024, service.config.body_timeout_s
    body = await read_body(request, limit=limit, timeout_s=timeout_s, arriving=arriving)
    parsed = parse(body, kind)
    reply = Reply(parsed, await service.open(parsed, size=len(body)))
    return EventStream(reply.events()) if parsed.stream else JSONResponse(await reply.whole())


async def read_body(request: Request, *, limit: int, timeout_s: float, arriving: Arriving) -> bytes:
    """Return the body, if it is JSON, not too large, complete, and in time.

    Raises:
        ApiError: 400, 408, 413 or 415.
    """
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if kind != "application/json":  # also blocks web pages: they may send other types, or none, without a preflight
        raise ApiError(415, "content-type must be application/json")
    too_large = ApiError(413, f"the body exceeds {limit} bytes", code="request_too_large")
    length = request.headers.get("content-length", "0")
    if not length.isdecimal() or len(length) > 18 or int(length) > limit:
        raise too_large
    body = bytearray()
    try:
        async with asyncio.timeout(timeout_s) as deadline:
            _enter(arriving, deadline)
            async for chunk in request.stream():
                body += chunk
                if len(body) > limit:
                    raise too_large
    except TimeoutError:
        reason = f"the body did not arrive within {timeout_s:g} s, or {HURRIED_S:g} s as one of more than {MOST_BODIES}"
        raise ApiError(408, reason, code="request_timeout") from None
    except (ClientDisconnect, TaskCancelledError):  # Ray Serve cancels what brings the body, if the client has left
        raise ApiError(400, "the body is shorter than its content-length") from None
    finally:
        arriving.pop(deadline, None)
    return bytes(body)


def _enter(arriving: Arriving, deadline: asyncio.Timeout) -> None:
    """Add a body to those that are arriving. If they are too many, bring the oldest one's deadline forward: else slow
    clients, which are answered only at their deadlines, would take all the requests that Ray Serve lets a replica have
    at a time."""
    arriving[deadline] = asyncio.get_running_loop().time()
    if len(arriving) > MOST_BODIES:
        oldest = next(iter(arriving))
        hurried, deadline_s = arriving.pop(oldest) + HURRIED_S, oldest.when()
        if deadline_s is not None and hurried < deadline_s and not oldest.expired():
            oldest.reschedule(hurried)


class EventStream(Response):
    """Response of server-sent events, which are sent as they arrive."""

    def __init__(self, events: AsyncGenerator[bytes]) -> None:
        super().__init__(media_type="text/event-stream", headers={"cache-control": "no-cache"})
        del self.headers["content-length"]
        self._events = events

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
        try:
            async for data in self._events:
                await send({"type": "http.response.body", "body": data, "more_body": True})
        except EngineError:
            await send({"type": "http.response.body", "body": error_event(unavailable()), "more_body": True})
        finally:
            await self._events.aclose()  # now, not at garbage collection: the engine releases what is left
        await send({"type": "http.response.body", "body": b""})


class _Guard:
    """ASGI middleware that checks access, and counts responses."""

    def __init__(self, app: ASGIApp, service: Service, key_digest: str | None) -> None:
        self._app, self._service, self._key_digest = app, service, key_digest

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return

        async def counted(message: Message) -> None:
            if message["type"] == "http.response.start":
                path = scope["path"] if scope["path"] in _PATHS else "other"
                self._service.meters.requests.inc(tags={"path": path, "status": str(message["status"])})
            await send(message)

        if error := self._stranger(scope):
            await error_response(error)(scope, receive, counted)
        else:
            await self._app(scope, receive, counted)

    def _stranger(self, scope: Scope) -> ApiError | None:
        if scope["path"] == _OPEN:
            return None
        headers = dict(scope["headers"])
        if self._key_digest is None:
            client = (scope.get("client") or ("", 0))[0]
            if self._service.config.open or (is_loopback(client) and not _of_a_web_page(headers)):
                return None
            return ApiError(
                401,
                "this server has no API key, so it answers only clients on its own machine, and no web pages",
                code="no_api_key",
            )
        scheme, _, key = headers.get(b"authorization", b"").partition(b" ")
        found = hashlib.sha256(key.strip()).hexdigest()
        if hmac.compare_digest(found, self._key_digest) and scheme.lower() == b"bearer":
            return None
        return ApiError(401, "wrong or missing API key: send it as Authorization: Bearer …", code="invalid_api_key")


def _of_a_web_page(headers: Mapping[bytes, bytes]) -> bool:
    """Return True if a browser sends this for a page of another machine. The page may be of a name that now means this
    machine's address, so that the browser takes the server for the page's own."""
    origin = headers.get(b"origin", b"http://localhost").decode("latin-1")
    try:
        host = urlsplit(origin).hostname or ""
    except ValueError:
        host = ""
    return headers.get(b"sec-fetch-site") == b"cross-site" or not is_loopback(host)


_PATHS = {"/v1/chat/completions", "/v1/completions", "/v1/models", "/health", "/metrics"}


async def _refused(request: Request, error: ApiError) -> Response:
    if error.status == 400:
        logger.warning("%s: refused with 400: %r", request.url.path, error.message)
    return error_response(error)


async def _not_routed(request: Request, error: HTTPException) -> Response:
    what = "unknown path" if error.status_code == 404 else f"{request.method} is not allowed here"
    response = error_response(ApiError(error.status_code, what))
    response.headers.update(error.headers or {})
    return response


async def _broken(_: Request, __: EngineError) -> Response:
    return error_response(unavailable())


async def _unforeseen(_: Request, error: Exception) -> Response:
    logger.error("a request failed", exc_info=error)
    return error_response(ApiError(500, "internal error", kind="server_error"))
