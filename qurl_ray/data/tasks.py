"""Loading of the problems that the task section of a run describes."""

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain, islice

from qurl_ray.config.shown import shortened
from qurl_ray.config.task import ArithmeticTask, TaskConfig
from qurl_ray.rewards.scorers import compared_as_text
from qurl_ray.tables import TASKS
from qurl_ray.types import Problem

_MOST_CHECKED = 20_000  # expected answers


@dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    """Training and held-out problems, and the reward that judges their answers."""

    train: Sequence[Problem]
    held_out: Sequence[Problem]
    """Held-out problems; none of their prompts is in `train`."""
    reward: str
    """Name of the reward, for tables.REWARDS: the one that the user set, or the default of the task's type."""
    notes: tuple[str, ...] = ()
    """Notes on skipped problems (empty rows, duplicates), one sentence each; a run reports them at its start."""

    def digest(self) -> str:
        """Return a digest of all problems, with their answers and meta, in their order: 32 hexadecimal digits."""
        digest = hashlib.blake2b(f"{len(self.train)} {len(self.held_out)}\n".encode(), digest_size=16)
        for problem in chain(self.train, self.held_out):
            further = [part for part in (problem.meta, problem.messages, problem.chat_template_args) if part]
            parts = [problem.uid, problem.prompt, problem.answer, *further]
            digest.update(json.dumps(parts, sort_keys=True).encode() + b"\n")
        return digest.hexdigest()


def load_task(task: TaskConfig, *, eval_problems: int) -> Task:
    """Load the problems of a task, with at most `eval_problems` held-out problems of each set.

    Raises:
        DataError: the file, data set, column or parameter does not exist, or there are no problems.
    """
    split = TASKS.load(task.type)(task)
    worked = isinstance(task, ArithmeticTask) and task.worked
    reward = task.reward or ("last_number" if worked else TASKS.entries[task.type].reward)
    notes = list(split.notes)
    if reward == "math_verify":
        checked = islice(chain(split.held_out, split.train), _MOST_CHECKED)
        if odd := [problem for problem in checked if compared_as_text(problem.answer)]:
            notes.append(
                f"math_verify accepts only the same text for {len(odd)} expected answers, such as "
                f"{shortened(odd[0].answer, 60)!r} of {odd[0].uid}: they look like numbers that it reads as symbols, "
                "or would take long to compare"
            )
    return Task(
        train=split.train,
        held_out=_first_of_each_set(split.held_out, eval_problems),
        reward=reward,
        notes=tuple(notes),
    )


def _first_of_each_set(problems: Sequence[Problem], most: int) -> Sequence[Problem]:
    if not problems[0].held_out_set:
        return problems[:most]
    names = dict.fromkeys(problem.held_out_set for problem in problems)
    return [problem for name in names for problem in [p for p in problems if p.held_out_set == name][:most]]
