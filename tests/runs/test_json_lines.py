import errno
import json
import math
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from qurl_ray.runs.values import flatten, number, plain
from qurl_ray.runs.json_lines import JsonLines, MetricsFile, samples_file
from qurl_ray.types import Event


def refuse(word: str):
    raise AssertionError(f"{word} is not JSON")


def strict_lines(path: Path) -> list[dict]:
    return [json.loads(line, parse_constant=refuse) for line in path.read_text(encoding="utf-8").splitlines()]


leaves = st.none() | st.booleans() | st.integers() | st.floats() | st.text()
trees = st.recursive(leaves, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3))


@settings(max_examples=200, deadline=None)
@given(trees)
def test_whatever_an_event_holds_is_strict_json(value):
    text = json.dumps(plain(value), allow_nan=False)
    assert plain(json.loads(text, parse_constant=refuse)) == plain(value)


def test_numpy_paths_and_records_become_plain_values():
    @dataclass
    class Pair:
        left: object
        right: object

    value = {"a": np.float32(0.5), "b": np.array([1, 2]), "c": Pair(np.int64(3), Path("x")), 4: (np.bool_(True),)}
    assert plain(value) == {"a": 0.5, "b": [1, 2], "c": {"left": 3, "right": "x"}, "4": [True]}


def test_what_is_not_finite_becomes_null():
    assert plain({"a": math.nan, "b": [-math.inf, np.float64("nan")]}) == {"a": None, "b": [None, None]}


def test_nested_names_are_joined_and_lists_stay():
    assert dict(flatten({"a": {"b": {"c": 1}, "d": [2]}, "e": {}}, "/")) == {"a/b/c": 1, "a/d": [2]}


def test_truth_values_and_text_are_not_numbers():
    assert [number(v) for v in (True, np.bool_(False), "1", None, np.int32(2), 0.5)] == [None] * 4 + [2.0, 0.5]


def test_each_event_is_one_line_at_once(tmp_path):
    sink = MetricsFile(tmp_path)
    sink.handle(Event(kind="step", step=3, message="two\nlines", values={"reward/mean": math.nan}), 12.5)
    assert strict_lines(tmp_path / "metrics.jsonl") == [
        {"kind": "step", "step": 3, "time": 12.5, "message": "two\nlines", "values": {"reward/mean": None}}
    ]
    sink.close("finished")


def test_samples_go_to_their_own_file_one_line_each(tmp_path):
    samples = [{"uid": "a/0", "prompt": "1+1=", "answer": "2", "reward": 1.0}, {"uid": "a/1", "answer": "\ud83d …"}]
    event = Event(kind="samples", step=2, values={"samples": samples})
    metrics, texts = MetricsFile(tmp_path), samples_file(tmp_path)
    for sink in (metrics, texts):
        sink.handle(event, 1.0)
        sink.close("finished")
    assert strict_lines(tmp_path / "metrics.jsonl") == []
    first, second = strict_lines(tmp_path / "samples.jsonl")
    assert first == {"step": 2, "time": 1.0, **samples[0]}
    assert second["answer"] == "? …"  # half a surrogate pair cannot be written


