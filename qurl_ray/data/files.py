"""Problems from a local file, or from a Hugging Face data set."""

import difflib
import json
import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from datetime import date, datetime, time
from decimal import Decimal
from itertools import chain
from pathlib import Path
from typing import Any

from qurl_ray.config.paths import expanded, is_path
from qurl_ray.config.shown import shortened
from qurl_ray.config.task import ANSWER_COLUMNS, PROMPT_COLUMNS, DatasetTask
from qurl_ray.data.split import Split, disjoint, held_out_from
from qurl_ray.errors import DataError
from qurl_ray.tables import REWARDS, TASKS
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

_SUFFIXES = (".jsonl", ".json", ".parquet")
_SEEN = ("image", "images", "video", "videos", "audio", "audios")
"""Columns of what a policy that reads text cannot be given."""
_PLACE = re.compile("<(image|video|audio)>")
_UNUSED = (*_SEEN, "system", "system_prompt", "context", "documents", "instruction", "input")
"""Columns that are parts of prompts elsewhere, and are not shown to the policy here."""
_RESERVED = "truncated"
"""Key of Problem.meta by which rewards learn that an answer was cut off."""


@dataclass(frozen=True, slots=True)
class _Row:
    """A row as its source has it."""

    where: str
    """The source, and the line or row, for errors."""
    fields: Mapping[str, Any]


def dataset_split(task: DatasetTask) -> Split:
    """Read a data set and split it. Held-out problems come from held_out_path, or are the last held_out_share of rows.

    Rows with an empty prompt, or an empty answer that the reward would need, are skipped and counted.

    Raises:
        DataError: the source is missing, unreadable or empty, or lacks a column.
    """
    train, notes = _problems(task, task.path, task.split, (task.prompt_column, task.answer_column), "train")
    if task.held_out_path is None:
        train, held_out = held_out_from(train, task.held_out_share, source=task.path, remedy="set task.held_out_path")
        held_out = [replace(problem, uid=f"held_out-{index}") for index, problem in enumerate(held_out)]
    else:
        held_out = []
        columns = (task.held_out_prompt_column or task.prompt_column, task.held_out_answer_column or task.answer_column)
        for name, source in task.held_out_sets().items():
            more, said = _problems(task, source, task.held_out_split, columns, name or "held_out")
            held_out += [replace(problem, held_out_set=name) for problem in more]
            notes += said
    answers = any(problem.answer for problem in (*train, *held_out))
    split = disjoint(train, held_out, source=task.path, meta=not answers)
    return split._replace(notes=tuple(notes) + split.notes)


def hub_sources(task: DatasetTask) -> list[str]:
    """Return the sources of problems that are no local files, so that they are looked for on the hub."""
    return [source for source in (task.path, *task.held_out_sets().values()) if not _is_file(source)]


# --- rows to problems --------------------------------------------------------------------------------------------


def _problems(
    task: DatasetTask, source: str, split: str, columns: tuple[str, str | None], prefix: str
) -> tuple[list[Problem], list[str]]:
    """Return the problems of a source, and sentences on what was chosen or left out."""
    rows = _read_file(expanded(source)) if _is_file(source) else _read_hub(source, task.name, split)
    first = next(rows, None)
    if first is None:
        raise DataError(f"{source} is empty")
    # The package's own rewards compare with the expected answer.
    needs_answer = (task.reward or TASKS.entries[task.type].reward) in REWARDS.entries
    optional = not needs_answer or task.last_turn == "answer"
    try:
        prompt, answer, notes = _columns(first, columns, source, optional=optional)
    except DataError:
        for column in (columns[0], *PROMPT_COLUMNS):  # the answer may be in the messages, which is another error
            if is_conversation(asked := first.fields.get(column)):
                split_last_turn(read_messages(asked, first.where), task.last_turn, first.where)
        raise
    if answer is None and columns[1] is not None:
        instead = "they are the last turns" if task.last_turn == "answer" else "the reward gets none"
        notes.append(f"{source}: there is no column of answers; {instead}")
    problems: list[Problem] = []
    dropped: set[str] = set()
    unused: set[str] = set()
    count = as_text = 0
    for row in chain([first], rows):
        count += 1
        uid = f"{prefix}-{len(problems)}"
        try:
            problem = _problem(row, prompt, answer, uid, dropped, task, needs_answer=needs_answer)
        except KeyError as error:
            _no_column(str(error.args[0]), row)
        if problem:
            problems.append(problem)
            unused |= {name for name in _UNUSED if row.fields.get(name) and name not in (prompt, answer)}
            as_text += problem.messages is not None and isinstance(_value(row.fields, prompt), str)
    if not problems:
        raise DataError(f"{source}: each of the {count} rows has an empty prompt or answer")
    if skipped := count - len(problems):
        notes.append(f"{source}: {skipped} of {count} rows skipped, prompt or answer empty")
    if as_text:
        notes.append(f"{source}: {as_text} prompts are JSON text of messages, and are read as messages")
    if unused:
        notes.append(f"{source}: columns that the policy does not see: {', '.join(sorted(unused))}")
    if dropped:
        names = ", ".join(sorted(dropped))
        notes.append(f"{source}: columns that rewards do not get, as they hold no plain values: {names}")
    return problems, notes


