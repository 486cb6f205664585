"""Noise on the gains of norms: its size, the same in engine and learner, resumed, and gone from what is saved."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from qurl_ray.engines.torch.engine import TorchEngine
from qurl_ray.learner.batching import plan, to_tensors
from qurl_ray.learner.learner import PolicyLearner
from qurl_ray.learner.noise import NoiseSchedule
from qurl_ray.quant.equalize import equalized
from qurl_ray.weights.local import send_into
from qurl_ray.weights.stream import Publisher
from tests.conftest import taken
from tests.learner.test_adapters import LORA, adapted, drawn, scatter
from tests.learner.test_torch_backend import groups
from tests.ranks import run_ranks

NOISE = NoiseSchedule(start=0.2, end=0.05, stages=4, steps=4, seed=3)


def gains(learner: PolicyLearner) -> dict[str, torch.Tensor]:
    return {
        name: value.detach().clone()
        for name, value in learner._policy.named_parameters()
        if name.endswith("norm.weight")
    }


def update(learner: PolicyLearner, ranks: int = 1, rank: int = 0) -> None:
    learner.learn(plan(groups(), updates=1, ranks=ranks, token_budget=100, seed=3)[rank])


def test_the_size_falls_in_stages():
    schedule = NoiseSchedule(start=1e-2, end=1e-4, stages=4, steps=8, seed=0)
    assert [schedule.sigma(step) for step in range(9)] == pytest.approx(
        [0, 0, 1e-2, 1e-2, 1e-3, 1e-3, 1e-4, 1e-4, 0], rel=1e-12
    )
    two = NoiseSchedule(start=1e-2, end=1e-4, stages=2, steps=2, seed=0)
    assert [two.sigma(step) for step in range(3)] == [0, 1e-2, 0]
    longer = NoiseSchedule(start=1e-2, end=1e-4, stages=10, steps=3, seed=0)  # fewer steps than stages
    assert [longer.sigma(step) > 0 for step in range(4)] == [False, True, True, False]


def test_it_has_the_size_that_the_schedule_says(tiny_spec):
    learner, _ = adapted(tiny_spec, "int8", noise=NOISE)
    clean = gains(learner)
    update(learner)
    noise = torch.cat([value - clean[name] for name, value in gains(learner).items()])
    assert len(noise) > 200
    assert noise.std().item() == pytest.approx(0.2, rel=0.15)
    assert abs(noise.mean().item()) < 0.05
    update(learner)
    other = torch.cat([value - clean[name] for name, value in gains(learner).items()])
    assert abs(torch.corrcoef(torch.stack([noise, other]))[0, 1]) < 0.3  # drawn again


@pytest.mark.equal_bits
@pytest.mark.parametrize("format_name", ["int8", "fp8_block"])
def test_engine_and_learner_have_the_same_noise(tiny_spec, tokenizer, format_name):
    learner, quantized = adapted(tiny_spec, format_name, equalize=format_name == "int8", noise=NOISE)
    scatter(learner)
    clean = gains(learner)
    engine, publisher = TorchEngine(replace(tiny_spec, adapters=LORA), slots=16), Publisher(quantized)
    for version in (1, 2, 3, 4, 5):
        base = version - 1 if version > 1 else None
        named = learner.changing_parameters() if base else learner.named_parameters()
        send_into(
            publisher,
            engine,
            equalized(named, learner.factors()),
            taken(format_name),
            version=version,
            base_version=base,
            subset_of=base,
        )
        samples = drawn(engine, tokenizer, version)
        batch = to_tensors(samples)
        found_BT, *_ = learner._policy(batch)
        assert torch.equal(found_BT[batch.mask_BT].detach(), batch.behavior_BT[batch.mask_BT])
        noisy = {name for name, value in gains(learner).items() if not torch.equal(value, clean[name])}
        assert noisy == (clean.keys() if version in (2, 3, 4) else set())
        result = learner.learn(plan([[s] for s in samples], updates=1, ranks=1, token_budget=80, seed=1)[0])
        assert result.sums["max_rho"] == 1.0
        assert result.sums["max_noise"] == NOISE.sigma(version - 1)


def test_it_is_resumed_and_ends(tiny_spec, tmp_path):
    learner, _ = adapted(tiny_spec, "int8", noise=NOISE)
    clean = gains(learner)
    assert not learner.end_noise()
    update(learner)
    learner.save(tmp_path)
    again, _ = adapted(tiny_spec, "int8", noise=NOISE)
    again.load(tmp_path)
    assert all(torch.equal(value, gains(again)[name]) for name, value in gains(learner).items())
    assert learner.end_noise()
    assert not learner.end_noise()
    assert all(torch.equal(value, clean[name]) for name, value in gains(learner).items())


def train(rank: int, ranks: int, spec, out: str) -> None:
    for number, backend in enumerate(({"backend": "deepspeed", "zero_stage": 2}, {"backend": "fsdp"}, {})):
        learner, _ = adapted(spec, "int8", noise=NOISE, **backend)
        update(learner, ranks, rank)
        found = gains(learner)
        if rank == 0:
            torch.save(found, f"{out}/{number}.pt")


@pytest.mark.slow
def test_every_backend_has_the_same_noise(tiny_spec, tmp_path):
    run_ranks(2, train, tiny_spec, str(tmp_path))
    alone, _ = adapted(tiny_spec, "int8", noise=NOISE)
    update(alone)
    for number in range(3):
        found = torch.load(Path(tmp_path, f"{number}.pt"))
        assert all(torch.equal(value, found[name]) for name, value in gains(alone).items())
