"""Prompts as tokens."""

import heapq
import inspect
import re
from collections.abc import Callable, Iterable, Mapping, Sequence, Sized
from itertools import takewhile
from typing import Any

import numpy as np

from qurl_ray.config.model import TINY_CHARACTERS
from qurl_ray.config.task import TaskConfig
from qurl_ray.errors import DataError
from qurl_ray.types import Problem

_MOST_CHECKED = 20_000
_VARIABLES = {"tools", "documents"}
"""Parameters of apply_chat_template that are variables of the template; all others say how it is rendered."""


def encode_prompt(problem: Problem, tokenizer: Any, task: TaskConfig) -> np.ndarray:
    r"""Token ids of a prompt, int32 [length].

    Messages, and with `task.chat` text as one user message, go through the tokenizer's chat template and are followed
    by the start of the assistant's turn; if the last message is the assistant's, the answer continues it. Other text
    gets `task.template`: only {prompt} is replaced in it, and other braces, as in \boxed{}, are kept.

    Raises:
        DataError: a chat template is missing or fails, or the prompt has no tokens.
    """
    if is_chat(problem, task):
        if tokenizer.chat_template is None:
            form = "a list of messages" if problem.messages else "to be a chat, by task.chat=true"
            raise DataError(f"{problem.uid} is {form}, and the tokenizer has no chat template: give it as text")
        try:
            ids = chat_ids(chat_messages(problem, tokenizer, task), tokenizer, chat_variables(problem, task))
        except Exception as error:  # the template is a program, which may raise anything
            message = f"the tokenizer's chat template failed on {problem.uid}: {type(error).__name__}: {error}"
            raise DataError(message) from error
    else:
        ids = text_ids(task.template.replace("{prompt}", problem.prompt), tokenizer)
    if len(ids) == 0:
        raise DataError(f"the prompt of {problem.uid} has no tokens: {problem.prompt[:80]!r}")
    return np.asarray(ids, dtype=np.int32)


def is_chat(problem: Problem, task: TaskConfig) -> bool:
    """True if a prompt goes through the tokenizer's chat template."""
    return problem.messages is not None or task.chat


def text_ids(text: str, tokenizer: Any) -> list[int]:
    """Return the token ids of a text, with one beginning token if the tokenizer writes it and the text has it, too."""
    return one_beginning(tokenizer(text)["input_ids"], tokenizer)


def chat_ids(messages: Sequence[dict[str, Any]], tokenizer: Any, variables: Mapping[str, Any]) -> list[int]:
    """Return the token ids of a conversation, as `conversation` has it, up to where an answer begins.

    Args:
        variables: of the chat template, by name.

    Raises:
        Exception: the template is a program, which may raise anything.
    """
    unfinished = is_unfinished(messages)
    ids = tokenizer.apply_chat_template(
        list(messages),
        add_generation_prompt=not unfinished,
        continue_final_message=unfinished,
        return_dict=False,
        **variables,
    )
    return one_beginning(ids, tokenizer)


def conversation(messages: Sequence[dict[str, Any]], tokenizer: Any, system_prompt: str | None) -> list[dict[str, Any]]:
    """Return messages with the system prompt, unless they begin with one of their own; without an empty message of the
    assistant at the end, which is where the answer goes; and without beginning tokens that the template writes."""
    turns = list(messages)
    if system_prompt is not None and turns[0]["role"] != "system":
        turns.insert(0, {"role": "system", "content": system_prompt})
    last = turns[-1]
    if last["role"] == "assistant" and not last["content"] and not last.get("tool_calls") and len(turns) > 1:
        turns.pop()
    if "bos_token" in str(tokenizer.chat_template) and (begin := tokenizer.bos_token):
        turns = [turn | {"content": turn["content"].removeprefix(begin)} for turn in turns]
    return turns


def is_unfinished(messages: Sequence[dict[str, Any]]) -> bool:
    """True if the last message is the beginning of an answer, which the policy continues."""
    return messages[-1]["role"] == "assistant" and not messages[-1].get("tool_calls")


def one_beginning(ids: list[int], tokenizer: Any) -> list[int]:
    """Return token ids without all but one of the beginning tokens that they start with."""
    begin = tokenizer.bos_token_id
    more = len(list(takewhile(lambda token: token == begin, ids))) - 1
    return ids[max(more, 0) :]


def chat_messages(problem: Problem, tokenizer: Any, task: TaskConfig) -> list[dict[str, Any]]:
    """Return the conversation that a prompt is."""
    messages = problem.messages or [{"role": "user", "content": problem.prompt}]
    return conversation(messages, tokenizer, task.system_prompt)


def chat_variables(problem: Problem, task: TaskConfig) -> dict[str, Any]:
    """Return the variables of the chat template: the problem's own come before those of the task."""
    return task.chat_template_args | problem.chat_template_args


