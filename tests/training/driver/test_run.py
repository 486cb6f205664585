"""Whole runs on a local Ray cluster: the files they leave, the exact agreement of engine and learner, faults."""

import json
import re
import shutil
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from ray.util.placement_group import placement_group, remove_placement_group
from transformers import AutoModelForCausalLM, AutoTokenizer

from qurl_ray.config import load_config
from qurl_ray.errors import DeadlineExceeded, PlacementError, RewardError
from qurl_ray.training.driver.run import run
from tests.training.runs import CERTIFIED, ROOT, SMALL, WHOLE, events, forget_after, parameters, prompts

pytestmark = pytest.mark.ray


def small_run(tmp_path, *overrides: str):
    return run(load_config(None, [*SMALL, "steps=3", f"output_dir={tmp_path}", *overrides]))


@pytest.mark.equal_bits
def test_a_run_leaves_everything_that_is_promised(whole):
    run_dir = whole.run_dir
    summary = json.loads((run_dir / "summary.json").read_text())
    assert summary == whole.summary
    assert not {
        "accuracy_before", "accuracy_after", "accuracy_after_quantized", "eval_problems", "steps", "train_seconds",
        "samples_per_second", "rollout_tokens_per_second", "phase_seconds", "precision_flow", "quantization",
        "correction", "uaq_scale", "acr_active_tokens", "mlflow_run_id", "interrupted", "accuracy_p_value",
        "reward_before", "reward_after", "reward_after_quantized", "reward_p_value",
    } - set(summary)  # fmt: skip
    assert set(summary["phase_seconds"]) == {"rollout", "reward", "logprob", "update", "sync"}
    assert (summary["steps"], summary["eval_problems"], summary["quantization"]) == (4, 40, "int8")
    steps = events(run_dir, "step")
    assert [line["step"] for line in steps] == [1, 2, 3, 4]
    for line in steps:
        assert line["values"]["sync/refits"] == 0
        assert line["values"]["sync/probe_gap_max"] == 0
    for line in steps[::2]:  # a certificate's step sends everything, as it changes the format and back
        changed = {key: share for key, share in line["values"].items() if key.startswith("sync/codes_changed")}
        assert len(changed) == 8  # all, and q, k, v, o, gate, up, down
        assert all(0 < share < 1 for share in changed.values())
        assert 0 < line["values"]["sync/bytes_ratio"] < 0.25
        assert line["values"]["sync/delta"] == 1
    assert all(0.9 < line["values"]["mismatch/ess"] <= 1 for line in steps)
    assert [line["message"] for line in events(run_dir, "evaluation")] == [
        "before",
        "during",
        "after, quantized",
        "after",
    ]
    assert sorted(p.name for p in (run_dir / "checkpoints").iterdir()) == [f"step-{step:06d}" for step in (2, 3, 4)]
    policy = AutoModelForCausalLM.from_pretrained(run_dir / "policy")
    tokenizer = AutoTokenizer.from_pretrained(run_dir / "policy")
    assert policy.generate(**tokenizer("3+4=", return_tensors="pt"), max_new_tokens=3).shape[1] > 4

    from mlflow import MlflowClient

    client = MlflowClient(f"sqlite:///{run_dir.parent}/mlflow.db")
    history = client.get_metric_history(summary["mlflow_run_id"], "reward/mean")
    assert [point.step for point in history] == [1, 2, 3, 4]


def test_a_run_leaves_the_files_that_the_documentation_names(whole):
    page = (ROOT / "docs" / "quickstart.md").read_text().split("## What a run leaves")[1].split("A finished run")[0]
    files = {name for cell in re.findall(r"^\| (.+?) \|", page, re.MULTILINE) for name in re.findall(r"`(.+?)`", cell)}
    assert {"policy/", "policy-int8/", "report.html", "checkpoints/"} <= files
    assert [name for name in files if not (whole.run_dir / name).exists()] == []