def test_a_half_line_of_a_killed_process_does_not_swallow_the_next(tmp_path):
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 1}\n{"st')
    lines = JsonLines(path)
    lines.write([{"step": 2}])
    lines.close()
    assert path.read_text().splitlines() == ['{"step": 1}', '{"st', '{"step": 2}']


def test_rewinding_keeps_what_came_before_whatever_it_holds(tmp_path):
    metrics, samples = MetricsFile(tmp_path), samples_file(tmp_path)
    for step in (1, 2, 3):
        metrics.handle(Event(kind="step", step=step, values={"loss": step / 3}), at=0.0)
        strange = {"answer": f"a\u2028b\u2029c\u0085d {step}"}
        samples.handle(Event(kind="samples", step=step, values={"samples": [strange]}), at=0.0)
    metrics.handle(Event(kind="evaluation", step=2, message="during"), at=0.0)
    metrics.handle(Event(kind="evaluation", step=2, message="after, quantized"), at=0.0)
    metrics.handle(Event(kind="summary", step=2), at=0.0)
    metrics.handle(Event(kind="warning", step=3, message="a worker died"), at=0.0)
    with (tmp_path / "samples.jsonl").open("ab") as file:
        file.write('{"answer": "é'.encode()[:-1])  # torn inside a character
    assert metrics.rewind(2, ["during"]) == []
    assert samples.rewind(2) == ["samples.jsonl: 1 damaged or incomplete line(s) removed"]
    kept = strict_lines(tmp_path / "metrics.jsonl")
    assert [(line["kind"], line["step"], line["message"]) for line in kept] == [
        ("step", 1, ""),
        ("step", 2, ""),
        ("evaluation", 2, "during"),
        ("warning", 3, "a worker died"),
    ]
    assert kept[1]["values"] == {"loss": 2 / 3}
    lines = [json.loads(line) for line in (tmp_path / "samples.jsonl").read_bytes().splitlines()]
    assert [line["answer"] for line in lines] == [f"a\u2028b\u2029c\u0085d {step}" for step in (1, 2)]
    metrics.rewind(2)
    assert strict_lines(tmp_path / "metrics.jsonl") == kept
    metrics.handle(Event(kind="step", step=3, values={"loss": 4.0}), at=0.0)
    assert metrics.rewind(3) == []
    assert [line["step"] for line in strict_lines(tmp_path / "metrics.jsonl")] == [1, 2, 2, 3, 3]


STEP = {"kind": "step", "time": 1.0, "message": "", "values": {}}
NOT_OURS = [
    "{", "[]", "null", "7", '"step"', "\x00\x00", '{"kind": "step"}', '{"step": 1}', "[" * 100_000,
    *(json.dumps({**STEP, "step": 1, key: value}) for key, value in [
        ("step", -1), ("step", "1"), ("step", True), ("step", 1.5), ("step", 10**400), ("time", None), ("time", "now"),
        ("kind", "stop"), ("kind", []), ("message", None), ("values", []),
    ]),
    json.dumps({**STEP, "step": 1, "message": "\xf3"}, ensure_ascii=False),  # no UTF-8
]  # fmt: skip


@pytest.mark.parametrize("line", NOT_OURS, ids=lambda line: line[:60])
def test_a_damaged_line_is_removed_and_what_it_held_is_named(tmp_path, line):
    content = [json.dumps({**STEP, "step": number}).encode() for number in range(1, 14)]
    content[2] = line.encode("latin-1")
    (tmp_path / "metrics.jsonl").write_bytes(b"\n".join(content) + b"\n")
    metrics = MetricsFile(tmp_path)
    assert metrics.rewind(13) == [
        "metrics.jsonl: 1 damaged or incomplete line(s) removed",
        "metrics.jsonl lacks 1 of 13 steps (3): reports leave them out",
    ]
    assert [found["step"] for found in strict_lines(tmp_path / "metrics.jsonl")] == [1, 2, *range(4, 14)]


def test_an_evaluation_that_is_lost_is_named(tmp_path):
    metrics = MetricsFile(tmp_path)
    for step, label in ((1, "during"), (1, "after")):
        metrics.handle(Event(kind="evaluation", step=step, message=label), at=0.0)
    assert metrics.rewind(0, ["before"]) == ["metrics.jsonl lacks the evaluation before: reports leave it out"]
    metrics.handle(Event(kind="evaluation", step=0, message="before"), at=0.0)
    assert metrics.rewind(0, ["before"]) == []


def test_many_lost_steps_are_counted(tmp_path):
    assert MetricsFile(tmp_path).rewind(20) == [
        "metrics.jsonl lacks 20 of 20 steps (1, 2, 3, 4, 5, 6, 7, 8, …): reports leave them out"
    ]


def test_a_full_disk_leaves_the_file_in_use(tmp_path, monkeypatch):
    metrics = MetricsFile(tmp_path)
    monkeypatch.setattr(Path, "replace", refuse_space)
    with pytest.raises(OSError, match="No space left"):
        metrics.rewind(0)
    metrics.handle(Event(kind="step", step=1), at=0.0)
    assert [line["step"] for line in strict_lines(tmp_path / "metrics.jsonl")] == [1]


def refuse_space(*_):
    raise OSError(errno.ENOSPC, "No space left on device")
