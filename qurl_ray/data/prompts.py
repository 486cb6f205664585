"""Prompts as tokens."""

import heapq
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np

from qurl_ray.errors import DataError
from qurl_ray.types import Problem

_MOST_CHECKED = 20_000


def encode_prompt(problem: Problem, tokenizer: Any, *, template: str, chat: bool) -> np.ndarray:
    r"""Token ids of a prompt, int32 [length].

    With `chat` and a tokenizer that has a chat template, the prompt is one user message, followed by
    the start of the assistant's turn. Otherwise `template` is used. Only {prompt} is replaced in it:
    other braces, as in \boxed{}, are kept.

    Raises:
        DataError: the chat template fails, or the prompt has no tokens.
    """
    if chat and tokenizer.chat_template is not None:
        messages = [{"role": "user", "content": problem.prompt}]
        try:
            ids = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)
        except Exception as error:  # the template is a program, which may raise anything
            message = f"the tokenizer's chat template failed on {problem.uid}: {type(error).__name__}: {error}"
            raise DataError(message) from error
    else:
        ids = tokenizer(template.replace("{prompt}", problem.prompt))["input_ids"]
    if len(ids) == 0:
        raise DataError(f"the prompt of {problem.uid} has no tokens: {problem.prompt[:80]!r}")
    return np.asarray(ids, dtype=np.int32)


def check_lengths(
    problems: Sequence[Problem], encode: Callable[[Problem], np.ndarray], *, max_new_tokens: int, context: int
) -> None:
    """Check that every prompt leaves room for max_new_tokens in the context. All lengths are in tokens.

    If there are more than 20,000 problems, only the 20,000 longest by characters are encoded.

    Raises:
        DataError: some prompts do not fit; the message names the longest one, and their number.
    """
    lengths = [(len(encode(problem)), problem.uid) for problem in _longest(problems)]
    too_long = [entry for entry in lengths if entry[0] + max_new_tokens > context]
    if not too_long:
        return
    length, uid = max(too_long)
    raise DataError(
        f"{uid}: prompt of {length} tokens + max_new_tokens {max_new_tokens} exceeds the context {context} "
        f"({len(too_long)} of {len(lengths)} prompts checked do); "
        "lower rollout.max_new_tokens or raise model.max_length"
    )


def _longest(problems: Sequence[Problem]) -> Iterable[Problem]:
    if len(problems) <= _MOST_CHECKED:
        return problems
    return heapq.nlargest(_MOST_CHECKED, problems, key=lambda problem: len(problem.prompt))
