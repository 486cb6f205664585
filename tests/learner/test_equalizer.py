"""Equalized codes in the loop: learner and engine keep equal bits, and all ranks and resumed runs the same factors."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from qurl_ray.config.learner import LearnerConfig
from qurl_ray.config.quantization import QuantizationConfig
from qurl_ray.engines.torch.engine import TorchEngine
from qurl_ray.errors import CheckpointError
from qurl_ray.learner.batching import plan, to_tensors
from qurl_ray.learner.equalizer import equalizer_for
from qurl_ray.learner.learner import make_learner
from qurl_ray.learner.protocol import EnginePrecision
from qurl_ray.policy.load import load_model
from qurl_ray.quant.equalize import equalized
from qurl_ray.types import Trajectory
from qurl_ray.weights.local import send_into
from qurl_ray.weights.stream import Publisher
from tests.conftest import requests_for
from tests.learner.test_flow import BACKWARDS, SETTINGS, flow_of
from tests.learner.test_torch_backend import groups
from tests.ranks import run_ranks

ON = QuantizationConfig(equalize=True, equalize_every=2)


def learner_of(model, *, format_name: str = "int8", unified: bool = False, quantization=ON, **config):
    flow = flow_of(model, format_name)
    equalizer = equalizer_for(model, quantization, flow.quantized, {format_name})
    made = make_learner(
        model,
        LearnerConfig(**({"lr": 1e-3} | config)),
        SETTINGS,
        temperature=1.0,
        total_updates=10,
        flow=replace(flow, equalized=True) if unified else None,
        equalizer=equalizer,
    )
    return made, flow


def sent(learner, flow, engine, publisher, version: int, unquantized: str = "float32"):
    """Send a version as the loop's sender does. Return the precision in which the learner scores it."""
    factors = learner.factors()
    send_into(
        publisher,
        engine,
        equalized(learner.named_parameters(), factors),
        flow.fmt,
        version=version,
        base_version=version - 1 if version > 1 else None,
        unquantized=unquantized,
    )
    return EnginePrecision(fmt=flow.fmt, quantized=flow.quantized, unquantized=unquantized, factors=factors)


def learn(learner, seed: int) -> None:
    learner.learn(plan(groups(), updates=2, ranks=1, token_budget=100, seed=seed)[0])


def scale_channels(model) -> None:
    """Give some channels activations 30 times as large, as trained models have."""
    with torch.no_grad():
        for layer in model.base_model.layers:
            for norm in (layer.input_layernorm, layer.post_attention_layernorm):
                norm.weight[::17] *= 30


@pytest.mark.sampled(3)
@pytest.mark.equal_bits
@pytest.mark.parametrize("unquantized", ["float32", "bfloat16"])
@pytest.mark.parametrize("format_name", BACKWARDS)
def test_the_learner_scores_what_engines_draw_to_the_bit(tiny_spec, tokenizer, model, format_name, unquantized):
    """Over three versions, two of them deltas, with factors that move in between."""
    scale_channels(model)
    learner, flow = learner_of(model, format_name=format_name, lr=1e-2)
    engine, publisher = TorchEngine(tiny_spec, slots=4), Publisher(flow.quantized)
    probe = requests_for(tokenizer, count=1, samples=2)
    for version in (1, 2, 3):
        precision = sent(learner, flow, engine, publisher, version, unquantized)
        drawn = engine.generate(probe, version=version)
        for own, completion in zip(learner.logprobs(drawn, probe[0].prompt_ids, precision), drawn, strict=True):
            assert np.array_equal(own, completion.logprobs)
        unfolded = EnginePrecision(fmt=flow.fmt, quantized=flow.quantized, unquantized=unquantized)
        others = learner.logprobs(drawn, probe[0].prompt_ids, unfolded)
        assert not all(map(np.array_equal, others, (c.logprobs for c in drawn))), "factors that do nothing would pass"
        learn(learner, version)
        with torch.no_grad():
            model.base_model.layers[0].input_layernorm.weight[version] *= 100  # a range that moves its factor


@pytest.mark.sampled(2)
@pytest.mark.equal_bits
@pytest.mark.parametrize("format_name", BACKWARDS)
def test_a_unified_flow_trains_the_equalized_network_to_the_bit(tiny_spec, tokenizer, model, format_name):
    scale_channels(model)
    learner, flow = learner_of(model, format_name=format_name, unified=True, lr=1e-2)
    engine, publisher = TorchEngine(tiny_spec, slots=4), Publisher(flow.quantized)
    probe = requests_for(tokenizer, count=2, samples=2)
    for version in (1, 2):
        sent(learner, flow, engine, publisher, version)
        drawn = engine.generate(probe, version=version)
        samples = [
            Trajectory(
                uid=c.uid, prompt_ids=r.prompt_ids, token_ids=c.token_ids, logprobs=c.logprobs, reward=0.0,
                advantage=1.0, versions=c.versions,
            )
            for c, r in zip(drawn, probe, strict=True)
        ]  # fmt: skip
        batch = to_tensors(samples)
        found_BT, *_ = learner._policy(batch)
        assert torch.equal(found_BT[batch.mask_BT].detach(), batch.behavior_BT[batch.mask_BT])
        learn(learner, version)


