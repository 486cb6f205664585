"""Environments that hang, crash, flood and fork cost their trajectory, a bounded time, and nothing else."""

import contextlib
import re
import sys
import time
import uuid
from pathlib import Path

import pytest

from qurl_ray.config import load_config
from qurl_ray.environments.declared import with_tools
from qurl_ray.environments.process import CallFailed, EnvironmentProcess
from qurl_ray.environments.protocol import Step, Traits
from qurl_ray.errors import DataError, EnvironmentFailed, QurlError, RewardError
from qurl_ray.rewards.process import VerifierProcess
from qurl_ray.tables import ENVIRONMENTS, PROBLEMS
from qurl_ray.types import Problem

BAD = "tests.environments.bad_environments"
PROBLEM = Problem(uid="0", prompt="1*1", answer="1", meta={"level": 3})


@pytest.fixture(autouse=True)
def _nothing_is_left(monkeypatch):
    """Of the processes that a test starts, none is alive when it ends."""
    mark = f"mark-{uuid.uuid4()}"
    monkeypatch.setenv("QURL_TEST_MARK", mark)
    yield
    deadline = time.monotonic() + 20
    while alive(mark) and time.monotonic() < deadline:
        time.sleep(0.02)
    assert not alive(mark)


def alive(mark: str) -> list[int]:
    found = []
    for path in Path("/proc").glob("[0-9]*/environ"):
        with contextlib.suppress(OSError):
            if mark.encode() in path.read_bytes():
                found.append(int(path.parent.name))
    return found


def process(name: str, timeout_s: float = 20.0, memory_gb: float = 1.0, **params) -> EnvironmentProcess:
    name = name if ":" in name or name == "calculator" else f"{BAD}:{name}"
    return EnvironmentProcess(name, params, timeout_s=timeout_s, memory_gb=memory_gb)


def test_a_calculator_answers_calls_and_ends_with_an_answer():
    with process("calculator") as calculator:
        assert calculator.reset("a", PROBLEM) == []
        said = {"[37*48]": "1776=", "[5-9]": "-4=", "[37*]": "?=", "[": "?=", f"[{'9' * 10}*1]": "?="}
        for call, result in said.items():
            step = calculator.step("a", call)
            assert [m["content"] for m in step.messages] == [result]
            assert (step.done, step.reward) == (False, None)
            assert step.info == {"calls": 1, "failed_calls": int(result == "?=")}
        assert calculator.step("a", "1776") == Step(messages=[], done=True)
        assert calculator.traits.deterministic


def test_the_control_of_the_calculator_answers_nothing():
    with process("calculator", works=False) as calculator:
        calculator.reset("a", PROBLEM)
        assert calculator.step("a", "[1+1]").messages[0]["content"] == "?="


@pytest.mark.parametrize("name", ["Counts", "Awaits"])
def test_each_trajectory_has_an_environment_of_its_own(name):
    with process(name) as found:
        for trajectory in "ab":
            assert found.reset(trajectory, PROBLEM) == []
        found.step("a", "x")
        assert found.step("a", "é\n<eos>").messages == [{"role": "user", "content": "2: é\n<eos>"}]
        assert found.step("b", "end") == Step(messages=[], reward=1.0, done=True)
        found.forget("b")
        assert found.step("b", "x") == CallFailed(kind="lost", detail=found.step("b", "x").detail)
        assert found.there == {"a"}


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    ("answer", "kind", "detail"),
    [
        ("hang", "timeout", "no reply within 1 s"),
        ("exit", "died", "exit code 3"),
        ("flood", "died", "wrote to the socket"),
        ("write", "died", "wrote to the socket"),
        ("memory", "error", "MemoryError"),
        ("raise", "error", "no such move"),
        ("quit", "error", "SystemExit"),
        ("nothing", "invalid", "returned NoneType, expected a Step"),
        ("nan", "invalid", "the reward is nan"),
        ("text", "invalid", "returned str for messages"),
        ("number", "invalid", "the content of message 1 is int, expected text"),
        ("role", "invalid", "expected a mapping with role and content"),
        ("info", "invalid", "no plain JSON"),
        ("surrogate", "invalid", "is half of a surrogate pair"),
        ("list", "invalid", "info is list"),
    ],
)
def test_what_goes_wrong_is_told_and_the_next_trajectory_finds_a_sound_process(answer, kind, detail):
    with process("Misbehaves", timeout_s=1.0) as found:
        found.reset("a", PROBLEM)
        failed = found.step("a", answer)
        assert isinstance(failed, CallFailed)
        assert failed.kind == kind
        assert detail in failed.detail
        assert "a" not in found.there
        found.reset("b", PROBLEM)
        assert found.step("b", "x").messages == [{"role": "user", "content": "1: x"}]


