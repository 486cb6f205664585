"""OpenAI's requests, with validation, and OpenAI's errors. Independent of HTTP and of engines."""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeVar, cast

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator, model_validator

from qurl_ray.config.shown import shortened
from qurl_ray.errors import DataError
from qurl_ray.tools.messages import read_message, read_tools

_GREEDY = 1e-4  # lower temperatures count as 0: division of logits by them would overflow

_IGNORED = {
    "user",
    "metadata",
    "store",
    "service_tier",
    "safety_identifier",
    "prompt_cache_key",
    "prompt_cache_retention",
    "verbosity",
}
"""OpenAI's parameters that are accepted and have no effect here."""
_NEUTRAL: dict[str, tuple[Any, ...]] = {
    "frequency_penalty": (0,),
    "presence_penalty": (0,),
    "logit_bias": ({},),
    "response_format": ({"type": "text"},),
    "parallel_tool_calls": (True,),
    "functions": ([],),
    "function_call": ("none",),
    "modalities": (["text"],),
    "audio": (),
    "prediction": (),
    "reasoning_effort": ("none",),
    "web_search_options": (),
    "best_of": (1,),
    "echo": (False,),
    "suffix": ("",),
}
"""OpenAI's parameters that are not supported, with the values that are accepted because they have no effect."""


class ApiError(Exception):
    """Error for a client, in OpenAI's format. The message contains only what the client sent, and limits.

    Example:
        raise ApiError(400, "n must be at least 1", param="n")
    """

    def __init__(
        self,
        status: int,
        message: str,
        *,
        kind: str = "invalid_request_error",
        param: str | None = None,
        code: str | None = None,
        retry_after_s: int | None = None,
    ) -> None:
        super().__init__(message)
        self.status, self.message, self.kind, self.param, self.code = status, message, kind, param, code
        self.retry_after_s = retry_after_s

    def body(self) -> dict[str, Any]:
        return {"error": {"message": self.message, "type": self.kind, "param": self.param, "code": self.code}}


def unavailable() -> ApiError:
    """Return ApiError 503: there is no policy, or its engine has died and is being restarted."""
    return ApiError(503, "the policy is not available: try again", kind="server_error", retry_after_s=1)


def overloaded(retry_after_s: int) -> ApiError:
    """Return ApiError 429: there is no room for more requests."""
    return ApiError(
        429,
        "all slots are taken and too many requests wait: try again",
        kind="requests",
        code="rate_limit_exceeded",
        retry_after_s=retry_after_s,
    )


def event(record: dict[str, Any]) -> bytes:
    """Return a record as an event of a stream."""
    return b"data: " + json.dumps(record, ensure_ascii=False, separators=(",", ":")).encode() + b"\n\n"


def error_event(error: ApiError) -> bytes:
    """Return the event of an error in the middle of a stream, whose status has been sent already."""
    return event(error.body())


class _Model(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False, hide_input_in_errors=True)

    @model_validator(mode="before")
    @classmethod
    def _null_is_absent(cls, data: Any) -> Any:
        return {key: value for key, value in data.items() if value is not None} if isinstance(data, dict) else data


class _StreamOptions(_Model):
    include_usage: bool = False
    include_obfuscation: bool = False
    """Ignored: nothing is obfuscated."""


class _TextPart(_Model):
    type: Literal["text"]
    text: str

    @field_validator("type", mode="before")
    @classmethod
    def _is_text(cls, kind: Any) -> Any:
        if isinstance(kind, str) and kind != "text":
            what = "images" if "image" in kind else f"parts of type {shortened(kind, 40)!r}"
            raise ValueError(f"{what} are not supported: send text")
        return kind


class _CalledFunction(_Model):
    name: str
    arguments: str

    @field_validator("arguments")
    @classmethod
    def _is_an_object(cls, arguments: str) -> str:
        try:
            found = json.loads(arguments)
        except (ValueError, RecursionError):
            found = None
        if not isinstance(found, dict):
            raise ValueError("must be a JSON object, as text")
        return arguments


class _Call(_Model):
    id: str
    type: Literal["function"] = "function"
    function: _CalledFunction


class Message(_Model):
    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | list[_TextPart] = ""
    name: str | None = None
    tool_calls: list[_Call] = []
    tool_call_id: str | None = None
    refusal: str | None = None
    """Ignored, as are annotations: answers that a client sends back may have them."""
    annotations: list[Any] = []

    @model_validator(mode="after")
    def _fits_the_role(self) -> "Message":
        if self.tool_calls and self.role != "assistant":
            raise ValueError("only messages of the assistant can have tool_calls")
        if "content" not in self.model_fields_set and not self.tool_calls:
            raise ValueError("a message must have content, or tool_calls")
        return self

    def plain(self) -> dict[str, Any]:
        """Return the message in the form that chat templates expect."""
        return read_message(self.model_dump(exclude={"refusal", "annotations"}), "the message", "the request")


