import json
import re
from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from qurl_ray.config import RunConfig
from qurl_ray.report.catalog import groups
from qurl_ray.report.timeline import (
    COLORS,
    LEVELS,
    PAGE,
    TRACE,
    Span,
    chrome_trace,
    lanes,
    levels,
    read_timeline,
    write_timeline,
)
from qurl_ray.runs.files import RunRecord
from qurl_ray.runs.json_lines import timeline_file
from qurl_ray.tracking.tracker import Tracker
from qurl_ray.types import Event
from tests.report.browser import Dom, Reader, needs_chromium, opened
from tests.report.test_report import HOSTILE, Page
from tests.report.test_viewer import ACTS

BEGAN = 1_800_000_000.0


def span(lane: str, name: str, start: float, seconds: float, step: int = 1, **figures: float) -> dict:
    return {"lane": lane, "name": name, "start": BEGAN + start, "seconds": seconds, "step": step, **figures}


def a_step(n: int) -> list[dict]:
    """10 s, of which the rank is idle 4 s and a worker 6 s."""
    at = 10.0 * (n - 1)
    return [
        span("steps", "step", at, 9.5, n),
        span("rollouts", "rollout", at, 3.0, n),
        span("rollouts", "reward", at + 3, 1.0, n),
        span("rank 0", "logprob", at + 4, 1.0, n),
        span("rank 0", "update", at + 5, 3.0, n),
        span("rank 0", "sync", at + 8, 1.5, n),
        span("worker 0", "generate", at, 3.0, n, requests=64, tokens=1500, version=n),
        span("worker 0", "load", at + 8.5, 1.0, n),
        span("worker 1", "generate", at, 2.0, n, requests=32, tokens=500, version=n),
        span("worker 1", "dead", at + 3.0, 5.0, n),
    ]


def a_run(folder: Path, *spans: dict, tail: str = "") -> Path:
    folder.mkdir(exist_ok=True)
    lines = "".join(json.dumps({"time": 1.0, **one}) + "\n" for one in spans)
    (folder / "timeline.jsonl").write_text(lines + tail)
    (folder / "config.yaml").write_text("name: n\n")
    return folder


def events(*spans: dict) -> Event:
    return Event(kind="timeline", step=max(one["step"] for one in spans), values={"spans": list(spans)})


# --- the file ---------------------------------------------------------------------------------------------------------


def test_spans_go_to_their_file_and_nowhere_else_and_redone_steps_are_replaced(tmp_path, capsys):
    config = RunConfig.model_validate({"name": "n", "tracking": {"mlflow": False, "console": "plain"}})
    with Tracker(tmp_path, config, resolved={}) as tracker:
        for n in (1, 2, 3):
            tracker.handle(events(*a_step(n)))
        tracker.handle(events(span("rank 0", "checkpoint", 20.0, 1.0, 2)))  # told later, of step 2
        tracker.rewind(2)
        assert [one.step for one in read_timeline(tmp_path)] == [1] * 10 + [2] * 11
        tracker.handle(events(*a_step(3)))
    assert len(read_timeline(tmp_path)) == 31
    (line,) = (tmp_path / "metrics.jsonl").read_text().splitlines()
    assert "lacks 2 of 2 steps" in line  # they were recorded nowhere else
    assert "checkpoint" not in capsys.readouterr().out
    tracker.handle(events(*a_step(4)))  # too late: nothing happens
    assert len(read_timeline(tmp_path)) == 31


def test_a_file_that_grew_too_large_loses_its_older_half(tmp_path):
    sink = timeline_file(tmp_path, limit_bytes=20_000)
    for n in range(1, 101):
        sink.handle(events(*a_step(n)), 1.0)
    sink.close("finished")
    lines = (tmp_path / "timeline.jsonl").read_text().splitlines()
    steps = [json.loads(line)["step"] for line in lines]  # every line is whole
    assert 8_000 < (tmp_path / "timeline.jsonl").stat().st_size <= 20_000
    assert steps == sorted(steps)
    assert steps[-1] == 100


