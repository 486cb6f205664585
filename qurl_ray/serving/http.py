"""OpenAI's API over HTTP: access control, validation of requests, and errors in OpenAI's format."""

import hashlib
import hmac
import logging
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import aclosing
from typing import Any, cast
from urllib.parse import urlsplit

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.types import ASGIApp, Receive, Scope, Send

from qurl_ray.config.serving import ServingConfig, is_loopback
from qurl_ray.config.shown import shortened
from qurl_ray.errors import EngineError
from qurl_ray.serving.protocol import ApiError, ChatRequest, CompletionRequest, unavailable
from qurl_ray.serving.replies import Reply
from qurl_ray.serving.served import Served
from qurl_ray.serving.service import Service

logger = logging.getLogger(__name__)

_OPEN = "/health"  # needs no key, because a load balancer has none; the page reveals nothing
_KINDS = {bool: "true or false", int: "a number", float: "a number", str: "a string", list: "a list", dict: "an object"}
"""JSON's names of values."""
_NAMES = {*ChatRequest.model_fields, *CompletionRequest.model_fields}


def digest(key: str) -> str:
    """Return the SHA-256 digest of a key. Replicas get only this digest, and recognise the key by it."""
    return hashlib.sha256(key.encode()).hexdigest()


def http_app(service: Service, *, key_digest: str | None) -> ASGIApp:
    """Return the ASGI app of the whole API.

    Args:
        key_digest: digest of the key that clients must send, on all paths but /health. None means that there is no key;
            then only clients on this machine are answered, unless `config.open`.
    """
    kinds = (ApiError, RequestValidationError, HTTPException, EngineError, Exception)
    handlers = cast(Any, dict.fromkeys(kinds, _error_response))
    app = FastAPI(openapi_url=None, exception_handlers=handlers)  # the API is OpenAI's, described there

    @app.post("/v1/chat/completions")
    async def chat(request: ChatRequest) -> Response:
        return await _answered(service, request)

    @app.post("/v1/completions")
    async def completions(request: CompletionRequest) -> Response:
        return await _answered(service, request)

    @app.get("/v1/models")
    async def models() -> dict[str, Any]:
        served = service.current
        return {"object": "list", "data": [_model(name, served) for name in served.models]}

    @app.get("/v1/models/{name:path}")
    async def model(name: str) -> dict[str, Any]:
        service.current.check_model(name)
        return _model(name, service.current)

    @app.get(_OPEN)
    async def health() -> dict[str, str]:
        service.check_health()
        assert service.current
        return {"status": "ok"}

    return _Guard(app, service.config, key_digest)


def _model(name: str, served: Served) -> dict[str, object]:
    return {"id": name, "object": "model", "created": served.created, "owned_by": "qurl-ray"}


async def _answered(service: Service, request: ChatRequest | CompletionRequest) -> Response:
    reply = Reply(request, await service.open(request))
    return EventStream(reply.events()) if request.stream else JSONResponse(await reply.whole())


class EventStream(StreamingResponse):
    """Response of server-sent events, which are sent as they arrive."""

    def __init__(self, events: AsyncGenerator[bytes]) -> None:
        super().__init__(events, media_type="text/event-stream", headers={"cache-control": "no-cache"})
        self._events = events

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        # Ray Serve cancels this when the client leaves, so nothing listens for that here.
        async with aclosing(self._events):  # now, not at garbage collection: the engine releases what is left
            await self.stream_response(send)


