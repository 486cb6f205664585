"""metrics.jsonl and samples.jsonl: one strict JSON object per line, on disk as soon as it is written."""

import json
import os
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from qurl_ray.tracking.sink import Outcome
from qurl_ray.tracking.values import plain
from qurl_ray.types import Event


class JsonLines:
    """Appends to one file; a run that goes on in the same folder keeps its earlier lines."""

    def __init__(self, path: Path) -> None:
        torn = _ends_mid_line(path)
        # A tokenizer may decode to half a surrogate pair, which UTF-8 cannot hold: it becomes "?".
        self._file = path.open("a", encoding="utf-8", errors="replace", buffering=1, newline="\n")
        if torn:  # the process that wrote it was killed: keep its half line from swallowing our first
            self._file.write("\n")

    def write(self, records: Iterable[dict[str, Any]]) -> None:
        for record in records:
            # One write per line: lines of a crashed run are then whole but for the last.
            self._file.write(json.dumps(plain(record), allow_nan=False, ensure_ascii=False) + "\n")
        self._file.flush()

    def close(self) -> None:
        self._file.close()


class MetricsFile:
    """Every event but the samples, one line each: kind, step, time (unix seconds), message, values."""

    name = "metrics.jsonl"

    def __init__(self, folder: Path) -> None:
        self._lines = JsonLines(folder / self.name)

    def handle(self, event: Event, at: float) -> None:
        if event.kind == "samples":
            return
        record = {"kind": event.kind, "step": event.step, "time": at, "message": event.message, "values": event.values}
        self._lines.write([record])

    def notices(self) -> list[str]:
        return []

    def close(self, outcome: Outcome) -> None:
        self._lines.close()


class SamplesFile:
    """One line per sampled rollout: step, time and whatever the sample holds (uid, prompt, answer, reward, …)."""

    name = "samples.jsonl"

    def __init__(self, folder: Path) -> None:
        self._lines = JsonLines(folder / self.name)

    def handle(self, event: Event, at: float) -> None:
        if event.kind == "samples":
            samples = event.values.get("samples", [])
            self._lines.write({"step": event.step, "time": at, **sample} for sample in samples)

    def notices(self) -> list[str]:
        return []

    def close(self, outcome: Outcome) -> None:
        self._lines.close()


def rewind(folder: Path, step: int) -> list[Event]:
    """Forget what came after `step`, so that a run can go on from there. Returns the events that are left."""
    # A run that was asked to stop evaluated at its end; that end is no longer one.
    kept = _filter(
        folder / MetricsFile.name,
        lambda line: (
            line["step"] <= step
            and line["kind"] != "summary"
            and not (line["kind"] == "evaluation" and line["message"].startswith("after"))
        ),
    )
    _filter(folder / SamplesFile.name, lambda line: line["step"] <= step)
    return [
        Event(kind=line["kind"], step=line["step"], message=line["message"], values=line["values"]) for line in kept
    ]


def _filter(path: Path, wanted: Callable[[dict[str, Any]], bool]) -> list[dict[str, Any]]:
    """Keep the wanted lines of a file; half lines go. Written aside and renamed."""
    if not path.exists():
        return []
    kept = []
    # Bytes: text would also be split at the line separators of Unicode, which answers may hold.
    for line in path.read_bytes().split(b"\n"):
        try:
            record = json.loads(line)
        except ValueError:  # half a line: the process that wrote it was killed
            continue
        if wanted(record):
            kept.append(record)
    aside = path.with_suffix(".rewound")
    text = "".join(json.dumps(record, ensure_ascii=False) + "\n" for record in kept)
    aside.write_text(text, encoding="utf-8", newline="\n")
    aside.replace(path)
    return kept


def _ends_mid_line(path: Path) -> bool:
    if not path.exists() or not path.stat().st_size:
        return False
    with path.open("rb") as file:
        file.seek(-1, os.SEEK_END)
        return file.read(1) != b"\n"
