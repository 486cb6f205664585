"""Problems from reasoning-gym, judged later by the data set's own scorer."""

import dataclasses
import json
from collections.abc import Iterator
from typing import Any

from qurl_ray.config.shown import shown
from qurl_ray.config.task import ReasoningGymTask
from qurl_ray.data.split import Split, disjoint
from qurl_ray.errors import DataError
from qurl_ray.extensions import did_you_mean
from qurl_ray.rewards.entries import pack
from qurl_ray.types import Problem


def gym_split(task: ReasoningGymTask) -> Split:
    """Create train_size problems with seeds from `seed` on, and held_out_size problems with the seeds after them.

    reasoning-gym makes entry i of a data set from seed + i. A held-out set made from seed + 1 would
    therefore repeat the training set; seed + train_size is the first seed that training does not use.

    Raises:
        DataError: unknown data set or parameter, or the data set refuses the parameters.
    """
    _check_names(task)
    train = _problems(task, prefix="train", seed=task.seed, size=task.train_size)
    held_out = _problems(task, prefix="held_out", seed=task.seed + task.train_size, size=task.held_out_size)
    distinct = {problem.prompt: problem for problem in held_out}
    return disjoint(train, list(distinct.values()), source=f"reasoning-gym {task.dataset}")


def _problems(task: ReasoningGymTask, *, prefix: str, seed: int, size: int) -> Iterator[Problem]:
    import reasoning_gym

    params = {**task.params, "seed": seed, "size": size}
    try:
        entries = reasoning_gym.create_dataset(task.dataset, **params)
        for index in range(size):
            yield _problem(entries[index], uid=f"{prefix}-{index}", dataset=task.dataset, params=params)
    except DataError:
        raise
    except Exception as error:  # generators assert, raise ValueError, or break on a parameter's type
        raise DataError(
            f"reasoning-gym {task.dataset} cannot make problems with task.params {shown(task.params)}: "
            f"{type(error).__name__}: {error}"
        ) from error


def _problem(entry: dict[str, Any], *, uid: str, dataset: str, params: dict[str, Any]) -> Problem:
    meta = {"dataset": dataset, "params": params, "entry": pack(entry)}
    try:
        json.dumps(meta)
    except TypeError as error:
        raise DataError(f"reasoning-gym {dataset}: an entry is not plain JSON and cannot travel: {error}") from error
    answer = entry["answer"]  # None if many answers are correct, and only the scorer can recognise them
    return Problem(uid=uid, prompt=entry["question"], answer="" if answer is None else str(answer), meta=meta)


def _check_names(task: ReasoningGymTask) -> None:
    from reasoning_gym.factory import DATASETS

    if task.dataset not in DATASETS:
        raise DataError(f"reasoning-gym has no data set {task.dataset!r}{did_you_mean(task.dataset, DATASETS)}")
    _, config = DATASETS[task.dataset]
    known = {field.name for field in dataclasses.fields(config)} - {"seed", "size"}
    for name in task.params:
        if name in ("seed", "size"):
            raise DataError(f"task.params.{name}: use task.seed, task.train_size and task.held_out_size instead")
        if name not in known:
            raise DataError(
                f"reasoning-gym {task.dataset} has no parameter {name!r}{did_you_mean(name, known)} "
                f"(it has {', '.join(sorted(known))})"
            )
