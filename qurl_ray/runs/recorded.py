"""Events read back from a run's files, so that they can be sent again to a sink that missed them."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from qurl_ray.runs.files import finite, lines
from qurl_ray.types import KINDS, Event


def events(run_dir: Path) -> Iterator[tuple[Event, float]]:
    """Yield (event, unix time in seconds) per complete line of metrics.jsonl; nothing if there is no such file."""
    for line in _timed(run_dir / "metrics.jsonl"):
        if line.get("kind") in KINDS:
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
    """Yield (step, unix time in seconds, sample) per complete line of samples.jsonl."""
    return ((line["step"], line["time"], line) for line in _timed(run_dir / "samples.jsonl"))


def message_lines(run_dir: Path) -> Iterator[str]:
    """Yield the warnings and messages of the run as lines of JSON."""
    for line in _timed(run_dir / "metrics.jsonl"):
        if line.get("kind") in ("warning", "info"):
            yield json.dumps(line) + "\n"


def _timed(path: Path) -> Iterator[dict[str, Any]]:
    return (line for _, line in lines(path) if line is not None and finite(line.get("time")) is not None)
