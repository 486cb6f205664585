"""Whole runs on a local Ray cluster: the files they leave, the exact agreement of engine and learner, faults."""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import ray
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from qurl_ray.config import load_config
from qurl_ray.errors import ConfigError, DeadlineExceeded, EngineError, RewardError
from qurl_ray.loop.run import run

ROOT = Path(__file__).parents[2]
pytestmark = pytest.mark.ray

SMALL = [
    "model.cold_start=false",
    "model.layers=2",
    "model.hidden_size=128",
    "model.intermediate_size=256",
    "task.max_operand=30",
    "task.reward=tests.loop.rewards:length",
    "rollout.prompts_per_step=8",
    "rollout.samples_per_prompt=4",
    "rollout.max_new_tokens=6",
    "evaluation.problems=40",
    "learner.lr=1e-3",
    "tracking.mlflow=false",
    "tracking.console=none",
]


ALONE = {name: value for name, value in os.environ.items() if name != "RAY_ADDRESS"} | {"PYTHONPATH": str(ROOT)}
"""Environment of jobs that start a Ray of their own."""


def small_run(tmp_path, *overrides: str):
    return run(load_config(None, [*SMALL, "steps=3", f"output_dir={tmp_path}", *overrides]))


def events(run_dir: Path, kind: str) -> list[dict]:
    lines = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    return [line for line in lines if line["kind"] == kind]


def parameters(folder: Path) -> torch.Tensor:
    return torch.cat([p.detach().reshape(-1) for p in AutoModelForCausalLM.from_pretrained(folder).parameters()])


