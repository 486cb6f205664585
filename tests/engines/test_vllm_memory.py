"""Versions are written where the first one was, as CUDA graphs require: addresses, replayed steps, compiled models."""

import shutil

import pytest

from qurl_ray.errors import QuantizationError
from tests.conftest import requests_for
from tests.engines.test_torch_engine import weights_of
from tests.engines.test_vllm_engine import alone, assert_close, gaps, policy, same, spec, tokenizer  # noqa: F401
from tests.engines.vllm_process import EngineProcess

pytest.importorskip("vllm", reason="needs the extra cpu or gpu")

KEEP = (r"lm_head\.", r"embed_tokens\.")


@pytest.fixture(scope="module")
def requests(tokenizer):  # noqa: F811
    return requests_for(tokenizer, 3, 1, max_new_tokens=12, ignore_eos=True)


@pytest.fixture(scope="module")
def fresh(spec, requests):  # noqa: F811
    """Answers of an engine that records nothing, by seed of the policy."""
    with EngineProcess(spec, slots=2, threads=1, kernel="emulation") as engine:
        found = {}
        for seed in range(4):
            engine.call("load", *weights_of(policy(spec, seed), "int8", seed))
            found[seed] = alone(engine, requests, seed)
    return found


@pytest.mark.slow
def test_a_step_that_was_recorded_once_follows_every_load(spec, requests, fresh):  # noqa: F811
    with EngineProcess(spec, slots=2, threads=1, kernel="emulation", capture=True) as engine:
        engine.call("load", *weights_of(policy(spec, 0), "int8", 0))
        engine.call("record")
        for seed in range(4):
            engine.call("load", *weights_of(policy(spec, seed), "int8", seed))
            assert same(alone(engine, requests, seed), fresh[seed])
        assert engine.call("replayed") == 4 * 3 * 11 - 1


@pytest.mark.slow
def test_nothing_moves_in_twenty_loads(spec):  # noqa: F811
    with EngineProcess(spec, slots=2, threads=1, kernel="emulation", capture=True) as engine:
        places = {}
        for version in range(20):
            engine.call("load", *weights_of(policy(spec, version % 3), "int8", version))
            found = engine.call("addresses")
            assert found == (places := places or found)
    assert sum(".0._codes" in name for name in places) == 8  # four linears in each of two layers
    assert sum(".0.scale" in name for name in places) == 8


@pytest.mark.slow
@pytest.mark.skipif(not shutil.which("g++"), reason="needs g++, with which torch compiles for a CPU")
@pytest.mark.parametrize("format_name", ["int8", "fp8"])
def test_a_compiled_model_follows_every_load_and_restarts_for_another_format(spec, requests, format_name):  # noqa: F811
    made = {"format_name": format_name, "keep": KEEP, "graphs": True, "kernel": "emulation", "timeout_s": 180}
    with EngineProcess(spec, slots=2, threads=1, capture=True, **made) as engine:
        for version in range(3):
            model = policy(spec, version)
            engine.call("load", *weights_of(model, format_name, version))
            found = gaps(model, requests, alone(engine, requests, version), format_name)
            assert found.mean() < 0.02  # other weights are off by 1 and more
        assert engine.call("compilations") > 0
        ticket = engine.start("load", *weights_of(policy(spec), "none", 3))
        engine.result(ticket, 180)
        assert engine.call("kernels") == []
        assert_close(policy(spec), requests, alone(engine, requests, 3), "none")


@pytest.mark.slow
@pytest.mark.skipif(not shutil.which("g++"), reason="needs g++, with which torch compiles for a CPU")
def test_a_layer_of_another_format_is_refused_by_name(spec):  # noqa: F811
    made = {"format_name": "int8", "keep": (*KEEP, "o_proj"), "graphs": True, "kernel": "emulation", "timeout_s": 180}
    with EngineProcess(spec, slots=2, threads=1, **made) as engine:
        with pytest.raises(QuantizationError, match=r"layers\.0\.self_attn\.o_proj was made for none, and int8 came"):
            engine.call("load", *weights_of(policy(spec), "int8", 0))
        assert engine.call("version") is None
