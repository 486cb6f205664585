"""Whole runs that train adapters: no mismatch, syncs of adapters alone, exact resume, and files that others read."""

import json
import shutil
from pathlib import Path

import numpy as np
import peft
import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from qurl_ray.config import load_config
from qurl_ray.config.serving import ServingConfig
from qurl_ray.errors import ConfigError
from qurl_ray.evaluation.evaluate import evaluate
from qurl_ray.serving.load import load_policy
from qurl_ray.serving.policies import files_of, pin
from qurl_ray.training.driver.run import run
from qurl_ray.types import Request, SamplingParams
from tests.training.driver.test_run import assert_resumed_ends_like
from tests.training.runs import WHOLE, events, parameters

pytestmark = pytest.mark.ray

LORA = [*WHOLE, "learner.lora.rank=4", "learner.lr=1e-2", "algorithm.correction=ignore"]


@pytest.fixture(scope="module")
def adapted(tmp_path_factory, cluster):
    return run(load_config(None, [*LORA, f"output_dir={tmp_path_factory.mktemp('adapted')}"]))


def adapter_of(folder: Path) -> dict[str, torch.Tensor]:
    return load_file(folder / "adapter" / "adapter_model.safetensors")


@pytest.mark.equal_bits
def test_engine_and_learner_never_differ_and_syncs_carry_adapters_alone(adapted):
    steps = [line["values"] for line in events(adapted.run_dir, "step")]
    assert len(steps) == 4
    assert all(values["mismatch/kl"] == values["mismatch/abs_logprob_gap"] == 0 for values in steps)
    assert all(values["sync/probe_gap_max"] == 0 for values in steps)
    assert adapted.summary["adapter"].endswith("of the parameters")
    adapter = sum(value.nbytes for value in adapter_of(adapted.run_dir).values())
    assert all(0 < values["sync/bytes"] <= adapter for values in steps)
    assert all(values["sync/bytes_ratio"] < 0.1 for values in steps)
    moved = [value for name, value in adapter_of(adapted.run_dir).items() if ".lora_B." in name]
    assert all(value.abs().max() > 0 for value in moved)


def test_its_folders_hold_one_policy(adapted):
    """adapter/ in stock peft on the base model is policy/, and qurl evaluate of it is the run's own evaluation."""
    run_dir = adapted.run_dir
    config = load_config(run_dir / "config.yaml", [])
    report = evaluate(config, run_dir / "adapter")
    assert report.quantization == "int8"
    assert report.reward.value == adapted.summary["reward_after_quantized"]
    merged = AutoModelForCausalLM.from_pretrained(run_dir / "policy", dtype=torch.float32)
    base = peft.PeftConfig.from_pretrained(run_dir / "adapter").base_model_name_or_path
    model = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    loaded = peft.PeftModel.from_pretrained(model, run_dir / "adapter").merge_and_unload()
    own = dict(loaded.named_parameters())
    for name, value in merged.named_parameters():
        torch.testing.assert_close(value, own[name], rtol=1e-5, atol=1e-6)
    assert (run_dir / "policy-int8" / "config.json").is_file()
    for folder in (run_dir / "checkpoints").iterdir():
        assert (folder / "adapter" / "adapter_config.json").is_file()
        assert not (folder / "policy").exists()


def test_an_adapter_is_served_over_its_own_codes_and_no_others(tmp_path, adapted):
    config = ServingConfig(policy=str(adapted.run_dir), slots=2)
    pinned = pin(config)
    assert pinned.folder == str(adapted.run_dir / "adapter")
    with files_of(pinned, config) as folder:
        loaded = load_policy(folder, config)
    try:
        assert loaded.engine.kernels()  # codes, not full precision
        (answer,) = loaded.engine.generate(
            [
                Request(
                    uid="a",
                    prompt_ids=np.array([3, 4], dtype=np.int32),
                    seed=1,
                    sampling=SamplingParams(max_new_tokens=8),
                )
            ],
            version=1,
        )
        assert len(answer.token_ids) > 0
    finally:
        loaded.engine.close()
    other = tmp_path / "adapter"
    shutil.copytree(adapted.run_dir / "adapter", other)
    settings = json.loads((other / "adapter_config.json").read_text())
    settings["base_model_name_or_path"] = str(adapted.run_dir / "policy")  # another model of the same shape
    (other / "adapter_config.json").write_text(json.dumps(settings))
    with pytest.raises(ConfigError, match="trained over other codes"):
        load_policy(other, config)


@pytest.mark.slow
def test_a_run_that_was_interrupted_ends_with_the_same_adapter(tmp_path, adapted):
    assert_resumed_ends_like(adapted, tmp_path, LORA)
    assert adapter_of(tmp_path / "copy" / adapted.run_dir.name).keys() == adapter_of(adapted.run_dir).keys()


@pytest.mark.slow
@pytest.mark.parametrize(
    "settings",
    [
        ["learner.backend=deepspeed", "learner.zero_stage=3", "learner.workers=2"],
        ["learner.backend=fsdp", "learner.workers=2", "algorithm.kl_coef=0.01"],
        ["algorithm.type=ppo", "rollout.samples_per_prompt=1", "learner.packing=true", "learner.lora.base=full"],
        ["rollout.quantization=none", "learner.lora.base=full", "learner.sequence_parallel=2", "learner.workers=2"],
    ],
    ids=["deepspeed", "fsdp", "ppo", "sequence"],
)
def test_other_learners_train_adapters_and_are_resumed_to_the_bit(tmp_path, cluster, settings):
    whole = run(load_config(None, [*LORA, *settings, f"output_dir={tmp_path}"]))
    steps = [line["values"] for line in events(whole.run_dir, "step")]
    assert all(values["sync/bytes_ratio"] < 0.1 for values in steps)
    assert_resumed_ends_like(whole, tmp_path, [*LORA, *settings])
    assert parameters(whole.policy).isfinite().all()


@pytest.mark.slow
def test_noise_is_the_policys_own_and_no_part_of_what_is_saved(tmp_path, cluster):
    settings = ["learner.lora.noise={start: 0.05, end: 0.02, stages: 2}"]
    whole = run(load_config(None, [*LORA, *settings, f"output_dir={tmp_path}"]))
    steps = [line["values"] for line in events(whole.run_dir, "step")]
    assert [values["adapter/noise"] for values in steps] == [0.0, 0.0, 0.05, 0.05]
    assert all(values["mismatch/kl"] == values["sync/probe_gap_max"] == 0 for values in steps)
    report = evaluate(load_config(whole.run_dir / "config.yaml", []), whole.run_dir / "adapter")
    assert report.reward.value == whole.summary["reward_after_quantized"]
    assert_resumed_ends_like(whole, tmp_path, [*LORA, *settings])


@pytest.mark.slow
def test_in_bfloat16_engine_and_learner_are_close(tmp_path, cluster):
    """The other figures of a resumed run are those of an undisturbed one; its probes are of other tokens."""
    settings = ["rollout.quantization=fp8_block", "learner.compute=bfloat16", "rollout.dtype=bfloat16"]
    whole = run(load_config(None, [*LORA, *settings, f"output_dir={tmp_path}"]))
    steps = [line["values"] for line in events(whole.run_dir, "step")]
    assert all(values["sync/probe_gap"] < 0.01 and values["mismatch/kl"] < 0.01 for values in steps)
    assert all(values["sync/bytes_ratio"] < 0.05 for values in steps)