def _problem(
    row: _Row, prompt: str, answer: str | None, uid: str, dropped: set[str], task: DatasetTask, *, needs_answer: bool
) -> Problem | None:
    """Return the problem of a row, with its other columns as meta; None if its prompt or answer is empty.

    Raises:
        KeyError: the row has not the column that the error names.
    """
    asked, expected = _value(row.fields, prompt), None if answer is None else _value(row.fields, answer)
    asked = (isinstance(asked, str) and conversation_in(asked, row.where)) or asked
    messages = read_messages(asked, row.where) if is_conversation(asked) else None
    if messages:
        messages, said = split_last_turn(messages, task.last_turn, row.where)
        expected = said if said is not None and answer is None else expected
    text = text_of(messages) if messages else _text(asked, row, prompt)
    if (place := _PLACE.search(text)) and (shown := [name for name in _SEEN if row.fields.get(name)]):
        raise DataError(f"{row.where}: {place[0]} stands for what is in {shown[0]!r}, and the policy reads text alone")
    if isinstance(expected, list | dict) and not needs_answer:
        expected = json.dumps(plain_value(expected), ensure_ascii=False)
    answer_text = _text(expected, row, answer or "")
    if not text or (needs_answer and not answer_text):
        return None
    meta = {}
    for key, field in row.fields.items():
        if key == prompt:
            continue
        try:
            if key == _RESERVED:
                raise TypeError
            meta[key] = plain_value(field)
        except TypeError:
            dropped.add(key)
    others = {key: field for key, field in row.fields.items() if key not in (prompt, answer)}
    variables = read_variables(others, row.where)
    return Problem(uid=uid, prompt=text, answer=answer_text, meta=meta, messages=messages, chat_template_args=variables)


def _text(value: Any, row: _Row, column: str) -> str:
    """Return a prompt or an answer as text; "" if there is none."""
    if value is None or value != value:  # NaN: tables have it where nothing is
        return ""
    if not isinstance(value, str | int | float):
        raise DataError(f"{row.where}: {column!r} is {type(value).__name__}, expected text, a number or messages")
    return str(value) if str(value).strip() else ""


def plain_value(value: Any) -> Any:
    """Return a value as JSON has it. Raise TypeError if it has no such form, as an image or other bytes."""
    if value is None or isinstance(value, bool | int | str):
        return value
    if isinstance(value, float):
        return None if math.isnan(value) else value if math.isfinite(value) else str(value)
    if isinstance(value, Mapping):
        return {str(key): plain_value(field) for key, field in value.items()}
    if isinstance(value, list | tuple):
        return [plain_value(item) for item in value]
    if isinstance(value, date | datetime | time):
        return value.isoformat()
    if isinstance(value, Decimal):
        return str(value)
    raise TypeError(type(value).__name__)


# --- columns -----------------------------------------------------------------------------------------------------


def _columns(
    row: _Row, columns: tuple[str, str | None], source: str, *, optional: bool
) -> tuple[str, str | None, list[str]]:
    """Return the columns of prompts and of answers, and a sentence on each that was not the one asked for.

    Args:
        optional: a column of answers may be missing.
    """
    prompt, answer = columns
    notes = []
    if not _has(row.fields, prompt):
        prompt = _other(row, prompt, PROMPT_COLUMNS)
        notes.append(f"{source}: prompts are in the column {prompt!r}")
    if answer is not None and not _has(row.fields, answer):
        if answer == ANSWER_COLUMNS[0] and optional and not any(_has(row.fields, c) for c in ANSWER_COLUMNS):
            return prompt, None, notes
        answer = _other(row, answer, ANSWER_COLUMNS)
        notes.append(f"{source}: answers are in the column {answer!r}")
    return prompt, answer, notes


def _other(row: _Row, column: str, usual: tuple[str, ...]) -> str:
    """Return the first of the usual columns that is there, if `column` is the default, which is the first of them."""
    there = [other for other in usual if _has(row.fields, other)]
    if column != usual[0] or not there:
        _no_column(column, row)
    return there[0]


