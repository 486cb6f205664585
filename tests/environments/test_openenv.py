"""Sessions of a server with OpenEnv's protocol, and what becomes of a trajectory when the server fails."""

import json
import random
import time

import pytest

from qurl_ray.environments.process import CallFailed, EnvironmentProcess
from qurl_ray.environments.protocol import Step
from qurl_ray.types import Problem
from tests.environments.openenv_server import openenv_server

PROBLEM = Problem(uid="train-0", prompt="Count.", answer="", meta={"seed": 7})


def process(url: str, timeout_s: float = 20.0, **params) -> EnvironmentProcess:
    return EnvironmentProcess("openenv", {"url": url, **params}, timeout_s=timeout_s, memory_gb=1.0)


@pytest.fixture(scope="module")
def url():
    with openenv_server() as (address, _):
        yield address


@pytest.fixture(scope="module")
def session(url):
    with process(url, text="prompt") as found:
        yield found


def said(text: str) -> list[dict]:
    return [{"role": "user", "content": text}]


def test_a_session_is_played(session):
    assert session.reset("a", PROBLEM) == said("Count from 7.")
    assert session.step("a", "é\n💥") == Step(messages=said("8: é\n💥"), reward=0.5, info={"calls": 1})
    assert session.step("a", "free").reward is None
    assert session.step("a", "end") == Step(messages=said("10: end"), reward=0.5, done=True, info={"calls": 1})
    assert not session.traits.deterministic


def test_each_trajectory_has_a_session_of_its_own(session):
    """In any order of turns it sees what it sees alone."""
    draw = random.Random(1)
    order = [trajectory for trajectory in "abc" for _ in range(5)]
    draw.shuffle(order)
    turns: dict[str, int] = {}
    for trajectory in order:
        seed = 10 * ord(trajectory)
        if trajectory not in turns:
            asked = Problem(uid=trajectory, prompt="Count.", answer="", meta={"seed": seed})
            assert session.reset(trajectory, asked) == said(f"Count from {seed}.")
            turns[trajectory] = 0
            continue
        turns[trajectory] += 1
        assert session.step(trajectory, "x").messages == said(f"{seed + turns[trajectory]}: x")


def test_sessions_end_with_their_trajectories():
    with openenv_server() as (url, server):
        with process(url) as found:
            for trajectory in "ab":
                found.reset(trajectory, PROBLEM)
            assert server.open == 2
            found.forget("a")
            deadline = time.monotonic() + 60
            while server.open == 2 and time.monotonic() < deadline:
                time.sleep(0.01)
            assert server.closed == ["closed"]
        while server.open and time.monotonic() < deadline:  # the process was killed
            time.sleep(0.01)
        assert server.closed == ["closed", "lost"]


def test_a_session_outlives_the_pause_of_a_long_turn():
    """The server pings, and ends sessions that do not answer in time."""
    with openenv_server(ping_s=1.5) as (url, server), process(url, text="prompt") as found:
        found.reset("a", PROBLEM)
        time.sleep(4.0)
        assert found.step("a", "x").messages == said("8: x")
        assert not server.closed


@pytest.mark.parametrize(
    ("params", "meta", "first"),
    [
        ({}, {}, json.dumps({"prompt": "Count from 7.", "messages": [{"content": "hello None"}]})),
        ({"text": "messages.0.content", "reset": {"name": "you"}}, {}, "hello you"),
        ({"text": "messages.0.content", "reset": {"name": "you"}}, {"reset": {"name": "me"}}, "hello me"),
        ({"text": "messages"}, {}, '[{"content": "hello None"}]'),
        ({"text": "metadata.secret"}, {}, "1"),
    ],
)
def test_the_settings_say_what_is_shown_and_how_it_begins(url, params, meta, first):
    with process(url, **params) as found:
        asked = Problem(uid="0", prompt="Count.", answer="", meta={"seed": 7} | meta)
        assert found.reset("a", asked) == said(first)


def test_what_the_prompt_says_is_not_said_again_and_the_uid_is_a_seed(session):
    first, again, other = (
        session.reset("a", Problem(uid=uid, prompt="?", answer="")) for uid in ("train-0", "train-0", "train-1")
    )
    assert first == again != other
    assert session.reset("a", Problem(uid="train-0", prompt=f"Go! {first[0]['content']}", answer="")) == []


ACTION = {"message": "you said: {answer}", "number": 3}


