"""Files such as metrics.jsonl and samples.jsonl: one strict JSON object per line, flushed after every write."""

import json
import os
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO

from qurl_ray.runs.files import finite, is_step, json_object
from qurl_ray.runs.values import plain
from qurl_ray.types import KINDS, Event, Outcome

_TIMELINE_BYTES = 32 << 20


class JsonLines:
    """Writer that appends to one file. A run that resumes in the same folder keeps its earlier lines."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._open()

    def _open(self) -> None:
        torn = False
        if self._path.exists() and self._path.stat().st_size:
            with self._path.open("rb") as file:
                file.seek(-1, os.SEEK_END)
                torn = file.read(1) != b"\n"
        self._file = self._path.open("a", encoding="utf-8", buffering=1, newline="\n")
        if torn:  # the process that wrote it was killed: its partial line must not merge with our first line
            self._file.write("\n")

    def write(self, records: Iterable[dict[str, Any]]) -> None:
        for record in records:
            text = json.dumps(plain(record), allow_nan=False, ensure_ascii=False)
            # A tokenizer may decode to half a surrogate pair, which UTF-8 cannot encode: it becomes "?".
            text = text.encode("utf-8", errors="replace").decode("utf-8")
            # Printable characters stay, so that `less` shows text. Others are escaped: no answer can move the cursor.
            if not text.isprintable():
                text = "".join(char if char.isprintable() else json.dumps(char)[1:-1] for char in text)
            # One write per line: after a crash, all lines but the last are then complete.
            self._file.write(text + "\n")
        self._file.flush()

    def keep(self, wanted: Callable[[dict[str, Any]], bool | None]) -> int:
        """Remove unwanted and damaged lines from the file. Return the number of damaged ones.

        Args:
            wanted: returns None for a record that the file's owner cannot have written.
        """
        self._file.close()
        try:
            return _filter(self._path, wanted)
        finally:
            self._open()

    @property
    def bytes(self) -> int:
        """Size of the file in bytes."""
        return os.fstat(self._file.fileno()).st_size

    def halve(self) -> None:
        """Remove the older half of the file."""
        self._file.close()
        content = self._path.read_bytes()
        with _replacing(self._path) as kept:
            kept.write(content[content.find(b"\n", len(content) // 2) + 1 :])
        self._open()

    def close(self) -> None:
        self._file.close()


class MetricsFile:
    """Sink for all events without their own file, one line each: kind, step, time (unix seconds), message, values."""

    name = "metrics.jsonl"

    def __init__(self, folder: Path) -> None:
        self._lines = JsonLines(folder / self.name)

    def handle(self, event: Event, at: float) -> None:
        if event.kind in ("samples", "prompts", "timeline", "phase"):
            return
        record = {"kind": event.kind, "step": event.step, "time": at, "message": event.message, "values": event.values}
        self._lines.write([record])

    def notices(self) -> list[str]:
        return []

    def close(self, outcome: Outcome) -> None:
        self._lines.close()

    def rewind(self, step: int, evaluations: Iterable[str] = ()) -> list[str]:
        """Remove the events after `step`, so that a run can resume from there. Warnings and messages are kept.
        Return a sentence on each kind of damage that was found.

        Args:
            evaluations: labels of the evaluations up to `step`.
        """
        lacking, unseen = set(range(1, step + 1)), set(evaluations)

        def wanted(line: dict[str, Any]) -> bool | None:
            kind, message = line.get("kind"), line.get("message")
            if kind not in KINDS or not isinstance(message, str) or not isinstance(line.get("values"), dict):
                return None
            if kind in ("warning", "info"):
                return True
            if kind == "step":
                lacking.discard(line["step"])
            # A run that was asked to stop made its final evaluation then; on resuming, it is no longer final.
            final = kind == "summary" or (kind == "evaluation" and message.startswith("after"))
            kept = line["step"] <= step and not final
            if kept and kind == "evaluation":
                unseen.discard(message)
            return kept

        notes = _damage(self.name, self._lines.keep(wanted))
        if lacking:
            shown = ", ".join(map(str, sorted(lacking)[:8])) + (", …" if len(lacking) > 8 else "")
            notes.append(f"{self.name} lacks {len(lacking)} of {step} steps ({shown}): reports leave them out")
        if unseen:
            notes.append(f"{self.name} lacks the evaluation {' and '.join(sorted(unseen))}: reports leave it out")
        return notes


class StepsFile:
    """Sink for one kind of event. Each line has the step and the time of its event.

    Args:
        records: function from the values of an event to its records, one line each.
        limit_bytes: size limit of the file; a larger file loses its older half.
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

    def rewind(self, step: int) -> list[str]:
        """Remove the lines after `step`. Return a sentence on damaged lines, if there were any."""
        return _damage(self.name, self._lines.keep(lambda line: line["step"] <= step))

    def close(self, outcome: Outcome) -> None:
        self._lines.close()


def samples_file(folder: Path) -> StepsFile:
    """Return the sink of samples.jsonl, with one line per sampled rollout: uid, prompt, answer, reward, …"""
    return StepsFile(folder, "samples", lambda values: values.get("samples", []))


def prompts_file(folder: Path) -> StepsFile:
    """Return the sink of prompts.jsonl, with one line per step: the uids of its prompts, in the order of drawing."""
    return StepsFile(folder, "prompts", lambda values: [values])


def timeline_file(folder: Path, limit_bytes: int = _TIMELINE_BYTES) -> StepsFile:
    """Return the sink of timeline.jsonl, with one line per span of a process: lane, name, start, seconds, figures."""
    return StepsFile(folder, "timeline", lambda values: values["spans"], limit_bytes)


def _filter(path: Path, wanted: Callable[[dict[str, Any]], bool | None]) -> int:
    """Rewrite the file with the wanted lines. Return the number of damaged ones; see JsonLines.keep."""
    damaged = 0
    # Bytes, because text would also be split at Unicode line separators, which answers may contain.
    with path.open("rb") as file, _replacing(path) as kept:
        for line in file:
            try:
                line.decode()
                record = json_object(line)
            except UnicodeDecodeError:
                record = None
            dated = record is not None and is_step(record.get("step")) and finite(record.get("time")) is not None
            verdict = wanted(record) if record is not None and dated else None
            if verdict:
                kept.write(line.rstrip(b"\n") + b"\n")
            damaged += verdict is None and bool(line.strip())
    return damaged


@contextmanager
def _replacing(path: Path) -> Iterator[BinaryIO]:
    """Replace the file atomically: yield a new file beside it, and rename that at the end."""
    aside = path.with_suffix(".rewound")
    with aside.open("wb") as file:
        yield file
    aside.replace(path)


def _damage(name: str, lines: int) -> list[str]:
    return [f"{name}: {lines} damaged or incomplete line(s) removed"] if lines else []
