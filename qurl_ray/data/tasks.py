"""From the task section of a run to its problems."""

from collections.abc import Sequence
from dataclasses import dataclass

from qurl_ray.config.models import ArithmeticTask, DatasetTask, ReasoningGymTask, TaskConfig
from qurl_ray.data.arithmetic import arithmetic_split
from qurl_ray.data.files import dataset_split
from qurl_ray.data.gym import gym_split
from qurl_ray.data.split import Split
from qurl_ray.types import Problem

_REWARDS = {"arithmetic": "exact", "reasoning_gym": "reasoning_gym", "dataset": "math_verify"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    """Problems, and how answers to them are judged."""

    train: Sequence[Problem]
    held_out: Sequence[Problem]
    """No prompt of these is in `train`."""
    reward: str
    """For rewards.resolve: the user's own, or that of the task's type."""
    notes: tuple[str, ...] = ()
    """What was left out (empty rows, duplicates), one sentence each; a run announces them at its start."""


def load_task(task: TaskConfig, *, eval_problems: int) -> Task:
    """The problems of a task, at most `eval_problems` of them held out.

    Raises:
        DataError: no such file, data set, column or parameter, or no problems.
    """
    split = _split(task)
    return Task(
        train=split.train,
        held_out=split.held_out[:eval_problems],
        reward=task.reward or _REWARDS[task.type],
        notes=split.notes,
    )


def _split(task: TaskConfig) -> Split:
    match task:
        case ArithmeticTask():
            return arithmetic_split(task)
        case ReasoningGymTask():
            return gym_split(task)
        case DatasetTask():
            return dataset_split(task)