def test_what_is_no_span_is_left_out(tmp_path):
    odd = [{"step": 1}, {"step": 1, "lane": 3, "name": "x", "start": 1.0, "seconds": 1.0}]
    odd += [span("a", "b", 0.0, -1.0), span("a", "b", 0.0, "x"), span("a", "b", 0.0, 1.0, -3)]
    run = a_run(tmp_path, *odd, span("a", "b", 0.0, 1.0, 2, tokens=3, text="x"), tail='{"step": 1, "lane"')
    assert read_timeline(run) == [Span(lane="a", name="b", start=BEGAN, seconds=1.0, step=2, figures={"tokens": 3.0})]


def test_lanes_are_in_the_order_of_their_numbers():
    names = ["worker 10", "worker 2", "other", "environments", "evaluation", "rank 1", "rank 0", "rollouts", "steps"]
    spans = [Span(lane=name, name="x", start=0.0, seconds=0.0, step=1, figures={}) for name in names]
    assert lanes(spans) == [
        "steps",
        "rollouts",
        "evaluation",
        "rank 0",
        "rank 1",
        "environments",
        "worker 2",
        "worker 10",
        "other",
    ]


def test_a_phase_has_the_colour_of_the_reports_chart():
    charts = [chart for group in groups(RunRecord(config={}, summary=None), {}) for chart, _ in group.charts]
    (phases,) = [chart for chart in charts if chart.title == "Time per phase"]
    series = [series for panel in phases.panels for series in panel.series]
    assert {one.label: one.color for one in series}.items() <= COLORS.items()


def test_generate_rollout_and_answers_at_the_engines_have_colours_of_their_own():
    assert len({COLORS["generate"], COLORS["rollout"], LEVELS["engines"][1]}) == 3


# --- numbers of trajectories ------------------------------------------------------------------------------------------


def level(start: float, seconds: float, step: int = 1, **figures: float) -> dict:
    return span("environments", "trajectories", start, seconds, step, **(dict.fromkeys(LEVELS, 0.0) | figures))


def waits(n: int) -> list[dict]:
    """First 8 at the engines, then 6 that wait for their environments, of which 2 have one that works."""
    at = 10.0 * (n - 1)
    return [level(at, 1.0, n, engines=8.0), level(at + 1.0, 2.0, n, engines=2.0, environments=2.0, waiting=4.0)]


def as_span(one: dict) -> Span:
    known = {key: one[key] for key in ("lane", "name", "start", "seconds", "step")}
    return Span(**known, figures={key: one[key] for key in one if key not in known})


@given(st.lists(st.tuples(st.integers(0, 40), st.integers(1, 9), st.integers(0, 5)), max_size=12))
def test_levels_of_rounds_that_overlap_are_added(intervals):
    spans = sorted((as_span(level(a / 4, s / 4, waiting=float(v))) for a, s, v in intervals), key=lambda one: one.start)
    found = levels(spans)
    for one, after in pairwise(found):
        assert one.start + one.seconds <= after.start + 1e-6
    for tick in range(50):  # in the middle of each quarter of a second
        at = BEGAN + tick / 4 + 0.125
        there = [one.figures["waiting"] for one in found if one.start <= at < one.start + one.seconds]
        expected = [v for a, s, v in intervals if a <= tick < a + s]
        assert there == ([sum(expected)] if expected else [])


def test_what_rounding_leaves_between_levels_is_nothing():
    spans = [as_span(level(0.0, 1.0000004, engines=3.0)), as_span(level(1.0, 1.0, engines=5.0))]
    assert [(one.seconds, one.figures["engines"]) for one in levels(spans)] == [
        (pytest.approx(1.0), 3.0),
        (pytest.approx(1.0), 5.0),
    ]


