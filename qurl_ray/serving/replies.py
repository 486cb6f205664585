"""Replies to clients in OpenAI's format: whole, or as server-sent events."""

import json
import secrets
import time
from collections.abc import AsyncGenerator, Sequence
from typing import Any

from transformers import PreTrainedTokenizerBase

from qurl_ray.errors import EngineError
from qurl_ray.serving.choice import AnswerPart, TokenLogprob
from qurl_ray.serving.protocol import ChatRequest, CompletionRequest, unavailable
from qurl_ray.serving.served import Answer
from qurl_ray.tools.calls import ToolCall

_LEAST = -9999.0  # JSON has no infinity, and OpenAI writes this for very unlikely tokens


def event(record: dict[str, Any]) -> bytes:
    """Return a record as an event of a stream."""
    return b"data: " + json.dumps(record, ensure_ascii=False, separators=(",", ":")).encode() + b"\n\n"


class Reply:
    """Reply to one request. Every record of it names the model with its version."""

    def __init__(self, request: ChatRequest | CompletionRequest, answer: Answer) -> None:
        self._request, self._answer = request, answer
        self._chat = isinstance(request, ChatRequest)
        self._head = {
            "id": ("chatcmpl-" if self._chat else "cmpl-") + secrets.token_hex(12),
            "object": "chat.completion" if self._chat else "text_completion",
            "created": int(time.time()),
            "model": answer.adapter.model,
            "system_fingerprint": f"fp_{answer.adapter.fingerprint}",
        }

    async def whole(self) -> dict[str, Any]:
        """Return the whole reply. Raise EngineError if the engine dies."""
        choices = []
        for index, part in enumerate(await self._answer.whole()):
            content: dict[str, Any] = {"text": part.text}
            if self._chat:
                message: dict[str, Any] = {"role": "assistant", "content": part.text, "refusal": None}
                if part.calls:
                    message |= {"content": part.text or None, "tool_calls": [_call(call) for _, call in part.calls]}
                content = {"message": message}
            choices.append(self._choice(index, content, part))
        return self._head | {"choices": choices, "usage": self._answer.usage}

    async def events(self) -> AsyncGenerator[bytes]:
        """Yield the bytes of one or more new events at a time. If the engine dies, the last event is the error."""
        if self._chat:
            self._head["object"] = "chat.completion.chunk"
            first = {"delta": {"role": "assistant", "content": ""}}
            yield b"".join(self._event([self._choice(i, first, AnswerPart())]) for i in range(self._answer.count))
        try:
            async for news in self._answer.parts():
                told = [(i, part) for i, part in news if part.text or part.calls or part.logprobs or part.finish]
                if told:
                    yield b"".join(self._event([self._choice(i, self._delta(part), part)]) for i, part in told)
        except EngineError:
            yield event(unavailable().body())
            return
        if self._request.include_usage:
            yield self._event([])
        yield b"data: [DONE]\n\n"

    def _event(self, choices: list[dict[str, Any]]) -> bytes:
        """Return the event of a choice; without one, the last event, which has the usage."""
        usage = {"usage": None if choices else self._answer.usage} if self._request.include_usage else {}
        return event(self._head | {"choices": choices} | usage)

    def _delta(self, part: AnswerPart) -> dict[str, Any]:
        if not self._chat:
            return {"text": part.text}
        delta: dict[str, Any] = {"content": part.text} if part.text or part.logprobs else {}
        if part.calls:  # a stream has the whole call in one piece, since it is checked as a whole
            delta["tool_calls"] = [{"index": number} | _call(call) for number, call in part.calls]
        return {"delta": delta}

    def _choice(self, index: int, content: dict[str, Any], part: AnswerPart) -> dict[str, Any]:
        logprobs = None
        if self._request.top is not None and (part.logprobs or not self._request.stream):
            write = _chat_logprobs if self._chat else _completion_logprobs
            logprobs = write(part.logprobs, self._answer.served.tokenizer)
        return {"index": index, **content, "logprobs": logprobs, "finish_reason": part.finish}


def _call(call: ToolCall) -> dict[str, Any]:
    function = {"name": call.name, "arguments": json.dumps(call.arguments, ensure_ascii=False)}
    return {"id": f"call_{secrets.token_hex(12)}", "type": "function", "function": function}


def _chat_logprobs(logprobs: Sequence[TokenLogprob], tokenizer: PreTrainedTokenizerBase) -> dict[str, Any]:
    def written(token: int, logprob: float | None) -> dict[str, Any]:
        text = token_text(tokenizer, token)
        return {"token": text, "logprob": max(logprob or 0.0, _LEAST), "bytes": list(text.encode())}

    content = [
        written(entry.draw.token, entry.draw.logprob)
        | {"top_logprobs": [written(token, logprob) for token, logprob in entry.draw.top]}
        for entry in logprobs
    ]
    return {"content": content, "refusal": None}


def _completion_logprobs(logprobs: Sequence[TokenLogprob], tokenizer: PreTrainedTokenizerBase) -> dict[str, Any]:
    """As at OpenAI, the likeliest tokens include the drawn one."""
    drawn = [(token_text(tokenizer, entry.draw.token), max(entry.draw.logprob or 0.0, _LEAST)) for entry in logprobs]
    tops = [
        {token_text(tokenizer, token): max(logprob, _LEAST) for token, logprob in entry.draw.top} | dict([own])
        for entry, own in zip(logprobs, drawn, strict=True)
    ]
    return {
        "tokens": [text for text, _ in drawn],
        "token_logprobs": [logprob for _, logprob in drawn],
        "top_logprobs": tops,
        "text_offset": [entry.at for entry in logprobs],
    }


def token_text(tokenizer: PreTrainedTokenizerBase, token: int) -> str:
    """Return the text of a token alone. Bytes that are no whole character are U+FFFD, as at vLLM."""
    piece = tokenizer.convert_ids_to_tokens(token) or ""  # None beyond the vocabulary, with which some heads are padded
    if piece.startswith("▁"):  # decoded alone, it would lose the space
        return piece.replace("▁", " ")
    return tokenizer.decode([token], clean_up_tokenization_spaces=False) if piece else ""
