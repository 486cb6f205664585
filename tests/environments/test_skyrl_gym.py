"""SkyRL Gym's own environments behind the adapter, and one that a user wrote."""

import http.server
import json
import random
import sqlite3
import threading

import pytest

pytest.importorskip("skyrl_gym")

from qurl_ray.environments.process import CallFailed, EnvironmentProcess
from qurl_ray.environments.protocol import Step
from qurl_ray.errors import EnvironmentFailed
from qurl_ray.types import Problem

MINE = "tests.environments.skyrl_environments:Echo"
SUM = Problem(uid="train-0", prompt="12 + 34?", answer="46")


def process(timeout_s: float = 60.0, **params) -> EnvironmentProcess:
    return EnvironmentProcess("skyrl_gym", params, timeout_s=timeout_s, memory_gb=2.0)


@pytest.fixture(scope="module")
def sums():
    with process(env="gsm8k_multi_turn", max_turns=3) as found:
        yield found


def test_each_turn_is_judged_and_the_last_is_asked_for_the_number_alone(sums):
    """0.2 in all for the form, shared among the turns; 1 for the answer."""
    assert sums.reset("a", SUM) == []
    step = sums.step("a", "I think #### 45")
    assert step.reward == pytest.approx(0.2 / 3)
    assert "tentative numeric answer" in step.messages[0]["content"]
    step = sums.step("a", "forty-six")
    assert (step.reward, step.done) == (0, False)
    assert "only the final numeric answer" in step.messages[0]["content"]
    assert sums.step("a", "#### 46") == Step(messages=[], reward=1.0, done=True)
    sums.reset("a", SUM)
    assert sums.step("a", "#### 46").done
    assert sums.traits.deterministic


def test_the_ground_truth_of_the_problems_own_columns_comes_first(sums):
    meta = {"reward_spec": {"method": "rule", "ground_truth": "47"}}
    sums.reset("a", Problem(uid="0", prompt="?", answer="46", meta=meta))
    assert sums.step("a", "#### 47").reward == 1.0


def test_trajectories_in_one_process_are_what_each_is_alone(sums):
    draw = random.Random(1)
    problems = [Problem(uid=str(number), prompt="?", answer=str(number % 4)) for number in range(6)]
    answers = [[f"#### {draw.randint(0, 3)}" if draw.random() < 0.8 else "hm" for _ in range(3)] for _ in problems]

    def played(order) -> dict:
        seen: dict[int, list] = {}
        for number in order:
            if number not in seen:
                seen[number] = [sums.reset(str(number), problems[number])]
            elif not (len(seen[number]) > 1 and seen[number][-1].done):
                seen[number].append(sums.step(str(number), answers[number][len(seen[number]) - 1]))
        return seen

    order = [number for number in range(6) for _ in range(4)]
    alone = played(order)
    assert len({len(seen) for seen in alone.values()}) > 1
    draw.shuffle(order)
    assert played(order) == alone


@pytest.mark.parametrize(
    "answer", ["", "x" * 200_000, "####", "#### ", "#### 4\u06646", "\x00#### ,.,.", "#### 46" * 9999]
)
def test_no_answer_breaks_it(sums, answer):
    sums.reset("a", SUM)
    assert isinstance(sums.step("a", answer), Step)


def test_a_query_sees_its_database_and_the_solution_is_compared_with_the_right_one(tmp_path):
    folder = tmp_path / "spider" / "database" / "zoo"
    folder.mkdir(parents=True)
    with sqlite3.connect(folder / "zoo.sqlite") as base:
        base.execute("create table animals (name text, legs int)")
        base.executemany("insert into animals values (?, ?)", [("ant", 6), ("cat", 4)])
    meta = {"db_id": "zoo", "data": "spider", "extra": 1}
    asked = Problem(uid="0", prompt="Who has six legs?", answer="select name from animals where legs = 6", meta=meta)
    with process(env="text2sql", env_config={"db_path": str(tmp_path)}, max_turns=4) as base:
        assert base.reset("a", asked) == []
        assert not base.traits.deterministic
        step = base.step("a", "<think>Look.</think><sql>select name from animals where legs > 5</sql>")
        assert (step.reward, step.done) == (0, False)
        assert "ant" in step.messages[0]["content"]
        assert "cat" not in step.messages[0]["content"]
        step = base.step("a", "<think>Hm.</think><sql>drop</sql>")
        assert "Error executing SQL" in step.messages[0]["content"]
        solution = "<think>So.</think><solution>select name from animals where legs <> 4</solution>"
        assert base.step("a", solution) == Step(messages=[], reward=1.0, done=True)
        other = Problem(uid="1", prompt="?", answer="", meta=meta | {"db_id": "circus"})
        assert "Database file not found" in base.reset("b", other).detail