@pytest.fixture(scope="module")
def cluster():
    """One local Ray for the runs of this process; it finds tests.loop.rewards on PYTHONPATH."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", str(ROOT))
        ray.init(num_cpus=4, include_dashboard=False, log_to_driver=False)
        yield
        ray.shutdown()


def test_a_run_leaves_everything_that_is_promised(tmp_path, cluster):
    result = small_run(
        tmp_path, "tracking.mlflow=true", "checkpoint.every=1", "checkpoint.keep=2", "evaluation.every=2"
    )
    run_dir = result.run_dir
    summary = json.loads((run_dir / "summary.json").read_text())
    assert summary == result.summary
    assert not {
        "accuracy_before", "accuracy_after", "accuracy_after_quantized", "eval_problems", "steps", "train_seconds",
        "samples_per_second", "rollout_tokens_per_second", "phase_seconds", "precision_flow", "quantization",
        "correction", "uaq_scale", "acr_active_tokens", "mlflow_run_id", "interrupted", "accuracy_p_value",
    } - set(summary)  # fmt: skip
    assert set(summary["phase_seconds"]) == {"rollout", "reward", "logprob", "update", "sync"}
    assert (summary["steps"], summary["eval_problems"], summary["quantization"]) == (3, 40, "int8")
    steps = events(run_dir, "step")
    assert [line["step"] for line in steps] == [1, 2, 3]
    for line in steps:
        changed = {key: share for key, share in line["values"].items() if key.startswith("sync/codes_changed")}
        assert len(changed) == 8  # all, and q, k, v, o, gate, up, down
        assert all(0 < share < 1 for share in changed.values())
        assert 0 < line["values"]["sync/bytes_ratio"] < 0.25
        assert (line["values"]["sync/delta"], line["values"]["sync/refits"]) == (1, 0)
        assert line["values"]["sync/probe_gap_max"] == 0
    assert all(0.9 < line["values"]["mismatch/ess"] <= 1 for line in steps)
    assert [line["message"] for line in events(run_dir, "evaluation")] == [
        "before",
        "during",
        "after, quantized",
        "after",
    ]
    assert sorted(p.name for p in (run_dir / "checkpoints").iterdir()) == ["step-000002", "step-000003"]
    policy = AutoModelForCausalLM.from_pretrained(run_dir / "policy")
    tokenizer = AutoTokenizer.from_pretrained(run_dir / "policy")
    assert policy.generate(**tokenizer("3+4=", return_tensors="pt"), max_new_tokens=3).shape[1] > 4

    from mlflow import MlflowClient

    client = MlflowClient(f"sqlite:///{tmp_path}/mlflow.db")
    history = client.get_metric_history(summary["mlflow_run_id"], "reward/mean")
    assert [point.step for point in history] == [1, 2, 3]


def test_full_precision_rollouts_match_the_learner_exactly_and_learn_the_same_way_twice(tmp_path, cluster):
    plain = ["rollout.quantization=none", "algorithm.correction.type=ignore", "algorithm.updates_per_rollout=2"]
    first = small_run(tmp_path / "a", *plain)
    for line in events(first.run_dir, "step"):
        assert line["values"]["mismatch/abs_logprob_gap"] == 0
        assert line["values"]["mismatch/max_rho"] == 1
    again = small_run(tmp_path / "b", *plain, "rollout.workers=2", "rollout.slots=5", "task.verifiers=2")
    assert torch.equal(parameters(first.policy), parameters(again.policy))


def test_acr_is_active_where_the_format_is_coarse(tmp_path, cluster):
    result = small_run(
        tmp_path, "rollout.quantization=int4", "algorithm.correction.is_cap=1.01", "algorithm.clip_high=0.02"
    )
    assert result.summary["acr_active_tokens"] > 0


def test_two_learner_ranks_and_two_rollout_workers_train_together(tmp_path, cluster):
    small_run(tmp_path, "steps=2")
    together = small_run(tmp_path, "steps=2", "learner.workers=2", "rollout.workers=2")
    alone = parameters(tmp_path / "run.1" / "policy")  # an older run of the name is moved aside, not overwritten
    moved = (alone - parameters(Path(together.summary["initial_policy"]))).norm()
    assert (alone - parameters(together.policy)).norm() <= 0.02 * moved


def test_uaq_is_folded_while_training_and_unfolded_in_what_is_saved(tmp_path, cluster):
    result = small_run(tmp_path, "steps=1", "quantization.uaq_scale=2", "learner.lr=1e-12")
    start = parameters(Path(result.summary["initial_policy"]))
    torch.testing.assert_close(parameters(result.policy), start, rtol=0, atol=1e-9)


def test_failing_rewards_are_counted_and_their_groups_left_out(tmp_path, cluster):
    result = small_run(tmp_path, "task.reward=tests.loop.rewards:sometimes_nan", "algorithm.dynamic_sampling=false")
    steps = events(result.run_dir, "step")
    assert any(line["values"]["reward/failed"] for line in steps)
    assert all(line["values"]["rollout/trained_samples"] < 32 for line in steps if line["values"]["reward/failed"])
    assert any("rewards ended in invalid" in line["message"] for line in events(result.run_dir, "warning"))


def test_a_step_without_any_signal_is_skipped_and_said(tmp_path, cluster):
    result = small_run(tmp_path, "task.reward=tests.loop.rewards:constant", "algorithm.max_refill_rounds=2")
    assert torch.equal(parameters(result.policy), parameters(Path(result.summary["initial_policy"])))
    assert sum("the step is skipped" in line["message"] for line in events(result.run_dir, "warning")) == 3


@pytest.mark.parametrize("reward", ["raises", "hangs", "nan"])
def test_a_reward_that_cannot_judge_the_right_answer_ends_the_run_before_it_starts(tmp_path, reward):
    started = time.monotonic()
    with pytest.raises(RewardError, match=rf"reward tests.loop.rewards:{reward} ended in"):
        small_run(tmp_path, f"task.reward=tests.loop.rewards:{reward}", "task.reward_timeout_s=1")
    assert time.monotonic() - started < 20


def test_a_fleet_that_cannot_be_placed_says_what_is_missing(tmp_path, cluster):
    with pytest.raises(DeadlineExceeded, match=r"9 rollout worker\(s\) of .*the cluster has 4 CPU"):
        small_run(tmp_path, "rollout.workers=9", "rollout.start_timeout_s=3")


def test_rollouts_that_take_too_long_end_the_run_and_say_how_far_they_came(tmp_path, cluster):
    with pytest.raises(
        DeadlineExceeded, match=r"waited 0.01 s for rollouts of 40 requests .*: \d+ are unfinished, after up"
    ):
        small_run(tmp_path, "rollout.timeout_s=0.01")


def test_ranks_that_cannot_be_placed_end_the_run_and_not_in_a_hang(tmp_path, cluster):
    with pytest.raises(DeadlineExceeded, match=r"9 learner rank\(s\).*were not placed within 4 s"):
        small_run(tmp_path, "learner.workers=9", "learner.timeout_s=4")


def forget_after(run_dir: Path, step: int) -> None:
    """Leave a run as if it had been killed soon after the checkpoint of `step`."""
    (run_dir / "summary.json").unlink()
    for folder in (run_dir / "checkpoints").iterdir():
        if int(folder.name.removeprefix("step-")) > step:
            shutil.rmtree(folder)


@pytest.mark.parametrize(
    "backend",
    [
        ["quantization.uaq_scale=1.5", "learner.lr_final_share=0.1"],
        ["learner.backend=deepspeed", "learner.zero_stage=3", "learner.workers=2"],
        pytest.param(
            ["algorithm.type=ppo", "rollout.samples_per_prompt=1", "learner.packing=true"], marks=pytest.mark.slow
        ),
    ],
    ids=["torch", "deepspeed", "ppo"],
)
def test_a_run_that_was_interrupted_and_resumed_ends_where_the_undisturbed_one_does(tmp_path, cluster, backend):
    setting = [*SMALL, "steps=4", f"output_dir={tmp_path}", "checkpoint.every=1", "checkpoint.keep=9", *backend]
    whole = run(load_config(None, setting))
    expected, summary = parameters(whole.policy), whole.summary
    steps = [line["values"] for line in events(whole.run_dir, "step")]
    forget_after(whole.run_dir, 2)
    resumed = run(load_config(None, setting))
    assert resumed.run_dir == whole.run_dir
    found = parameters(resumed.policy)
    if "learner.backend=deepspeed" in backend:
        moved = (expected - parameters(Path(summary["initial_policy"]))).norm()
        assert (found - expected).norm() <= 1e-6 * moved
    else:
        assert torch.equal(found, expected)
    again = [line["values"] for line in events(resumed.run_dir, "step")]
    kept = [key for key in steps[0] if not key.startswith("time/") and "per_second" not in key]
    for before, after in zip(steps, again, strict=True):
        for key in kept:
            assert after[key] == pytest.approx(before[key], rel=1e-5, nan_ok=True), key
    for key in ("accuracy_before", "accuracy_after", "accuracy_after_quantized", "steps"):
        assert resumed.summary[key] == summary[key]
    assert any("going on after step 2 of 4" in line["message"] for line in events(resumed.run_dir, "info"))
    assert [line["message"] for line in events(resumed.run_dir, "evaluation")].count("before") == 1


def test_a_driver_that_is_killed_is_gone_on_with_by_the_same_command(tmp_path, cluster):
    settings = [*SMALL, "steps=12", "checkpoint.every=3"]
    undisturbed = run(load_config(None, [*settings, f"output_dir={tmp_path / 'a'}"]))
    command = [sys.executable, "jobs/qurl_dapo.py", *settings, f"output_dir={tmp_path / 'b'}"]
    run_dir = tmp_path / "b" / "run"
    job = subprocess.Popen(command, cwd=ROOT, env=ALONE, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    _wait_for_steps(run_dir, 7, job)
    job.kill()
    job.wait()
    assert not (run_dir / "summary.json").exists()
    again = run(load_config(None, [*settings, f"output_dir={tmp_path / 'b'}"]))
    assert any("going on after step 6 of 12" in line["message"] for line in events(run_dir, "info"))
    assert torch.equal(parameters(again.policy), parameters(undisturbed.policy))
    assert [line["step"] for line in events(run_dir, "step")] == list(range(1, 13))
    (run_dir / "summary.json").unlink()
    with pytest.raises(ConfigError, match=r"unfinished run with other settings: learner\.lr"):
        run(load_config(None, [*settings, f"output_dir={tmp_path / 'b'}", "learner.lr=1e-4"]))


def test_a_killed_rollout_worker_ends_the_run_with_its_name_and_not_with_a_hang(tmp_path):
    code = (
        "import sys; from qurl_ray.config import load_config; from qurl_ray.loop.run import run;"
        "run(load_config(None, sys.argv[1:]))"
    )
    arguments = [*SMALL, "steps=500", f"output_dir={tmp_path}", "tracking.console=plain"]
    job = subprocess.Popen(
        [sys.executable, "-c", code, *arguments],
        cwd=ROOT,
        env=ALONE,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    _wait_for_steps(tmp_path / "run", 2, job)
    os.kill(_descendant(job.pid, "ray::RolloutWorker"), signal.SIGKILL)
    output, _ = job.communicate(timeout=120)
    assert job.returncode != 0
    assert EngineError.__name__ in output
    assert "a rollout worker died during" in output


def test_ctrl_c_stops_at_the_step_evaluates_and_saves(tmp_path):
    job = subprocess.Popen(
        [sys.executable, "jobs/qurl_dapo.py", *SMALL, "steps=500", f"output_dir={tmp_path}"],
        cwd=ROOT,
        env=ALONE,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    _wait_for_steps(tmp_path / "run", 2, job)
    job.send_signal(signal.SIGINT)
    output, _ = job.communicate(timeout=120)
    assert job.returncode == 130, output
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert 2 <= summary["steps"] < 500
    assert summary["accuracy_after"] is not None
    assert AutoModelForCausalLM.from_pretrained(tmp_path / "run" / "policy")


def _wait_for_steps(run_dir: Path, count: int, job: subprocess.Popen) -> None:
    deadline = time.monotonic() + 120
    while not (run_dir / "metrics.jsonl").is_file() or len(events(run_dir, "step")) < count:
        assert job.poll() is None, job.communicate()[0]
        assert time.monotonic() < deadline
        time.sleep(0.2)


def _descendant(pid: int, name: str) -> int:
    """Process below `pid` whose command line begins with `name`."""
    parents, names = {}, {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            parents[int(stat.parent.name)] = int(stat.read_text().rpartition(")")[2].split()[1])
            names[int(stat.parent.name)] = (stat.parent / "cmdline").read_bytes().decode()
        except (OSError, IndexError):
            continue  # ended meanwhile
    for candidate, command in names.items():
        ancestor = candidate
        while ancestor in parents and ancestor != pid:
            ancestor = parents[ancestor]
        if ancestor == pid and command.startswith(name):
            return candidate
    raise AssertionError(f"no {name} below {pid}")


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


@pytest.mark.parametrize(
    "settings",
    [["rollout.quantization=fp8_block"], pytest.param(["precision_flow=unified_int8"], marks=pytest.mark.slow)],
)
def test_a_unified_flow_trains_what_generates(tmp_path, cluster, settings):
    result = small_run(tmp_path, "precision_flow=unified", *settings, "algorithm.correction=ignore", "steps=2")
    steps = events(result.run_dir, "step")
    assert len(steps) == 2
    for line in steps:
        assert (line["values"]["mismatch/max_rho"], line["values"]["mismatch/kl"]) == (1, 0)
        assert line["values"]["sync/probe_gap_max"] == 0
        assert line["values"]["sync/codes_changed"] > 0
    assert result.summary["precision_flow"].startswith("unified")
    assert not events(result.run_dir, "warning")


@pytest.mark.slow
def test_a_unified_flow_with_vllm_is_off_by_its_kernels_noise(tmp_path, cluster):
    pytest.importorskip("vllm")
    settings = ["rollout.quantization=fp8_block", "rollout.engine=vllm", "rollout.slots=32", "steps=1"]
    for flow, least, most in (("unified", 0.0, 1e-5), ("rollout_only", 1e-5, 0.1)):
        result = small_run(tmp_path / flow, f"precision_flow={flow}", "algorithm.correction=monitor", *settings)
        (line,) = events(result.run_dir, "step")
        assert least <= line["values"]["mismatch/kl"] < most, flow
