"""What the processes of a run say that they did when."""

import time

import pytest

from qurl_ray.spans import _LIMIT, Spans


def taken(spans: Spans) -> list[dict]:
    return [span for event in spans.events() for span in event.values["spans"]]


def test_a_block_is_a_span_however_it_ends():
    spans, began = Spans(), time.time()
    spans.step = 3
    with spans.during("worker 0", "generate", requests=2) as figures:
        time.sleep(0.02)
        figures["tokens"] = 5
    with pytest.raises(KeyError), spans.during("rank 0", "sync"):
        raise KeyError
    first, second = taken(spans)
    assert first | {"start": 0, "seconds": 0} == {
        "lane": "worker 0",
        "name": "generate",
        "start": 0,
        "seconds": 0,
        "step": 3,
        "requests": 2,
        "tokens": 5,
    }
    assert began <= first["start"] <= time.time() - first["seconds"] + 0.01
    assert 0.02 <= first["seconds"] < time.time() - began + 0.01
    assert (second["lane"], second["name"]) == ("rank 0", "sync")
    assert spans.events() == []


def test_phases_follow_each_other_up_to_now():
    spans, now = Spans(), time.time()
    spans.phases("rank 0", {"logprob": 1.0, "update": 2.5})
    spans.past("steps", "step", 4.0)
    logprob, update, step = taken(spans)
    assert logprob["start"] == pytest.approx(now - 3.5, abs=0.1)
    assert update["start"] == pytest.approx(logprob["start"] + 1.0, abs=1e-5)
    assert (step["start"], step["seconds"]) == (pytest.approx(now - 4.0, abs=0.1), 4.0)


def test_too_many_are_counted():
    spans = Spans()
    for _ in range(_LIMIT + 7):
        spans.past("worker 0", "generate", 0.1)
    found = taken(spans)
    assert len(found) == _LIMIT + 1
    assert (found[-1]["name"], found[-1]["spans"]) == ("spans left out", 7)
    spans.past("worker 0", "generate", 0.1)
    assert len(taken(spans)) == 1