class Retriever(http.server.BaseHTTPRequestHandler):
    """A search server of one document, as Search-R1's."""

    def do_POST(self):
        asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        text = f'{asked["query"]}: "Bern"\nThe capital of Switzerland, {asked["topk"]} times.'
        body = json.dumps({"result": [[{"document": {"contents": text}, "score": 1.0}]]}).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_):
        pass


def test_a_search_is_answered_by_the_server_that_the_settings_name():
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Retriever) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        url = f"http://127.0.0.1:{server.server_port}/retrieve"
        meta = {"reward_spec": {"ground_truth": {"target": ["Bern", "Berne"]}}}
        with process(env="search", env_config={"search_url": url, "topk": 2}, max_turns=3) as search:
            search.reset("a", Problem(uid="0", prompt="?", answer="", meta=meta))
            step = search.step("a", "<search> capital </search>")
            assert "The capital of Switzerland, 2 times." in step.messages[0]["content"]
            assert search.step("a", "<answer>Berne</answer>") == Step(messages=[], reward=1, done=True)
        server.shutdown()


def test_an_environment_of_the_users_own_is_named_by_its_class():
    with process(env=MINE, env_config={"greeting": "hello"}) as echo:
        said = echo.reset("a", Problem(uid="0", prompt="?", answer="1", meta={"level": 3}))
        keys = "['extra_info', 'level', 'reward_model', 'reward_spec']"
        assert said == [{"role": "user", "content": f"hello: {keys}"}]
        assert echo.step("a", "yes") == Step(messages=[{"role": "user", "content": "yes"}], reward=1.0)
        assert echo.step("a", "end") == Step(messages=[], reward=2.0, done=True)


def test_what_would_change_what_the_policy_saw_or_drew_is_refused():
    with process(env=MINE, env_config={"greeting": "hello"}) as echo:
        echo.reset("a", SUM)
        failed = echo.step("a", "too long")
        assert isinstance(failed, CallFailed)
        assert "rewrites a turn" in failed.detail
        failed = echo.reset("a", Problem(uid="0", prompt="?", answer="1", meta={"rewrite": True}))
        assert "rewrites the prompt" in failed.detail


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    ("params", "message"),
    [
        ({"env": "gsm9k"}, "no environment 'gsm9k'; did you mean 'gsm8k'"),
        ({"env": "search", "env_config": {"top": 3}}, "unexpected keyword argument 'top'"),
        ({"env": "no.such:Env"}, "No module named 'no'"),
        ({}, "missing 1 required keyword-only argument: 'env'"),
    ],
)
def test_an_environment_that_is_not_there_is_an_error(params, message):
    with process(**params) as found:
        assert message in found.reset("a", SUM).detail


def test_code_is_run_against_its_tests():
    tests = json.dumps([{"input": "3\n", "output": "9\n", "testtype": "stdin"}])
    asked = Problem(uid="0", prompt="Square a number.", answer=tests)
    with process(env="lcb") as code:
        for program, reward in (("print(int(input()) ** 2)", 1.0), ("print(int(input()) * 2)", 0.0)):
            code.reset("a", asked)
            assert code.step("a", f"```python\n{program}\n```") == Step(messages=[], reward=reward, done=True)


def test_names_are_known_before_a_run(sums):
    with pytest.raises(EnvironmentFailed, match="did you mean 'skyrl_gym'"):
        EnvironmentProcess("skyrl_gim", {}, timeout_s=5.0, memory_gb=1.0).check()
