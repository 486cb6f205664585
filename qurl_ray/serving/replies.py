"""Replies to clients in OpenAI's format: whole, or as server-sent events."""

import json
import secrets
import time
from collections.abc import AsyncGenerator, Sequence
from typing import Any

from qurl_ray.serving.choice import AnswerPart, TokenLogprob, chat_logprobs, completion_logprobs
from qurl_ray.serving.protocol import ChatRequest, CompletionRequest, event
from qurl_ray.serving.served import Answer
from qurl_ray.tools.calls import ToolCall

DONE = b"data: [DONE]\n\n"


class Reply:
    """Reply to one request. Every record of it names the model with its version."""

    def __init__(self, request: ChatRequest | CompletionRequest, answer: Answer) -> None:
        self._request, self._answer = request, answer
        self._chat = isinstance(request, ChatRequest)
        self._head = {
            "id": ("chatcmpl-" if self._chat else "cmpl-") + secrets.token_hex(12),
            "object": "",
            "created": int(time.time()),
            "model": answer.served.model,
            "system_fingerprint": f"fp_{answer.served.fingerprint}",
        }

    async def whole(self) -> dict[str, Any]:
        """Return the whole reply. Raise EngineError if the engine dies."""
        parts = await self._answer.whole()
        kind = "chat.completion" if self._chat else "text_completion"
        choices = [self._choice(index, part) for index, part in enumerate(parts)]
        return self._head | {"object": kind, "choices": choices, "usage": self._answer.usage.as_dict()}

    async def events(self) -> AsyncGenerator[bytes]:
        """Yield the bytes of one or more new events at a time. Raise EngineError if the engine dies."""
        if self._chat:
            roles = [self._delta(index, {"role": "assistant", "content": ""}) for index in range(self._answer.count)]
            yield b"".join(map(self._event, roles))
        async for news in self._answer.parts():
            told = [(index, part) for index, part in news if part.text or part.calls or part.logprobs or part.finish]
            if told:
                yield b"".join(self._event(self._chunk(index, part)) for index, part in told)
        if self._request.include_usage:
            yield self._event(None)
        yield DONE

    def _event(self, choice: dict[str, Any] | None) -> bytes:
        """Return the event of a choice; for None, the last event, which has the usage."""
        kind = "chat.completion.chunk" if self._chat else "text_completion"
        record = self._head | {"object": kind, "choices": [choice] if choice else []}
        if self._request.include_usage:
            record["usage"] = None if choice else self._answer.usage.as_dict()
        return event(record)

    def _chunk(self, index: int, part: AnswerPart) -> dict[str, Any]:
        if not self._chat:
            return self._choice(index, part)
        delta: dict[str, Any] = {"content": part.text} if part.text or part.logprobs else {}
        if part.calls:
            delta["tool_calls"] = [{"index": number} | _call(call) for number, call in part.calls]
        return self._delta(index, delta, part)

    def _delta(self, index: int, delta: dict[str, Any], part: AnswerPart | None = None) -> dict[str, Any]:
        return {
            "index": index,
            "delta": delta,
            "logprobs": self._logprobs(part.logprobs) if part and part.logprobs else None,
            "finish_reason": part.finish if part else None,
        }

    def _choice(self, index: int, part: AnswerPart) -> dict[str, Any]:
        if self._chat:
            message: dict[str, Any] = {"role": "assistant", "content": part.text, "refusal": None}
            if part.calls:
                message |= {"content": part.text or None, "tool_calls": [_call(call) for _, call in part.calls]}
            content: dict[str, Any] = {"message": message}
        else:
            content = {"text": part.text}
        logprobs = self._logprobs(part.logprobs)
        return {"index": index, **content, "logprobs": logprobs, "finish_reason": part.finish}

    def _logprobs(self, logprobs: Sequence[TokenLogprob]) -> dict[str, Any] | None:
        if self._request.top is None:
            return None
        write = chat_logprobs if self._chat else completion_logprobs
        return write(logprobs, self._answer.served.token_bytes)


def _call(call: ToolCall) -> dict[str, Any]:
    """Return a call in OpenAI's format. A stream has the whole call in one piece, since it is checked as a whole."""
    arguments = json.dumps(call.arguments, ensure_ascii=False)
    function = {"name": call.name, "arguments": arguments}
    return {"id": f"call_{secrets.token_hex(12)}", "type": "function", "function": function}
