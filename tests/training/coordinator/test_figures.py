"""The figures of a step and of an evaluation, worked out by hand."""

import asyncio
from types import SimpleNamespace

import pytest

from qurl_ray.config import load_config
from qurl_ray.learner.protocol import StepResult
from qurl_ray.training.coordinator.collect import Collected
from qurl_ray.training.coordinator.events import EventBuffer
from qurl_ray.training.coordinator.figures import evaluation_figures, step_figures
from qurl_ray.training.coordinator.session import Session
from qurl_ray.types import Verdict

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


def test_an_evaluation_has_the_mean_reward_and_the_share_solved():
    """Graded rewards, one of which failed and counts as 0."""
    graded = [0.25, 0.5, 0.75, 3.5]
    verdicts = [*(Verdict(reward=reward) for reward in graded), Verdict(reward=0.0, status="timeout")]
    values = evaluation_figures(verdicts)
    assert (values["eval/reward"], values["eval/accuracy"]) == (1.0, 0.4)
    assert values["eval/reward_low"] < 1.0 < values["eval/reward_high"]
    assert values["eval/low"] < 0.4 < values["eval/high"]
    assert (values["eval/problems"], values["eval/failed"]) == (5, 1)
    assert (values["outcomes"], values["rewards"]) == ("00110", [*graded, 0.0])


def test_rewards_of_0_and_1_are_one_figure_recorded_under_both_names():
    values = evaluation_figures([Verdict(reward=reward) for reward in (0.0, 1.0, 1.0, 0.0, 0.0)])
    for one, other in (("reward", "accuracy"), ("reward_low", "low"), ("reward_high", "high")):
        assert values[f"eval/{one}"] == values[f"eval/{other}"]
    assert values["outcomes"] == "01100"
    assert "rewards" not in values


def test_sets_of_held_out_problems_have_figures_of_their_own():
    verdicts = [Verdict(reward=reward) for reward in (1.0, 0.0, 1.0, 1.0, 0.25)]
    names = ["easy", "hard", "easy", "hard", "hard"]
    values = evaluation_figures(verdicts, names)
    assert (values["eval/accuracy"], values["eval/easy/accuracy"], values["eval/hard/accuracy"]) == (0.6, 1.0, 1 / 3)
    assert (values["eval/reward"], values["eval/hard/reward"]) == (0.65, 1.25 / 3)
    alone = evaluation_figures([v for v, name in zip(verdicts, names, strict=True) if name == "hard"])
    for key in ("low", "high", "reward_low", "reward_high"):
        assert values[f"eval/hard/{key}"] == alone[f"eval/{key}"]
    assert evaluation_figures(verdicts, [""] * 5) == evaluation_figures(verdicts)


class Collector:
    """Has these verdicts on the held-out problems."""

    held_out_sets = ()

    def __init__(self, *verdicts: Verdict) -> None:
        self._verdicts = verdicts

    async def judge_held_out(self):
        return list(self._verdicts)


def test_the_ranks_get_the_mean_reward_by_which_checkpoints_are_kept_and_failures_are_a_warning():
    verdicts = Verdict(reward=0.75), Verdict(reward=0.75), Verdict(reward=0.0, status="error")
    config, events = load_config(None, ["sync.probe_tokens=0"]), EventBuffer()

    async def ask():
        session = Session(config, Collector(*verdicts), SimpleNamespace(those=lambda *_: []), events, asyncio.Event())
        return await session.evaluate("during", 3, 0)

    assert asyncio.run(ask()) == 0.5
    phase, warning, evaluation = events.take()
    assert (phase.kind, phase.step) == ("phase", 3)
    assert warning.message.startswith("evaluation 'during': 1 of 3 rewards failed and count as 0. The first (error): ")
    assert (evaluation.message, evaluation.values["eval/accuracy"]) == ("during", 2 / 3)
