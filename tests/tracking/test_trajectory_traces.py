"""Trajectories of several turns as MLflow traces, read back with MLflow's own client from a real store."""

import asyncio
import json
import time

import pytest

from qurl_ray.actors.environments import EnvironmentReply
from qurl_ray.actors.trajectories import Played
from qurl_ray.environments.process import CallFailed
from qurl_ray.environments.protocol import Step
from qurl_ray.runs.json_lines import samples_file
from qurl_ray.types import Problem
from tests.actors.test_trajectories import Scripted, Seats, player, requests
from tests.data.test_turns import tokenizer_with
from tests.tracking.test_mlflow_sink import _database, _empty_database, open_sink, samples, sink, traces_of  # noqa: F401

BEGAN = 1_700_000_000.25
TOLD = [{"role": "tool", "name": "calculator", "content": "1776="}]
SAMPLE = {
    "uid": "train-1/0",
    "prompt": "37*48=",
    "answer": "[37*48]<eos>1776=1776<eos>",
    "expected": "1776",
    "reward": 1.0,
    "status": "ok",
    "finish": "stop",
    "versions": [[6, 1], [7, 2], [-1, 1], [7, 2]],
    "tokens": ["[37*48", "]", "<eos>", "1776=", "1776", "<eos>"],
    "logprobs": [-0.5, -0.25, -0.1, None, -0.3, 0.0],
    "proximal_logprobs": [-0.5, -0.2, -0.1, None, -0.5, 0.0],
    "began": BEGAN,
    "queued": 0.75,
    "seconds": 4.0,
    "turns": [
        {"at": 0, "tokens": 3, "text": "[37*48]", "asked": 0.5, "waited": 1.0},
        {"at": 4, "tokens": 2, "text": "1776", "asked": 3.25, "waited": 0.5},
    ],
    "said": [
        {"at": 0, "messages": [], "reward": None, "calls": 0, "failed_calls": 0, "asked": 0.0, "seconds": 0.25,
         "waited": 0.5},
        {"at": 3, "messages": TOLD, "reward": 0.5, "calls": 1, "failed_calls": 0, "asked": 1.5, "seconds": 1.25,
         "waited": 1.75},
        {"at": 6, "messages": [], "reward": None, "calls": 0, "failed_calls": 0, "asked": 3.75, "seconds": 0.125,
         "waited": 0.25, "failed": "timeout: no reply within 5 s"},
    ],
}  # fmt: skip


def times(span) -> tuple[float, float]:
    """Start and duration in seconds, the start since the trajectory began."""
    return span.start_time_ns / 1e9 - BEGAN, (span.end_time_ns - span.start_time_ns) / 1e9


def test_turns_and_what_environments_said_are_spans_with_their_times(tmp_path):
    run = open_sink(tmp_path / "demo")
    for _ in range(2):  # sent again, it is the same trace
        run.handle(samples(3, SAMPLE), BEGAN + 60)
    run.close("finished")
    assert run.notices() == []
    (trace,) = traces_of(tmp_path / "demo")
    assert (trace.info.request_time, trace.info.execution_duration) == (int(1000 * BEGAN), 4000)
    root, *parts = sorted(trace.data.spans, key=lambda span: (span.parent_id is not None, span.start_time_ns))
    kinds = [(span.name, span.span_type) for span in parts]
    assert kinds == [
        ("reset", "TOOL"),
        ("turn 1", "LLM"),
        ("environment 1", "TOOL"),
        ("turn 2", "LLM"),
        ("environment 2", "TOOL"),
        ("judge", "EVALUATOR"),
    ]
    assert {span.parent_id for span in parts} == {root.span_id}
    expected = [(0.0, 0.5), (0.5, 1.0), (1.5, 1.75), (3.25, 0.5), (3.75, 0.25), (4.0, 0.0)]
    assert times(root) == pytest.approx((0.0, 4.0), abs=1e-5)
    assert root.attributes["seconds_queued"] == 0.75
    for span, (at, seconds) in zip(parts, expected, strict=True):
        assert times(span) == pytest.approx((at, seconds), abs=1e-5)
    reset, first, told, second, failed, judged = parts
    assert (first.inputs, first.outputs) == ("37*48=", "[37*48]")
    assert (told.inputs, told.outputs) == ("[37*48]", TOLD)
    assert (second.inputs, second.outputs) == (TOLD, "1776")
    assert first.attributes["tokens"] == ["[37*48", "]", "<eos>"]
    assert (first.attributes["versions"], second.attributes["versions"]) == ([[6, 1], [7, 2]], [[7, 2]])
    assert first.attributes["logprob_gap"] == [0.0, -0.05, 0.0]
    assert second.attributes["logprob_gap"] == [0.2, 0.0]
    assert (told.attributes["seconds_worked"], told.attributes["seconds_waited"]) == (1.25, 1.75)
    assert (told.attributes["reward"], told.attributes["calls"], told.attributes["failed_calls"]) == (0.5, 1, 0)
    assert [str(span.status.status_code.value) for span in (reset, first, told, second, failed)] == [
        *["OK"] * 4,
        "ERROR",
    ]
    assert failed.status.description == failed.attributes["failed"] == "timeout: no reply within 5 s"
    assert judged.inputs["expected"] == "1776"


