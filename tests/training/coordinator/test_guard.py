"""The guard against recorded runs, and its rules on made-up figures."""

import csv
import json
import math
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

from qurl_ray.config.guard import GuardConfig
from qurl_ray.training.coordinator.guard import Guard
from qurl_ray.training.messages import Level

DATA = Path(__file__).parent / "data"
HEALTHY = {
    "reward/mean": 0.5,
    "rollout/garbage_share": 0.0,
    "grad_norm": 2.0,
    "mismatch/ess": 0.99,
    "mismatch/kl": 0.001,
    "mismatch/max_rho": 1.5,
    "clip/upper": 0.01,
    "clip/lower": 0.02,
    "policy/entropy": 0.5,
    "certificate/cost_least": -0.02,
}
SKIPPED = {"reward/mean": 0.5, "rollout/garbage_share": 0.0, "grad_norm": math.nan}
BEYOND = {
    "mismatch/ess": 0.2,
    "mismatch/kl": 0.2,
    "mismatch/max_rho": 200.0,
    "clip/upper": 0.7,
    "clip/lower": 0.7,
    "grad_norm": 50.0,
    "reward/mean": 0.1,
    "policy/entropy": 0.01,
    "certificate/cost_least": 0.2,
    "rollout/garbage_share": 0.9,
}
EVERYTHING = GuardConfig(rho_max=100.0, entropy_min=0.1, cost_max=0.1)
QUICK = GuardConfig(window=4, patience=2, calm_steps=3, precision_steps=5, trips=2)
BAD = HEALTHY | {"mismatch/kl": 0.5}


def recorded(name: str) -> list[dict[str, float]]:
    """The figures of a real run, step by step."""
    with (DATA / f"{name}.csv").open() as file:
        return [{key: float(value) for key, value in row.items() if value} for row in csv.DictReader(file)]


def run(guard: Guard, steps: list[dict[str, float]], first: int = 1) -> list:
    return [guard.judge(step, values) for step, values in enumerate(steps, first)]


def levels(directives) -> list[int]:
    return [int(one.level) for one in directives]


# --- recorded runs ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["quickstart_int8", "int4_learns"])
def test_runs_that_learn_are_left_alone(name):
    directives = run(Guard(GuardConfig()), recorded(name))
    assert levels(directives) == [0] * len(directives)
    assert not any(one.messages for one in directives)


def test_a_run_that_collapses_gets_full_precision_within_15_steps():
    """Ternary weights, naive importance sampling, a rate of 8e-5: accuracy fell from 44 to 3 % in 60 steps."""
    directives = run(Guard(GuardConfig()), recorded("ternary_collapses"))
    assert levels(directives[:15]) == [0] * 4 + [1] * 5 + [2] * 5 + [3]
    said = [text for one in directives[:15] for text in one.messages]
    assert len(said) == 3
    assert "mismatch/kl" in said[0]
    assert "(5 of the last 5 steps)" in said[0]
    assert said[2].endswith("rollouts in full precision for 20 steps, to step 35")


def test_rewards_alone_tell_of_a_collapse():
    """Those of skipped steps, too: at its end all answers were wrong in most steps."""
    steps = recorded("ternary_collapses")
    assert any("mismatch/kl" not in values for values in steps)
    blind = GuardConfig(ess_min=None, kl_max=None, clip_max=None, grad_norm_max=None)
    directives = run(Guard(blind, can_change_precision=False), steps)
    first = levels(directives).index(1)
    assert 20 <= first <= 36
    assert directives[first].messages[0].startswith("guard: reward/mean")
    assert levels(directives)[-1] >= Level.TIGHTEN


# --- every figure ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("key", BEYOND)
def test_every_figure_raises_the_level_by_itself(key):
    guard = Guard(EVERYTHING)
    assert levels(run(guard, [HEALTHY] * 20)) == [0] * 20
    directives = run(guard, [HEALTHY | {key: BEYOND[key]}] * 5, 21)
    assert levels(directives) == [0, 0, 0, 0, 1]
    (message,) = directives[-1].messages
    assert message.startswith("guard: ")
    assert key in message
    assert f"{BEYOND[key]:.3g}" in message or key.startswith("clip")


FIELDS = {
    "mismatch/ess": "ess_min",
    "mismatch/kl": "kl_max",
    "mismatch/max_rho": "rho_max",
    "clip/upper": "clip_max",
    "grad_norm": "grad_norm_max",
    "reward/mean": "reward_min",
    "policy/entropy": "entropy_min",
    "certificate/cost_least": "cost_max",
    "rollout/garbage_share": "garbage_max",
}


@pytest.mark.parametrize(("key", "name"), FIELDS.items())
def test_a_threshold_of_none_is_off(key, name):
    guard = Guard(EVERYTHING.model_copy(update={name: None}))
    run(guard, [HEALTHY] * 20)
    assert levels(run(guard, [HEALTHY | {key: BEYOND[key]}] * 40, 21)) == [0] * 40


