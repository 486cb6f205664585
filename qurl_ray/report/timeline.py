"""timeline.html and timeline.json: the activity of every process of a run over time, from timeline.jsonl.

timeline.json is in Chrome's trace event format, which Perfetto and chrome://tracing can open. timeline.html draws the
same spans itself, because Perfetto is a web site or a program to install, and a run's folder must be readable without
either: on a cluster without a network, or years later. Other pages of the run link to a step in it.
"""

import json
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from qurl_ray.files import write_whole
from qurl_ray.report.page import render_page, script_data
from qurl_ray.report.run_files import finite, read_spans, run_name
from qurl_ray.report.text import one_line
from qurl_ray.spans import EVALUATION, ROLLOUTS, STEPS

PAGE, TRACE = "timeline.html", "timeline.json"
COLORS = {"rollout": 1, "generate": 1, "reward": 2, "logprob": 3, "update": 4, "sync": 5, "load": 5}
COLORS |= {"evaluation": 6, "checkpoint": 7, "start": 8, "sleep": 8, "ask": 8, "dead": 9}
"""Colour classes of the style sheet by span name, as in the report's chart of phases. Other names have class 8."""
_PROCESSES = {STEPS: "run", ROLLOUTS: "run", EVALUATION: "run", "rank": "learner", "worker": "rollout workers"}
"""Process of a lane by the lane's first word, in the order of the rows."""
_PAGE_SPANS = 60_000
_KNOWN = {"step", "time", "lane", "name", "start", "seconds"}
_LIMIT = 80
"""Largest number of characters of a name."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Span:
    """One line of timeline.jsonl."""

    lane: str
    name: str
    start: float
    """Unix time of the start, in seconds, by the clock of the process that recorded the span."""
    seconds: float
    step: int
    figures: dict[str, float]


def read_timeline(run_dir: Path) -> list[Span]:
    """Read all valid spans, in the order of their start times."""
    spans = [
        Span(
            lane=one_line(line["lane"], _LIMIT),
            name=one_line(line["name"], _LIMIT),
            start=float(line["start"]),
            seconds=float(line["seconds"]),
            step=line["step"],
            figures={
                one_line(key, _LIMIT): value
                for key in line
                if key not in _KNOWN and (value := finite(line[key])) is not None
            },
        )
        for line in read_spans(run_dir)
    ]
    return sorted(spans, key=lambda span: span.start)


def write_timeline(run_dir: Path) -> Path | None:
    """Write `run_dir`/timeline.html and timeline.json. Return the path of the page, or None if no span was recorded.

    Raises:
        OSError: the folder is missing or not writable.
    """
    spans = read_timeline(run_dir)
    if not spans:
        return None
    write_whole(run_dir / TRACE, json.dumps(chrome_trace(spans), allow_nan=False, separators=(",", ":")))
    write_whole(run_dir / PAGE, timeline_page(run_name(run_dir), spans))
    return run_dir / PAGE


def lanes(spans: Iterable[Span]) -> list[str]:
    """Return the lanes of the spans in the order of the rows: the whole run, learner ranks, rollout workers."""
    words = list(_PROCESSES)

    def place(lane: str) -> tuple[int, int, str]:
        word, _, number = lane.partition(" ")
        return words.index(word) if word in words else len(words), int(number) if number.isdecimal() else 0, lane

    return sorted({span.lane for span in spans}, key=place)


def chrome_trace(spans: Sequence[Span]) -> dict[str, Any]:
    """Convert spans to trace events: one complete event ("X") per span, with times in microseconds since the first
    span, and the names of processes (run, learner, rollout workers) and threads (lanes) as metadata ("M")."""
    names = lanes(spans)
    processes = list(dict.fromkeys(map(_process, names)))
    began = spans[0].start if spans else 0.0
    ids = {lane: {"pid": processes.index(_process(lane)) + 1, "tid": i} for i, lane in enumerate(names, start=1)}
    events: list[dict[str, Any]] = []
    for pid, process in enumerate(processes, start=1):
        events.append(_metadata("process_name", {"pid": pid, "tid": 0}, name=process))
        events.append(_metadata("process_sort_index", {"pid": pid, "tid": 0}, sort_index=pid))
    for i, lane in enumerate(names, start=1):
        events.append(_metadata("thread_name", ids[lane], name=lane))
        events.append(_metadata("thread_sort_index", ids[lane], sort_index=i))
    for span in spans:
        name = f"step {span.step}" if span.lane == STEPS and span.name == "step" else span.name
        times = {"ts": _microseconds(span.start - began), "dur": _microseconds(span.seconds)}
        figures = {"step": span.step, **span.figures}
        events.append({"name": name, "cat": _process(span.lane), "ph": "X", **ids[span.lane], **times, "args": figures})
    return {"traceEvents": events, "displayTimeUnit": "ms", "otherData": {"began_unix_s": began}}


def timeline_page(name: str, spans: Sequence[Span]) -> str:
    """Return the page's text. If there are more than `_PAGE_SPANS` spans, it has only the latest ones."""
    return render_page(
        "timeline.html.j2",
        styles=("page.css.j2", "viewer.css.j2", "timeline.css.j2"),
        script="timeline.js.j2",
        name=name,
        trace=TRACE,
        left_out=max(0, len(spans) - _PAGE_SPANS),
        data=script_data(page_data(spans[-_PAGE_SPANS:])),
    )


def page_data(spans: Sequence[Span]) -> dict[str, Any]:
    """Return the data for the page's script: for each lane, spans as [start, seconds, index of the name, step, figures
    or 0]. Start times are in seconds since the first span."""
    names = list(dict.fromkeys(span.name for span in spans))
    place = {name: i for i, name in enumerate(names)}
    began = spans[0].start if spans else 0.0
    rows: dict[str, list[list[Any]]] = {lane: [] for lane in lanes(spans)}
    for span in spans:
        start, seconds = round(span.start - began, 5), round(span.seconds, 5)
        rows[span.lane].append([start, seconds, place[span.name], span.step, span.figures or 0])
    return {
        "names": names,
        "colors": [COLORS.get(name, 8) for name in names],
        "lanes": [{"name": lane, "spans": found} for lane, found in rows.items()],
    }


def _process(lane: str) -> str:
    return _PROCESSES.get(re.split(r"\s", lane, maxsplit=1)[0], "other")


def _metadata(kind: str, ids: dict[str, int], **arguments: Any) -> dict[str, Any]:
    return {"name": kind, "ph": "M", **ids, "args": arguments}


def _microseconds(seconds: float) -> float:
    return round(1e6 * seconds, 1)
