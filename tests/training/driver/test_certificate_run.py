"""Whole runs with certificates: they change nothing else, are resumed exactly, and notice a format that costs."""

import pytest
import torch

from qurl_ray.config import load_config
from qurl_ray.training.driver.run import run
from tests.training.runs import FOLDED, events, parameters, prompts

pytestmark = pytest.mark.ray


@pytest.mark.slow
def test_a_run_with_certificates_trains_as_one_without(tmp_path, cluster, whole):
    without = run(load_config(None, [*FOLDED, f"output_dir={tmp_path}"]))
    assert torch.equal(parameters(whole.policy), parameters(without.policy))
    assert prompts(whole.run_dir) == prompts(without.run_dir)


def test_a_certificate_is_in_metrics_report_and_tracking(whole):
    every = [line["values"] for line in events(whole.run_dir, "step")]
    assert [values.get("certificate/pairs") for values in every] == [None, 32, None, 64]
    steps = every[1::2]
    for values in steps:
        assert values["certificate/cost_least"] < values["certificate/cost"] < values["certificate/cost_most"]
        assert 0.9 < values["certificate/equal_tokens"] <= 1
        assert 0.9 < values["certificate/gradient_cosine"] < 1
        assert values["time/certificate"] > 0
    told = [line["message"] for line in events(whole.run_dir, "info")]
    assert sum(message.startswith("certificate: at 95 %, quantization costs at most") for message in told) == 2
    assert "Cost of quantization" in (whole.run_dir / "report.html").read_text()

    from mlflow import MlflowClient

    client = MlflowClient(f"sqlite:///{whole.run_dir.parent}/mlflow.db")
    history = client.get_metric_history(whole.summary["mlflow_run_id"], "certificate/cost_most")
    assert [point.value for point in history] == [values["certificate/cost_most"] for values in steps]


TERNARY = [
    *("task.operators=+", "task.min_operand=10", "model.cold_start_accuracy=0.3", "rollout.max_new_tokens=4"),
    *("rollout.prompts_per_step=8", "rollout.samples_per_prompt=4", "rollout.start_timeout_s=900"),
    *("rollout.quantization=int4", "quantization.weight_max_code=1", "algorithm.correction=tis", "learner.lr=1e-6"),
    *("evaluation.problems=40", "tracking.mlflow=false", "tracking.console=none", "algorithm.max_refill_rounds=2"),
    *("guard.patience=1", "guard.window=1", "guard.precision_steps=2", "guard.kl_max=null", "guard.ess_min=null"),
]
"""A policy that can add a little, and weights with three values, with which it cannot."""


@pytest.mark.slow
def test_weights_with_three_values_are_found_out_and_the_guard_rolls_out_without_them(tmp_path, cluster):
    settings = ["evaluation.certificate.every=1", "guard.cost_max=0.02", "guard.reward_min=null", "steps=12"]
    settings += ["rollout.engine=tests.training.engines:drafting"]  # which drafts where weights are in full precision
    result = run(load_config(None, [*TERNARY, *settings, f"output_dir={tmp_path}"]))
    steps = [line["values"] for line in events(result.run_dir, "step")]
    warnings = [
        line["message"] for line in events(result.run_dir, "warning") if "certificate/cost_least" in line["message"]
    ]
    assert len(warnings) >= 3
    assert "rollouts in full precision for 2 steps" in warnings[2]
    first = next(place for place, values in enumerate(steps) if values["guard/level"] == 3)
    assert steps[first - 1]["certificate/cost_least"] > 0.02
    assert steps[first - 1]["certificate/equal_tokens"] < 0.5
    drafted = ["rollout/tokens_per_pass" in values for values in steps]
    assert drafted == [False, *(values["guard/level"] == 3 for values in steps[:-1])]
    pairs = [values.get("certificate/pairs") for values in steps]
    assert pairs[:first] == [128 * (place + 1) for place in range(first)]
    assert pairs[first : first + 3] == [None, None, 128]  # in full precision there is nothing to certify