@pytest.mark.parametrize("key", ["mismatch/kl", "mismatch/ess", "grad_norm", "reward/mean"])
@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_what_is_not_finite_is_beyond(key, value):
    guard = Guard(GuardConfig())
    run(guard, [HEALTHY] * 20)
    directives = run(guard, [HEALTHY | {key: value}] * 5, 21)
    assert levels(directives)[-1] == 1
    assert f"{key} {value}" in directives[-1].messages[0]


def test_disabled_it_does_and_says_nothing():
    directives = run(Guard(GuardConfig(enabled=False)), [BAD] * 100)
    assert levels(directives) == [0] * 100
    assert all(one.metrics == {} and not one.messages for one in directives)


def test_the_gradient_is_compared_with_its_own_history():
    """Norms that grow slowly are no alarm, however large; those that are beyond do not become the measure."""
    guard = Guard(GuardConfig())
    slow = [HEALTHY | {"grad_norm": 1.02**step} for step in range(300)]
    assert levels(run(guard, slow)) == [0] * 300
    assert levels(run(guard, [HEALTHY | {"grad_norm": 1e5}] * 5, 301))[-1] == 1
    assert all(norm < 1e4 for norm in guard.state()["norms"])


def test_what_began_at_nothing_is_not_compared():
    """A policy without entropy, or gradients of rewards that are all alike."""
    guard = Guard(QUICK.model_copy(update={"entropy_min": 0.2}), can_change_precision=True)
    still = HEALTHY | {"policy/entropy": 0.0, "grad_norm": 0.0}
    directives = run(guard, [still] * 30 + [HEALTHY] * 30)
    assert levels(directives)[-1] == Level.NONE
    assert not any(one.messages for one in directives)


def test_rewards_that_are_never_positive_are_not_compared():
    steps = [HEALTHY | {"reward/mean": reward} for reward in [0.0] * 15 + [-1.0] * 40]
    assert levels(run(Guard(GuardConfig()), steps)) == [0] * 55


# --- steps -------------------------------------------------------------------------------------------------------


def test_a_few_bad_steps_are_no_alarm():
    directives = run(Guard(GuardConfig()), ([BAD] * 4 + [HEALTHY] * 10) * 5)
    assert levels(directives) == [0] * 70
    assert [one.metrics["guard/beyond"] for one in directives[:5]] == [1, 1, 1, 1, 0]


def test_skipped_steps_neither_count_nor_calm():
    guard = Guard(QUICK)
    assert levels(run(guard, [BAD, *[SKIPPED] * 30, BAD])) == [0] * 31 + [1]
    assert levels(run(guard, [HEALTHY] * 2 + [SKIPPED] * 30 + [HEALTHY])) == [1] * 32 + [0]


@pytest.mark.parametrize("bad", [{"reward/mean": 0.0}, {"certificate/cost_least": 0.2}], ids=str)
def test_a_reward_that_collapses_counts_in_skipped_steps_too(bad):
    """All answers wrong: no group is left to learn from, in every step."""
    guard = Guard(EVERYTHING)
    run(guard, [HEALTHY] * 20)
    assert levels(run(guard, [SKIPPED | bad] * 5, 21))[-1] == 1


# --- the ladder --------------------------------------------------------------------------------------------------


def test_up_the_ladder_and_down_again():
    guard = Guard(QUICK)
    up = run(guard, [BAD] * 6)
    assert levels(up) == [0, 1, 1, 2, 2, 3]
    assert [(one.tighten, one.full_precision, one.stop) for one in up[1::2]] == [
        (False, False, False),
        (True, False, False),
        (False, True, False),
    ]
    assert [len(one.messages) for one in up] == [0, 1, 0, 1, 0, 1]
    down = run(guard, [HEALTHY] * 11, 7)
    assert levels(down) == [3] * 4 + [2] * 3 + [1] * 3 + [0]
    assert [index for index, one in enumerate(down) if one.messages] == [4, 7, 10]


def test_between_release_and_threshold_nothing_moves():
    guard = Guard(QUICK)
    run(guard, [BAD] * 4)
    assert levels(run(guard, [HEALTHY | {"mismatch/kl": 0.09}] * 50, 5)) == [2] * 50
    assert levels(run(guard, [HEALTHY | {"mismatch/kl": 0.07}] * 3, 55)) == [2, 2, 1]


def test_each_relapse_takes_twice_as_long_and_the_last_one_ends_the_run():
    directives, guard = [], Guard(QUICK)
    for step in range(1, 60):  # mismatch is gone while rollouts are in full precision, and back at once
        values = HEALTHY if guard.directive.full_precision else BAD
        directives.append(guard.judge(step, values))
    found = levels(directives)
    assert found[5:10] == [3] * 5
    assert found[10:12] == [2, 2]
    assert found[12:22] == [3] * 10
    assert found[22:25] == [2, 2, 4]
    assert set(found[24:]) == {4}
    assert directives[24].stop
    assert directives[24].messages[0].endswith("the run stops, with a checkpoint, after 2 attempts to save it")
    assert not any(one.messages for one in directives[25:])


