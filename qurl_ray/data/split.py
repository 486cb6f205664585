"""Split into training and held-out problems without a common prompt."""

import json
from collections.abc import Iterable, Sequence
from typing import NamedTuple, TypeVar

from qurl_ray.errors import DataError
from qurl_ray.types import Problem

T = TypeVar("T")


class Split(NamedTuple):
    """Training and held-out problems from one source."""

    train: Sequence[Problem]
    held_out: Sequence[Problem]
    notes: tuple[str, ...] = ()
    """Notes on skipped or removed problems, one sentence each."""


def disjoint(candidates: Iterable[Problem], held_out: Sequence[Problem], *, source: str, meta: bool = False) -> Split:
    """Remove training problems whose prompt is also held out, and count them in a note.

    Problems are removed from the training side, because it is larger, and accuracy needs a fixed number of held-out
    problems.

    Args:
        meta: problems with the same prompt and other meta are different ones, as games with other seeds are.

    Raises:
        DataError: no training problem is left.
    """
    everything = list(candidates)

    def key(problem: Problem) -> tuple[str, str]:
        return problem.prompt, json.dumps(problem.meta, sort_keys=True) if meta else ""

    known = set(map(key, held_out))
    train = [problem for problem in everything if key(problem) not in known]
    if not train:
        raise DataError(f"{source}: every training prompt is held out as well, so none is left to train on")
    left_out = len(everything) - len(train)
    notes = (f"{source}: {left_out} training prompts left out because they are held out",) if left_out else ()
    return Split(train, held_out, notes)


def held_out_from(problems: list[T], share: float, *, source: str, remedy: str) -> tuple[list[T], list[T]]:
    """Split into (training, held-out). The last `share` is held out: at least one problem, and never all.

    Raises:
        DataError: there are fewer than two problems.
    """
    if len(problems) < 2:
        many = "one usable problem only" if problems else "no usable problem"
        raise DataError(f"{source} has {many}, so none can be held out; {remedy}")
    cut = len(problems) - min(max(round(len(problems) * share), 1), len(problems) - 1)
    return problems[:cut], problems[cut:]
