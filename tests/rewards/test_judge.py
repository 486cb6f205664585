"""Whatever a reward function does becomes a verdict."""

import re
from fractions import Fraction
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from qurl_ray.rewards.judge import judge
from tests.rewards.verdicts import PROBLEM


def judged(value):
    return judge(lambda answer, problem: value, "2", PROBLEM)


@pytest.mark.parametrize(
    "value", [1, 1.0, True, np.float32(1), np.float64(1), np.int64(1), np.bool_(True), Fraction(1)]
)
def test_every_kind_of_number_is_a_reward(value):
    verdict = judged(value)
    assert (verdict.reward, verdict.status) == (1.0, "ok")
    assert type(verdict.reward) is float


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf"), np.float32("nan"), 10**400, 1e300])
def test_a_number_that_is_not_finite_or_too_large_to_learn_from_is_invalid(value):
    verdict = judged(value)
    assert (verdict.reward, verdict.status) == (0.0, "invalid")
    assert "finite" in verdict.detail


@pytest.mark.parametrize("value", [None, "1.0", [1.0], 1j, np.ones(2)])
def test_what_is_not_a_number_is_invalid_and_names_its_type(value):
    verdict = judged(value)
    assert (verdict.reward, verdict.status) == (0.0, "invalid")
    assert type(value).__name__ in verdict.detail


@pytest.mark.parametrize("error", [ValueError("bad answer"), MemoryError(), RecursionError("deep"), SystemExit(3)])
def test_an_exception_is_an_error_with_its_type(error):
    def score(answer, problem):
        raise error

    verdict = judge(score, "2", PROBLEM)
    assert (verdict.reward, verdict.status) == (0.0, "error")
    assert verdict.detail.startswith(type(error).__name__)


def test_an_exception_that_cannot_print_itself_is_still_an_error():
    class SilentError(Exception):
        def __str__(self):
            raise RuntimeError

    def score(answer, problem):
        raise SilentError

    assert judge(score, "2", PROBLEM).detail.startswith("SilentError: (no message: RuntimeError) (")


def test_messages_are_cut_at_300_characters_and_the_place_is_kept():
    def score(answer, problem):
        raise ValueError("x" * 10_000)

    detail, found = judge(score, "2", PROBLEM).detail, re.escape(__file__)
    line = score.__code__.co_firstlineno + 1
    (kept,) = re.findall(rf"ValueError: x{{288}} \({found}, line {line}, in score; traceback in (\S+)\)", detail)
    assert f'line {line}, in score\n    raise ValueError("x" * 10_000)' in Path(kept).read_text()


def test_an_interrupt_from_the_keyboard_is_not_swallowed():
    def score(answer, problem):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        judge(score, "2", PROBLEM)


@given(st.one_of(st.floats(), st.integers(), st.text(), st.none(), st.booleans(), st.binary(), st.complex_numbers()))
def test_a_reward_is_finite_and_zero_unless_ok(value):
    verdict = judged(value)
    assert np.isfinite(verdict.reward)
    assert verdict.status == "ok" or verdict.reward == 0.0
