"""Turns as tokens: what stands between the end of a turn of the policy and the start of its next one.

Nothing that the policy drew is encoded again. A chat template is rendered with a stand-in for the turn, and what it
writes after the stand-in follows the tokens that were drawn. Only where a new row begins, because the template writes
earlier turns otherwise than the policy drew them, is the whole conversation encoded: as the prompt of that row.
"""

import json
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from qurl_ray.config.task import TaskConfig
from qurl_ray.data.prompts import (
    chat_messages,
    chat_variables,
    encode_prompt,
    is_chat,
    is_unfinished,
    one_beginning,
)
from qurl_ray.errors import DataError
from qurl_ray.types import Problem

_TURN = "qurl turn 7f3a"
_SAID = "qurl said 9c1e {}."
"""Stand-ins for text. A template may not change them, and hardly any other text contains them."""
_THOUGHT = "<think>\nqurl thought 5d2b\n</think>\n\n"
_HIDDEN = "qurl hidden 3e8d"
"""Beginning of a stand-in for the text of a special token."""


@dataclass(frozen=True, slots=True, kw_only=True)
class History:
    """Conversation of a trajectory up to the start of a turn, and the row that the policy continues there."""

    messages: tuple[dict[str, Any], ...]
    spelled: tuple[frozenset[str], ...]
    """Texts of special tokens that are no special tokens in each message."""
    row: str
    """Text of the row, with each turn as the policy drew it."""
    begun: str = ""
    """Beginning of the first turn, which the prompt already holds."""


