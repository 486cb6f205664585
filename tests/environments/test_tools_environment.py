"""The environment of tools, in its process: results, errors for the policy, and errors of the tools."""

from dataclasses import replace

import pytest

from qurl_ray.environments.process import CallFailed, EnvironmentProcess
from qurl_ray.environments.protocol import Step
from qurl_ray.errors import EnvironmentFailed
from qurl_ray.types import Problem

HERE = "tests.tools.functions"
PROBLEM = Problem(uid="0", prompt="?", answer="42")


def process(*functions, **params) -> EnvironmentProcess:
    params = {"functions": list(functions), **params}
    return EnvironmentProcess("tools", params, timeout_s=20, memory_gb=1)


def call(body: str) -> str:
    return f"<tool_call>{body}</tool_call>"


def told(step: Step) -> list[str]:
    return [message["content"] for message in step.messages]


def test_calls_are_answered_in_their_order_and_a_turn_without_one_ends_the_trajectory():
    with process(f"{HERE}:weather", "python") as tools:
        assert tools.reset("a", PROBLEM) == []
        turn = "I look." + call('{"name": "weather", "arguments": {"city": "Ulm"}}')
        turn += (
            call('{"name": "python", "arguments": {"code": "print(6*7)"}}')
            + call("{")
            + call('{"name": "x", "arguments": {}}')
        )
        step = tools.step("a", turn)
        assert [message.get("name") for message in step.messages] == ["weather", "python", None, "x"]
        assert told(step)[:2] == ['{"city": "Ulm", "unit": "C", "days": null}', "42"]
        assert [text[:6] for text in told(step)[2:]] == ["error:", "error:"]
        assert (step.done, step.reward, step.info) == (False, None, {"calls": 4, "failed_calls": 2})
        assert tools.step("a", "It is 42.") == Step(messages=[], done=True)


def test_the_process_tells_its_traits():
    with process(f"{HERE}:weather", deterministic=True, format="llama") as tools:
        tools.check()
        assert tools.traits.deterministic
        assert tools.traits.tool_format == "llama"
        assert [tool["function"]["name"] for tool in tools.traits.tools] == ["weather"]
        tools.reset("a", PROBLEM)
        assert told(tools.step("a", '{"name": "weather", "parameters": {"city": "x"}}')) != []
    with process("python", described=False) as tools:
        tools.check()
        assert not tools.traits.deterministic
        assert not tools.traits.described
        assert [tool["function"]["name"] for tool in tools.traits.tools] == ["python"]


def test_each_trajectory_has_objects_of_its_own():
    with process({f"{HERE}:Counter": {"start": 1}}) as tools:
        one = call('{"name": "Counter", "arguments": {"step": 1}}')
        for trajectory in "ab":
            tools.reset(trajectory, PROBLEM)
        assert [told(tools.step(trajectory, one)) for trajectory in "aab"] == [["2"], ["3"], ["2"]]


def test_a_tool_that_wants_to_knows_the_problem():
    with process(f"{HERE}:Solution", "python") as tools:
        tools.reset("a", replace(PROBLEM, answer="seven"))
        tools.reset("b", replace(PROBLEM, answer="eight"))
        one = call('{"name": "Solution", "arguments": {}}')
        assert [told(tools.step(trajectory, one)) for trajectory in "ab"] == [["seven"], ["eight"]]


def test_what_a_tool_raises_is_told_to_the_policy_and_its_traceback_is_in_the_log(tmp_path):
    log, params = tmp_path / "logs" / "environment-0-0.log", {"functions": [f"{HERE}:raises"]}
    with EnvironmentProcess("tools", params, timeout_s=20, memory_gb=1, log=log) as tools:
        tools.reset("a", PROBLEM)
        one = call('{"name": "raises", "arguments": {"text": "boo"}}')
        assert told(tools.step("a", one)) == ["error: KeyError: 'boo'"]
    assert "raise KeyError(text)" in log.read_text()


def test_long_results_are_cut():
    with process("python", most_characters=10) as tools:
        tools.reset("a", PROBLEM)
        (text,) = told(tools.step("a", call('{"name": "python", "arguments": {"code": "print(\'x\' * 100)"}}')))
        assert text == "x" * 10 + "… (cut here)"


def test_a_result_that_is_no_text_fails_the_trajectory():
    with process(f"{HERE}:returns_an_object") as tools:
        tools.reset("a", PROBLEM)
        failed = tools.step("a", call('{"name": "returns_an_object", "arguments": {}}'))
        assert isinstance(failed, CallFailed)
        assert (failed.kind, "neither text nor JSON" in failed.detail) == ("error", True)


@pytest.mark.parametrize(
    ("params", "message"),
    [
        ({"functions": ["pyton"]}, "did you mean 'python'"),
        ({"functions": [f"{HERE}:without_hints"]}, "needs a type hint"),
        ({}, "environment.params: TypeError: .*'functions'"),
        ({"functions": ["python"], "format": "qwen"}, "unknown format 'qwen'; known: hermes, llama"),
        ({"functions": ["python"], "formats": 1}, "unexpected keyword argument 'formats'"),
    ],
)
def test_tools_that_cannot_be_used_are_named_before_a_trajectory_starts(params, message):
    tools = EnvironmentProcess("tools", params, timeout_s=20, memory_gb=1)
    with tools, pytest.raises(EnvironmentFailed, match=message):
        tools.check()
