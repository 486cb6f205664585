"""From the task section of a run to its problems."""

from collections.abc import Sequence
from dataclasses import dataclass

from qurl_ray.config.models import TaskConfig
from qurl_ray.tables import TASKS
from qurl_ray.types import Problem


@dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    """Problems, and how answers to them are judged."""

    train: Sequence[Problem]
    held_out: Sequence[Problem]
    """No prompt of these is in `train`."""
    reward: str
    """A name of tables.REWARDS: the user's own, or that of the task's type."""
    notes: tuple[str, ...] = ()
    """What was left out (empty rows, duplicates), one sentence each; a run announces them at its start."""


def load_task(task: TaskConfig, *, eval_problems: int) -> Task:
    """The problems of a task, at most `eval_problems` of them held out.

    Raises:
        DataError: no such file, data set, column or parameter, or no problems.
    """
    split = TASKS.load(task.type)(task)
    return Task(
        train=split.train,
        held_out=split.held_out[:eval_problems],
        reward=task.reward or TASKS.entries[task.type].reward,
        notes=split.notes,
    )
