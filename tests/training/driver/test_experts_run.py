"""Whole runs of a mixture of experts: replayed routes, exact resume, and files that stock transformers loads."""

import pytest
import torch
from transformers import AutoModelForCausalLM

from qurl_ray.config import load_config
from qurl_ray.evaluation.evaluate import evaluate
from qurl_ray.training.driver.run import run
from tests.policy.gpt_oss import in_mxfp4, written
from tests.training.driver.test_run import assert_resumed_ends_like
from tests.training.runs import WHOLE, events, parameters

pytestmark = pytest.mark.ray

MIXTURE = [*WHOLE, "model.experts=4", "model.intermediate_size=128"]


@pytest.mark.equal_bits
def test_routes_arrive_at_the_learner_and_stock_transformers_loads_the_policy(tmp_path, cluster):
    whole = run(load_config(None, [*MIXTURE, "steps=2", "rollout.router_replay=rollout", f"output_dir={tmp_path}"]))
    steps = [line["values"] for line in events(whole.run_dir, "step")]
    assert all(0 <= values["mismatch/routes_differing"] < 0.5 for values in steps)
    assert any(values["mismatch/routes_differing"] > 0 for values in steps)
    assert all(values["sync/probe_gap_max"] == 0 for values in steps if "sync/probe_gap_max" in values)
    stock = AutoModelForCausalLM.from_pretrained(whole.policy, dtype=torch.float32)
    assert stock.model.layers[0].mlp.experts.gate_up_proj.shape[0] == 4
    report = evaluate(load_config(whole.run_dir / "config.yaml", []), whole.run_dir / "policy-int8")
    assert report.quantization == "int8"


@pytest.mark.slow
def test_a_run_with_replayed_routes_is_resumed_to_the_bit(tmp_path, cluster):
    settings = [*MIXTURE, "rollout.router_replay=rollout"]
    assert_resumed_ends_like(run(load_config(None, [*settings, f"output_dir={tmp_path}"])), tmp_path, settings)


@pytest.mark.slow
@pytest.mark.parametrize(
    "settings",
    [
        ["learner.backend=fsdp", "learner.workers=2", "rollout.router_replay=always", "algorithm.kl_coef=0.01"],
        [
            "learner.backend=fsdp",
            "learner.workers=2",
            "learner.expert_parallel=true",
            "precision_flow=unified",
            "algorithm.correction=ignore",
            "algorithm.router_balance_coef=0.01",
            "quantization.equalize=true",
            "learner.gradient_checkpointing=true",
        ],
        ["learner.backend=deepspeed", "learner.zero_stage=3", "learner.workers=2"],
        ["precision_flow=unified", "algorithm.correction=ignore", "learner.sequence_parallel=2", "learner.workers=2"],
        ["learner.lora.rank=4", "algorithm.correction=ignore", "quantization.uaq_scale=1"],
        ["rollout.engine=vllm", "rollout.router_replay=rollout"],
    ],
    ids=["fsdp", "experts", "deepspeed", "sequence", "lora", "vllm"],
)
def test_other_learners_train_experts(tmp_path, cluster, settings):
    whole = run(load_config(None, [*MIXTURE, *settings, f"output_dir={tmp_path}"]))
    steps = [line["values"] for line in events(whole.run_dir, "step")]
    assert len(steps) == 4
    if "algorithm.correction=ignore" in settings:
        assert all(values["mismatch/kl"] == 0 for values in steps)
    if "rollout.router_replay=rollout" in settings:
        assert all(0 <= values["mismatch/routes_differing"] < 0.5 for values in steps)
    assert parameters(whole.policy).isfinite().all()
    if "rollout.engine=vllm" not in settings:  # vLLM's last bits depend on the batch
        assert_resumed_ends_like(whole, tmp_path, [*MIXTURE, *settings])


@pytest.mark.slow
@pytest.mark.parametrize(
    "settings",
    [
        ["rollout.router_replay=rollout", "quantization.equalize=true", "quantization.uaq_scale=1.5"],
        ["precision_flow=unified", "algorithm.correction=ignore", "learner.backend=fsdp", "learner.workers=2"],
    ],
    ids=["replay", "unified"],
)
def test_gpt_oss_trains_from_mxfp4_and_is_resumed_to_the_bit(tmp_path, cluster, tiny_spec, settings):
    sizes = {"hidden_size": 128, "num_hidden_layers": 2, "intermediate_size": 128, "num_local_experts": 4}
    packed, _ = in_mxfp4(written(tmp_path / "gpt-oss", tiny_spec, scale=0.1, **sizes), tmp_path)
    settings = [*settings, "model.type=pretrained", f"model.path={packed.source}", "export.quantized=none"]
    settings += [setting for setting in WHOLE if not setting.startswith("model.")]
    whole = run(load_config(None, [*settings, f"output_dir={tmp_path}"]))
    steps = [line["values"] for line in events(whole.run_dir, "step")]
    assert len(steps) == 4
    assert all(values["sync/probe_gap_max"] == 0 for values in steps if "sync/probe_gap_max" in values)
    if "precision_flow=unified" in settings:
        assert all(values["mismatch/kl"] == 0 for values in steps)
    else:
        assert all(0 <= values["mismatch/routes_differing"] < 0.5 for values in steps)
    stock = AutoModelForCausalLM.from_pretrained(whole.policy, dtype=torch.float32)
    assert stock.model.layers[0].mlp.experts.gate_up_proj.shape == (4, 128, 256)
    assert parameters(whole.policy).isfinite().all()
    assert_resumed_ends_like(whole, tmp_path, settings)
