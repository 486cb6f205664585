"""Calls of tools in the text of a turn, in the formats of chat templates.

format  a call                                                              of
hermes  <tool_call>{"name": "add", "arguments": {"a": 1}}</tool_call>       Qwen, Hermes; a turn may have several
llama   {"name": "add", "parameters": {"a": 1}}, which is the whole turn    Llama 3.1 to 3.3

Text in the form of a call is read strictly: anything else than one JSON object with these two keys is a BadCall, whose
message goes back to the policy.
"""

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, NoReturn

ToolFormat = Literal["hermes", "llama"]
FORMATS: tuple[ToolFormat, ...] = ("hermes", "llama")

EXAMPLES: dict[ToolFormat, str] = {
    "hermes": '<tool_call>{"name": …, "arguments": {…}}</tool_call>',
    "llama": '{"name": …, "parameters": {…}}',
}
"""A call in each format, for people."""

_OPENING, _CLOSING = "<tool_call>", "</tool_call>"
_ARGUMENTS = {"hermes": "arguments", "llama": "parameters"}
_LLAMA_TAG = "<|python_tag|>"
_LLAMA_STARTS = tuple(f'{{"{key}"' for key in ("name", "type", "parameters"))
"""Beginnings of a turn, without spaces, that make it a call; other JSON is an answer like any other."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolCall:
    """A call as the policy wrote it. Whether there is such a tool is not known."""

    name: str
    arguments: dict[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class BadCall:
    """Text that has the form of a call and is none."""

    text: str
    """As the policy wrote it."""
    problem: str
    """A sentence without a full stop, for the policy."""


Part = str | ToolCall | BadCall
"""Part of a turn, in the order of the text."""


def read_turn(text: str, format: ToolFormat) -> list[Part]:
    """Return the parts of a whole turn. Text between calls is left out if it is nothing but spaces."""
    reader = CallReader(format)
    return [*reader.feed(text), *reader.end()]


class CallReader:
    """Reader of a turn that arrives in pieces: the parts are the same however it is split, but for the pieces of text.
    Text that may be the beginning of a call is held back."""

    def __init__(self, format: ToolFormat) -> None:
        self._format = format
        self._held = ""
        self._in_call = False
        self._is_call: bool | None = None
        """In Llama's format: whether the turn is a call; None while it is too short to tell."""

    def feed(self, text: str) -> list[Part]:
        """Return the parts that are complete now."""
        self._held += text
        if self._format == "hermes":
            return self._hermes()
        if self._is_call is None:
            self._is_call = _begins_as_llama(self._held)
        if self._is_call is not False:  # a call is read at the end of the turn
            return []
        told, self._held = self._held, ""
        return [told] if told else []

    def end(self) -> list[Part]:
        """Return the rest, at the end of the turn."""
        held, self._held = self._held, ""
        if self._is_call:
            return [_call(held.strip().removeprefix(_LLAMA_TAG), "llama", held)]
        if self._in_call:
            return [BadCall(text=_OPENING + held, problem=f"the call has no {_CLOSING}")]
        return _texts(held)

    def _hermes(self) -> list[Part]:
        parts: list[Part] = []
        while True:
            mark = _CLOSING if self._in_call else _OPENING
            before, separator, after = self._held.partition(mark)
            if not separator:
                break
            parts += [_call(before, "hermes", _OPENING + before + _CLOSING)] if self._in_call else _texts(before)
            self._held, self._in_call = after, not self._in_call
        if not self._in_call:
            sure = self._held[: len(self._held) - overlap(self._held, _OPENING)].rstrip()
            parts += _texts(sure)
            self._held = self._held[len(sure) :]
        return parts


def _texts(text: str) -> list[Part]:
    kept = text.rstrip()  # spaces before a call, and at the end
    return [kept] if kept else []


def overlap(text: str, mark: str) -> int:
    """Length of the longest suffix of `text` that is a prefix of `mark`, but not the whole of it."""
    return next((n for n in range(min(len(text), len(mark) - 1), 0, -1) if text.endswith(mark[:n])), 0)


def _begins_as_llama(text: str) -> bool | None:
    """True if the text begins like a call, False if it does not, None if it is too short to tell."""
    text = text.lstrip()
    if text.startswith(_LLAMA_TAG):
        return True
    if _LLAMA_TAG.startswith(text):
        return None
    text = re.sub(r"\s", "", text)
    if text.startswith(_LLAMA_STARTS):
        return True
    return None if any(start.startswith(text) for start in _LLAMA_STARTS) else False


def _call(body: str, format: ToolFormat, written: str) -> ToolCall | BadCall:
    """Read the JSON of a call."""
    key = _ARGUMENTS[format]
    try:
        call = json.loads(body, object_pairs_hook=_without_repeats, parse_constant=_no_number)
    except (ValueError, RecursionError) as error:
        return BadCall(text=written, problem=f"the call is no JSON: {error}")
    if not isinstance(call, dict):
        return BadCall(text=written, problem="the call is no JSON object")
    if format == "llama" and call.get("type") == "function":
        del call["type"]
    if set(call) != {"name", key} or not isinstance(call["name"], str) or not isinstance(call[key], dict):
        return BadCall(text=written, problem=f'the call must have "name", which is text, and "{key}", an object')
    return ToolCall(name=call["name"], arguments=call[key])


def _without_repeats(pairs: Sequence[tuple[str, Any]]) -> dict[str, Any]:
    fields = dict(pairs)
    if len(fields) < len(pairs):
        raise ValueError("a key appears twice")
    return fields


def _no_number(name: str) -> NoReturn:
    raise ValueError(f"{name} is not JSON")
