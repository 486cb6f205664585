"""Passes in float16: closer to float32 than bfloat16's, from scaled losses that nothing else sees."""

import pytest
import torch

from qurl_ray.config.learner import LearnerConfig
from qurl_ray.learner.batching import plan
from qurl_ray.learner.learner import PolicyLearner, make_learner
from qurl_ray.policy.load import load_model
from tests.learner.test_torch_backend import SETTINGS, groups
from tests.ranks import run_ranks


def learner(spec, **config) -> PolicyLearner:
    settings = LearnerConfig(**({"lr": 1e-3} | config))
    return make_learner(load_model(spec), settings, SETTINGS, temperature=1.0, total_updates=11)


def flat(trained: PolicyLearner) -> torch.Tensor:
    return torch.cat([parameter.detach().reshape(-1).clone() for _, parameter in trained.named_parameters()])


def share(rank: int = 0, ranks: int = 1):
    return plan(groups(), updates=2, ranks=ranks, token_budget=60, seed=3)[rank]


def gradient(spec, **config) -> torch.Tensor:
    """The gradient of an update, as the optimizer gets it."""
    trained, found = learner(spec, **config), []
    parameters = list(trained._policy.module.parameters())
    optimizer = getattr(trained._policy, "_backend", trained._policy)._optimizers[0]
    optimizer.register_step_pre_hook(
        lambda *_: found.append(torch.cat([p.grad.reshape(-1).clone() for p in parameters]))
    )
    trained.learn(share()[:1])
    return found[0]


def test_gradients_are_those_of_float32_up_to_rounding_and_closer_than_bfloat16s(tiny_spec):
    exact = gradient(tiny_spec)
    off = {
        compute: float((gradient(tiny_spec, compute=compute) - exact).norm() / exact.norm())
        for compute in ("float16", "bfloat16")
    }
    assert off["float16"] < 3e-3
    assert off["float16"] < off["bfloat16"] / 3


def test_without_scaling_small_gradients_would_be_lost(tiny_spec):
    """What the factor is for: losses divided by many tokens have gradients below float16's smallest number."""
    exact = gradient(tiny_spec)
    trained = learner(tiny_spec, compute="float16")
    trained._policy.factor = 2.0**-12
    trained.learn(share()[:1])
    moved = flat(trained) - flat(learner(tiny_spec))
    assert (moved == 0).float().mean() > (exact == 0).float().mean() + 0.1


def test_an_overflow_leaves_out_the_update_and_halves_the_factor(tiny_spec):
    trained = learner(tiny_spec, compute="float16")
    before, trained._policy.factor = flat(trained), 2.0**40
    assert trained.learn(share()[:1]).skipped_updates == 1
    assert torch.equal(flat(trained), before)
    assert trained._policy.factor == 2.0**39
    trained._policy.factor, trained._policy._finite = 2.0**8, 999
    assert trained.learn(share()[:1]).skipped_updates == 0
    assert trained._policy.factor == 2.0**9


def on_two(rank: int, ranks: int, spec, out: str) -> None:
    for backend in ("torch", "fsdp"):
        trained = learner(spec, compute="float16", backend=backend)
        trained.learn(share(rank, ranks))
        torch.save(flat(trained), f"{out}/{backend}.{rank}.pt")


@pytest.mark.slow
def test_two_ranks_make_the_updates_of_one(tiny_spec, tmp_path):
    run_ranks(2, on_two, tiny_spec, str(tmp_path))
    alone = learner(tiny_spec, compute="float16")
    before = flat(alone)
    alone.learn(share())
    for backend in ("torch", "fsdp"):
        found = torch.load(tmp_path / f"{backend}.0.pt")
        assert (found - flat(alone)).norm() <= 0.05 * (flat(alone) - before).norm(), backend


def test_the_factor_is_part_of_a_checkpoint(tiny_spec, tmp_path):
    trained = learner(tiny_spec, compute="float16")
    trained._policy.factor, trained._policy._finite = 2.0**7, 12
    trained.save(tmp_path)
    resumed = learner(tiny_spec, compute="float16")
    resumed.load(tmp_path)
    assert (resumed._policy.factor, resumed._policy._finite) == (2.0**7, 12)
