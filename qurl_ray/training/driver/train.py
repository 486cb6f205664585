"""Training from Python: a model, problems and a reward as objects, and settings as keywords."""

import hashlib
import json
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

from qurl_ray.config.load import runs_folder, validated_run
from qurl_ray.data.files import plain_value
from qurl_ray.errors import DataError
from qurl_ray.files import write_whole
from qurl_ray.rewards.given import give
from qurl_ray.tracking.callback import Callback
from qurl_ray.training.driver.run import RunResult, run
from qurl_ray.training.driver.run_dir import submitted

Rows = Iterable[Mapping[str, Any] | str]
"""Problems: mappings of columns, as a list or a `datasets.Dataset`, or prompts alone."""


def train(
    model: str | Path | Mapping[str, Any],
    data: str | Path | Rows,
    reward: Callable[..., float] | str | None = None,
    *,
    held_out: str | Path | Rows | Mapping[str, str | Path | Rows] | None = None,
    callbacks: Iterable[Callback] = (),
    fresh: bool = False,
    extend: bool = False,
    **settings: Any,
) -> RunResult:
    """Train a model on problems with a reward. It is `run`, for which the settings are put together here.

    Args:
        model: folder of a model, its id on the hub, a GGUF file, or the section `model` of the settings.
        data: problems: a file (.jsonl, .json, .parquet), the id of a data set on the hub, a `datasets.Dataset`, or
            mappings with a prompt (text or a list of messages) and the columns that the reward needs.
        reward: function of (answer: str, problem: Problem) that returns a number, or the name of one; None compares
            with the problem's answer as mathematics.
        held_out: problems for evaluations, likewise, or several sets of them by name; None takes the last tenth of
            `data`.
        callbacks, fresh, extend: see `run`.
        settings: all other settings of a run (docs/configuration.md): `steps=100`, `learner={"lr": 1e-5}`.

    Raises:
        ConfigError: a setting is unknown (the nearest one is named) or contradicts another.
        QurlError: see `run`.

    Example:
        train("HuggingFaceTB/SmolLM2-135M-Instruct", [{"prompt": "1+1=", "answer": "2"}, ...], near, steps=20)
    """
    runs = runs_folder(settings.get("output_dir"), submitted=submitted())
    task = {"type": "dataset", "path": _source(data, runs), **settings.pop("task", {})}
    if isinstance(held_out, Mapping):
        task["held_out_path"] = {name: _source(problems, runs) for name, problems in held_out.items()}
    elif held_out is not None:
        task["held_out_path"] = _source(held_out, runs)
    if reward is not None:
        task["reward"] = reward if isinstance(reward, str) else give(reward)
    if not isinstance(model, Mapping):
        model = {"type": "gguf" if str(model).endswith(".gguf") else "pretrained", "path": str(model)}
    config = validated_run({"model": dict(model), "task": task, **settings}, "qurl_ray.train")
    return run(config, fresh=fresh, extend=extend, callbacks=callbacks)


def _source(data: str | Path | Rows, runs: Path) -> str:
    """Return the path of the problems, or their id on the hub. Rows are written to a file in the folder of runs, by
    their content: a run that resumes finds the same file, and so does an evaluation."""
    if isinstance(data, str | Path):
        return str(data)
    if isinstance(data, Mapping):
        raise DataError(f"data is a mapping of {', '.join(map(str, data))}: give one split, or a list of rows")
    lines = []
    for place, row in enumerate(data):
        fields = {"prompt": row} if isinstance(row, str) else row
        if not isinstance(fields, Mapping):
            raise DataError(f"row {place} of data is {type(row).__name__}, expected a mapping with a prompt")
        try:
            lines.append(json.dumps(plain_value(fields), ensure_ascii=False) + "\n")
        except TypeError as error:
            raise DataError(f"row {place} of data holds {error}, which is no plain value: remove that column") from None
    if not lines:
        raise DataError("data has no rows")
    text = "".join(lines)
    path = runs / "data" / f"{hashlib.sha256(text.encode()).hexdigest()[:16]}.jsonl"
    if not path.is_file():
        path.parent.mkdir(parents=True, exist_ok=True)
        write_whole(path, text)
    return str(path)