def test_numbers_of_trajectories_are_counters_that_end_at_zero(tmp_path):
    run = a_run(tmp_path, *a_step(1), *waits(1), *a_step(2), *waits(2))
    write_timeline(run)
    events = json.loads((run / TRACE).read_text())["traceEvents"]
    counters = [event for event in events if event["ph"] == "C"]
    assert len([event for event in events if event["ph"] == "X"]) == 20
    assert {(event["name"], event["pid"], event["tid"]) for event in counters} == {
        ("trajectories", counters[0]["pid"], counters[0]["tid"])
    }
    (thread,) = [e for e in events if e["name"] == "thread_name" and e["args"] == {"name": "environments"}]
    assert (thread["pid"], thread["tid"]) == (counters[0]["pid"], counters[0]["tid"])
    assert [(event["ts"] / 1e6, sum(event["args"].values())) for event in counters] == [
        (0.0, 8.0),
        (1.0, 8.0),
        (3.0, 0.0),
        (10.0, 8.0),
        (11.0, 8.0),
        (13.0, 0.0),
    ]
    assert counters[1]["args"] == {"engines": 2.0, "environments": 2.0, "waiting": 4.0, "queued": 0.0}


# --- for Perfetto -----------------------------------------------------------------------------------------------------


def test_the_trace_is_as_chrome_wants_it(tmp_path):
    run = a_run(tmp_path, *a_step(1), *a_step(2))
    write_timeline(run)
    trace = json.loads((run / TRACE).read_text())
    assert trace.keys() == {"traceEvents", "displayTimeUnit", "otherData"}
    assert trace["otherData"] == {"began_unix_s": BEGAN}
    named = {(e["name"], e["pid"], e["tid"]): e["args"] for e in trace["traceEvents"] if e["ph"] == "M"}
    processes = {args["name"]: pid for (kind, pid, _), args in named.items() if kind == "process_name"}
    assert list(processes) == ["run", "learner", "rollout workers"]
    threads = {args["name"]: (pid, tid) for (kind, pid, tid), args in named.items() if kind == "thread_name"}
    assert threads["rank 0"][0] == processes["learner"]
    assert threads["worker 1"][0] == processes["rollout workers"]
    complete = [e for e in trace["traceEvents"] if e["ph"] != "M"]
    assert len(complete) == 20
    for event in complete:
        assert event.keys() == {"name", "cat", "ph", "ts", "dur", "pid", "tid", "args"}
        assert event["ph"] == "X"
        assert event["ts"] >= 0
        assert event["dur"] >= 0
        assert (event["pid"], event["tid"]) in threads.values()
    generate = next(e for e in complete if e["name"] == "generate" and e["args"]["step"] == 2)
    assert (generate["ts"], generate["dur"]) == (10e6, 3e6)  # microseconds
    assert (generate["pid"], generate["tid"]) == threads["worker 0"]
    assert generate["args"] == {"step": 2, "requests": 64.0, "tokens": 1500.0, "version": 2.0}
    assert [e["name"] for e in complete if (e["pid"], e["tid"]) == threads["steps"]] == ["step 1", "step 2"]


def test_no_spans_are_no_timeline(tmp_path):
    assert write_timeline(tmp_path) is None
    assert chrome_trace([])["traceEvents"] == []
    assert list(tmp_path.iterdir()) == []


# --- the page ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("text", [*HOSTILE, *ACTS])
def test_no_element_and_no_attribute_comes_from_data(tmp_path, text):
    def shape(text: str, folder: Path) -> list:
        run = a_run(folder, span(text, text, 0.0, 1.0, **{text: 1.0}))
        page = Page(write_timeline(run))
        assert page.oddities == []
        json.loads((run / TRACE).read_text())
        return [element for element in page.elements if element[0] != "meta"]

    assert shape(text, tmp_path / "a") == shape("harmless", tmp_path / "b")


