"""Adapters: what is trained is what generates, bit for bit, syncs carry adapters alone, and the base never moves."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from qurl_ray.config.learner import LearnerConfig
from qurl_ray.engines.torch.engine import TorchEngine
from qurl_ray.errors import CheckpointError, SyncError
from qurl_ray.learner.batching import plan, to_tensors
from qurl_ray.learner.flow import EQUALIZATION, Adaptation, FrozenCodes, UnifiedFlow
from qurl_ray.learner.learner import PolicyLearner, make_learner
from qurl_ray.learner.noise import NoiseSchedule
from qurl_ray.learner.protocol import EnginePrecision
from qurl_ray.numerics.products import AdapterFactor
from qurl_ray.policy.adapters import add_adapters
from qurl_ray.policy.load import load_model
from qurl_ray.policy.ranges import measured_factors
from qurl_ray.quant.equalize import equalized, read_factors
from qurl_ray.quant.quantize import dequantize
from qurl_ray.quant.units import units
from qurl_ray.types import Adapters, Trajectory
from qurl_ray.weights.local import send_into
from qurl_ray.weights.stream import Publisher
from tests.conftest import requests_for, taken
from tests.learner.test_flow import KEEP, SETTINGS, trajectories
from tests.learner.test_torch_backend import groups
from tests.ranks import run_ranks

LORA = Adapters(rank=6, alpha=9.0, targets=("all_linear",))
FORMATS = ("int8", "fp8", "fp8_block", "int4", "nvfp4", "nvfp4_w4a4")


def adapted(
    spec,
    format_name: str | None,
    *,
    equalize: bool = False,
    lora: Adapters = LORA,
    noise: NoiseSchedule | None = None,
    **options,
):
    """A learner of adapters over codes, or over full precision, and the units that engines hold as codes."""
    config = LearnerConfig(**({"lr": 1e-2} | options))
    model = load_model(spec)
    quantized = units(model, KEEP)
    factors = measured_factors(model, quantized) if equalize else {}
    add_adapters(model, lora, seed=5)
    frozen = None
    if format_name:
        flow = UnifiedFlow(fmt=taken(format_name), quantized=quantized, backward="straight_through")
        frozen = FrozenCodes(model, flow, factors, "cpu")
    learner = make_learner(
        model,
        config,
        SETTINGS,
        temperature=1.0,
        total_updates=10,
        adaptation=Adaptation(
            adapters=lora, base=frozen.record.fingerprint if frozen else "full", frozen=frozen, noise=noise
        ),
    )
    return learner, quantized


def scatter(learner: PolicyLearner, seed: int = 0, scale: float = 0.02) -> None:
    """Give B values, so that the adapters change something."""
    random = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, value in learner.named_parameters(trained=True):
            if ".lora_B." in name:
                value.copy_(torch.randn(value.shape, generator=random) * scale)


def drawn(engine: TorchEngine, tokenizer, version: int) -> list[Trajectory]:
    requests = requests_for(tokenizer, count=6, samples=4)
    return trajectories(requests, engine.generate(requests, version=version), seed=version)


@pytest.mark.equal_bits
@pytest.mark.parametrize("equalize", [False, True])
@pytest.mark.parametrize("format_name", FORMATS)
def test_over_codes_trained_and_generated_log_probs_are_equal_to_the_bit(tiny_spec, tokenizer, format_name, equalize):
    learner, quantized = adapted(tiny_spec, format_name, equalize=equalize)
    scatter(learner)
    engine, publisher = TorchEngine(replace(tiny_spec, adapters=LORA), slots=16), Publisher(quantized)
    for version in (1, 2, 3):
        subset_of = version - 1 if version > 1 else None
        named = learner.named_parameters(trained=subset_of is not None)
        manifest = send_into(
            publisher,
            engine,
            equalized(named, learner.factors()),
            taken(format_name),
            version=version,
            base_version=subset_of,
            subset_of=subset_of,
        )
        assert manifest.complete == (version == 1)
        assert all(".lora_" in record.name for record in manifest.tensors) == (version > 1)
        samples = drawn(engine, tokenizer, version)
        batch = to_tensors(samples)
        found_BT, *_ = learner._policy(batch)
        assert torch.equal(found_BT[batch.mask_BT].detach(), batch.behavior_BT[batch.mask_BT])
        result = learner.learn(plan([[s] for s in samples], updates=2, ranks=1, token_budget=80, seed=1)[0])
        assert result.sums["max_rho"] == 1.0
        assert result.grad_norm > 0


@pytest.mark.equal_bits
def test_the_probe_has_the_log_probs_of_an_engine_over_the_same_codes(tiny_spec, tokenizer):
    learner, quantized = adapted(tiny_spec, "int8", equalize=True)
    scatter(learner)
    engine = TorchEngine(replace(tiny_spec, adapters=LORA), slots=4)
    send_into(
        Publisher(quantized), engine, equalized(learner.named_parameters(), learner.factors()), taken("int8"), version=1
    )
    request, *_ = requests_for(tokenizer, 1, 2)
    completions = engine.generate([request, replace(request, uid="b", seed=2)], version=1)
    precision = EnginePrecision(
        fmt=taken("int8"), quantized=quantized, unquantized="float32", factors=learner.factors()
    )
    for own, completion in zip(learner.logprobs(completions, request.prompt_ids, precision), completions, strict=True):
        assert np.array_equal(own, completion.logprobs)
    first = next(m for m in learner._scorer.policy.modules() if isinstance(m, AdapterFactor))
    with torch.no_grad():
        first.weight.mul_(1.5)  # another adapter than the engine's
    (own, _), completion = learner.logprobs(completions, request.prompt_ids, precision), completions[0]
    assert not np.array_equal(own, completion.logprobs)


@pytest.mark.equal_bits
@pytest.mark.parametrize("format_name", [None, "int8"])
def test_over_full_precision_an_engine_without_codes_is_the_learner(tiny_spec, tokenizer, format_name):
    learner, quantized = adapted(tiny_spec, None)
    scatter(learner)
    engine = TorchEngine(replace(tiny_spec, adapters=LORA), slots=16)
    fmt = taken(format_name) if format_name else None
    send_into(Publisher(quantized), engine, learner.named_parameters(), fmt, version=1)
    batch = to_tensors(drawn(engine, tokenizer, 1))
    with torch.no_grad():
        found_BT, *_ = learner._policy(batch)
    gap = (found_BT - batch.behavior_BT)[batch.mask_BT].abs().max()
    assert gap == 0 if format_name is None else 0 < gap < 1


def test_nothing_but_adapters_is_trained(tiny_spec):
    learner, _ = adapted(tiny_spec, "int8")
    policy = learner._scorer.policy
    before = {name: p.detach().clone() for name, p in policy.named_parameters()}
    codes = {name: q.codes.clone() for name, q in learner._frozen.named_codes()}
    learner.learn(plan(groups(), updates=2, ranks=1, token_budget=100, seed=3)[0])
    moved = {name for name, p in policy.named_parameters() if not torch.equal(p, before[name])}
    assert moved == {name for name, _ in learner.named_parameters(trained=True)}
    assert all(torch.equal(q.codes, codes[name]) for name, q in learner._frozen.named_codes())
    states = learner._policy._optimizers[0].state
    assert len(states) == len(moved)


def test_the_gradient_is_that_of_the_dequantized_base(tiny_spec):
    """Independent: autograd over plain linears that hold the dequantized weights, where activations are not rounded."""
    learner, _ = adapted(tiny_spec, "int4")  # rounds weights alone
    scatter(learner)
    samples = groups()
    (share,) = plan(samples, updates=1, ranks=1, token_budget=10_000, seed=3)[0]

    def gradients(of: PolicyLearner) -> dict[str, torch.Tensor]:
        passes = [of._make_pass(chosen) for chosen in of._shares(share)]
        of._accumulate(passes, share.denominators, strength=1.0, calibration=None)
        return {name: p.grad.clone() for name, p in of.named_parameters(trained=True)}

    found = gradients(learner)
    plain, _ = adapted(tiny_spec, None)
    scatter(plain)
    with torch.no_grad():
        own = dict(plain._scorer.policy.named_parameters())
        for name, q in learner._frozen.named_codes():
            own[name].copy_(dequantize(q))
    for name, expected in gradients(plain).items():
        torch.testing.assert_close(found[name], expected, rtol=1e-3, atol=1e-6)


@pytest.mark.parametrize("packing", [False, True])
def test_checkpointing_changes_no_gradient(tiny_spec, packing):
    """Though nothing before the first adapter has a gradient."""

    def after(**options) -> list[torch.Tensor]:
        learner, _ = adapted(tiny_spec, "int8", packing=packing, **options)
        learner.learn(plan(groups(), updates=2, ranks=1, token_budget=100, seed=3, packed=packing)[0])
        return [value for _, value in learner.named_parameters(trained=True)]

    assert all(map(torch.equal, after(), after(gradient_checkpointing=True)))


def test_a_checkpoint_holds_adapters_alone_and_is_refused_over_another_base(tiny_spec, tmp_path):
    learner, _ = adapted(tiny_spec, "int8", equalize=True)
    learner.learn(plan(groups(), updates=2, ranks=1, token_budget=100, seed=3)[0])
    learner.save(tmp_path)
    again, _ = adapted(tiny_spec, "int8", equalize=True)
    again.load(tmp_path)
    for (name, value), (_, other) in zip(
        learner.named_parameters(trained=True), again.named_parameters(trained=True), strict=True
    ):
        assert torch.equal(value, other), name
    for one in (learner, again):
        one.learn(plan(groups(), updates=2, ranks=1, token_budget=100, seed=4)[0])
    assert all(
        torch.equal(value, other)
        for (_, value), (_, other) in zip(
            learner.named_parameters(trained=True), again.named_parameters(trained=True), strict=True
        )
    )
    written = read_factors(tmp_path / EQUALIZATION)
    assert written.keys() == learner.factors().keys()
    assert (tmp_path / "policy" / "rank-0-of-1.safetensors").stat().st_size < 4e6
    other, _ = adapted(tiny_spec, "int4")
    with pytest.raises(CheckpointError, match="adapters of another base model"):
        other.load(tmp_path)


def test_the_reference_is_the_policy_with_the_adapters_of_the_start(tiny_spec):
    model = load_model(tiny_spec)
    add_adapters(model, LORA, seed=5)
    learner = make_learner(
        model,
        LearnerConfig(lr=1e-2),
        replace(SETTINGS, kl_coef=0.1),
        temperature=1.0,
        total_updates=10,
        adaptation=Adaptation(adapters=LORA, base="full"),
    )
    batch = to_tensors([sample for group in groups() for sample in group])
    with torch.no_grad():
        start_BT, *_ = learner._policy(batch)
    learner.learn(plan(groups(), updates=2, ranks=1, token_budget=100, seed=3)[0])
    with torch.no_grad():
        now_BT, *_ = learner._policy(batch)
    reference_BT, *_ = learner._reference(batch)
    assert torch.equal(reference_BT, start_BT)
    assert not torch.equal(now_BT, start_BT)
    with torch.no_grad():
        after_BT, *_ = learner._policy(batch)
    assert torch.equal(after_BT, now_BT)


def test_a_subset_needs_the_version_it_is_of(tiny_spec):
    learner, quantized = adapted(tiny_spec, "int8")
    engine, publisher = TorchEngine(replace(tiny_spec, adapters=LORA), slots=4), Publisher(quantized)
    with pytest.raises(SyncError, match="no complete version"):
        list(publisher.prepare(learner.named_parameters(trained=True), taken("int8"), version=1, complete=False))
    send_into(publisher, engine, learner.named_parameters(), taken("int8"), version=1)
    with pytest.raises(SyncError, match="is not among the tensors"):
        list(publisher.prepare([("more", torch.ones(2))], taken("int8"), version=2, complete=False))
    without, publisher = TorchEngine(tiny_spec, slots=4), Publisher(quantized)
    with pytest.raises(SyncError, match="unexpected"):
        send_into(publisher, without, learner.named_parameters(), taken("int8"), version=1)


def test_a_version_that_is_sent_again_is_whole(tiny_spec):
    """After subsets, an engine that was restarted gets every tensor, with the last values."""
    learner, quantized = adapted(tiny_spec, "int8")
    engine, publisher = TorchEngine(replace(tiny_spec, adapters=LORA), slots=4), Publisher(quantized)
    send_into(publisher, engine, learner.named_parameters(), taken("int8"), version=1)
    scatter(learner)
    sent = send_into(
        publisher, engine, learner.named_parameters(trained=True), taken("int8"), version=2, base_version=1, subset_of=1
    )
    again = [record for bucket in publisher.resend() for record in bucket.records]
    assert {record.name for record in again} == {name for name, _ in learner.named_parameters()}
    last = {record.name: record.fingerprint for record in again}
    assert all(last[record.name] == record.fingerprint for record in sent.tensors)


# --- several ranks ---------------------------------------------------------------------------------------------------

SHARDED = [{"backend": "deepspeed", "zero_stage": 2}, {"backend": "deepspeed", "zero_stage": 3}, {"backend": "fsdp"}]


def updates(rank: int, ranks: int, spec, folder: Path | None = None, **config) -> dict[str, torch.Tensor]:
    learner, _ = adapted(spec, "int8", **config)
    learner.learn(plan(groups(), updates=2, ranks=ranks, token_budget=60, seed=3)[rank])
    if folder:
        folder.mkdir(exist_ok=True)
        learner.save(folder)
    return {name: value.detach().clone() for name, value in learner.named_parameters(trained=True)}


def train(rank: int, ranks: int, spec, out: str) -> None:
    for number, backend in enumerate(SHARDED):
        found = updates(rank, ranks, spec, Path(out, str(number)), **backend)
        if rank == 0:
            torch.save(found, f"{out}/{number}.pt")


@pytest.mark.slow
def test_sharded_adapters_get_the_updates_of_whole_ones(tiny_spec, tmp_path):
    run_ranks(2, train, tiny_spec, str(tmp_path))
    alone = updates(0, 1, tiny_spec)
    start, _ = adapted(tiny_spec, "int8")
    begun = {name: value.detach().clone() for name, value in start.named_parameters(trained=True)}
    for number, backend in enumerate(SHARDED):
        found = torch.load(tmp_path / f"{number}.pt")
        assert found.keys() == alone.keys()
        off = torch.cat([(found[name] - alone[name]).reshape(-1) for name in alone]).norm()
        way = torch.cat([(alone[name] - begun[name]).reshape(-1) for name in alone]).norm()
        assert off <= 2e-2 * way, backend
        start.load(tmp_path / str(number))  # with one rank, by another backend
        for name, value in start.named_parameters(trained=True):
            torch.testing.assert_close(value, found[name], rtol=0, atol=0)