@pytest.mark.sampled(3)
@pytest.mark.parametrize(
    ("action", "answer", "shown"),
    [
        (ACTION, "{answer} {x}", "10: you said: {answer} {x}"),
        ({"message": '{"say": "{answer}"}', "number": 1}, "hi", '8: {"say": "hi"}'),
        ({"message": "x", "number": "{json}"}, " 5", "12: x"),
        ("{json}", '{"message": "b", "number": 2}', "9: b"),
        ({"message": "x", "number": "{json}"}, "five", "No valid action: no JSON: "),
        ({"message": "x", "number": "{json}"}, "[" * 100_000, "No valid action: no JSON: "),
        ({"message": "x", "number": "{json}"}, "9" * 5000, "No valid action: no JSON: "),
        ("{json}", '{"message": 3}', "No valid action: message: Input should be a valid string"),
        ("{json}", '{"word": 3, "message": ""}', "No valid action: word: Extra inputs are not permitted"),
        ("{json}", "[3]", "No valid action: : no mapping"),
    ],
)
def test_a_turn_becomes_an_action(url, action, answer, shown):
    with process(url, action=action, text="prompt") as found:
        found.reset("a", PROBLEM)
        step = found.step("a", answer)
        assert isinstance(step, Step)
        assert shown in step.messages[0]["content"]
        refused = not step.messages[0]["content"][0].isdigit()
        assert step.info == {"calls": 1} | ({"failed_calls": 1} if refused else {})
        assert len(step.messages[0]["content"]) < 1000
        assert isinstance(found.step("a", '{"message": "x"}' if action == "{json}" else "1"), Step)


@pytest.mark.parametrize("answer", ["", "x" * 300_000, "\x00\u202e", '"}, "x": {"', "\\u0000"])
def test_no_answer_breaks_a_session(session, answer):
    session.reset("a", PROBLEM)
    assert session.step("a", answer).messages == said(f"8: {answer}")


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    ("answer", "kind", "detail"),
    [
        ("hang", "timeout", "no reply within 2 s"),
        ("leave", "error", "closed the session"),
        ("raise", "error", "answered EXECUTION_ERROR: no such move"),
        ("odd", "error", "answered no message of OpenEnv"),
    ],
)
def test_a_server_that_fails_costs_its_trajectory(url, answer, kind, detail):
    with process(url, timeout_s=2.0, text="prompt") as found:
        found.reset("a", PROBLEM)
        failed = found.step("a", answer)
        assert isinstance(failed, CallFailed)
        assert failed.kind == kind
        assert detail in failed.detail
        assert found.reset("b", PROBLEM) == said("Count from 7.")


def test_a_server_that_is_gone_is_named():
    with openenv_server() as (url, _), process(url) as found:
        found.reset("a", PROBLEM)
        found.reset("b", PROBLEM)
    with process(url) as found:
        failed = found.reset("a", PROBLEM)
        assert failed.kind == "error"
        assert f"no OpenEnv server at {url}: ConnectionRefusedError" in failed.detail


def test_a_server_that_ends_in_the_middle_is_an_error_of_its_trajectories():
    with openenv_server() as (url, _):
        found = process(url)
        found.reset("a", PROBLEM)
    with found:
        failed = found.step("a", "x")
        assert failed.kind == "error"
        assert f"{url} closed the session" in failed.detail


def test_the_last_words_of_a_server_are_heard():
    """It ends the session while the policy draws."""
    with openenv_server() as (url, server), process(url) as session:
        session.reset("a", PROBLEM)
        session.step("a", "idle")
        deadline = time.monotonic() + 60
        while not server.closed and time.monotonic() < deadline:
            time.sleep(0.01)
        assert server.closed == ["idle"]
        assert "answered SESSION_ERROR: idle for too long" in session.step("a", "x").detail


def test_a_full_server_says_so():
    with openenv_server(sessions=1) as (url, _), process(url) as found:
        found.reset("a", PROBLEM)
        failed = found.reset("b", PROBLEM)
        assert "answered CAPACITY_REACHED: no capacity" in failed.detail


@pytest.mark.parametrize(
    ("path", "params", "detail"),
    [
        ("/other", {}, "no OpenEnv server at"),
        ("", {"text": "answer"}, "has no answer: it has prompt, messages, metadata"),
        ("", {"text": "messages.one"}, "has no messages.one"),
        ("", {"reset": {"over": True}}, "the episode is over before its first turn"),
        (
            "",
            {"action": {"word": "{answer}"}},
            "does not take the action or the reset: word: Extra inputs",
        ),
    ],
)
def test_settings_that_do_not_fit_the_server_are_an_error(url, path, params, detail):
    with process(url + path, **params) as found:
        failed = found.reset("a", PROBLEM)
        if isinstance(failed, list):
            failed = found.step("a", "x")
        assert isinstance(failed, CallFailed)
        assert failed.kind == "error"
        assert detail in failed.detail


def test_an_address_that_is_none_is_an_error():
    with process("ftp://127.0.0.1") as found:
        assert "is no address of a server" in found.reset("a", PROBLEM).detail
