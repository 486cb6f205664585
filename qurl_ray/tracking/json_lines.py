"""metrics.jsonl, samples.jsonl and their like: one strict JSON object per line, on disk as soon as it is written."""

import json
import os
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from qurl_ray.tracking.sink import Outcome
from qurl_ray.tracking.values import plain
from qurl_ray.types import Event

_TIMELINE_BYTES = 32 << 20


class JsonLines:
    """Appends to one file; a run that goes on in the same folder keeps its earlier lines."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._open()

    def _open(self) -> None:
        torn = _ends_mid_line(self._path)
        self._file = self._path.open("a", encoding="utf-8", buffering=1, newline="\n")
        if torn:  # the process that wrote it was killed: keep its half line from swallowing our first
            self._file.write("\n")

    def write(self, records: Iterable[dict[str, Any]]) -> None:
        for record in records:
            # One write per line: lines of a crashed run are then whole but for the last.
            self._file.write(_line(plain(record)))
        self._file.flush()

    def keep(self, wanted: Callable[[dict[str, Any]], bool]) -> list[dict[str, Any]]:
        """Drop all lines but the wanted ones, and half lines. Returns what is left."""
        self._file.close()
        kept = _filter(self._path, wanted)
        self._open()
        return kept

    @property
    def bytes(self) -> int:
        """Size of the file."""
        return os.fstat(self._file.fileno()).st_size

    def halve(self) -> None:
        """Drop the older half of the file."""
        self._file.close()
        content = self._path.read_bytes()
        _replace(self._path, content[content.find(b"\n", len(content) // 2) + 1 :])
        self._open()

    def close(self) -> None:
        self._file.close()


class MetricsFile:
    """Every event without a file of its own, one line each: kind, step, time (unix seconds), message, values."""

    name = "metrics.jsonl"

    def __init__(self, folder: Path) -> None:
        self._lines = JsonLines(folder / self.name)

    def handle(self, event: Event, at: float) -> None:
        if event.kind in ("samples", "prompts", "timeline"):
            return
        record = {"kind": event.kind, "step": event.step, "time": at, "message": event.message, "values": event.values}
        self._lines.write([record])

    def notices(self) -> list[str]:
        return []

    def close(self, outcome: Outcome) -> None:
        self._lines.close()

    def rewind(self, step: int) -> list[Event]:
        """Forget what came after `step`, so that a run can go on from there. What was told of it is kept: it happened.
        Returns the events that are left."""
        kept = self._lines.keep(
            # A run that was asked to stop evaluated at its end; that end is no longer one.
            lambda line: (
                line["kind"] in ("warning", "info")
                or (
                    line["step"] <= step
                    and line["kind"] != "summary"
                    and not (line["kind"] == "evaluation" and line["message"].startswith("after"))
                )
            )
        )
        return [
            Event(kind=line["kind"], step=line["step"], message=line["message"], values=line["values"]) for line in kept
        ]


class StepsFile:
    """Lines of one kind of event, each with its step and time.

    Args:
        records: of an event's values.
        limit_bytes: a file that has grown beyond it loses its older half.
    """

    def __init__(
        self,
        folder: Path,
        kind: str,
        records: Callable[[dict[str, Any]], Iterable[dict[str, Any]]],
        limit_bytes: int | None = None,
    ) -> None:
        self.name = f"{kind}.jsonl"
        self._kind, self._records, self._limit_bytes = kind, records, limit_bytes
        self._lines = JsonLines(folder / self.name)

    def handle(self, event: Event, at: float) -> None:
        if event.kind != self._kind:
            return
        self._lines.write({"step": event.step, "time": at, **record} for record in self._records(event.values))
        if self._limit_bytes and self._lines.bytes > self._limit_bytes:
            self._lines.halve()

    def notices(self) -> list[str]:
        return []

    def rewind(self, step: int) -> None:
        """Forget what came after `step`."""
        self._lines.keep(lambda line: line["step"] <= step)

    def close(self, outcome: Outcome) -> None:
        self._lines.close()


def samples_file(folder: Path) -> StepsFile:
    """One line per sampled rollout: uid, prompt, answer, reward, …"""
    return StepsFile(folder, "samples", lambda values: values.get("samples", []))


def prompts_file(folder: Path) -> StepsFile:
    """One line per step: the uids of the prompts that were drawn for it, in their order."""
    return StepsFile(folder, "prompts", lambda values: [values])


def timeline_file(folder: Path, limit_bytes: int = _TIMELINE_BYTES) -> StepsFile:
    """One line per span of a process of the run: lane, name, start, seconds, figures."""
    return StepsFile(folder, "timeline", lambda values: values["spans"], limit_bytes)


def _filter(path: Path, wanted: Callable[[dict[str, Any]], bool]) -> list[dict[str, Any]]:
    """Keep the wanted lines of a file; half lines go."""
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
    _replace(path, "".join(map(_line, kept)).encode())
    return kept


def _replace(path: Path, content: bytes) -> None:
    """Written aside and renamed."""
    aside = path.with_suffix(".rewound")
    aside.write_bytes(content)
    aside.replace(path)


def _line(record: dict[str, Any]) -> str:
    """Printable characters as they are, so that `less` shows text and no answer moves the cursor; others escaped.

    A tokenizer may decode to half a surrogate pair, which UTF-8 cannot hold: it becomes "?".
    """
    text = json.dumps(record, allow_nan=False, ensure_ascii=False).encode("utf-8", errors="replace").decode("utf-8")
    if not text.isprintable():
        text = "".join(char if char.isprintable() else json.dumps(char)[1:-1] for char in text)
    return text + "\n"


def _ends_mid_line(path: Path) -> bool:
    if not path.exists() or not path.stat().st_size:
        return False
    with path.open("rb") as file:
        file.seek(-1, os.SEEK_END)
        return file.read(1) != b"\n"
