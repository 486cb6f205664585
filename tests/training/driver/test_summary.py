"""What a run's summary says of its evaluations."""

import json
from fractions import Fraction

import pytest

from qurl_ray.config import RunConfig, load_config
from qurl_ray.errors import CheckpointError
from qurl_ray.training.coordinator.figures import evaluation_figures
from qurl_ray.training.driver.summary import summarize, write_summary
from qurl_ray.training.totals import RunTotals
from qurl_ray.types import Event, Verdict

WHEN = ("before", "after", "after, quantized")


def evaluation(label: str, rewards: list[float]) -> Event:
    values = evaluation_figures([Verdict(reward=reward) for reward in rewards])
    return Event(kind="evaluation", step=0, message=label, values={"label": label} | values)


def summary(*events: Event) -> dict:
    """The summary of a run of these events, its totals having been in a checkpoint."""
    totals = RunTotals()
    for event in events:
        totals.add(event)
    state = json.loads(json.dumps(totals.state(), allow_nan=False))
    assert RunTotals(**state) == totals
    return summarize(RunConfig(), totals)


def test_graded_rewards_have_their_means_and_a_paired_test_of_their_own():
    """Every reward rises and no problem changes from unsolved to solved, or back."""
    rewards = [0.0, 0.1, 0.2, 0.6, 0.7], [0.4, 0.5, 0.3, 0.8, 0.9], [0.3, 0.3, 0.3, 0.8, 0.8]
    found = summary(*map(evaluation, WHEN, rewards))
    means = [found[f"reward_{when}"] for when in ("before", "after", "after_quantized")]
    assert means == pytest.approx([0.32, 0.58, 0.5])
    assert [found[f"accuracy_{when}"] for when in ("before", "after", "after_quantized")] == [0.4] * 3
    assert found["reward_p_value"] == Fraction(2, 2**5)  # all five up, or all five down
    assert found["accuracy_p_value"] == 1.0


def test_adapters_are_named_with_their_share_of_the_parameters():
    totals = RunTotals()
    config = RunConfig.model_validate({"rollout": {"quantization": "int8"}, "learner": {"lora": {"rank": 8}}})
    assert summarize(config, totals)["adapter"] == "LoRA of rank 8, α 32, on all_linear, over int8 codes"
    totals.add(Event(kind="info", step=0, message="adapters: …", values={"adapter/share": 0.0349}))
    assert summarize(config, totals)["adapter"].endswith("over int8 codes, 3.5% of the parameters")
    assert RunTotals.of(totals.state()).trained_share == 0.0349


@pytest.mark.parametrize(
    ("algorithm", "rho", "kept", "expected"),
    [
        ("correction=acr", 1.4, 0, "no weight truncated: the largest rho was 1.4, and C = 2"),
        ("correction=acr", 3.1, 0, "up to a rho of 3.1, with C = 2; ACR was TIS: no truncated token reached the clip"),
        ("correction=acr", 3.1, 12, "up to a rho of 3.1, with C = 2; 12 tokens kept that TIS would clip"),
        ("correction=acr updates_per_rollout=1", 3.1, 0, "as it is with one update per rollout"),
        ("correction=tis", 3.1, 0, "weights truncated, up to a rho of 3.1, with C = 2"),
        ("correction=sequence_tis", 3.1, 0, None),
        ("correction=monitor", 3.1, 5, None),
    ],
)
def test_the_effect_of_a_correction_is_told_and_the_reason_where_it_had_none(algorithm, rho, kept, expected):
    totals = RunTotals()
    totals.add(step(1, mismatch__max_rho=rho, acr_active_tokens=kept))
    config = load_config(None, [f"algorithm.{setting}" for setting in algorithm.split()])
    told = summarize(config, totals).get("correction_effect")
    assert told is None if expected is None else told.endswith(expected)


def test_rewards_of_0_and_1_have_the_same_figures_under_both_names():
    found = summary(evaluation("before", [0, 0, 0, 0, 1]), evaluation("after", [1, 1, 1, 0, 1]))
    for figure in ("before", "after", "after_quantized", "p_value"):
        assert found[f"reward_{figure}"] == found[f"accuracy_{figure}"]
    assert found["accuracy_p_value"] == Fraction(2, 2**3)


def test_a_run_without_evaluations_has_none_of_their_figures():
    found = summary()
    assert {value for key, value in found.items() if key.startswith(("reward", "accuracy"))} == {None}


def step(number: int, **values: float | None) -> Event:
    return Event(kind="step", step=number, values={key.replace("__", "/"): value for key, value in values.items()})


def test_figures_are_summed_over_the_steps():
    found = summary(
        step(1, time__step=2.0, time__rollout=0.5, rollout__samples=10, rollout__tokens=40, acr_active_tokens=3),
        step(2, time__step=3.0, time__rollout=0.5, rollout__samples=15, rollout__tokens=20, mismatch__max_rho=1.5),
        step(3, mismatch__max_rho=1.25, guard__level=4),
    )
    assert (found["steps"], found["train_seconds"], found["samples_per_second"]) == (3, 5.0, 5.0)
    assert (found["rollout_tokens_per_second"], found["acr_active_tokens"], found["max_rho"]) == (60.0, 3, 1.5)
    assert (found["phase_seconds"]["rollout"], found["stopped_by_guard"]) == (1.0, True)


def test_final_evaluations_are_not_final_any_more_where_a_run_resumes():
    totals = RunTotals()
    for label in ("before", "during", *WHEN[1:]):
        totals.add(evaluation(label, [0, 1]))
    assert list(RunTotals.of(totals.state()).evaluations) == ["before", "during"]


def test_a_number_that_json_cannot_hold_counts_as_0():
    assert summary(step(1, time__step=None, rollout__samples=1))["train_seconds"] == 0


def test_a_disk_that_is_full_leaves_no_part_of_a_summary(tmp_path, small_files):
    write_summary(tmp_path, {"steps": 3})
    for _ in range(2):
        with pytest.raises(CheckpointError, match=r"summary\.json cannot be written: File too large.*same command"):
            write_summary(tmp_path, {"name": "x" * 200_000})
        assert [path.name for path in tmp_path.iterdir()] == ["summary.json"]
        assert json.loads((tmp_path / "summary.json").read_text()) == {"steps": 3}


def test_a_folder_in_the_place_of_a_summary_is_an_error(tmp_path):
    (tmp_path / "summary.json").mkdir()
    with pytest.raises(CheckpointError, match=r"summary\.json cannot be written: Is a directory"):
        write_summary(tmp_path, {})


def test_sets_of_held_out_problems_are_told_before_and_after():
    verdicts = [[Verdict(reward=reward) for reward in rewards] for rewards in ((0.0, 0.0, 1.0), (1.0, 0.0, 1.0))]
    events = [
        Event(kind="evaluation", step=0, message=label, values=evaluation_figures(found, ["a", "b", "b"]))
        for label, found in zip(("before", "after"), verdicts, strict=True)
    ]
    assert summary(*events)["eval_sets"] == {
        "a": {"reward_before": 0.0, "accuracy_before": 0.0, "reward_after": 1.0, "accuracy_after": 1.0},
        "b": {"reward_before": 0.5, "accuracy_before": 0.5, "reward_after": 0.5, "accuracy_after": 0.5},
    }
    assert "eval_sets" not in summary(evaluation("before", [0.0, 1.0]))