def test_a_turn_without_tokens_is_still_a_trace(tmp_path):
    run = open_sink(tmp_path / "demo")
    run.handle(samples(3, SAMPLE | {"tokens": None, "logprobs": None, "versions": None}), BEGAN + 60)
    run.close("finished")
    assert run.notices() == []
    (trace,) = traces_of(tmp_path / "demo")
    assert {"judge", "turn 2"} <= {span.name for span in trace.data.spans}


class Slow(Scripted):
    """Takes its time for a turn."""

    async def generate(self, request):
        await asyncio.sleep(0.03)
        return await super().generate(request)


class Tools(Seats):
    """Says that it worked for 10 ms."""

    async def reply(self, outcome):
        await asyncio.sleep(0.05)
        return EnvironmentReply(number=0, outcome=outcome, seconds=0.01)


def played_here() -> tuple[list[Played], float, float]:
    """Two trajectories, the second of which fails; and when they began and ended."""

    def make(problem: Problem):
        left = iter(range(2))

        def step(answer: str):
            if problem.uid == "b" and next(left):
                return CallFailed(kind="died", detail="the process ended")
            return Step(messages=TOLD, reward=0.5, info={"calls": 1})

        return step, []

    tokenizer, began = tokenizer_with(None), time.time()
    problems = [Problem(uid=uid, prompt="12", answer="") for uid in "ab"]
    made = player(
        Slow(50, tokenizer.eos_token_id), Tools(make), tokenizer, cut_turns="close", turn_tokens=4, max_turns=3
    )
    found = asyncio.run(made.play(requests(tokenizer, problems), problems))
    return found, began, time.time()


def test_what_a_player_records_becomes_spans_that_follow_each_other(tmp_path):
    found, began, ended = played_here()
    sink_of_file = samples_file(tmp_path)
    lines = [{"uid": one.completion.uid, "status": "error" if one.failure else "ok"} | one.log() for one in found]
    sink_of_file.handle(samples(1, *lines), ended)
    written = [json.loads(line) for line in (tmp_path / "samples.jsonl").read_text().splitlines()]
    run = open_sink(tmp_path / "demo")
    run.handle(samples(1, *written), ended)
    run.close("finished")
    good, failed = sorted(traces_of(tmp_path / "demo"), key=lambda trace: trace.info.tags["uid"])
    assert [span.name for span in good.data.spans].count("judge") == 1
    for trace, one in ((good, found[0]), (failed, found[1])):
        root, *parts, _ = sorted(trace.data.spans, key=lambda span: (span.parent_id is not None, span.start_time_ns))
        assert began - 0.001 <= root.start_time_ns / 1e9 <= root.end_time_ns / 1e9 <= ended + 0.001
        names = [span.name for span in parts]
        assert names == ["reset", *(f"{kind} {n + 1}" for n in range(one.turns) for kind in ("turn", "environment"))]
        at = root.start_time_ns
        for span in parts:
            assert span.start_time_ns >= at - 5_000  # rounded to microseconds
            at = span.end_time_ns
            assert span.end_time_ns - span.start_time_ns >= (28e6 if span.name.startswith("turn") else 48e6)
        assert at <= root.end_time_ns + 5_000
        assert [span.outputs for span in parts if span.name.startswith("turn")] == [turn.text for turn in one.drew]
        assert all(turn.text for turn in one.drew)
        worked = {span.attributes["seconds_worked"] for span in parts if not span.name.startswith("turn")}
        assert worked == {0.01}
    assert (found[0].turns, found[1].turns) == (3, 2)
    last = max((span for span in failed.data.spans if span.span_type == "TOOL"), key=lambda span: span.start_time_ns)
    assert last.attributes["failed"] == "died: the process ended"
    assert failed.info.state == "ERROR"
