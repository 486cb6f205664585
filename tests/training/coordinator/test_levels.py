"""Numbers of trajectories over time, against times that are added up one by one."""

from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from qurl_ray.actors.trajectories import EnvironmentTurn, Played, PolicyTurn
from qurl_ray.training.coordinator.levels import trajectory_levels
from qurl_ray.types import Completion

NOTHING = np.zeros(0, np.int32)
NO_ANSWER = Completion(uid="u", token_ids=NOTHING, logprobs=NOTHING, versions=NOTHING, finish="stop")


def played(began: float, queued: float, *course: tuple[float, float, float]) -> Played:
    """A trajectory of (seconds at the engine, seconds until the environment replies, seconds that it works)."""
    found = Played(completion=NO_ANSWER, prompt_ids=NOTHING, last_turn=NOTHING, began=began, queued=queued)
    at = 0.0
    for drawing, waiting, working in course:
        found.drew.append(PolicyTurn(at=0, tokens=1, text="", asked=at, waited=drawing))
        at += drawing
        found.said.append(
            EnvironmentTurn(
                at=1, messages=[], reward=None, calls=0, failed_calls=0, asked=at, seconds=working, waited=waiting
            )
        )
        at += waiting
    return replace(found, seconds=at)


def test_two_trajectories_by_hand():
    """The first is drawn for 1 s, waits for 1 s and is worked on for 2 s; the second waits for a place meanwhile, and
    is then drawn for 4 s."""
    found = trajectory_levels([played(1000.0, 0.0, (1.0, 3.0, 2.0)), played(1004.0, 4.0, (4.0, 0.0, 0.0))])
    assert len(found) == 100
    assert (found[0][0], found[-1][0] + found[-1][1]) == (1000.0, pytest.approx(1008.0))

    def at(time: float) -> dict[str, float]:
        (figures,) = [figures for start, seconds, figures in found if start <= time < start + seconds]
        return {key: value for key, value in figures.items() if value}

    assert at(1000.5) == {"engines": 1.0, "queued": 1.0}
    assert at(1001.5) == {"waiting": 1.0, "queued": 1.0}
    assert at(1003.5) == {"environments": 1.0, "queued": 1.0}
    assert at(1006.0) == {"engines": 1.0}


seconds = st.floats(0, 50)
course = st.tuples(seconds, seconds, seconds)
trajectories = st.lists(
    st.builds(lambda b, q, c: played(1.7e9 + b, q, *c), seconds, seconds, st.lists(course, max_size=4)),
    min_size=1,
    max_size=8,
)


@given(trajectories)
def test_all_time_is_counted_once_and_in_its_state(found):
    levels = trajectory_levels(found)
    assert len(levels) <= 100
    for (start, took, _), (after, _, _) in pairwise(levels):
        assert start + took == pytest.approx(after, rel=0, abs=1e-5)
        assert took >= 0.02
    spent = {
        state: sum(took * figures[state] for _, took, figures in levels)
        for state in ("engines", "environments", "waiting", "queued")
    }
    said = [one for trajectory in found for one in trajectory.said]
    rounding = 0.001 * sum(took for _, took, _ in levels) + 1e-4
    assert spent["queued"] == pytest.approx(sum(one.queued for one in found), abs=rounding)
    assert spent["engines"] == pytest.approx(sum(t.waited for one in found for t in one.drew), abs=rounding)
    assert spent["environments"] + spent["waiting"] == pytest.approx(sum(s.waited for s in said), abs=rounding)
    assert spent["environments"] == pytest.approx(sum(min(s.seconds, s.waited) for s in said), abs=rounding)


def test_nothing_played_has_no_levels():
    assert trajectory_levels([]) == []
    assert trajectory_levels([played(1000.0, 0.0)]) == []
