"""Formats of numbers, durations and untrusted text for console and pages."""

from collections.abc import Mapping
from typing import Any

from qurl_ray.runs.values import number

MISSING = "–"


def duration(seconds: float) -> str:
    """Format a duration as h:mm:ss, or as m:ss below an hour."""
    minutes, left = divmod(max(0, round(seconds)), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{left:02d}" if hours else f"{minutes}:{left:02d}"


def one_line(text: Any, limit: int | None = None) -> str:
    """Replace line breaks and control characters in `text`: a policy may emit escape codes for the terminal."""
    line = "".join("⏎" if char == "\n" else char if char.isprintable() else "·" for char in str(text))
    return line if limit is None or len(line) <= limit else line[: limit - 1] + "…"


def storable(text: str) -> str:
    """Replace by "?" all that UTF-8 or a database cannot store: halves of surrogate pairs, and NUL."""
    return text.encode("utf-8", errors="replace").decode("utf-8").replace("\0", "?")


def pairs(values: Mapping[str, Any], prefix: str = "") -> str:
    """Format the numbers in `values`, with names without `prefix`: `accuracy 0.382  problems 500`."""
    numbers = ((key.removeprefix(prefix), number(value)) for key, value in values.items())
    return "  ".join(f"{one_line(key)} {value:.4g}" for key, value in numbers if value is not None)


def listed(value: Any) -> Any:
    """Return a list as text; other values are unchanged."""
    return ", ".join(map(str, value)) if isinstance(value, list) else value


def format_setting(value: Any) -> Any:
    """Format a setting as in config.yaml."""
    if value is None:
        return MISSING
    return str(value).lower() if isinstance(value, bool) else listed(value)