@pytest.mark.slow
def test_full_precision_rollouts_match_the_learner_exactly_and_learn_the_same_way_twice(tmp_path, cluster):
    plain = ["rollout.quantization=none", "algorithm.correction.type=ignore", "algorithm.updates_per_rollout=2"]
    first = small_run(tmp_path / "a", *plain)
    for line in events(first.run_dir, "step"):
        assert line["values"]["mismatch/abs_logprob_gap"] == 0
        assert line["values"]["mismatch/max_rho"] == 1
    again = small_run(tmp_path / "b", *plain, "rollout.workers=2", "rollout.slots=5", "task.verifiers=2")
    assert torch.equal(parameters(first.policy), parameters(again.policy))


FULL = ["rollout.quantization=none", "algorithm.correction=ignore"]


def full_precision_run(tmp_path, engine: str):
    chosen = f"rollout.engine=tests.training.engines:{engine}"
    return small_run(tmp_path / engine, *FULL, "steps=2", "evaluation.problems=8", chosen)


@pytest.mark.slow  # by default: engines in engines/test_drafts.py
@pytest.mark.equal_bits
def test_tokens_that_were_drafted_have_the_learners_logprobs(tmp_path, cluster):
    for line in events(full_precision_run(tmp_path, "drafting").run_dir, "step"):
        assert 0.3 < line["values"]["rollout/draft_agreement"] <= 1
        assert 1 < line["values"]["rollout/tokens_per_pass"] <= 4
        assert line["values"]["mismatch/kl"] == 0


@pytest.mark.slow
@pytest.mark.equal_bits
def test_a_run_whose_tokens_are_drafted_ends_with_the_parameters_of_one_without_drafts(tmp_path, cluster):
    drafting, plain = (full_precision_run(tmp_path, engine) for engine in ("drafting", "plain"))
    assert torch.equal(parameters(drafting.policy), parameters(plain.policy))
    assert all("rollout/tokens_per_pass" not in line["values"] for line in events(plain.run_dir, "step"))


@pytest.mark.slow
def test_a_run_with_drafts_that_was_interrupted_and_resumed_ends_where_the_undisturbed_one_does(tmp_path, cluster):
    settings = [*WHOLE, *FULL, "rollout.engine=tests.training.engines:drafting"]
    assert_resumed_ends_like(run(load_config(None, [*settings, f"output_dir={tmp_path}"])), tmp_path, settings)


@pytest.mark.slow
def test_three_steps_of_smollm2_without_loss_have_the_parameters_of_full_precision(tmp_path, cluster):
    few = ["rollout.prompts_per_step=2", "rollout.samples_per_prompt=2", "rollout.max_new_tokens=24"]
    few += ["rollout.slots=2", "steps=3", "tracking.mlflow=false", "tracking.console=none", "evaluation.problems=2"]
    few += ["quantization.uaq_scale=1", "algorithm.dynamic_sampling=false", "export.quantized=none", *FULL]
    found = {}
    for lossless in ("false", "true"):
        settings = [*few, f"output_dir={tmp_path / lossless}", f"rollout.lossless={lossless}"]
        found[lossless] = run(load_config(ROOT / "qurl_ray" / "configs" / "smollm2_135m.yaml", settings))
    assert torch.equal(parameters(found["true"].policy), parameters(found["false"].policy))
    assert all(line["values"]["rollout/tokens_per_pass"] > 1 for line in events(found["true"].run_dir, "step"))


@pytest.mark.slow
def test_acr_is_active_where_the_format_is_coarse(tmp_path, cluster):
    result = small_run(
        tmp_path, "rollout.quantization=int4", "algorithm.correction.is_cap=1.01", "algorithm.clip_high=0.02"
    )
    assert result.summary["acr_active_tokens"] > 0


