"""Rewards that are functions and no names: how they travel, and what is said where they cannot."""

import re
import threading

import pytest

from qurl_ray.errors import RewardError
from qurl_ray.rewards import given, scorers
from qurl_ray.rewards.given import carried, give, load, told
from qurl_ray.rewards.process import VerifierProcess
from tests.rewards.verdicts import PROBLEM, statuses


def test_a_function_of_a_module_has_its_name():
    reference = give(scorers.exact)
    assert reference == "qurl_ray.rewards.scorers:exact"
    assert carried(reference) == told(reference) == reference
    assert load(reference) is scorers.exact


def test_a_function_that_no_module_has_travels_to_the_process_that_judges():
    bonus = {"2": 0.75}
    reference = give(lambda answer, problem: bonus.get(answer, float(answer == problem.meta.get("level"))))
    assert re.fullmatch("given:<lambda>-[0-9a-f]{8}", reference)
    with VerifierProcess(reference, timeout_s=30) as process:
        verdicts = process.judge_many([("2", PROBLEM), ("3", PROBLEM)])
    assert statuses(verdicts) == [(0.75, "ok"), (0.0, "ok")]


def test_a_name_depends_on_the_code_and_on_nothing_else():
    def made(text):
        return give(eval(f"lambda answer, problem: {text}"))

    assert made("float(answer in {'a', 'b', 'c'})") == made("float(answer in {'a', 'b', 'c'})")
    bodies = (
        "1.0",
        "2.0",
        "float(answer)",
        "float(problem)",
        "float(len(answer))",
        "(lambda: 1.0)()",
        "(lambda: 2.0)()",
    )
    assert len({made(body) for body in bodies}) == len(bodies)


def test_a_large_function_travels_as_well():
    """More than an argument of a process may have."""
    table = [str(number) for number in range(300_000)]
    reference = give(lambda answer, problem: float(answer in table))
    assert len(carried(reference)) > 1 << 18
    with VerifierProcess(carried(reference), timeout_s=60) as process:
        assert statuses(process.judge_many([("17", PROBLEM), ("x", PROBLEM)])) == [(1.0, "ok"), (0.0, "ok")]


def test_an_object_that_can_be_called_is_a_reward():
    class Near:
        def __call__(self, answer, problem):
            return 0.5

    assert load(carried(give(Near())))("", PROBLEM) == 0.5


@pytest.mark.parametrize(
    ("function", "message"),
    [
        (lambda answer: 1.0, r"must take \(answer, problem\)"),
        (lambda answer, problem, lock=threading.Lock(): 1.0, "cannot be sent to other processes: TypeError"),
    ],
)
def test_a_function_that_cannot_judge_is_refused(function, message):
    with pytest.raises(RewardError, match=message):
        give(function)


def test_a_function_that_was_given_elsewhere_is_asked_for(monkeypatch):
    monkeypatch.setattr(given, "_given", {})
    with pytest.raises(RewardError, match=r"given:near was given to qurl_ray\.train as a function.*give it again"):
        VerifierProcess("given:near", timeout_s=5)


def test_messages_name_the_function_and_not_its_code():
    def near(answer, problem):
        return 1.0

    broken = carried(give(near))[:-40]
    with pytest.raises(RewardError, match=r"reward given:near-[0-9a-f]{8} cannot be loaded") as caught:
        load(broken)
    assert len(str(caught.value)) < 300
    assert re.fullmatch("given:near-[0-9a-f]{8}", told(broken))
