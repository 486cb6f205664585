"""Conversion of event values to plain values: strict JSON, flat names, numbers."""

import dataclasses
import math
from collections.abc import Iterator, Mapping
from numbers import Integral, Real
from typing import Any

import numpy as np

StepValues = tuple[int, Mapping[str, float | None]]
"""Step and its finite values by name; None, like a missing name, is a gap. Rows are in the order of their steps."""


def plain(value: Any) -> Any:
    """Convert `value` to strict JSON types. NaN and infinities become None, unknown objects their str().

    JSON has no NaN, and the `NaN` that json.dumps writes by default is refused by jq, DuckDB and browsers. With null, a
    column of numbers remains a column of numbers.
    """
    if value is None or isinstance(value, str | bool):
        return value
    if isinstance(value, np.bool_):
        return bool(value)
    if isinstance(value, Integral):
        return int(value)
    if isinstance(value, Real):
        return float(value) if math.isfinite(value) else None
    if isinstance(value, np.ndarray):
        return plain(value.tolist())
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return plain({field.name: getattr(value, field.name) for field in dataclasses.fields(value)})
    if isinstance(value, Mapping):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple | set | frozenset):
        return [plain(item) for item in value]
    return str(value)


def flatten(values: Mapping[str, Any], separator: str) -> Iterator[tuple[str, Any]]:
    """Yield (joined name, leaf) of nested mappings. Lists are leaves; empty mappings are dropped.

    Example:
        dict(flatten({"phase": {"update": 1.5}}, "/")) == {"phase/update": 1.5}
    """
    for key, value in values.items():
        if isinstance(value, Mapping):
            yield from ((f"{key}{separator}{name}", leaf) for name, leaf in flatten(value, separator))
        else:
            yield str(key), value


def number(value: Any) -> float | None:
    """Return `value` as a float if it is a number (also NaN and infinities, but not truth values), else None."""
    if isinstance(value, bool | np.bool_) or not isinstance(value, Real):
        return None
    return float(value)
