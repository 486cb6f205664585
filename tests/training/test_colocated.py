"""Colocated runs: engines and learner take turns where they are, and what is learned does not know of it."""

import pytest
import torch

from benchmarks.gpu.runs import ON_A_CPU
from qurl_ray.config import load_config
from qurl_ray.training.driver.run import run
from tests.training.runs import SMALL, events, parameters, prompts, start_job, strike, wait_for_steps

pytestmark = pytest.mark.ray


def small_run(folder, *overrides):
    settings = [*SMALL, "steps=2", "evaluation.problems=8", "checkpoint.every=1", f"output_dir={folder}"]
    return run(load_config(None, [*settings, *overrides])).run_dir


@pytest.mark.slow
def test_the_quickstart_of_gpus_makes_its_steps_on_a_cpu_with_evaluations_in_one_format(tmp_path, cluster):
    own = ["steps=2", "tracking.mlflow=false", "tracking.console=none", "task.reward=tests.training.rewards:length"]
    own += ["rollout.quantization=int8", "evaluation.full_precision=false", "evaluation.every=0"]
    config = load_config("quickstart_gpu", [*ON_A_CPU, *own, "evaluation.target_reward=null", f"output_dir={tmp_path}"])
    done = run(config)
    assert [line["message"] for line in events(done.run_dir, "evaluation")] == ["before", "after, quantized"]
    assert done.summary["steps"] == 2
    assert done.summary["reward_after"] is None
    assert done.summary["reward_p_value"] is not None
    assert done.summary["reward_after_quantized"] is not None


@pytest.mark.slow
def test_a_colocated_run_ends_where_a_disaggregated_one_does_to_the_bit(tmp_path, cluster):
    apart = small_run(tmp_path / "apart")
    together = small_run(tmp_path / "together", "placement=colocated")
    assert torch.equal(parameters(together / "policy"), parameters(apart / "policy"))
    assert prompts(together) == prompts(apart)
    assert not events(together, "warning")
    assert all(line["values"]["time/turns"] > 0 for line in events(together, "step"))
    assert not any("time/turns" in line["values"] for line in events(apart, "step"))


@pytest.mark.slow
def test_two_ranks_share_with_two_engines(tmp_path, cluster):
    two = ["learner.workers=2", "rollout.workers=2"]
    apart = small_run(tmp_path / "apart", *two)
    together = small_run(tmp_path / "together", "placement=colocated", *two)
    assert torch.equal(parameters(together / "policy"), parameters(apart / "policy"))


@pytest.mark.slow
def test_processes_are_killed_one_after_the_other_and_the_run_ends_where_it_would_have(tmp_path):
    settings = [*SMALL, "steps=12", "checkpoint.every=2", "rollout.max_new_tokens=24", "placement=colocated"]
    job = start_job(*settings, f"output_dir={tmp_path / 'hurt'}")
    for number, name in enumerate(("ray::RolloutWorker", "ray::RayTrainWorker", "ray::Coordinator"), start=1):
        wait_for_steps(tmp_path / "hurt" / "run", 3 * number, job)
        strike(job, name)
    output, _ = job.communicate(timeout=280)
    assert job.returncode == 0, output[-3000:]
    whole = start_job(*settings, f"output_dir={tmp_path / 'whole'}")
    output, _ = whole.communicate(timeout=280)
    assert whole.returncode == 0, output[-3000:]
    hurt, undisturbed = (parameters(tmp_path / name / "run" / "policy") for name in ("hurt", "whole"))
    assert torch.equal(hurt, undisturbed)
