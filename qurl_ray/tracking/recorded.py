"""A run's files as the events that they were written from, to be sent once more to who missed them."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, get_args, get_type_hints

from qurl_ray.tracking.run_files import finite, lines
from qurl_ray.types import Event

_KINDS = frozenset(get_args(get_type_hints(Event)["kind"]))


def events(run_dir: Path) -> Iterator[tuple[Event, float]]:
    """(event, unix time in seconds) per whole line of metrics.jsonl; none if there is no such file."""
    for line in _timed(run_dir / "metrics.jsonl"):
        if line.get("kind") in _KINDS:
            values = line.get("values")
            yield (
                Event(
                    kind=line["kind"],
                    step=line["step"],
                    message=str(line.get("message") or ""),
                    values=values if isinstance(values, dict) else {},
                ),
                line["time"],
            )


def samples(run_dir: Path) -> Iterator[tuple[int, float, dict[str, Any]]]:
    """(step, unix time, sample) per whole line of samples.jsonl."""
    return ((line["step"], line["time"], line) for line in _timed(run_dir / "samples.jsonl"))


def message_lines(run_dir: Path) -> Iterator[str]:
    """What was told of the run, warnings and other sentences, as lines of JSON."""
    for line in _timed(run_dir / "metrics.jsonl"):
        if line.get("kind") in ("warning", "info"):
            yield json.dumps(line) + "\n"


def _timed(path: Path) -> Iterator[dict[str, Any]]:
    return (line for _, line in lines(path) if line is not None and finite(line.get("time")) is not None)