@pytest.mark.slow
def test_two_learner_ranks_and_two_rollout_workers_train_together(tmp_path, cluster):
    small_run(tmp_path, "steps=2")
    together = small_run(tmp_path, "steps=2", "learner.workers=2", "rollout.workers=2")
    alone = parameters(tmp_path / "run.1" / "policy")  # an older run of the name is moved aside, not overwritten
    moved = (alone - parameters(Path(together.summary["initial_policy"]))).norm()
    assert (alone - parameters(together.policy)).norm() <= 0.02 * moved


@pytest.mark.slow
def test_uaq_is_folded_while_training_and_unfolded_in_what_is_saved(tmp_path, cluster):
    result = small_run(tmp_path, "steps=1", "quantization.uaq_scale=2", "learner.lr=1e-12")
    start = parameters(Path(result.summary["initial_policy"]))
    torch.testing.assert_close(parameters(result.policy), start, rtol=0, atol=1e-9)


@pytest.mark.slow
def test_failing_rewards_are_counted_and_their_samples_left_out(tmp_path, cluster):
    result = small_run(tmp_path, "task.reward=tests.training.rewards:sometimes_nan", "algorithm.dynamic_sampling=false")
    steps = events(result.run_dir, "step")
    assert any(line["values"]["reward/failed"] for line in steps)
    for values in (line["values"] for line in steps):
        assert values["rollout/trained_samples"] == values["rollout/samples"] - values["reward/failed"]
    assert any("rewards ended in invalid" in line["message"] for line in events(result.run_dir, "warning"))


@pytest.mark.slow
def test_a_step_without_any_signal_is_skipped_and_said(tmp_path, cluster):
    result = small_run(tmp_path, "task.reward=tests.training.rewards:constant", "algorithm.max_refill_rounds=2")
    assert torch.equal(parameters(result.policy), parameters(Path(result.summary["initial_policy"])))
    assert sum("the step is skipped" in line["message"] for line in events(result.run_dir, "warning")) == 3


@pytest.mark.parametrize("reward", ["raises", "hangs", "nan"])
def test_a_reward_that_cannot_judge_the_right_answer_ends_the_run_before_it_starts(tmp_path, reward):
    with pytest.raises(RewardError, match=rf"reward tests.training.rewards:{reward} ended in"):
        small_run(tmp_path, f"task.reward=tests.training.rewards:{reward}", "task.reward_timeout_s=1")


@pytest.mark.parametrize("side", ["rollout", "learner"])
def test_what_the_cluster_can_never_hold_ends_the_run_at_once(tmp_path, cluster, side):
    with pytest.raises(PlacementError, match=r"can never hold this run: 10 CPU are asked for, and it has 4 CPU in all"):
        small_run(tmp_path, f"{side}.workers=9")


@contextmanager
def others_hold(cpus: int):
    """That many CPUs of the cluster."""
    group = placement_group([{"CPU": 1}] * cpus)
    assert group.wait(10)
    yield
    remove_placement_group(group)


def test_a_fleet_that_cannot_be_placed_says_what_is_missing(tmp_path, cluster):
    missing = r"1 of 2 rollout worker\(s\) of 1 CPU were not placed within 3 s; the cluster has 4 CPU"
    with others_hold(3), pytest.raises(DeadlineExceeded, match=missing):
        small_run(tmp_path, "rollout.workers=2", "rollout.start_timeout_s=3")


@pytest.mark.slow
def test_rollouts_that_take_too_long_end_the_run_and_say_how_far_they_came(tmp_path, cluster):
    with pytest.raises(
        DeadlineExceeded, match=r"waited 0.01 s for rollouts by rollout worker 0 .*: \d+ of 40 .* unfinished, after up"
    ):
        small_run(tmp_path, "rollout.timeout_s=0.01")


@pytest.mark.slow
def test_ranks_that_cannot_be_placed_end_the_run_and_not_in_a_hang(tmp_path, cluster):
    with others_hold(2), pytest.raises(DeadlineExceeded, match=r"2 learner rank\(s\).*were not placed within 4 s"):
        small_run(tmp_path, "learner.workers=2", "learner.timeout_s=4")


