"""Problems from a local .jsonl or .parquet file, or from a Hugging Face data set."""

import difflib
import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from qurl_ray.config.shown import shortened
from qurl_ray.config.task import DatasetTask
from qurl_ray.data.split import Split, disjoint, held_out_from
from qurl_ray.errors import DataError
from qurl_ray.types import Problem

_SUFFIXES = (".jsonl", ".parquet")

Rows = list[tuple[Any, Any]]
"""Rows of (prompt, answer), unchanged from the source."""


def dataset_split(task: DatasetTask) -> Split:
    """Read a data set and split it. Held-out problems come from held_out_path, or are the last held_out_share of rows.

    Rows with an empty prompt or answer are skipped and counted.

    Raises:
        DataError: the source is missing, unreadable or empty, or lacks a column.
    """
    columns = (task.prompt_column, task.answer_column)
    rows, notes = _usable(_read(task, task.path, task.split, columns), source=task.path)
    if task.held_out_path is None:
        train_rows, held_out_rows = held_out_from(
            rows, task.held_out_share, source=task.path, remedy="set task.held_out_path"
        )
    else:
        own = (task.held_out_prompt_column or columns[0], task.held_out_answer_column or columns[1])
        held_out = _usable(_read(task, task.held_out_path, task.held_out_split, own), source=task.held_out_path)
        train_rows, held_out_rows, notes = rows, held_out[0], notes + held_out[1]
    split = disjoint(_problems(train_rows, "train"), _problems(held_out_rows, "held_out"), source=task.path)
    return split._replace(notes=notes + split.notes)


def hub_sources(task: DatasetTask) -> list[str]:
    """Return the sources of problems that are no local files, so that they are looked for on the hub."""
    return [source for source in (task.path, task.held_out_path) if source and not _is_file(source)]


def _problems(rows: Rows, prefix: str) -> list[Problem]:
    return [
        Problem(uid=f"{prefix}-{index}", prompt=str(prompt), answer=str(answer))
        for index, (prompt, answer) in enumerate(rows)
    ]


def _usable(rows: Rows, *, source: str) -> tuple[Rows, tuple[str, ...]]:
    """Return the rows with both a prompt and an answer, and a note on how many rows were skipped."""
    if not rows:
        raise DataError(f"{source} is empty")
    kept = [row for row in rows if all(_has_text(value, source) for value in row)]
    if not kept:
        raise DataError(f"{source}: each of the {len(rows)} rows has an empty prompt or answer")
    skipped = len(rows) - len(kept)
    return kept, (f"{source}: {skipped} of {len(rows)} rows skipped, prompt or answer empty",) if skipped else ()


def _has_text(value: Any, source: str) -> bool:
    if value is None:
        return False
    if not isinstance(value, str | int | float):
        raise DataError(f"{source}: a prompt or answer is {type(value).__name__}, expected text or a number")
    return bool(str(value).strip())


# --- reading -------------------------------------------------------------------------------------


def _read(task: DatasetTask, source: str, split: str, columns: tuple[str, str]) -> Rows:
    if _is_file(source):
        return _read_file(Path(source).expanduser(), columns)
    return _read_hub(source, task.name, split, columns)


def _is_file(source: str) -> bool:
    path = Path(source).expanduser()
    return path.is_file() or path.suffix in _SUFFIXES


def _read_file(path: Path, columns: tuple[str, str]) -> Rows:
    if not path.is_file():
        raise DataError(f"no such file: {path.absolute()}")
    if path.suffix == ".parquet":
        return _read_parquet(path, columns)
    if path.suffix == ".jsonl":
        return _read_jsonl(path, columns)
    raise DataError(f"{path}: task.path takes files ending in {' or '.join(_SUFFIXES)}")


def _read_jsonl(path: Path, columns: tuple[str, str]) -> Rows:
    rows = []
    try:
        with path.open(encoding="utf-8") as lines:
            for number, line in enumerate(lines, start=1):
                text = line.removeprefix("\ufeff").strip()  # a byte order mark, also of a file that was appended
                if text:
                    rows.append(_row(text, columns, where=f"{path}, line {number}"))
    except UnicodeDecodeError as error:
        raise DataError(f"{path} is not UTF-8 text: {error}") from error
    except OSError as error:
        raise DataError(f"{path} cannot be read: {error.strerror}") from error
    return rows


def _row(line: str, columns: tuple[str, str], *, where: str) -> tuple[Any, Any]:
    try:
        record = json.loads(line)
    except (ValueError, RecursionError) as error:  # also of numbers of thousands of digits, and deep nesting
        raise DataError(f"{where}: not JSON: {error}") from error
    if not isinstance(record, dict):
        raise DataError(f"{where}: expected an object, got {type(record).__name__}")
    _check_columns(columns, list(record), source=where)
    return record[columns[0]], record[columns[1]]


def _read_parquet(path: Path, columns: tuple[str, str]) -> Rows:
    import pyarrow
    import pyarrow.parquet

    try:
        _check_columns(columns, pyarrow.parquet.read_schema(path).names, source=str(path))
        table = pyarrow.parquet.read_table(path, columns=list(dict.fromkeys(columns)))
    except (pyarrow.ArrowException, OSError) as error:
        raise DataError(f"{path} is not a readable parquet file: {error}") from error
    return list(zip(*(table.column(column).to_pylist() for column in columns), strict=True))


def _read_hub(source: str, name: str | None, split: str, columns: tuple[str, str]) -> Rows:
    import datasets

    try:
        table = datasets.load_dataset(source, name, split=split)
    except Exception as error:  # the hub client raises a dozen unrelated types
        raise DataError(
            f"{source} is no local file, and loading it (configuration {name}, split {split}) from the Hugging Face "
            f"hub failed: {type(error).__name__}: {error}. Offline, download it first and give the file's path"
        ) from error
    _check_columns(columns, table.column_names, source=source)
    return list(zip(*(table[column] for column in columns), strict=True))


def _check_columns(columns: Iterable[str], present: Sequence[str], *, source: str) -> None:
    for column in columns:
        if column not in present:
            nearest = difflib.get_close_matches(column, present, n=1)
            hint = f" (did you mean {nearest[0]!r}?)" if nearest else ""
            raise DataError(
                f"{source} has no column {column!r}{hint}; it has {shortened(', '.join(present), 500) or 'none'}. "
                "task.prompt_column and task.answer_column (task.held_out_… for the held-out ones) name the columns"
            )