def _no_column(column: str, row: _Row) -> None:
    present = list(map(str, row.fields))
    nearest = difflib.get_close_matches(column, present, n=1)
    hint = f" (did you mean {nearest[0]!r}?)" if nearest else ""
    raise DataError(
        f"{row.where} has no column {column!r}{hint}; it has {shortened(', '.join(present), 500) or 'none'}. "
        "task.prompt_column and task.answer_column (task.held_out_… for the held-out ones) name the columns; "
        "task.answer_column=null is for problems without answers, which a reward of your own can judge"
    )


def _value(fields: Mapping[str, Any], column: str) -> Any:
    """Return the value of a column, or of a field within one, as in `reward_model.ground_truth`; None in a null.

    Raises:
        KeyError: there is none.
    """
    if column in fields:
        return fields[column]
    head, _, rest = column.partition(".")
    inner = fields.get(head)
    if rest and inner is None and head in fields:  # null in a row without a value, as tables write it
        return None
    if not rest or not isinstance(inner, Mapping):
        raise KeyError(column)
    try:
        return _value(inner, rest)
    except KeyError:
        raise KeyError(column) from None


def _has(fields: Mapping[str, Any], column: str) -> bool:
    try:
        _value(fields, column)
    except KeyError:
        return False
    return True


# --- reading -----------------------------------------------------------------------------------------------------


def _is_file(source: str) -> bool:
    path = expanded(source)
    return path.is_file() or path.suffix in _SUFFIXES or (is_path(source) and not path.is_dir())


def _read_file(path: Path) -> Iterator[_Row]:
    if not path.is_file():
        raise DataError(f"no such file: {path.absolute()}")
    readers = {".jsonl": _read_jsonl, ".json": _read_json, ".parquet": _read_parquet}
    if path.suffix not in readers:
        raise DataError(f"{path}: task.path takes files ending in {', '.join(_SUFFIXES)}")
    try:
        yield from readers[path.suffix](path)
    except UnicodeDecodeError as error:
        raise DataError(f"{path} is not UTF-8 text: {error}") from error
    except OSError as error:
        raise DataError(f"{path} cannot be read: {error.strerror or error}") from error


def _read_jsonl(path: Path) -> Iterator[_Row]:
    with path.open(encoding="utf-8") as lines:
        for number, line in enumerate(lines, start=1):
            text = line.removeprefix("\ufeff").strip()  # a byte order mark, also of a file that was appended
            if text:
                where = f"{path}, line {number}"
                yield _row(_parsed(text, where), where, escapes="\\u" in text)


def _read_json(path: Path) -> Iterator[_Row]:
    with path.open(encoding="utf-8-sig") as file:
        text = file.read()
    items = _parsed(text, str(path))
    if not isinstance(items, list):
        raise DataError(f"{path}: expected an array of objects, got {type(items).__name__}; lines of JSON are .jsonl")
    for number, item in enumerate(items, start=1):
        yield _row(item, f"{path}, row {number}", escapes="\\u" in text)


def _parsed(text: str, where: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:  # also of numbers of thousands of digits, and deep nesting
        raise DataError(f"{where}: not JSON: {error}") from error


def _row(item: Any, where: str, *, escapes: bool) -> _Row:
    """Return a row of JSON. With `escapes`, an escape in it may be half of a surrogate pair."""
    if not isinstance(item, dict):
        raise DataError(f"{where}: expected an object, got {type(item).__name__}")
    if escapes:
        check_text(item, where)
    return _Row(where, item)


def _read_parquet(path: Path) -> Iterator[_Row]:
    import pyarrow
    import pyarrow.parquet

    try:
        rows = pyarrow.parquet.read_table(path).to_pylist()
    except (pyarrow.ArrowException, OSError) as error:
        raise DataError(f"{path} is not a readable parquet file: {error}") from error
    for number, fields in enumerate(rows, start=1):
        yield _Row(f"{path}, row {number}", fields)


def _read_hub(source: str, name: str | None, split: str) -> Iterator[_Row]:
    import datasets

    try:
        table = datasets.load_dataset(source, name, split=split)
    except Exception as error:  # the hub client raises a dozen unrelated types
        raise DataError(
            f"{source} is no local file, and loading it (configuration {name}, split {split}) from the Hugging Face "
            f"hub failed: {type(error).__name__}: {error}. Offline, download it first and give the file's path"
        ) from error
    for number, fields in enumerate(table, start=1):
        yield _Row(f"{source}, row {number}", fields)
