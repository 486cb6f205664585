"""The order of problems: complete, shuffled anew, and resumable at any point."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from qurl_ray.data.cursor import PromptCursor
from qurl_ray.errors import DataError
from qurl_ray.types import Problem

sizes = st.integers(1, 40)
seeds = st.integers(-3, 2**64)


def problems(count):
    return [Problem(uid=f"train-{n}", prompt=f"{n}=", answer=str(n)) for n in range(count)]


def drawn(cursor, takes):
    return [problem.uid for n in takes for problem in cursor.take(n)]


@given(sizes, seeds, st.lists(st.integers(0, 50), max_size=12))
def test_each_epoch_visits_every_problem_once(count, seed, takes):
    order = drawn(PromptCursor(problems(count), seed=seed), takes)
    assert len(order) == sum(takes)
    for start in range(0, len(order), count):
        epoch = order[start : start + count]
        assert len(set(epoch)) == len(epoch)


@given(sizes, seeds, st.lists(st.integers(0, 50), max_size=8), st.lists(st.integers(0, 50), max_size=8))
def test_a_resumed_cursor_goes_on_exactly(count, seed, before, after):
    cursor = PromptCursor(problems(count), seed=seed)
    drawn(cursor, before)
    resumed = PromptCursor(problems(count), seed=seed)
    resumed.load_state(json.loads(json.dumps(cursor.state())))
    assert resumed.state() == cursor.state()
    assert drawn(resumed, after) == drawn(cursor, after)


@given(sizes, seeds, st.lists(st.integers(0, 50), min_size=1, max_size=8))
def test_how_many_are_taken_at_a_time_changes_nothing(count, seed, takes):
    many, one = (PromptCursor(problems(count), seed=seed) for _ in range(2))
    assert drawn(many, takes) == drawn(one, [sum(takes)])


def test_epochs_and_seeds_have_different_orders():
    cursor, other = PromptCursor(problems(100), seed=0), PromptCursor(problems(100), seed=1)
    first, second = drawn(cursor, [100]), drawn(cursor, [100])
    assert first != second
    assert first != drawn(other, [100])


def test_no_problems_is_an_error():
    with pytest.raises(DataError, match="no problems"):
        PromptCursor([], seed=0)


@pytest.mark.parametrize("state", [{"epoch": 0, "position": 6}, {"epoch": -1, "position": 0}])
def test_a_state_of_another_set_of_problems_is_an_error(state):
    with pytest.raises(DataError, match="has the task changed"):
        PromptCursor(problems(5), seed=0).load_state({"taken": "", **state})


def test_other_problems_under_the_same_names_are_an_error():
    cursor = PromptCursor(problems(9), seed=0)
    cursor.take(3)
    other = [Problem(uid=problem.uid, prompt=f"{problem.prompt}?", answer=problem.answer) for problem in problems(9)]
    with pytest.raises(DataError, match="has the task changed"):
        PromptCursor(other, seed=0).load_state(cursor.state())
    with pytest.raises(DataError, match="has the task changed"):
        PromptCursor(problems(9), seed=1).load_state(cursor.state())
