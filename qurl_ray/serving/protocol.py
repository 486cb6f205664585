"""OpenAI's requests, with validation, and OpenAI's errors. Independent of HTTP and of engines."""

from typing import Annotated, Any, Literal, cast

from pydantic import BaseModel, ConfigDict, Field, ValidationInfo, field_validator, model_validator

from qurl_ray.errors import DataError
from qurl_ray.tools.messages import check_text, read_messages, read_tools

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
_NEUTRAL: dict[str, Any] = {
    "frequency_penalty": 0,
    "presence_penalty": 0,
    "logit_bias": {},
    "response_format": {"type": "text"},
    "parallel_tool_calls": True,
    "reasoning_effort": "none",
    "best_of": 1,
    "echo": False,
    "suffix": "",
}
"""OpenAI's parameters that are not supported, with the value that is accepted because it has no effect."""


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
    ) -> None:
        super().__init__(message)
        self.status, self.message, self.kind, self.param, self.code = status, message, kind, param, code

    def body(self) -> dict[str, Any]:
        return {"error": {"message": self.message, "type": self.kind, "param": self.param, "code": self.code}}


def unavailable() -> ApiError:
    """Return ApiError 503: there is no policy, or its engine has died and is being restarted."""
    return ApiError(503, "the policy is not available: try again", kind="server_error")


class _Request(BaseModel):
    """Parameters that both kinds of request have. A parameter that is null is absent."""

    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)

    model: str
    n: int = Field(1, ge=1)
    temperature: float = Field(1.0, ge=0, le=2)
    top_p: float = Field(1.0, ge=0, le=1)
    top_k: int = Field(0, ge=0)
    """Number of likeliest tokens to sample from; 0 keeps the whole vocabulary. Not one of OpenAI's parameters."""
    ignore_eos: bool = False
    """True to draw exactly max_tokens. Not one of OpenAI's parameters."""
    seed: int | None = Field(None, ge=-(2**63), lt=2**63)
    stop: list[Annotated[str, Field(min_length=1, max_length=1000)]] = Field([], max_length=4)
    stream: bool = False
    stream_options: dict[str, bool] = {}
    max_tokens: int | None = Field(None, ge=1)

    @model_validator(mode="before")
    @classmethod
    def _without_the_ineffective(cls, data: Any) -> Any:
        if not isinstance(data, dict):
            return data
        given = {key: value for key, value in data.items() if value is not None and key not in _IGNORED}
        return {key: value for key, value in given.items() if key not in _NEUTRAL or value != _NEUTRAL[key]}

    @field_validator("stop", mode="before")
    @classmethod
    def _several_stops(cls, stop: Any) -> Any:
        return [stop] if isinstance(stop, str) else stop

    @model_validator(mode="after")
    def _stream_has_options(self) -> "_Request":
        if self.stream_options and not self.stream:
            raise ValueError("stream_options is only allowed when stream is true")
        return self

    @property
    def include_usage(self) -> bool:
        return self.stream_options.get("include_usage", False)

    @property
    def sampling_temperature(self) -> float:
        """Temperature; 0 (greedy) if it is too small to divide by, or if top_p leaves only one token."""
        return self.temperature if self.temperature >= _GREEDY and self.top_p > 0 else 0.0


class ChatRequest(_Request):
    """Body of /v1/chat/completions."""

    messages: list[dict[str, Any]] = Field(min_length=1)
    """In the form that chat templates take, after validation."""
    max_completion_tokens: int | None = Field(None, ge=1)
    logprobs: bool = False
    top_logprobs: int = Field(0, ge=0, le=20)
    tools: list[dict[str, Any]] = Field([], max_length=128)
    """In the form that chat templates take, after validation."""
    tool_choice: Literal["auto", "none"] = "auto"
    """With `none`, the answer's text is not read for calls. The policy cannot be forced to call."""
    chat_template_kwargs: dict[str, Any] = {}
    """Variables of the chat template; they replace those of the run. Not one of OpenAI's parameters."""

    @field_validator("messages", "tools")
    @classmethod
    def _as_templates_take_them(cls, value: list[dict[str, Any]], info: ValidationInfo) -> list[dict[str, Any]]:
        read = read_messages if info.field_name == "messages" else read_tools
        try:
            check_text(value, "the request")
            return read(value, "the request")
        except DataError as error:
            raise ValueError(str(error)) from None

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
    def callable_tools(self) -> list[dict[str, Any]]:
        """Tools whose calls are to be read in the answer."""
        return self.tools if self.tool_choice == "auto" else []


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

    @property
    def prompts(self) -> list[str] | list[list[int]]:
        """Prompts, as texts or token ids."""
        if isinstance(self.prompt, str):
            return [self.prompt]
        if self.prompt and isinstance(self.prompt[0], int):
            return cast(list[list[int]], [self.prompt])
        return cast(list[str] | list[list[int]], self.prompt)
