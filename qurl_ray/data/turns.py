"""Turns as tokens: what stands between the end of a turn of the policy and the start of its next one.

Nothing that the policy drew is encoded again. A chat template is rendered with a stand-in for the turn, and what it
writes after the stand-in follows the tokens that were drawn.
"""

import json
from collections.abc import Sequence
from typing import Any

import numpy as np

from qurl_ray.config.task import TaskConfig
from qurl_ray.data.prompts import chat_messages, encode_prompt, is_chat
from qurl_ray.errors import DataError
from qurl_ray.types import Problem

_TURN = "qurl turn 7f3a"
_SAID = "qurl said 9c1e {}."
"""Stand-ins for text. A template may not change them, and hardly any other text contains them."""
_THOUGHT = "<think>\nqurl thought 5d2b\n</think>\n\n"


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
        self._rendered: dict[str, str] = {}

    def opening(self, problem: Problem, said: Sequence[dict[str, Any]]) -> np.ndarray:
        """Return the tokens of a prompt and what an environment says after it, before the first turn, int32.

        Args:
            said: at least one message.

        Raises:
            DataError: the template fails, or does not take the messages as they are.
        """
        if not is_chat(problem, self._tokenizer, self._task):
            ids = encode_prompt(problem, self._tokenizer, self._task)
            return np.concatenate([ids, np.array(self._text_ids(_texts(said)), dtype=np.int32)])
        messages = [*chat_messages(problem, self._task), *_stood_in(said)]
        return self._encoded(self._render(messages, begin=True), said)

    def after(self, problem: Problem, drawn: np.ndarray, said: Sequence[dict[str, Any]]) -> np.ndarray:
        """Return the tokens that follow a turn, up to the start of the next one, int32.

        Args:
            drawn: tokens of the turn. If none of the stop tokens ends it, an end token comes first.
            said: at least one message.

        Raises:
            DataError: the template fails, or does not take the messages as they are.
        """
        ended = len(drawn) > 0 and int(drawn[-1]) in self._stop_ids
        if not is_chat(problem, self._tokenizer, self._task):
            end = [] if ended else [self._tokenizer.eos_token_id]
            return np.array(end + self._text_ids(_texts(said)), dtype=np.int32)
        text = self._after_turn(problem, said)
        if ended:
            text = text.removeprefix(self._tokenizer.decode([int(drawn[-1])]))
        return self._encoded(text, said)

    def check(self, problem: Problem, *, keep_history: bool) -> None:
        """Check that turns can follow each other.

        Args:
            keep_history: a template that rewrites earlier turns is no error.

        Raises:
            DataError: the template fails, or rewrites earlier turns.
        """
        if not is_chat(problem, self._tokenizer, self._task):
            return
        said = [{"role": "user", "content": "and"}]
        self._after_turn(problem, said)
        turn = {"role": "assistant", "content": _THOUGHT + _TURN}
        messages = chat_messages(problem, self._task)
        before, after = self._render([*messages, turn]), self._render([*messages, turn, *said], begin=True)
        if not keep_history and not after.startswith(before[: before.index(_TURN)]):
            raise DataError(
                "the tokenizer's chat template rewrites earlier turns, for example removes their thoughts, so that a "
                "trajectory is not what the policy drew: set environment.rewritten_history=keep to leave them as they "
                "were drawn, or use another template"
            )

    def _after_turn(self, problem: Problem, said: Sequence[dict[str, Any]]) -> str:
        """Return what the template writes after the policy's text, with stand-ins for what is said."""
        key = json.dumps([{k: v for k, v in m.items() if k != "content"} for m in said], default=str)
        if key not in self._rendered:
            turn = {"role": "assistant", "content": _TURN}
            text = self._render([*chat_messages(problem, self._task), turn, *_stood_in(said)], begin=True)
            if _TURN not in text:
                raise DataError("the tokenizer's chat template does not take the text of a turn as it is")
            self._rendered[key] = text.partition(_TURN)[2]
        return self._rendered[key]

    def _encoded(self, text: str, said: Sequence[dict[str, Any]]) -> np.ndarray:
        """Return the tokens of a rendered text, with what was said in the places of its stand-ins."""
        ids: list[int] = []
        for number, message in enumerate(said):
            before, found, text = text.partition(_SAID.format(number))
            if not found:
                role = message.get("role")
                raise DataError(f"the tokenizer's chat template does not take a message of {role!r} as it is")
            quoted = before.endswith('"') and text.startswith('"')  # Llama's template writes results as JSON
            content = json.dumps(message["content"], ensure_ascii=False)[1:-1] if quoted else message["content"]
            ids += self._tokenizer(before, add_special_tokens=False)["input_ids"]
            ids += self._text_ids(content)
        return np.array(ids + self._tokenizer(text, add_special_tokens=False)["input_ids"], dtype=np.int32)

    def _render(self, messages: Sequence[dict[str, Any]], *, begin: bool = False) -> str:
        try:
            return self._tokenizer.apply_chat_template(
                list(messages), add_generation_prompt=begin, tokenize=False, **self._task.chat_template_args
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


def _texts(said: Sequence[dict[str, Any]]) -> str:
    return "".join(message["content"] for message in said)