def assert_resumed_ends_like(whole, tmp_path, settings: list[str]) -> None:
    """Interrupt a copy of a finished run of these settings after step 2, and resume it."""
    folder = tmp_path / "copy"
    shutil.copytree(whole.run_dir, folder / whole.run_dir.name)
    forget_after(folder / whole.run_dir.name, 2)
    resumed = run(load_config(None, [*settings, f"output_dir={folder}"]))
    assert resumed.run_dir == folder / whole.run_dir.name
    assert torch.equal(parameters(resumed.policy), parameters(whole.policy))
    steps = [line["values"] for line in events(whole.run_dir, "step")]
    again = [line["values"] for line in events(resumed.run_dir, "step")]
    for before, after in zip(steps, again, strict=True):
        assert before.keys() == after.keys()
        for key in (key for key in before if not key.startswith("time/") and "per_second" not in key):
            if before[key] is None:  # nan, as JSON has it
                assert after[key] is None, key
            else:
                assert after[key] == pytest.approx(before[key], rel=1e-5, nan_ok=True), key
    for key in ("accuracy_before", "accuracy_after", "accuracy_after_quantized", "steps"):
        assert resumed.summary[key] == whole.summary[key]
    assert any("resuming after step 2 of 4" in line["message"] for line in events(resumed.run_dir, "info"))
    assert [line["message"] for line in events(resumed.run_dir, "evaluation")].count("before") == 1


def test_a_run_that_was_interrupted_and_resumed_ends_where_the_undisturbed_one_does(tmp_path, cluster, whole):
    assert_resumed_ends_like(whole, tmp_path, CERTIFIED)


@pytest.mark.slow
@pytest.mark.parametrize(
    "settings",
    [
        ["learner.backend=deepspeed", "learner.zero_stage=3", "learner.workers=2"],
        ["learner.backend=fsdp", "learner.workers=2", "quantization.uaq_scale=1.5", "algorithm.kl_coef=0.01"],
        ["algorithm.type=ppo", "rollout.samples_per_prompt=1", "learner.packing=true"],
    ],
    ids=["deepspeed", "fsdp", "ppo"],
)
def test_other_learners_are_resumed_to_the_bit_as_well(tmp_path, cluster, settings):
    whole = run(load_config(None, [*WHOLE, *settings, f"output_dir={tmp_path}"]))
    assert_resumed_ends_like(whole, tmp_path, [*WHOLE, *settings])


@pytest.mark.slow
def test_a_run_is_resumed_by_other_numbers_of_ranks_and_loses_no_prompt(tmp_path, cluster, whole):
    run_dir = tmp_path / "copy" / whole.run_dir.name
    shutil.copytree(whole.run_dir, run_dir)
    for step, ranks, backend in ((2, 2, "fsdp"), (3, 3, "fsdp"), (3, 1, "torch")):
        forget_after(run_dir, step)
        (run_dir / "checkpoints" / f".step-{step + 1:06d}" / "learner").mkdir(parents=True)  # killed while it saved
        settings = [f"learner.workers={ranks}", f"learner.backend={backend}", f"output_dir={run_dir.parent}"]
        resumed = run(load_config(None, [*CERTIFIED, *settings]))
        assert resumed.run_dir == run_dir
        assert any("added in another order" in line["message"] for line in events(run_dir, "info"))
    assert prompts(run_dir) == prompts(whole.run_dir)
    counted = [
        [(line["step"], line["values"]["rollout/samples"]) for line in events(folder, "step")]
        for folder in (run_dir, whole.run_dir)
    ]
    assert counted[0] == counted[1]


