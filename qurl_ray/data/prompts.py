"""Prompts as tokens."""

import heapq
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np

from qurl_ray.config.task import TaskConfig
from qurl_ray.errors import DataError
from qurl_ray.types import Problem

_MOST_CHECKED = 20_000


def encode_prompt(problem: Problem, tokenizer: Any, task: TaskConfig) -> np.ndarray:
    r"""Token ids of a prompt, int32 [length].

    Messages, and with `task.chat` text as one user message, go through the tokenizer's chat template and are followed
    by the start of the assistant's turn; if the last message is the assistant's, the answer continues it. Other text,
    and all text if the tokenizer has no chat template, gets `task.template`: only {prompt} is replaced in it, and other
    braces, as in \boxed{}, are kept.

    Raises:
        DataError: messages without a chat template, a template that fails, or a prompt without tokens.
    """
    if is_chat(problem, tokenizer, task):
        ids = _chat_ids(problem, tokenizer, task)
    else:
        ids = tokenizer(task.template.replace("{prompt}", problem.prompt))["input_ids"]
    if len(ids) == 0:
        raise DataError(f"the prompt of {problem.uid} has no tokens: {problem.prompt[:80]!r}")
    return np.asarray(ids, dtype=np.int32)


def is_chat(problem: Problem, tokenizer: Any, task: TaskConfig) -> bool:
    """True if a prompt goes through the tokenizer's chat template."""
    return problem.messages is not None or (task.chat and tokenizer.chat_template is not None)


def check_chat(task: TaskConfig, tokenizer: Any, problem: Problem) -> None:
    """Check that settings of the chat template have an effect on prompts such as this one.

    Raises:
        DataError: the prompt goes through no chat template, or the template has no such variable.
    """
    given = ["task.system_prompt"] if task.system_prompt is not None else []
    if task.chat_template_args:
        given.append(f"task.chat_template_args ({', '.join(task.chat_template_args)})")
    if not given:
        return
    if tokenizer.chat_template is None:
        raise DataError(f"{' and '.join(given)}: the tokenizer has no chat template")
    if problem.messages is None and not task.chat:
        raise DataError(
            f"{' and '.join(given)}: prompts that are text go through the chat template with task.chat=true"
        )
    for name in task.chat_template_args:
        if name not in str(tokenizer.chat_template):  # Jinja ignores variables that a template does not use
            hint = (
                ": the prompt has to describe them, with environment.params.described=false" if name == "tools" else ""
            )
            raise DataError(f"task.chat_template_args: the tokenizer's chat template has no variable {name!r}{hint}")


def chat_messages(problem: Problem, task: TaskConfig) -> list[dict[str, Any]]:
    """Return the conversation that a prompt is, with the system message that `task` adds."""
    messages = problem.messages or [{"role": "user", "content": problem.prompt}]
    if task.system_prompt is not None and messages[0]["role"] != "system":
        return [{"role": "system", "content": task.system_prompt}, *messages]
    return messages


def _chat_ids(problem: Problem, tokenizer: Any, task: TaskConfig) -> list[int]:
    if tokenizer.chat_template is None:
        raise DataError(f"{problem.uid} is a list of messages, and the tokenizer has no chat template: give it as text")
    messages = chat_messages(problem, task)
    goes_on = messages[-1]["role"] == "assistant"
    try:
        return tokenizer.apply_chat_template(
            messages,
            add_generation_prompt=not goes_on,
            continue_final_message=goes_on,
            return_dict=False,
            **task.chat_template_args,
        )
    except Exception as error:  # the template is a program, which may raise anything
        message = f"the tokenizer's chat template failed on {problem.uid}: {type(error).__name__}: {error}"
        raise DataError(message) from error


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