def test_factors_follow_the_samples_and_only_when_they_are_due(tiny_spec, model):
    learner, _ = learner_of(model)
    first = exponents_of(learner)
    assert first == exponents_of(learner), "measured once"
    moved = []
    for step in range(4):
        with torch.no_grad():
            model.base_model.layers[0].input_layernorm.weight[5 + step] *= 1000
        before = exponents_of(learner)
        learn(learner, step)
        moved.append(before != exponents_of(learner))
    assert moved == [True, False, True, False]


def test_masters_and_updates_know_no_factor(tiny_spec):
    """Equal parameters after a version was sent and updates were made, equalized or not."""

    def after(quantization) -> torch.Tensor:
        model = load_model(tiny_spec)
        learner, flow = learner_of(model, quantization=quantization)
        sent(learner, flow, TorchEngine(tiny_spec, slots=4), Publisher(flow.quantized), 1)
        learn(learner, 1)
        return torch.cat([p.detach().reshape(-1) for p in model.parameters()])

    assert torch.equal(after(ON), after(QuantizationConfig(equalize=False)))


def test_a_resumed_learner_has_the_factors_of_the_one_that_stopped(tiny_spec, model, tmp_path):
    learner, _ = learner_of(model)
    learner.factors()
    learn(learner, 1)
    learner.save(tmp_path)
    resumed, _ = learner_of(load_model(tiny_spec))
    resumed.load(tmp_path)
    assert exponents_of(resumed) == exponents_of(learner)
    for one in (learner, resumed):
        learn(one, 2)
        learn(one, 3)
    assert exponents_of(resumed) == exponents_of(learner)
    moved = learner._equalizer
    before = dict(moved.factors)
    learner.factors()
    assert all(before[name] is one for name, one in learner.factors().items()), "the same objects until some move"
    (tmp_path / "equalization.safetensors").unlink()
    with pytest.raises(CheckpointError, match="equalization"):
        resumed.load(tmp_path)


def test_a_run_without_factors_yet_resumes_and_measures_them_at_the_next_step(tiny_spec, model, tmp_path):
    """As with an export alone, and a first step of which no group teaches."""
    learner, _ = learner_of(model)
    learner.learn([])
    learner.save(tmp_path)
    resumed, _ = learner_of(load_model(tiny_spec))
    resumed.load(tmp_path)
    assert not resumed._equalizer.settled
    learn(resumed, 1)
    assert resumed._equalizer.settled
    assert resumed._equalizer.moved == 1.0


@pytest.mark.parametrize("packing", [False, True])
def test_factors_do_not_depend_on_micro_batches_padding_and_placeholders(tiny_spec, packing):
    """Sizes of micro-batches pad samples more or less; a backend in lockstep fills up with placeholders."""

    def after(token_budget: int, lockstep: bool) -> dict[str, list[float]]:
        model = load_model(tiny_spec)
        scale_channels(model)
        with torch.no_grad():
            model.get_input_embeddings().weight[0] *= 100  # the id of padding
        learner, _ = learner_of(model, share_prompts=False, packing=packing)
        learner._policy.lockstep = lockstep
        (mini_batch,) = plan(groups(), updates=1, ranks=1, token_budget=token_budget, seed=3)[0]
        learner.learn([replace(mini_batch, micro_batches=[*mini_batch.micro_batches, []])])
        return exponents_of(learner)

    assert after(1000, False) == after(20, False) == after(60, True)


def exponents_of(learner) -> dict[str, list[float]]:
    return {
        f"{name}.{side}": getattr(one, side).tolist()
        for name, one in learner.factors().items()
        for side in ("reads", "writes")
        if getattr(one, side) is not None
    }


# --- several ranks ---------------------------------------------------------------------------------------------------


def shared(rank: int, ranks: int, spec, out: str, backend: str) -> None:
    model = load_model(spec)
    scale_channels(model)
    learner, _ = learner_of(model, lr=1e-9, backend=backend, zero_stage=3)
    learner.factors()
    learner.learn(plan(groups(), updates=1, ranks=ranks, token_budget=60, seed=3)[rank])
    torch.save(exponents_of(learner), f"{out}/{ranks}-{rank}.pt")


@pytest.mark.slow
@pytest.mark.parametrize(
    "backend", ["torch", *(pytest.param(b, marks=pytest.mark.slow) for b in ("fsdp", "deepspeed"))]
)
def test_all_ranks_have_the_factors_that_one_has(tiny_spec, tmp_path, backend):
    """Maxima over ranks, each of which sees other samples; weights sharded."""
    run_ranks(2, shared, tiny_spec, str(tmp_path), backend)
    run_ranks(1, shared, tiny_spec, str(tmp_path), "torch")
    first, second, alone = (torch.load(tmp_path / f"{name}.pt") for name in ("2-0", "2-1", "1-0"))
    assert first == second
    assert first == alone