@pytest.fixture(scope="module")
def page(tmp_path_factory) -> Path:
    return write_timeline(a_run(tmp_path_factory.mktemp("run"), *(one for n in range(1, 9) for one in a_step(n))))


def drawn(dom: Dom, classes: str) -> list[tuple[float, float]]:
    """(x, width) of each rect of these classes."""
    wanted = set(classes.split())
    found = [a for tag, a, _ in dom.elements if tag == "rect" and wanted <= set(a.get("class", "").split())]
    return [(float(a["x"]), float(a["width"])) for a in found]


@pytest.mark.sampled(3)
@needs_chromium
@pytest.mark.parametrize(
    ("view", "seen", "steps", "dead"),
    [
        ("step=3", "step 3 · 10.00 s", ["3"], 1),
        ("step=2&steps=3", "steps 2 to 4 · 30.00 s", ["2", "3", "4"], 3),
        ("step=8", "step 8 · 9.50 s", ["8"], 1),
        ("", "steps 4 to 8 · 49.50 s", ["4", "5", "6", "7", "8"], 5),
        ("all=1", "steps 1 to 8 · 79.50 s", [str(n) for n in range(1, 9)], 8),
        ("from=13.5&to=14.5", "step 2 · 1.00 s", ["2"], 1),
        ("from=x&to=0", "steps 1 to 8 · 79.50 s", [str(n) for n in range(1, 9)], 8),
    ],
)
def test_a_view_shows_its_steps(page, tmp_path, view, seen, steps, dead):
    dom = opened(page, tmp_path, view)
    assert dom.text("window") == seen
    texts = ["".join(t) for tag, a, t in dom.elements if tag == "text" and a.get("class") == "mid"]
    assert texts == steps
    assert len(drawn(dom, "step")) == len(steps)
    assert len(drawn(dom, "span c9")) == dead


@needs_chromium
def test_what_is_drawn_is_as_long_as_it_took_and_idle_time_is_told(page, tmp_path):
    dom = opened(page, tmp_path, "step=3")
    assert len(drawn(dom, "idle")) == 3  # rank 0 and two workers
    ((left, whole), *_) = drawn(dom, "idle")
    ((x, width),) = drawn(dom, "span c4")  # the update: from 5 s to 8 s of 10 s
    assert x == pytest.approx(left + 0.5 * whole, abs=0.1)
    assert width == pytest.approx(0.3 * whole, abs=0.1)
    assert [text for text in dom.all("quiet end") if "busy" in text] == ["55 % busy", "40 % busy", "20 % busy"]
    legend = re.sub(r"\s+", " ", dom.text("legend"))
    assert "update 3.00 s" in legend
    assert "generate 5.00 s" in legend
    assert "dead 5.00 s" in legend


@needs_chromium
def test_keys_buttons_and_mouse(page, tmp_path):
    with Reader(tmp_path) as reader:

        def expect(window: str) -> None:
            reader.until(f"find('window').textContent === {json.dumps(window)}")

        reader.open(page, "step=3")
        reader.press("ArrowRight")
        expect("step 4 · 10.00 s")
        reader.press("+")
        expect("step 4 · 5.00 s")
        reader.until("location.hash === '#from=32.50000&to=37.50000'")
        reader.point("find('out')", click=True)
        expect("step 4 · 10.00 s")
        reader.point("document.querySelector('#drawing .idle')", wheel=-100)
        expect("step 4 · 8.00 s")
        reader.point("find('all')", click=True)
        expect("steps 1 to 8 · 79.50 s")
        reader.point("document.querySelectorAll('#drawing .step')[1]", click=True)
        expect("step 2 · 10.00 s")
        reader.point("document.querySelector('#drawing .span.c4')")
        reader.until("find('tip').textContent.includes('updateseconds3.00 sfrom15.00 sstep2')")
        reader.point("[...document.querySelectorAll('#drawing .idle')].find((one) => one.lane.name === 'worker 0')")
        reader.until("find('tip').textContent === 'laneworker 0idle5.50 sfrom13.00 s'")
        drawing = f"[...document.querySelectorAll('#drawing .span.c{COLORS['generate']}')]"
        reader.point(f"{drawing}.find((one) => one.lane.name === 'worker 1')")
        reader.until("find('tip').textContent.endsWith('requests32tokens500version2tokens/s250')")
        assert reader.complaints == []


