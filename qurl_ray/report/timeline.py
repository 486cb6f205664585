"""timeline.html and timeline.json: the activity of every process of a run over time, from timeline.jsonl.

timeline.json is in Chrome's trace event format, which Perfetto and chrome://tracing can open. timeline.html draws the
same spans itself, because Perfetto is a web site or a program to install, and a run's folder must be readable without
either: on a cluster without a network, or years later. Other pages of the run link to a step in it.
"""

import json
import re
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise, zip_longest
from pathlib import Path
from typing import Any

from qurl_ray.files import write_whole
from qurl_ray.report.page import render_page, script_data
from qurl_ray.report.text import one_line
from qurl_ray.runs.files import finite, read_spans, run_name
from qurl_ray.spans import ENVIRONMENTS, EVALUATION, ROLLOUTS, STEPS

PAGE, TRACE = "timeline.html", "timeline.json"
COLORS = {"rollout": 1, "generate": 12, "reward": 2, "logprob": 3, "update": 4, "sync": 5, "load": 5}
COLORS |= {"evaluation": 6, "checkpoint": 7, "start": 8, "sleep": 8, "ask": 8, "dead": 9}
"""Colour classes of the style sheet by span name, as in the report's chart of phases, which has no `generate`. Other
names have class 8."""
_PROCESSES = {STEPS: "run", ROLLOUTS: "run", EVALUATION: "run", "rank": "learner"}
_PROCESSES |= {ENVIRONMENTS: "trajectories", "worker": "rollout workers"}
"""Process of a lane by the lane's first word, in the order of the rows."""
LEVELS = {
    "engines": ("at the engines", 13),
    "environments": ("in their environment", 10),
    "waiting": ("waiting for their environment", 11),
    "queued": ("waiting for a place", 8),
}
"""Name and colour class of each figure of the lane ENVIRONMENTS, from the bottom to the top of its area."""
_SLIVER_S = 1e-5
"""Length of a gap or an overlap that comes from rounding."""
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


def levels(spans: Sequence[Span]) -> list[Span]:
    """Return intervals that do not overlap, from those of the lane ENVIRONMENTS, in the order of their start times. The
    figures of intervals that overlap are added: rollouts of several steps may be under way at a time."""
    moments = sorted({moment for span in spans for moment in (span.start, span.start + span.seconds)})
    intervals, open_, rest = [], list[Span](), deque(spans)
    for start, end in pairwise(moments):
        while rest and rest[0].start <= start:
            open_.append(rest.popleft())
        open_ = [span for span in open_ if span.start + span.seconds > start]
        if open_ and end - start > _SLIVER_S:
            figures = {key: sum(span.figures.get(key, 0.0) for span in open_) for key in LEVELS}
            intervals.append(replace(open_[-1], start=start, seconds=end - start, figures=figures))
    return intervals


def chrome_trace(spans: Sequence[Span]) -> dict[str, Any]:
    """Convert spans to trace events: one complete event ("X") per span, with times in microseconds since the first
    span, and the names of processes (run, learner, rollout workers) and threads (lanes) as metadata ("M"). Numbers of
    trajectories are counters ("C")."""
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
    counted, others = _parted(spans)
    for span, after in zip_longest(counted, counted[1:]):
        counter = {"name": span.name, "ph": "C", **ids[ENVIRONMENTS]}
        events.append({**counter, "ts": _microseconds(span.start - began), "args": span.figures})
        end = span.start + span.seconds
        if after is None or after.start - end > _SLIVER_S:
            events.append({**counter, "ts": _microseconds(end - began), "args": dict.fromkeys(LEVELS, 0.0)})
    for span in others:
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
    or 0]; of the lane ENVIRONMENTS its `levels`. Start times are in seconds since the first span."""
    names = list(dict.fromkeys(span.name for span in spans))
    place = {name: i for i, name in enumerate(names)}
    began = spans[0].start if spans else 0.0
    rows: dict[str, list[list[Any]]] = {lane: [] for lane in lanes(spans)}
    counted, others = _parted(spans)
    for span in [*counted, *others]:
        start, seconds = round(span.start - began, 5), round(span.seconds, 5)
        rows[span.lane].append([start, seconds, place[span.name], span.step, span.figures or 0])
    return {
        "names": names,
        "colors": [COLORS.get(name, 8) for name in names],
        "levels": {"lane": ENVIRONMENTS, "parts": [[key, *shown] for key, shown in LEVELS.items()]},
        "lanes": [{"name": lane, "spans": spans_of_lane} for lane, spans_of_lane in rows.items()],
    }


def _parted(spans: Sequence[Span]) -> tuple[list[Span], list[Span]]:
    """Return the levels of the lane ENVIRONMENTS, and the spans of all other lanes."""
    counted = [span for span in spans if span.lane == ENVIRONMENTS]
    return levels(counted), [span for span in spans if span.lane != ENVIRONMENTS]


def _process(lane: str) -> str:
    return _PROCESSES.get(re.split(r"\s", lane, maxsplit=1)[0], "other")


def _metadata(kind: str, ids: dict[str, int], **arguments: Any) -> dict[str, Any]:
    return {"name": kind, "ph": "M", **ids, "args": arguments}


def _microseconds(seconds: float) -> float:
    return round(1e6 * seconds, 1)