def test_relapses_are_forgotten_when_all_is_calm():
    guard = Guard(QUICK)
    for round_ in range(5):
        run(guard, [BAD] * 6)
        assert guard.state()["left"] == 5, round_
        assert levels(run(guard, [HEALTHY] * 11))[-1] == 0


def test_what_full_precision_does_not_cure_goes_on_to_the_end():
    """A lost reward stays lost: 5 steps in full precision, 10 more, stop."""
    guard = Guard(QUICK)
    run(guard, [HEALTHY] * 10)
    found = levels(run(guard, [HEALTHY | {"reward/mean": 0.0}] * 30))
    assert found == [0, 1, 1, 2, 2] + [3] * 15 + [4] * 10


def test_rewards_in_full_precision_are_not_what_quantized_ones_must_reach():
    guard = Guard(QUICK)
    low = {"reward/mean": 0.2}
    run(guard, [HEALTHY | low] * 10 + [BAD | low] * 6)
    run(guard, [HEALTHY | {"reward/mean": 0.6}] * 5)
    assert levels(run(guard, [HEALTHY | low] * 6)) == [2, 2, 1, 1, 1, 0]


@pytest.mark.parametrize(("highest", "level"), [("warn", 1), ("tighten", 2), ("full_precision", 3), ("stop", 4)])
def test_no_action_above_the_highest(highest, level):
    directives = run(Guard(QUICK.model_copy(update={"highest": highest})), [BAD] * 200)
    assert max(levels(directives)) == levels(directives)[-1] == level


def test_without_a_precision_to_change_to_that_rung_is_left_out():
    directives = run(Guard(QUICK, can_change_precision=False), [BAD] * 12)
    assert levels(directives) == [0, 1, 1, 2, 2, 2, 2, 2, 2, 4, 4, 4]
    bounded = Guard(QUICK.model_copy(update={"highest": "full_precision"}), can_change_precision=False)
    directives = run(bounded, [BAD] * 100)
    assert levels(directives)[-1] == Level.TIGHTEN
    assert not any(one.messages for one in directives[4:])


# --- resuming ----------------------------------------------------------------------------------------------------

_ANY = st.one_of(st.floats(0, 1), st.floats(0, 100), st.sampled_from([math.nan, math.inf, 0.0]))
_STEP = st.one_of(
    st.sampled_from([HEALTHY, BAD, SKIPPED, HEALTHY | {"reward/mean": 0.0}, HEALTHY | {"grad_norm": math.nan}]),
    st.fixed_dictionaries({}, optional=dict.fromkeys(HEALTHY, _ANY)),
)


@settings(max_examples=60, deadline=None)
@given(st.lists(_STEP, max_size=40), st.lists(_STEP, max_size=30), st.booleans())
def test_a_resumed_guard_decides_as_if_nothing_had_been(before, after, can_change):
    config = GuardConfig(window=4, patience=2, calm_steps=2, precision_steps=3, entropy_min=0.2, rho_max=50)
    whole = Guard(config, can_change_precision=can_change)
    run(whole, before)
    if whole.directive.stop:
        return
    text = json.dumps(whole.state(), allow_nan=False)
    resumed = Guard(config, can_change_precision=can_change)
    resumed.restore(json.loads(text))
    assert resumed.directive == whole.directive
    assert run(resumed, after) == run(whole, after)


def test_who_resumes_a_stopped_run_wants_it_to_go_on():
    guard = Guard(QUICK, can_change_precision=False)
    run(guard, [BAD] * 12)
    again = Guard(QUICK, can_change_precision=False)
    again.restore(json.loads(json.dumps(guard.state())))
    assert not again.directive.stop
    assert levels(run(again, [BAD] * 10)) == [0, 1, 1, 2, 2, 2, 2, 2, 2, 4]


def test_the_state_stays_small():
    guard = Guard(GuardConfig())
    run(guard, [HEALTHY] * 300)
    assert len(json.dumps(guard.state())) < 2000


# --- settings ----------------------------------------------------------------------------------------------------


def test_patience_beyond_the_window_is_refused():
    with pytest.raises(ValidationError, match="patience=6 counts steps among the last window=5"):
        GuardConfig(window=5, patience=6)


@pytest.mark.parametrize("wrong", [{"ess_min": 1.0}, {"kl_max": 0.0}, {"grad_norm_max": 1.0}, {"release": 1.1}])
def test_thresholds_that_make_no_sense_are_refused(wrong):
    with pytest.raises(ValidationError):
        GuardConfig(**wrong)