class _Guard:
    """ASGI middleware that lets a request in if its sender may ask and its body is not too large."""

    def __init__(self, app: ASGIApp, config: ServingConfig, key_digest: str | None) -> None:
        self._app, self._config, self._key_digest = app, config, key_digest

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        error = self._refusal(scope) if scope["type"] == "http" and scope["path"] != _OPEN else None
        await (_response(error) if error else self._app)(scope, receive, send)

    def _refusal(self, scope: Scope) -> ApiError | None:
        headers = dict(scope["headers"])
        if self._key_digest is None:
            client = (scope.get("client") or ("", 0))[0]
            if not self._config.open and (not is_loopback(client) or _of_a_web_page(headers)):
                message = "this server has no API key, so it answers only clients on its own machine, and no web pages"
                return ApiError(401, message, code="no_api_key")
        else:
            scheme, _, key = headers.get(b"authorization", b"").partition(b" ")
            sent = hashlib.sha256(key.strip()).hexdigest()
            if not hmac.compare_digest(sent, self._key_digest) or scheme.lower() != b"bearer":
                message = "wrong or missing API key: send it as Authorization: Bearer …"
                return ApiError(401, message, code="invalid_api_key")
        limit, length = self._config.max_body_kb * 1024, headers.get(b"content-length", b"0")
        if b"transfer-encoding" in headers or not length.isdigit():
            return ApiError(411, "a request must have a content-length")
        if len(length) > 18 or int(length) > limit:
            return ApiError(413, f"the body exceeds {limit} bytes", code="request_too_large")
        return None


def _of_a_web_page(headers: Mapping[bytes, bytes]) -> bool:
    """Return True if a browser sends this for a page of another machine. The page may be of a name that now means this
    machine's address, so that the browser takes the server for the page's own."""
    origin = headers.get(b"origin", b"http://localhost").decode("latin-1")
    try:
        host = urlsplit(origin).hostname or ""
    except ValueError:
        host = ""
    return headers.get(b"sec-fetch-site") == b"cross-site" or not is_loopback(host)


# --- errors --------------------------------------------------------------------------------------------------------


def _response(error: ApiError) -> Response:
    headers = {"retry-after": "1"} if error.status in (429, 503) else {}
    return JSONResponse(error.body(), status_code=error.status, headers=headers)


async def _error_response(request: Request, error: Exception) -> Response:
    """Return the response to a request that failed."""
    if isinstance(error, HTTPException):
        reasons = {404: "unknown path", 405: f"{request.method} is not allowed here"}
        response = _response(ApiError(error.status_code, reasons.get(error.status_code, "the body cannot be read")))
        response.headers.update(error.headers or {})
        return response
    if isinstance(error, EngineError):
        return _response(unavailable())
    refusal = _explained(error.errors()) if isinstance(error, RequestValidationError) else error
    if not isinstance(refusal, ApiError):
        logger.error("a request failed", exc_info=error)
        return _response(ApiError(500, "internal error", kind="server_error"))
    if refusal.status == 400:
        logger.warning("%s: refused with 400: %r", request.url.path, refusal.message)
    return _response(refusal)


def _explained(items: Sequence[Any]) -> ApiError:
    """Return the error of the parameter that was read furthest: a value may be one of several types, and pydantic tells
    an error for each. If several were read as far, the error names what came, and all that could have."""
    item = max(items, key=lambda item: len(item["loc"]))
    if item["type"] == "json_invalid" or (item["loc"] == ("body",) and item["type"] != "value_error"):
        return ApiError(400, "the body must be a JSON object in UTF-8, with the content type application/json")
    if item["type"] == "extra_forbidden":
        name = shortened(str(item["loc"][-1]))
        return ApiError(400, f"{name} is not supported", param=name, code="unsupported_parameter")
    param, message = _param(item), item["msg"].removeprefix("Value error, ")
    types = [other for other in items if (_param(other), len(other["loc"])) == (param, len(item["loc"]))]
    if len(types) > 1:
        wanted = dict.fromkeys(other["msg"].removeprefix("Input should be ") for other in types)
        message = f"Input should be {' or '.join(wanted)}, not {_KINDS.get(type(item['input']), 'this')}"
    code = "missing_required_parameter" if item["type"] == "missing" else None
    return ApiError(400, f"{param}: {message}" if param else message, param=param, code=code)


def _param(item: Any) -> str | None:
    """Return the place of an error, such as prompt[0], without the types of a union, which pydantic puts into it."""
    path = [part for part in item["loc"][1:] if isinstance(part, int) or part in _NAMES]
    return "".join(f"[{part}]" if isinstance(part, int) else part for part in path) or None
