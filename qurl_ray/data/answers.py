"""Answers as text, in the form that a reward function gets."""

from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from qurl_ray.config.task import TaskConfig
from qurl_ray.data.prompts import encode_prompt
from qurl_ray.rewards.final import REASONING_BEGINS, REASONING_REQUIRED
from qurl_ray.types import Completion, Problem

_TAIL = 32  # tokens at the end of a prompt that may begin the reasoning


def answer_text(token_ids: np.ndarray, tokenizer: Any, stop_ids: Sequence[int]) -> tuple[str, bool]:
    """Return the text of an answer before its first end token, and True if it has no end token.

    Special tokens before the end are kept in the text, as in "1<pad>3". Without them, a wrong answer could look right.
    """
    ends = np.flatnonzero(np.isin(token_ids, stop_ids))
    truncated = len(ends) == 0
    kept = token_ids if truncated else token_ids[: ends[0]]
    return tokenizer.decode(kept.tolist(), skip_special_tokens=False), truncated


def items_to_judge(
    completions: Iterable[Completion],
    problems: Sequence[Problem],
    tokenizer: Any,
    stop_ids: Sequence[int],
    task: TaskConfig,
) -> list[tuple[str, Problem]]:
    """Return (answer, problem) per completion.

    If the answer has no end token, problem.meta["truncated"] is True. If the settings or the prompts say whether
    answers have to end a reasoning, problem.meta has it, too (rewards.final).
    """
    required = task.reasoning
    if required is None and problems:
        prompt = encode_prompt(problems[0], tokenizer, task)
        tail = tokenizer.decode(prompt[-_TAIL:].tolist(), skip_special_tokens=False)
        if tail.rstrip().endswith(REASONING_BEGINS):  # the prompt begins the reasoning
            required = True
    known = {} if required is None else {REASONING_REQUIRED: required}
    items = []
    for completion, problem in zip(completions, problems, strict=True):
        text, truncated = answer_text(completion.token_ids, tokenizer, stop_ids)
        added = known | ({"truncated": True} if truncated else {})
        items.append((text, replace(problem, meta=problem.meta | added) if added else problem))
    return items
