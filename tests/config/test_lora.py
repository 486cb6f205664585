"""Settings of adapters that contradict others are refused, and the sentence says what to do."""

import pytest

from qurl_ray.config import load_config
from qurl_ray.errors import ConfigError

LORA = ["learner.lora.rank=4"]


@pytest.mark.parametrize(
    ("settings", "fact"),
    [
        (["precision_flow=unified"], "leave precision_flow=unified out"),
        (["quantization.uaq_scale=1.5"], "with learner.lora no code moves"),
        (["learner.backend=deepspeed", "learner.zero_stage=3", "algorithm.kl_coef=0.1"], "the adapters of the start"),
        (["learner.backend=deepspeed", "learner.zero_stage=3", "learner.lora.noise={}"], "changes the gains of norms"),
        (["rollout.quantization=none"], "learner.lora.base=codes needs codes"),
        (["evaluation.full_precision=true"], "has no policy in full precision"),
        (["algorithm.calibrate_every=2", "algorithm.updates_per_rollout=2"], "which learner.lora.base=codes has not"),
        (["learner.lora.dropout=0.1"], "learner.lora.dropout"),
        (["learner.lora.noise={start: 0}"], "learner.lora.noise.start"),
        (["learner.lora.noise={stages: 1}"], "learner.lora.noise.stages"),
    ],
)
def test_contradictions(settings, fact):
    with pytest.raises(ConfigError, match=fact):
        load_config(None, LORA + settings)


@pytest.mark.parametrize(
    "settings",
    [
        ["learner.lora.base=full", "rollout.quantization=none"],
        ["learner.lora.base=full", "evaluation.full_precision=true"],
        ["learner.backend=deepspeed", "learner.zero_stage=2", "learner.lora.noise={}", "algorithm.kl_coef=0.1"],
        ["learner.backend=fsdp", "learner.lora.noise={}"],
    ],
)
def test_neighbours_that_fit(settings):
    assert load_config(None, LORA + settings).learner.lora


def test_noise_is_qerls_where_nothing_is_given():
    noise = load_config(None, [*LORA, "learner.lora.noise={}"]).learner.lora.noise
    assert (noise.start, noise.end, noise.stages) == (1e-2, 1e-4, 10)