TARGET = [
    "steps=60", "evaluation.every=2", "evaluation.target_reward=0.3", "checkpoint.every=0", "learner.lr=1e-4",
    "task.reward=tests.training.rewards:ones", "learner.threads=1", "rollout.threads=1",
]  # fmt: skip


def looks(run_dir: Path) -> list[dict]:
    """The evaluations between steps."""
    return [line for line in events(run_dir, "evaluation") if line["message"] == "during"]


@pytest.mark.slow
def test_a_run_ends_at_its_target_and_is_finished_then(tmp_path, cluster):
    result = small_run(tmp_path, *TARGET)
    *before, last = looks(result.run_dir)
    reached = 2 * (1 + len(before))
    assert last["values"]["target_reached"]
    assert not any("target_reached" in line["values"] for line in before)
    assert result.summary["target_reached_at_step"] == result.summary["steps"] == last["step"] == reached < 60
    assert result.summary["accuracy_after_quantized"] == last["values"]["eval/accuracy"]  # of the same codes
    assert not result.interrupted
    (told,) = [
        line["message"] for line in events(result.run_dir, "info") if "has reached its target" in line["message"]
    ]
    assert float(re.findall(r"reward, (0\.\d+), has reached its target of 0\.3: the run ends", told)[0]) >= 0.3
    assert (result.run_dir / "checkpoints" / f"step-{reached:06d}").is_dir()


@pytest.mark.slow
def test_a_run_that_was_killed_after_its_target_ends_without_a_further_step(tmp_path, cluster):
    result = small_run(tmp_path, *TARGET)
    reached = result.summary["steps"]
    policy = parameters(result.policy)
    (result.run_dir / "summary.json").unlink()
    shutil.rmtree(result.policy)
    again = small_run(tmp_path, *TARGET)
    assert again.run_dir == result.run_dir
    assert torch.equal(parameters(again.policy), policy)
    assert (again.summary["steps"], again.summary["target_reached_at_step"]) == (reached, reached)
    assert not again.interrupted


@pytest.mark.slow
def test_two_ranks_whose_rollouts_run_ahead_end_at_their_target(tmp_path, cluster):
    result = small_run(tmp_path, *TARGET, "learner.workers=2", "rollout.max_staleness=2")
    assert result.summary["target_reached_at_step"] == result.summary["steps"] == looks(result.run_dir)[-1]["step"] < 60
    assert not result.interrupted


@pytest.mark.slow
@pytest.mark.equal_bits
def test_the_guard_acts_is_heard_and_stops_with_a_checkpoint(tmp_path, cluster):
    trips = ["guard.kl_max=1e-9", "guard.window=1", "guard.patience=1", "guard.precision_steps=2", "guard.trips=1"]
    result = small_run(tmp_path, *trips, "steps=20", "quantization.uaq_scale=1")
    steps = [line["values"] for line in events(result.run_dir, "step")]
    # after step 3 two steps in full precision; it comes back tightened, trips in step 6, and that was once too often
    assert [values["guard/level"] for values in steps] == [1, 2, 3, 3, 2, 4]
    assert [values["mismatch/kl"] == 0 for values in steps] == [False, False, False, True, True, False]
    warnings = [line["message"] for line in events(result.run_dir, "warning") if "guard:" in line["message"]]
    assert len(warnings) == 5
    assert "the run stops, with a checkpoint" in warnings[-1]
    assert result.interrupted
    assert result.summary["stopped_by_guard"]
    assert (result.run_dir / "checkpoints" / "step-000006").is_dir()


@pytest.mark.slow
def test_a_fleet_grows_where_there_is_room_and_changes_nothing(tmp_path, cluster, monkeypatch):
    monkeypatch.setattr("qurl_ray.actors.worker_group._TIMES", 2)
    expected = small_run(tmp_path / "a", "steps=60")  # while they last, a worker starts
    grown = small_run(tmp_path / "b", "steps=60", "rollout.max_workers=2")
    assert any("joins the fleet" in line["message"] for line in events(grown.run_dir, "info"))
    assert events(grown.run_dir, "step")[-1]["values"]["fleet/healthy"] == 2
    assert torch.equal(parameters(grown.policy), parameters(expected.policy))


