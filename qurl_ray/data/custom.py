"""Problems that a user's own function generates or reads."""

from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Any

from qurl_ray.config.shown import shown
from qurl_ray.config.task import CustomTask
from qurl_ray.data.split import Split, disjoint, held_out_from
from qurl_ray.errors import DataError, QurlError
from qurl_ray.extensions import announced_if_slow, described
from qurl_ray.tables import PROBLEMS
from qurl_ray.tools.messages import (
    check_text,
    conversation_in,
    is_conversation,
    read_messages,
    read_variables,
    split_last_turn,
    text_of,
)
from qurl_ray.types import Problem

_KEYS = ("prompt", "answer", "meta", "uid", "tools", "chat_template_kwargs")


def custom_split(task: CustomTask) -> Split:
    """Call `task.problems` with `task.params` and split the problems that it returns.

    The function returns or yields problems. Each is a Problem, or a mapping with a prompt (text or a list of messages)
    and optionally an answer and meta (plain JSON values for the reward). The last held_out_share of them are held out.
    Alternatively, the function returns a mapping with the keys train and held_out, each of which holds problems.

    Raises:
        DataError: the function cannot be imported, raises, or returns something else.
    """
    function = PROBLEMS.load(task.problems)
    try:
        with announced_if_slow(f"task.problems={task.problems}"):
            made = function(**task.params)
        if isinstance(made, Mapping):
            if set(made) != {"train", "held_out"}:
                raise DataError(
                    f"it returned a mapping with the keys {sorted(map(str, made))}, expected train, held_out"
                )
            train, held_out = (_problems(made[part], part, task.last_turn) for part in ("train", "held_out"))
        else:
            train, held_out = held_out_from(
                _problems(made, "train", task.last_turn),
                task.held_out_share,
                source=task.problems,
                remedy="return train and held_out",
            )
    except QurlError as error:
        raise DataError(f"task.problems={task.problems}: {error}") from error
    except (Exception, SystemExit) as error:  # a user's function may raise anything
        made_with = f"task.problems={task.problems} failed with task.params {shown(task.params)}"
        raise DataError(f"{made_with}: {described(error)}") from error
    uids = Counter(problem.uid for problem in (*train, *held_out))
    if repeated := [uid for uid, count in uids.items() if count > 1]:
        raise DataError(f"task.problems={task.problems} gave several problems with the uid {repeated[0]!r}")
    if not held_out:
        raise DataError(f"task.problems={task.problems} gave no held-out problems")
    return disjoint(train, held_out, source=task.problems, meta=True)


def _problems(made: Any, prefix: str, last_turn: str) -> list[Problem]:
    if not isinstance(made, Iterable) or isinstance(made, str | bytes):
        raise DataError(f"it returned {type(made).__name__}, expected problems")
    return [_problem(item, f"{prefix}-{index}", last_turn) for index, item in enumerate(made)]


def _problem(item: Any, uid: str, last_turn: str) -> Problem:
    if isinstance(item, Problem):
        asked = item.messages or item.prompt
        fields = {"prompt": asked, "answer": item.answer, "meta": item.meta, "uid": item.uid or uid}
        item = fields | {"chat_template_kwargs": item.chat_template_args}
    if not isinstance(item, Mapping):
        raise DataError(f"problem {uid} is {type(item).__name__}, expected a Problem or a mapping with a prompt")
    if unknown := [key for key in item if key not in _KEYS]:
        raise DataError(f"problem {uid} has the key {unknown[0]!r}; known are {', '.join(_KEYS)}: put others into meta")
    prompt, answer, meta = item.get("prompt"), item.get("answer"), item.get("meta") or {}
    if isinstance(prompt, str) and conversation_in(prompt, f"problem {uid}"):
        raise DataError(f"the prompt of problem {uid} is JSON text of messages: give the list itself")
    messages = read_messages(prompt, f"problem {uid}") if is_conversation(prompt) else None
    if messages:
        messages, said = split_last_turn(messages, last_turn, f"problem {uid}")
        answer = said if answer is None else answer
        prompt = text_of(messages)
    if not isinstance(prompt, str) or not prompt.strip():
        raise DataError(f"problem {uid} has no prompt")
    if not isinstance(meta, Mapping):
        raise DataError(f"the meta of problem {uid} is {type(meta).__name__}, expected a mapping")
    answer = "" if answer is None else str(answer)  # None where the reward knows right answers when it sees them
    made = Problem(
        uid=str(item.get("uid", uid)),
        prompt=prompt,
        answer=answer,
        meta=dict(meta),
        messages=messages,
        chat_template_args=read_variables(item, f"problem {uid}"),
    )
    check_text([made.prompt, made.answer, made.meta, made.messages, made.chat_template_args], f"problem {uid}")
    return made