class _Function(_Model):
    name: str = Field(pattern=r"^[a-zA-Z0-9_.:-]{1,64}$")
    description: str = ""
    parameters: dict[str, Any] = {}
    strict: Literal[False] = False
    """Answers are not forced into the schema."""


class _Tool(_Model):
    type: Literal["function"]
    function: _Function


class _Request(_Model):
    """Parameters that both kinds of request have."""

    model: str
    n: int = Field(1, ge=1)
    temperature: float = Field(1.0, ge=0, le=2)
    top_p: float = Field(1.0, ge=0, le=1)
    top_k: int = Field(0, ge=0)
    """Number of likeliest tokens to sample from; 0 keeps the whole vocabulary. Not one of OpenAI's parameters."""
    ignore_eos: bool = False
    """True to draw exactly max_tokens. Not one of OpenAI's parameters."""
    seed: int | None = Field(None, ge=-(2**63), lt=2**63)
    stop: str | list[str] = []
    stream: bool = False
    stream_options: _StreamOptions | None = None
    max_tokens: int | None = Field(None, ge=1)

    @field_validator("stop")
    @classmethod
    def _stops(cls, stop: str | list[str]) -> list[str]:
        stops = [stop] if isinstance(stop, str) else stop
        if len(stops) > 4:
            raise ValueError("at most 4 stop sequences are allowed")
        if any(not 1 <= len(one) <= 1000 for one in stops):
            raise ValueError("a stop sequence must have 1 to 1000 characters")
        return stops

    @model_validator(mode="after")
    def _options_of_a_stream(self) -> "_Request":
        if self.stream_options and not self.stream:
            raise ValueError("stream_options is only allowed when stream is true")
        return self

    @property
    def calls(self) -> bool:
        """True if calls of tools in the answer are to be read."""
        return False

    def described(self) -> list[dict[str, Any]]:
        """Return the tools as chat templates take them."""
        return []

    @property
    def variables(self) -> dict[str, Any]:
        """Variables of the chat template."""
        return {}

    @property
    def include_usage(self) -> bool:
        return bool(self.stream_options and self.stream_options.include_usage)

    @property
    def heat(self) -> float:
        """Temperature of sampling; 0 (greedy) if it is too small to divide by, or if top_p leaves only one token."""
        return self.temperature if self.temperature >= _GREEDY and self.top_p > 0 else 0.0


class ChatRequest(_Request):
    """Body of /v1/chat/completions."""

    messages: list[Message] = Field(min_length=1)
    max_completion_tokens: int | None = Field(None, ge=1)
    logprobs: bool = False
    top_logprobs: int = Field(0, ge=0, le=20)
    tools: list[_Tool] = Field([], max_length=128)
    chat_template_kwargs: dict[str, Any] = {}
    """Variables of the chat template; they replace those of the run. Not one of OpenAI's parameters."""
    tool_choice: Literal["auto", "none"] = "auto"
    """With `none`, the answer's text is not read for calls. The policy cannot be forced to call."""

    @model_validator(mode="after")
    def _logprobs_are_asked(self) -> "ChatRequest":
        if self.top_logprobs and not self.logprobs:
            raise ValueError("top_logprobs needs logprobs to be true")
        return self

    @property
    def top(self) -> int | None:
        """Number of likeliest tokens to return for each token; None for no log-probs."""
        return self.top_logprobs if self.logprobs else None

    @property
    def limit(self) -> int | None:
        """Token limit of the answer; None if the client has set none."""
        return self.max_completion_tokens or self.max_tokens

    @property
    def variables(self) -> dict[str, Any]:
        return self.chat_template_kwargs

    @property
    def calls(self) -> bool:
        return bool(self.tools) and self.tool_choice != "none"

    def described(self) -> list[dict[str, Any]]:
        return read_tools([tool.model_dump(exclude_unset=True) for tool in self.tools], "the request")

    def prompts(self) -> list[list[dict[str, Any]]]:
        try:
            return [[message.plain() for message in self.messages]]
        except DataError as error:  # what the form of a request allows, and is no conversation
            raise ApiError(400, str(error), param="messages") from None