@needs_chromium
def test_thousands_of_spans_are_as_many_rectangles_as_can_be_seen(tmp_path):
    many = [span("worker 0", "generate", 0.01 * i, 0.005) for i in range(20_000)]
    dom = opened(write_timeline(a_run(tmp_path / "run", *many)), tmp_path / "profile", "all=1")
    assert 1 <= len(drawn(dom, f"span c{COLORS['generate']}")) < 1300
    assert "50 % busy" in dom.all("quiet end")


@needs_chromium
def test_waiting_for_environments_is_an_area_over_time(tmp_path):
    run = a_run(tmp_path / "run", *(one for n in (1, 2, 3) for one in (*a_step(n), *waits(n))))
    dom = opened(write_timeline(run), tmp_path / "profile", "step=2")
    ((left, whole),) = drawn(dom, "levels")
    areas = {a["class"].split()[1]: a["d"] for tag, a, _ in dom.elements if tag == "path" and "level " in a["class"]}
    assert list(areas) == [f"c{color}" for _, color in LEVELS.values()]

    def top(color: int, time: float) -> float:
        """Height of an area's upper edge at a time of the step, which has 10 s."""
        points = [tuple(map(float, point.split())) for point in areas[f"c{color}"].strip("MZ").split("L")]
        upper = points[: len(points) // 2]
        return min(upper, key=lambda point: abs(point[0] - (left + whole * time / 10)))[1]

    (lane,) = [a for tag, a, _ in dom.elements if tag == "rect" and "levels" in a.get("class", "")]
    bottom, high = float(lane["y"]) + float(lane["height"]), float(lane["height"])
    heights = {time: [(bottom - top(color, time)) / high for _, color in LEVELS.values()] for time in (0.5, 2.0, 5.0)}
    assert heights[0.5] == pytest.approx([1.0, 1.0, 1.0, 1.0], abs=0.01)
    assert heights[2.0] == pytest.approx([0.25, 0.5, 1.0, 1.0], abs=0.01)
    assert heights[5.0] == pytest.approx([0.0] * 4, abs=0.01)
    # 8 · 1 s and 2 · 2 s at the engines, of 8 · 3 s
    assert [text for text in dom.all("quiet end") if "busy" not in text] == ["50 % wait", "8 at most"]
    legend = dom.text("legend")
    ending = "trajectories:at the engines 1.2in their environment 0.4waiting for their environment 0.8"
    assert legend.endswith(ending)
    assert "trajectories 3.00 s" not in legend


@needs_chromium
def test_the_pointer_tells_what_trajectories_wait_for(tmp_path):
    page = write_timeline(a_run(tmp_path / "run", *a_step(1), *waits(1)))
    with Reader(tmp_path / "profile") as reader:
        reader.open(page, "from=1&to=3")
        reader.point("document.querySelector('#drawing .levels')")
        told = "at2.00 sat the engines2.0in their environment2.0waiting for their environment4.0"
        reader.until(f"find('tip').textContent.includes({json.dumps(told)})")
        assert reader.complaints == []


@needs_chromium
@pytest.mark.parametrize("text", ACTS)
def test_foreign_text_stays_text_in_the_browser(tmp_path, text):
    run = a_run(tmp_path / "run", span(text, text, 0.0, 1.0, **{text: 1.0}))
    dom = opened(write_timeline(run), tmp_path / "profile")
    assert dom.all(tag="title") == ["n · timeline"]
    assert "img" not in [tag for tag, _, _ in dom.elements]
    assert PAGE == "timeline.html"
