"""quickstart_gpu with a tiny policy on a CPU: the preset's whole run, in the format and with the settings of a GPU."""

from statistics import mean

import pytest

from qurl_ray.config import load_config
from qurl_ray.training.driver.run import run
from tests.training.runs import events

pytestmark = [pytest.mark.ray, pytest.mark.slow]

ON_A_CPU = [
    *("rollout.engine=torch", "rollout.device=cpu", "rollout.dtype=float32", "rollout.quantization=int8"),
    *("sync.transport=object_store", "rollout.vllm.kv_cache_gb=null", "rollout.slots=256"),
    *("learner.device=cpu", "learner.compute=float32", "learner.lr=3e-4", "learner.warmup_steps=4"),
    *("model.hidden_size=128", "model.layers=2", "model.heads=4", "model.intermediate_size=256", "model.max_length=64"),
    *("task.terms=2", "task.digits=2", "rollout.max_new_tokens=8"),
    *("steps=40", "evaluation.every=0", "evaluation.target_reward=null", "tracking.mlflow=false"),
]


def test_it_learns(tmp_path, cluster):
    whole = run(load_config("quickstart_gpu", [*ON_A_CPU, f"output_dir={tmp_path}"]))
    rewards = [line["values"]["reward/mean"] for line in events(whole.run_dir, "step")]
    assert len(rewards) == 40
    assert mean(rewards[-8:]) > 1.4 * mean(rewards[:8])
    assert whole.summary["accuracy_after_quantized"] > whole.summary["accuracy_before"]
    assert whole.summary["precision_flow"] == "rollout_only"