class CompletionRequest(_Request):
    """Body of /v1/completions."""

    prompt: str | list[str] | list[int] | list[list[int]]
    logprobs: int | None = Field(None, ge=0, le=5)

    @property
    def top(self) -> int | None:
        return self.logprobs

    @property
    def limit(self) -> int | None:
        return self.max_tokens or 16  # OpenAI's default

    def prompts(self) -> list[str] | list[list[int]]:
        """Return the prompts, as texts or token ids."""
        if isinstance(self.prompt, str):
            return [self.prompt]
        if self.prompt and isinstance(self.prompt[0], int):
            return cast(list[list[int]], [self.prompt])
        return cast(list[str] | list[list[int]], self.prompt)


AnyRequest = TypeVar("AnyRequest", ChatRequest, CompletionRequest)


@dataclass(frozen=True, slots=True, kw_only=True)
class Usage:
    """Token counts of a request. Tokens of a prompt count once, whatever n is."""

    prompt_tokens: int
    completion_tokens: int

    def as_dict(self) -> dict[str, int]:
        total = self.prompt_tokens + self.completion_tokens
        return {
            "prompt_tokens": self.prompt_tokens,
            "completion_tokens": self.completion_tokens,
            "total_tokens": total,
        }


def parse(body: bytes, kind: type[AnyRequest]) -> AnyRequest:
    """Parse and validate the request in a body.

    Raises:
        ApiError: 400, with the name of the invalid parameter.
    """
    try:
        data = json.loads(body.decode("utf-8-sig"))  # given bytes, it takes UTF-16 and halves of surrogate pairs, too
        if b"\\u" in body:
            json.dumps(data, ensure_ascii=False).encode()  # an escape may be half of a surrogate pair, which is no text
    except (ValueError, RecursionError):
        raise ApiError(400, "the body is not valid JSON in UTF-8") from None
    if not isinstance(data, dict):
        raise ApiError(400, "the body must be a JSON object")
    for key in [key for key in data if key in _IGNORED or key in _NEUTRAL or data[key] is None]:
        value = data.pop(key)
        if value is not None and key in _NEUTRAL and value not in _NEUTRAL[key]:
            raise ApiError(400, f"{key} is not supported", param=key, code="unsupported_parameter")
    try:
        return kind.model_validate(data)
    except ValidationError as error:
        raise _invalid(error) from None


def _invalid(error: ValidationError) -> ApiError:
    items = error.errors(include_url=False)
    item = items[0]
    last = item["loc"][-1] if item["loc"] else 0
    if isinstance(last, str) and last not in _NAMES and item["type"] != "extra_forbidden":
        item = _of_union(items)
    # pydantic puts the types of a union into the path: messages, 0, content, list[_TextPart], 0, type
    path = [part for part in item["loc"] if isinstance(part, int) or part in _NAMES]
    param = "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in path).lstrip(".") or None
    if item["type"] == "extra_forbidden":
        unknown = shortened(str(item["loc"][-1]))
        return ApiError(400, f"unknown parameter: {unknown}", param=unknown, code="unknown_parameter")
    message = item["msg"].removeprefix("Value error, ")
    if item["type"] == "model_type":  # its message has the name of a class
        message = "Input should be an object"
    return ApiError(400, f"{param}: {message}" if param else message, param=param, code=_CODES.get(item["type"]))


def _of_union(items: Sequence[Any]) -> Any:
    """Return the error of the type that a value comes closest to, which is not the first of the union: the one that
    was read furthest. If there are several, the error names what came, and all that could have."""
    union = items[0]["loc"][:-1]
    items = [item for item in items if item["loc"][: len(union)] == union]
    deepest = max(items, key=lambda item: len(item["loc"]))
    last = deepest["loc"][len(union) + 1 :]
    alike = [item for item in items if item["loc"][len(union) + 1 :] == last]
    if len(alike) == 1:
        return deepest
    wanted = " or ".join(dict.fromkeys(item["msg"].removeprefix("Input should be ") for item in alike))
    return deepest | {"msg": f"Input should be {wanted}, not {_KINDS[type(deepest['input'])]}"}


_KINDS = {
    bool: "true or false",
    int: "a number",
    float: "a number",
    str: "a string",
    list: "a list",
    dict: "an object",
    type(None): "null",
}
"""JSON's names of values."""
_MODELS = (
    ChatRequest,
    CompletionRequest,
    Message,
    _TextPart,
    _StreamOptions,
    _Call,
    _CalledFunction,
    _Tool,
    _Function,
)
_NAMES = {name for model in _MODELS for name in model.model_fields}
_CODES = {"missing": "missing_required_parameter"}
