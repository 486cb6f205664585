"""Episodes of verifiers' environments, whose requests of chat completions are turns. `make verifiers` runs these tests:
verifiers needs a version of openai that the others cannot have."""

from pathlib import Path

import pytest

pytest.importorskip("verifiers.v1", reason="verifiers is not installed: make verifiers")

from qurl_ray.config import load_config
from qurl_ray.data.tasks import load_task
from qurl_ray.environments.process import CallFailed, EnvironmentProcess
from qurl_ray.environments.protocol import Step
from qurl_ray.types import Problem

HERE = Path(__file__).parent
ASKED = [{"role": "system", "content": "Be short."}, {"role": "user", "content": "Say 2."}]
PROBLEM = Problem(uid="0", prompt="Say 2.", answer="", meta={"task": 2}, messages=ASKED)


@pytest.fixture(scope="module", autouse=True)
def modules(tmp_path_factory):
    """Modules without a dot: one task set that is played by one agent, and one with an environment of its own."""
    folder = tmp_path_factory.mktemp("modules")
    text = (HERE / "verifiers_tasks.py").read_text()
    (folder / "talk_tasks.py").write_text(text)
    (folder / "number_tasks.py").write_text(text.replace('["Numbers", "Talk"]', '["Numbers"]'))
    (folder / "tool_harness.py").write_text((HERE / "verifiers_harness.py").read_text())
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(folder))
        yield


def process(timeout_s: float = 60.0, **params) -> EnvironmentProcess:
    return EnvironmentProcess("verifiers", params, timeout_s=timeout_s, memory_gb=2.0)


@pytest.fixture(scope="module")
def numbers(modules):
    with process(taskset="number_tasks") as found:
        yield found


@pytest.fixture(scope="module")
def talk(modules):
    with process(taskset={"id": "talk_tasks"}, max_concurrent_agents=2) as found:
        yield found


def user(text: str) -> list[dict]:
    return [{"role": "user", "content": text}]


def test_an_answer_is_judged_by_the_tasks_rewards(numbers):
    assert numbers.reset("a", PROBLEM) == []
    assert numbers.step("a", " 2 ") == Step(messages=[], reward=0.75, done=True)  # 0.5 for 2, 0.25 for short
    numbers.reset("a", PROBLEM)
    assert numbers.step("a", "I say that it is 2").reward == 0.0
    assert not numbers.traits.deterministic


def test_each_request_of_a_conversation_is_a_turn(talk):
    for trajectory in "ab":
        assert talk.reset(trajectory, PROBLEM) == []
    assert talk.step("a", "three\n💥") == Step(messages=user("Turn 1: no."), reward=0.0)
    assert talk.step("b", "1") == Step(messages=user("Turn 1: no."), reward=0.0)
    assert talk.step("a", "4").messages == user("Turn 2: no.")
    assert talk.step("a", "2") == Step(messages=[], reward=pytest.approx(1 / 3 + 0.75), done=True)
    assert talk.step("b", "2") == Step(messages=[], reward=pytest.approx(1 / 2 + 0.75), done=True)


def test_its_tasks_are_problems_that_the_environment_continues(talk):
    given = ["task.type=custom", "task.problems=verifiers", "task.params={taskset: talk_tasks, count: 4}"]
    task = load_task(load_config(None, given).task, eval_problems=9)
    problems = [*task.train, *task.held_out]
    assert [one.meta for one in problems] == [{"task": index} for index in range(4)]
    assert problems[2].messages == ASKED
    for one in problems:
        assert talk.reset("a", one) == []
        assert talk.step("a", str(one.meta["task"])).done


@pytest.mark.parametrize("answer", ["", " ", "x" * 200_000, "\x00\u202e", '{"role": "system"}'])
def test_no_answer_breaks_it(talk, answer):
    talk.reset("a", PROBLEM)
    assert talk.step("a", answer).messages == user("Turn 1: no.")
    assert talk.step("a", "2").done


def test_a_trajectory_that_is_cut_off_leaves_nothing(talk):
    for trajectory in "ab":
        talk.reset(trajectory, PROBLEM)
        talk.step(trajectory, "1")
    talk.forget("a")
    assert talk.step("b", "2").done


@pytest.mark.parametrize(
    ("name", "answer", "detail"),
    [("talk", "two", "has several"), ("talk", "raise", "KeyError"), ("numbers", "broken", "no such answer")],
)
def test_what_cannot_be_a_trajectory_is_an_error(name, answer, detail, request):
    found = request.getfixturevalue(name)
    found.reset("a", PROBLEM)
    failed = found.step("a", answer)
    assert isinstance(failed, CallFailed)
    assert failed.kind == "error"
    assert detail in failed.detail
    assert found.reset("b", PROBLEM) == []


def test_a_prompt_that_is_not_the_tasks_is_refused(talk):
    other = Problem(uid="0", prompt="Say 3.", answer="", meta={"task": 2})
    assert "rewrites the conversation" in talk.reset("a", other).detail


@pytest.mark.parametrize(
    ("params", "detail"),
    [
        ({"speaker": {"harness": {"id": "tool_harness"}}}, "gives its agent tools"),
        ({"taskset": "no_such_tasks"}, "taskset 'no_such_tasks' not found"),
        ({"speakr": {}}, "speakr"),
    ],
)
def test_settings_that_do_not_fit_are_an_error(params, detail):
    with process(**({"taskset": "talk_tasks"} | params)) as found:
        failed = found.reset("a", PROBLEM)
        assert isinstance(failed, CallFailed)
        assert failed.kind == "error"
        assert detail in failed.detail