@pytest.mark.slow
@pytest.mark.parametrize("ahead", [1, 3])
def test_rollouts_run_ahead_no_further_than_they_may_and_a_resumed_run_draws_the_same_prompts(tmp_path, cluster, ahead):
    settings = [*SMALL, "steps=8", f"rollout.max_staleness={ahead}", "checkpoint.every=1", "checkpoint.keep=9"]
    settings += ["rollout.max_new_tokens=40", f"output_dir={tmp_path}", "learner.threads=1", "rollout.threads=1"]
    result = run(load_config(None, settings))
    steps = [line["values"] for line in events(result.run_dir, "step")]
    assert len(steps) == 8
    lags = [values["rollout/staleness_max"] for values in steps]
    assert max(lags) <= ahead
    assert max(lags) >= 1
    assert all(values["mismatch/ess"] <= 1 for values in steps)
    drawn = prompts(result.run_dir)
    forget_after(result.run_dir, 3)
    again = prompts(run(load_config(None, settings)).run_dir)
    # How many a step needs depends on how its answers turn out: but none is lost, and none is doubled.
    both = min(len(drawn), len(again))
    assert drawn[:both] == again[:both]
    assert [line["step"] for line in events(result.run_dir, "step")] == list(range(1, 9))


@pytest.mark.slow
def test_vllm_generates_in_a_run_and_its_probe_agrees(tmp_path, cluster):
    pytest.importorskip("vllm")
    result = small_run(tmp_path, "rollout.engine=vllm", "rollout.slots=32", "steps=2")
    steps = events(result.run_dir, "step")
    assert len(steps) == 2
    for line in steps:
        assert (line["values"]["sync/delta"], line["values"]["sync/refits"]) == (1, 0)
        assert line["values"]["sync/probe_gap"] < 2e-3  # vLLM's attention is another; fbgemm's codes are the same
        assert line["values"]["mismatch/kl"] < 0.05
    assert not events(result.run_dir, "warning")


@pytest.mark.slow
@pytest.mark.parametrize("settings", [["rollout.quantization=fp8_block"], ["precision_flow=unified_int8"]])
def test_a_unified_flow_trains_what_generates(tmp_path, cluster, settings):
    result = small_run(tmp_path, "precision_flow=unified", *settings, "algorithm.correction=ignore", "steps=2")
    steps = events(result.run_dir, "step")
    assert len(steps) == 2
    for line in steps:
        assert (line["values"]["mismatch/max_rho"], line["values"]["mismatch/kl"]) == (1, 0)
        assert line["values"]["sync/probe_gap_max"] == 0
        assert line["values"]["sync/codes_changed"] > 0
    assert result.summary["precision_flow"].startswith("unified")
    told = [
        e["message"] for e in events(result.run_dir, "info") if "gradients of the learner's linears" in e["message"]
    ]
    assert len(told) == ("rollout.quantization=fp8_block" in settings)
    assert all("run on: emulation: scaled_mm_block needs a device of type cuda" in message for message in told)
    assert not events(result.run_dir, "warning")


@pytest.mark.slow
def test_a_unified_flow_with_vllm_is_off_by_its_kernels_noise(tmp_path, cluster):
    pytest.importorskip("vllm")
    settings = ["rollout.quantization=fp8_block", "rollout.engine=vllm", "rollout.slots=32", "steps=1"]
    for flow, least, most in (("unified", 0.0, 1e-5), ("rollout_only", 1e-5, 0.1)):
        result = small_run(tmp_path / flow, f"precision_flow={flow}", "algorithm.correction=monitor", *settings)
        (line,) = events(result.run_dir, "step")
        assert least <= line["values"]["mismatch/kl"] < most, flow