def check_chat(task: TaskConfig, tokenizer: Any, problems: Sequence[Problem]) -> None:
    """Check that settings of the chat template, and variables that problems bring, have an effect on their prompts.

    Raises:
        DataError: prompts go through no chat template, or the template has no such variable.
    """
    given = ["task.system_prompt"] if task.system_prompt is not None else []
    origins = {name: f"task.chat_template_args.{name}" for name in task.chat_template_args}
    if "tools" in origins:
        origins["tools"] = "tools, of the environment or task.chat_template_args"
    given += origins.values()
    if given and not is_chat(problems[0], task):
        raise DataError(
            f"{' and '.join(given)}: prompts that are text go through the chat template with task.chat=true"
        )
    if (given or task.chat) and tokenizer.chat_template is None:
        raise DataError(f"{' and '.join(given or ['task.chat=true'])}: the tokenizer has no chat template")
    for name, origin in origins.items():
        check_variables([name], tokenizer, origin)
    for problem in problems:
        names = problem.chat_template_args
        where = f"{problem.uid} brings variables of the chat template, from tools or chat_template_kwargs"
        if names and not is_chat(problem, task):
            raise DataError(f"{where} ({', '.join(names)}): text goes through the template with task.chat=true")
        if "tools" in names and "tools" in task.chat_template_args:
            raise DataError(f"{where}: its tools would hide those of the environment, or of task.chat_template_args")
        check_variables(names, tokenizer, where)


def prompt_notes(problems: Sequence[Problem], tokenizer: Any, task: TaskConfig) -> list[str]:
    """Return sentences on prompts that hold what the tokenizer or its chat template writes, too."""
    begin, specials = tokenizer.bos_token, set(filter(None, tokenizer.all_special_tokens))
    begins = begin is not None and tokenizer("")["input_ids"][:1] == [tokenizer.bos_token_id]
    begun = marked = 0
    marks: set[str] = set()
    for problem in problems:
        if is_chat(problem, task):
            said = "\n".join(message["content"] for message in problem.messages or [{"content": problem.prompt}])
            there = {special for special in specials if special in said}
            marked, marks = marked + bool(there), marks | there
        else:
            begun += begins and task.template.replace("{prompt}", problem.prompt).startswith(begin)
    notes = []
    if begun:
        notes.append(f"{begun} prompts begin with {begin!r}, which the tokenizer writes, too: it is there once")
    if marked:
        names = ", ".join(map(repr, sorted(marks)))
        notes.append(
            f"{marked} prompts hold special tokens, {names}, and go through the chat template as well: if it "
            "made them already, give the messages themselves, or the text with task.chat=false"
        )
    return notes


def check_variables(names: Iterable[str], tokenizer: Any, where: str) -> None:
    """Check that the chat template uses variables. Jinja ignores those that it does not use.

    Raises:
        DataError: it does not, or a name is a parameter of the function that renders it.
    """
    rendering = {"messages", *inspect.signature(tokenizer.apply_chat_template).parameters} - _VARIABLES
    for name in names:
        if name in rendering:
            raise DataError(f"{where}: {name!r} is no variable of a chat template")
        if not re.search(rf"\b{re.escape(name)}\b", str(tokenizer.chat_template)):
            hint = (
                ": the prompt has to describe them, with environment.params.described=false" if name == "tools" else ""
            )
            raise DataError(f"{where}: the tokenizer's chat template has no variable {name!r}{hint}")


def check_characters(problems: Sequence[Problem]) -> None:
    """Raise DataError if a problem has characters that the tiny policy does not read."""
    unknown = sorted(set("".join(p.prompt + p.answer for p in problems)) - set(TINY_CHARACTERS))
    if unknown:
        raise DataError(f"the tiny policy reads {TINY_CHARACTERS!r} only, the task also has {''.join(unknown)!r}")


def check_lengths(
    problems: Sequence[Problem], encode: Callable[[Problem], Sized], *, max_new_tokens: int, context: int
) -> None:
    """Check that every prompt leaves room for max_new_tokens in the context. All lengths are in tokens.

    If there are more than 20,000 problems, only the 20,000 longest by characters are encoded.

    Raises:
        DataError: some prompts do not fit; the message names the longest one, and their number.
    """
    if len(problems) > _MOST_CHECKED:
        problems = heapq.nlargest(_MOST_CHECKED, problems, key=lambda problem: len(problem.prompt))
    lengths = [(len(encode(problem)), problem.uid) for problem in problems]
    too_long = [entry for entry in lengths if entry[0] + max_new_tokens > context]
    if not too_long:
        return
    length, uid = max(too_long)
    raise DataError(
        f"{uid}: prompt of {length} tokens + max_new_tokens {max_new_tokens} exceeds the context {context} "
        f"({len(too_long)} of {len(lengths)} prompts checked do); "
        "lower rollout.max_new_tokens or raise model.max_length"
    )