def test_what_an_environment_raises_is_in_its_log(tmp_path):
    log = tmp_path / "logs" / "environment-0-0.log"
    settings = {"timeout_s": 20.0, "memory_gb": 1.0, "log": log}
    with EnvironmentProcess("tests.environments.bad_environments:Misbehaves", {}, **settings) as found:
        found.reset("a", PROBLEM)
        failed = found.step("a", "raise")
    place = rf"KeyError: 'no such move' \(.*/bad_environments\.py, line \d+, in step; traceback in {log}\)"
    assert re.fullmatch(place, failed.detail)
    assert 'raise KeyError("no such move")' in log.read_text()


def test_half_of_a_surrogate_pair_in_an_error_can_be_printed(tmp_path, monkeypatch):
    name = f"broken_{uuid.uuid4().hex}"
    (tmp_path / f"{name}.py").write_text("raise ValueError('no \\ud83d here')")
    monkeypatch.syspath_prepend(tmp_path)
    with process(f"{name}:Guess") as found, pytest.raises(EnvironmentFailed) as caught:
        found.check()
    assert str(caught.value).encode().count(rb"no \ud83d here (") == 1
    with VerifierProcess(f"{name}:score", timeout_s=5) as verifier, pytest.raises(RewardError) as caught:
        verifier.check()
    assert str(caught.value).encode().count(rb"no \ud83d here (") == 1


@pytest.mark.parametrize("tools", [[{"name": "\ud83d"}], [{"name": "f", "description": "\ud83d"}]])
def test_half_of_a_surrogate_pair_in_a_tool_is_an_error(tools):
    with pytest.raises(DataError, match="half of a surrogate pair"):
        with_tools(load_config(None, []), Traits(tools=tools))


@pytest.mark.parametrize("answer", ["fork", "twice"])
def test_what_an_environment_starts_ends_with_it(answer):
    with process("Misbehaves") as found:
        found.reset("a", PROBLEM)
        assert found.step("a", answer).messages
        assert found.step("a", "x").messages == [{"role": "user", "content": "2: x"}]


def test_another_trajectory_of_a_process_that_ended_is_told_so():
    with process("SharesAndMisbehaves") as found:
        for trajectory in "ab":
            found.reset(trajectory, PROBLEM)
        assert found.step("a", "exit").kind == "died"
        assert found.step("b", "x").kind == "lost"


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("no_such.module:Game", "cannot import no_such"),
        (f"{BAD}:Count", "has no Count; did you mean 'Counts'"),
        (f"{BAD}:NOT_AN_ENVIRONMENT", "not a function"),
    ],
)
def test_an_environment_that_is_not_there_is_an_error(name, message):
    with process(name) as found, pytest.raises(EnvironmentFailed, match=message):
        found.reset("a", PROBLEM)


@pytest.mark.parametrize(
    ("table", "name"),
    [(table, name) for table in (ENVIRONMENTS, PROBLEMS) for name, entry in table.entries.items() if entry.needs],
    ids=lambda part: part if isinstance(part, str) else part.kind,
)
def test_a_missing_package_is_named_with_the_command_that_installs_it(table, name, monkeypatch):
    (package,) = table.entries[name].needs
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(QurlError, match=rf"cannot import {package}: .*; install it: pip install \S+$"):
        table.load(name)


@pytest.mark.parametrize(("params", "says"), [({"sure": True}, True), ({"sure": False}, False), ({}, False)])
def test_whether_it_is_deterministic_may_depend_on_the_parameters(params, says):
    with process("Sometimes", **params) as found:
        found.reset("a", PROBLEM)
        assert found.traits.deterministic is says


def test_whether_it_is_deterministic_may_fail():
    with (
        process("Sometimes", sure="[") as found,
        pytest.raises(EnvironmentFailed, match=r"environment\.params: ValueError"),
    ):
        found.check()


def test_parameters_that_it_does_not_take_fail():
    with process("calculator", speed=3) as found:
        failed = found.reset("a", PROBLEM)
        assert failed.kind == "error"
        assert "speed" in failed.detail