class TurnEncoder:
    """Encoder of what an environment says.

    Where prompts go through the chat template, it renders the messages. Their content never becomes a special token,
    whatever it is: what a tool returns cannot end a turn. Elsewhere, contents follow the turn as they are.

    Args:
        tokenizer: the policy's.
        stop_ids: tokens that end a turn.
    """

    def __init__(self, tokenizer: Any, task: TaskConfig, stop_ids: Sequence[int]) -> None:
        self._tokenizer, self._task, self._stop_ids = tokenizer, task, tuple(stop_ids)
        self._special = {token.content: i for i, token in tokenizer.added_tokens_decoder.items() if token.special}
        self._rendered: dict[str, str] = {}

    def opening(self, problem: Problem, said: Sequence[dict[str, Any]]) -> np.ndarray:
        """Return the tokens of a prompt and what an environment says after it, before the first turn, int32.

        Args:
            said: at least one message.

        Raises:
            DataError: the template fails, or does not take the messages as they are.
        """
        if not is_chat(problem, self._task):
            ids = encode_prompt(problem, self._tokenizer, self._task)
            return np.concatenate([ids, np.array(self._text_ids(_texts(said)), dtype=np.int32)])
        messages = [*self._messages(problem), *_stood_in(said)]
        return self._encoded(_filled(self._render(problem, messages, begin=True), said))

    def after(self, problem: Problem, drawn: np.ndarray, said: Sequence[dict[str, Any]]) -> np.ndarray:
        """Return the tokens that follow a turn, up to the start of the next one, int32.

        Args:
            drawn: tokens of the turn. If none of the stop tokens ends it, an end token comes first.
            said: at least one message.

        Raises:
            DataError: the template fails, or does not take the messages as they are.
        """
        ended = len(drawn) > 0 and int(drawn[-1]) in self._stop_ids
        if not is_chat(problem, self._task):
            end = [] if ended else [self._tokenizer.eos_token_id]
            return np.array(end + self._text_ids(_texts(said)), dtype=np.int32)
        text = self._after_turn(problem, said)
        if ended:
            text = text.removeprefix(self._tokenizer.decode([int(drawn[-1])]))
        return self._encoded(_filled(text, said))

    def history(self, problem: Problem, said: Sequence[dict[str, Any]]) -> History | None:
        """Return the history before the first turn; None if prompts do not go through a chat template, which could
        rewrite it.

        Args:
            said: what an environment says after the prompt, as for `opening`; it may be nothing.

        Raises:
            DataError: the template fails.
        """
        if not is_chat(problem, self._task):
            return None
        messages = tuple(self._messages(problem))
        spelled = (frozenset[str](),) * len(messages)  # as encode_prompt has it
        if not said and is_unfinished(messages):
            row, begun = self._render(problem, messages, unfinished=True), messages[-1]["content"]
            return History(messages=messages[:-1], spelled=spelled[:-1], row=row, begun=begun)
        return self._told(problem, History(messages=messages, spelled=spelled, row=""), said)

    def follow(
        self, problem: Problem, history: History, drawn: np.ndarray, text: str, said: Sequence[dict[str, Any]]
    ) -> tuple[History, np.ndarray | None]:
        """Return the history at the start of the next turn, and the prompt of a new row, int32, or None if the row goes
        on as `after` says: where the template writes the conversation as the row has it.

        The prompt is what the template makes of all messages, with the text of the policy's turns. A special token in
        it is the template's, the problem's, or one that the policy drew.

        Args:
            history: what `history`, or this function, returned before the turn.
            drawn: tokens of the turn, and `text` what they say without the end token.
            said: at least one message.

        Raises:
            DataError: the template fails.
        """
        turn = {"role": "assistant", "content": history.begun + text}
        kept = drawn[:-1] if len(drawn) and int(drawn[-1]) in self._stop_ids else drawn
        spelled = frozenset(s for s, i in self._special.items() if text.count(s) != (kept == i).sum())
        before = History(messages=(*history.messages, turn), spelled=(*history.spelled, spelled), row="")
        whole = self._told(problem, before, said)
        told = "".join(text for text, _ in _filled(self._after_turn(problem, said), said))
        goes_on = whole.row == history.row + text + told
        return whole, None if goes_on else self._prompt(problem, whole)

    def check(self, problem: Problem, *, keep_history: bool) -> None:
        """Check that turns can follow each other.

        Args:
            keep_history: a template that rewrites earlier turns is no error.

        Raises:
            DataError: the template fails, or rewrites earlier turns.
        """
        if not is_chat(problem, self._task):
            return
        said = [{"role": "user", "content": "and"}]
        self._after_turn(problem, said)
        turn = {"role": "assistant", "content": _THOUGHT + _TURN}
        messages = self._messages(problem)
        before = self._render(problem, [*messages, turn])
        after = self._render(problem, [*messages, turn, *said], begin=True)
        if not keep_history and not after.startswith(before[: before.index(_TURN)]):
            raise DataError(
                "the tokenizer's chat template rewrites earlier turns, for example removes their thoughts, so that a "
                "trajectory is not what the policy drew: set environment.rewritten_history=keep to leave them as they "
                "were drawn, environment.rewritten_history=new_row to go on in a new row, or use another template"
            )

    def _after_turn(self, problem: Problem, said: Sequence[dict[str, Any]]) -> str:
        """Return what the template writes after the policy's text, with stand-ins for what is said."""
        without = [{k: v for k, v in m.items() if k != "content"} for m in said]
        key = json.dumps([problem.chat_template_args, without], default=str)
        if key not in self._rendered:
            turn = {"role": "assistant", "content": _TURN}
            text = self._render(problem, [*self._messages(problem), turn, *_stood_in(said)], begin=True)
            if _TURN not in text:
                raise DataError("the tokenizer's chat template does not take the text of a turn as it is")
            self._rendered[key] = text.partition(_TURN)[2]
        return self._rendered[key]

    def _told(self, problem: Problem, history: History, said: Sequence[dict[str, Any]]) -> History:
        """Return the history with what was said; its row is what the template makes of all messages."""
        messages = (*history.messages, *said)
        spelled = (*history.spelled, *[frozenset(self._special)] * len(said))
        return History(messages=messages, spelled=spelled, row=self._render(problem, messages, begin=True))

    def _prompt(self, problem: Problem, history: History) -> np.ndarray:
        """Return the tokens of a conversation as the template writes it, up to the start of the next turn."""
        hidden: list[str] = []
        stand_in = _HIDDEN
        while any(stand_in in str(message.get("content")) for message in history.messages):
            stand_in += "x"

        def hide(match: re.Match) -> str:
            hidden.append(match[0])
            return f"{stand_in} {len(hidden) - 1}."

        messages = []
        for message, spelled in zip(history.messages, history.spelled, strict=True):
            if spelled:
                longest_first = sorted(spelled, key=len, reverse=True)
                content = re.sub("|".join(map(re.escape, longest_first)), hide, message["content"])
                message = message | {"content": content}
            messages.append(message)
        parts = re.split(rf"{stand_in} (\d+)\.", self._render(problem, messages, begin=True))
        return self._encoded((hidden[int(part)], True) if n % 2 else (part, False) for n, part in enumerate(parts))

    def _encoded(self, parts: Iterable[tuple[str, bool]]) -> np.ndarray:
        """Return the tokens of texts, each with True if none of them is to be special, int32."""
        ids: list[int] = []
        for part, is_content in parts:
            if is_content:
                ids += self._text_ids(part)
            else:
                ids += self._tokenizer(part, add_special_tokens=False)["input_ids"]
        return np.array(one_beginning(ids, self._tokenizer), dtype=np.int32)

    def _messages(self, problem: Problem) -> list[dict[str, Any]]:
        return chat_messages(problem, self._tokenizer, self._task)

    def _render(
        self, problem: Problem, messages: Sequence[dict[str, Any]], *, begin: bool = False, unfinished: bool = False
    ) -> str:
        """Return what the template makes of messages.

        Args:
            begin: the start of the next turn follows.
            unfinished: the last message is the beginning of a turn.
        """
        try:
            return self._tokenizer.apply_chat_template(
                list(messages),
                add_generation_prompt=begin,
                continue_final_message=unfinished,
                tokenize=False,
                **chat_variables(problem, self._task),
            )
        except Exception as error:  # the template is a program, which may raise anything
            roles = ", ".join(str(message.get("role")) for message in messages)
            message = f"the tokenizer's chat template failed on messages of {roles}: {type(error).__name__}: {error}"
            raise DataError(message) from error

    def _text_ids(self, text: str) -> list[int]:
        """Return the tokens of a text, none of them special."""
        return self._tokenizer(text, add_special_tokens=False, split_special_tokens=True)["input_ids"]


def _stood_in(said: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    return [message | {"content": _SAID.format(number)} for number, message in enumerate(said)]


def _filled(text: str, said: Sequence[dict[str, Any]]) -> Iterator[tuple[str, bool]]:
    """Yield the parts of a rendered text, and True for those that were said, in the places of their stand-ins.

    Raises:
        DataError: a stand-in is missing.
    """
    for number, message in enumerate(said):
        before, stand_in, text = text.partition(_SAID.format(number))
        if not stand_in:
            role = message.get("role")
            raise DataError(f"the tokenizer's chat template does not take a message of {role!r} as it is")
        quoted = before.endswith('"') and text.startswith('"')  # Llama's template writes results as JSON
        yield before, False
        yield (json.dumps(message["content"], ensure_ascii=False)[1:-1] if quoted else message["content"]), True
    yield text, False


def _texts(said: Sequence[dict[str, Any]]) -> str:
    return "".join(message["content"] for message in said)
