r"""The final answer in what a policy wrote; the scorers of the package share this definition.

It is the content of the last closed \boxed{...} or \fbox{...} after the reasoning. Without a box it is all text after
the reasoning. Reasoning ends at the last </think>, if there is one.
"""

import re
from typing import NamedTuple

from qurl_ray.types import Problem

REASONING_BEGINS, REASONING_ENDS = "<think>", "</think>"
REASONING_REQUIRED = "reasoning_required"
"""Key of Problem.meta. True: an answer without </think> is unfinished. False: no answer is unfinished for lack of it.
Without the key, an answer is unfinished if it has a <think> after its last </think>."""

_BRACES = re.compile(r"\\+(?:boxed|fbox)\s*\{|\\.|[{}]", re.DOTALL)  # `\\.` skips escaped braces


class FinalAnswer(NamedTuple):
    """Final answer that a scorer judges."""

    text: str
    """The content of the box, or the text after the reasoning, without white space around it."""
    boxed: bool
    written: str
    """All text after the reasoning, without white space around it."""


def final_answer(answer: str, problem: Problem) -> FinalAnswer | None:
    r"""Return the final answer; None if the answer is unfinished.

    It is unfinished if its reasoning has not ended. If it was cut off before its end token
    (problem.meta["truncated"]), it is also unfinished without a closed box, or if it ends inside a later one.
    """
    required = problem.meta.get(REASONING_REQUIRED)
    _, end, written = answer.rpartition(REASONING_ENDS)
    unfinished = REASONING_BEGINS in written or (required and not end)
    if unfinished and required is not False:
        return None
    box, inside_another = _last_box(written)
    if problem.meta.get("truncated") and (box is None or inside_another):
        return None
    written = written.strip()
    return FinalAnswer(text=written if box is None else box.strip(), boxed=box is not None, written=written)


def last_boxed(text: str) -> str | None:
    r"""Return the content of the last closed \boxed{...} or \fbox{...}, with balanced braces; None if there is none."""
    return _last_box(text)[0]


def _last_box(text: str) -> tuple[str | None, bool]:
    """Return the content of the last closed box, and True if a later box is still open at the end."""
    open_at: list[tuple[int, bool]] = []  # where the content of each open brace begins, and whether it is a box
    content, begins = None, -1
    for token in _BRACES.finditer(text):
        opens_box = len(token[0]) > len(r"\{")
        if opens_box or token[0] == "{":
            open_at.append((token.end(), opens_box))
        elif token[0] == "}" and open_at:
            start, boxed = open_at.pop()
            if boxed and start > begins:
                content, begins = text[start : token.start()], start
    return content, any(boxed and start > begins for start, boxed in open_at)
