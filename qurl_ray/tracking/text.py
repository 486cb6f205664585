"""Numbers, durations and foreign text as the console shows them."""

import re
from collections.abc import Mapping
from typing import Any

from qurl_ray.tracking.values import number

MISSING = "–"
_CREDENTIALS = re.compile(r"(?<=://)[^/@\s]+@")


def duration(seconds: float) -> str:
    """h:mm:ss, or m:ss below an hour."""
    minutes, left = divmod(max(0, round(seconds)), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{left:02d}" if hours else f"{minutes}:{left:02d}"


def one_line(text: Any, limit: int | None = None) -> str:
    """`text` without line breaks, and without control characters: a policy may emit escape codes for the terminal."""
    line = "".join("⏎" if char == "\n" else char if char.isprintable() else "·" for char in str(text))
    return line if limit is None or len(line) <= limit else line[: limit - 1] + "…"


def storable(text: str) -> str:
    """`text` with "?" for what UTF-8 or a database cannot hold: halves of surrogate pairs, and NUL."""
    return text.encode("utf-8", errors="replace").decode("utf-8").replace("\0", "?")


def pairs(values: Mapping[str, Any], prefix: str = "") -> str:
    """`accuracy 0.382  problems 500`: the numbers among `values`, names without `prefix`."""
    found = ((key.removeprefix(prefix), number(value)) for key, value in values.items())
    return "  ".join(f"{one_line(key)} {value:.4g}" for key, value in found if value is not None)


def shown(value: Any) -> Any:
    """A setting as config.yaml has it."""
    if value is None:
        return MISSING
    return str(value).lower() if isinstance(value, bool) else redacted(value)


def redacted(value: Any) -> Any:
    """Text without the user and password of an address; other values as they are."""
    if isinstance(value, list):
        return ", ".join(str(redacted(item)) for item in value)
    return _CREDENTIALS.sub("…@", value) if isinstance(value, str) else value
