"""The figures of a step, worked out by hand."""

import pytest

from qurl_ray.learner.protocol import StepResult
from qurl_ray.loop.collect import Collected
from qurl_ray.loop.figures import step_figures

RESULT = StepResult(sums={}, seconds={}, grad_norm=1.0, lr=1e-3, skipped_updates=0, proximal={})


def figures(**collected) -> dict[str, float]:
    drawn = {"samples": 4, "tokens": 8, "rollout_seconds": 1.0, "lengths": [2] * 4, "all_groups": 1, "rounds": 1}
    return step_figures(1, Collected(**drawn | collected), [RESULT], {})


@pytest.mark.parametrize(
    ("rewards", "mean", "solved"),
    [([0.0, 0.25, 0.5, 0.75, 1.0, 3.5], 1.0, 0.5), ([-1.0, 1.0], 0.0, 0.5), ([0.5], 0.5, 0.0), ([], 0.0, 0.0)],
)
def test_an_answer_is_solved_by_a_reward_above_one_half(rewards, mean, solved):
    values = figures(rewards=rewards)
    assert (values["reward/mean"], values["reward/solved_share"]) == (mean, solved)


def test_failed_rewards_are_counted_of_every_kind():
    assert figures(failed={"timeout": 2, "error": 1})["reward/failed"] == 3
