"""One growing answer: its draws become text, log-probs and a finish reason."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

from transformers import PreTrainedTokenizerBase

from qurl_ray.engines.torch.batch import Draw
from qurl_ray.serving.text import Detokenizer, StopMatcher
from qurl_ray.tools.calls import CallReader, Part, ToolCall, ToolFormat
from qurl_ray.types import Finish

FinishReason = Literal["stop", "length", "tool_calls"]


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenLogprob:
    """A token with its log-prob."""

    draw: Draw
    at: int
    """Number of characters of the answer before this token."""


@dataclass(slots=True, kw_only=True)
class AnswerPart:
    """New part of an answer."""

    text: str = ""
    calls: list[tuple[int, ToolCall]] = field(default_factory=list)
    """Calls of tools with their numbers in the answer, from 0. Their text is not in `text`."""
    logprobs: list[TokenLogprob] = field(default_factory=list)
    finish: FinishReason | None = None

    def __add__(self, later: "AnswerPart") -> "AnswerPart":
        return AnswerPart(
            text=self.text + later.text,
            calls=self.calls + later.calls,
            logprobs=self.logprobs + later.logprobs,
            finish=later.finish,
        )


class Choice:
    """One answer, returned in parts while it is drawn.

    Args:
        stops: stop sequences; the answer ends before the first of them.
        stop_ids: tokens that end the answer and are not part of its text.
        calls: format of calls that are to be read; None reads none. What is no proper call stays text.
    """

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        *,
        stops: Sequence[str],
        stop_ids: Sequence[int],
        logprobs: bool,
        calls: ToolFormat | None = None,
    ) -> None:
        # The marks of calls are special tokens in some vocabularies.
        self._detokenizer = Detokenizer(tokenizer, skip_special=calls is None)
        self._stops = StopMatcher(stops)
        self._reader, self._calls = CallReader(calls) if calls else None, 0
        self._stop_ids, self._logprobs = frozenset(stop_ids), logprobs
        self._known = self._released = 0  # characters drawn, and characters returned
        self._pending: list[TokenLogprob] = []
        self.tokens = 0
        """Number of tokens drawn until the end, including stop tokens."""
        self.finish: FinishReason | None = None

    def feed(self, draws: Sequence[Draw], finish: Finish | None) -> AnswerPart:
        """Return the new part of the answer from these draws. Draws after the end are ignored."""
        part = AnswerPart()
        last = len(draws) - 1 if finish == "stop" else None
        for index, draw in enumerate(draws):
            if self.finish:
                return part
            self.tokens += 1
            if index == last and draw.token in self._stop_ids:
                continue
            if self._logprobs:
                self._pending.append(TokenLogprob(draw=draw, at=self._known))
            text = self._detokenizer.feed(draw.token)
            self._known += len(text)
            released, stopped = self._stops.feed(text)
            self._release(part, released)
            if stopped:
                self._close(part, "stop")
        if finish and not self.finish:
            text, stopped = self._stops.feed(self._detokenizer.flush())
            self._release(part, text if stopped else text + self._stops.flush())
            if not stopped:
                part.logprobs += self._pending  # tokens without text
            self._close(part, "stop" if stopped or finish == "stop" else "length")
        return part

    def _release(self, part: AnswerPart, text: str) -> None:
        self._add(part, self._reader.feed(text) if self._reader else [text])
        self._released += len(text)
        # A log-prob is returned with the first character of its token.
        count = next((i for i, entry in enumerate(self._pending) if entry.at >= self._released), len(self._pending))
        part.logprobs += self._pending[:count]
        del self._pending[:count]

    def _close(self, part: AnswerPart, finish: FinishReason) -> None:
        if self._reader:
            self._add(part, self._reader.end())
        self.finish = part.finish = "tool_calls" if self._calls and finish == "stop" else finish

    def _add(self, part: AnswerPart, pieces: Sequence[Part]) -> None:
        for piece in pieces:
            if isinstance(piece, ToolCall):
                part.calls.append((self._calls, piece))
                self._calls += 1
            else:
                part.text += piece if isinstance(piece, str) else piece.text
