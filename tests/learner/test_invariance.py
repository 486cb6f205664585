"""The gradient of an update is one number per parameter, however its samples are cut up, ordered, spread or packed."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from qurl_ray.config.learner import LearnerConfig
from qurl_ray.learner.batching import plan
from qurl_ray.learner.learner import make_learner
from qurl_ray.policy.load import load_model
from qurl_ray.rl.corrections import CorrectionSettings
from qurl_ray.rl.objective import ObjectiveSettings
from qurl_ray.rl.surrogate import cispo, gspo
from tests.learner.test_torch_backend import groups

ACR = CorrectionSettings(weight="token", cap=1.5, adaptive_clip=True)
BOUNDS = {"clip_low": 0.2, "clip_high": 0.28}
OBJECTIVES = {
    "acr": ObjectiveSettings(correction=ACR, dual_clip=3.0, **BOUNDS),
    "tis, sequence mean, KL, entropy": ObjectiveSettings(
        correction=CorrectionSettings(weight="token", cap=1.5),
        loss_mean="sequence",
        kl_coef=0.1,
        kl_estimator="k2",
        entropy_coef=0.05,
        **BOUNDS,
    ),
    "gspo, sequence weights, veto": ObjectiveSettings(
        form=gspo, correction=CorrectionSettings(weight="geometric", cap=2.0, veto=1e-3), **BOUNDS
    ),
    "cispo, band, fixed length": ObjectiveSettings(
        form=cispo,
        correction=CorrectionSettings(weight="token", band=(0.5, 2.0), reject="k3", reject_high=1.0),
        loss_mean="fixed",
        fixed_length=16,
        **BOUNDS,
    ),
}
SPLITS = {
    "one token": {"token_budget": 1},
    "small micro-batches": {"token_budget": 40},
    "two workers": {"token_budget": 60, "ranks": 2},
    "four workers": {"token_budget": 30, "ranks": 4},
    "prompts computed again for each sample": {"share_prompts": False},
    "packed": {"packed": True},
    "packed, small, two workers": {"packed": True, "token_budget": 50, "ranks": 2},
    "another order": {"order": 1},
}


CASES = [(name, torch.float64, 1e-10) for name in OBJECTIVES] + [
    (name, torch.float32, 1e-5) for name in list(OBJECTIVES)[:2]
]


def gradient(spec, settings, dtype, *, ranks=1, token_budget=10_000, packed=False, order=0, **learner) -> torch.Tensor:
    """Of the second of two updates: the policy has left p, so that ratios differ from 1. All ranks' parts, added."""
    chosen = groups()
    if order:
        shuffled = np.random.default_rng(order).permutation(len(chosen))
        chosen = [chosen[i][::-1] for i in shuffled]
    total = torch.zeros(())
    for rank in range(ranks):
        model = load_model(spec).to(dtype)
        reference = load_model(spec).to(dtype)
        trained = make_learner(
            model,
            LearnerConfig(packing=packed, **learner),
            settings,
            temperature=1.0,
            total_updates=1,
            reference=reference if settings.kl_coef else None,
        )
        (share,) = plan(chosen, updates=1, ranks=ranks, token_budget=token_budget, seed=3, packed=packed)[rank]
        passes = [trained._make_pass(samples) for samples in trained._shares(share)]
        trained._measure_all = True
        trained._before_the_first_update([passes])
        with torch.no_grad():
            noise = torch.Generator().manual_seed(1)
            for parameter in model.parameters():
                parameter.add_(0.02 * torch.randn(parameter.shape, generator=noise, dtype=torch.float64).to(dtype))
        trained._accumulate(passes, share.denominators, strength=1.0, calibration=None)
        zero = [torch.zeros_like(p) if p.grad is None else p.grad for p in model.parameters()]
        total = total + torch.cat([grad.reshape(-1) for grad in zero])
    return total


@pytest.fixture(scope="module")
def whole(tiny_spec):
    return {
        (name, dtype): gradient(tiny_spec, settings, dtype)
        for name, dtype, _ in CASES
        for settings in [OBJECTIVES[name]]
    }


@pytest.mark.sampled(8)
@pytest.mark.parametrize("split", SPLITS)
@pytest.mark.parametrize(("name", "dtype", "tolerance"), CASES)
def test_the_gradient_does_not_depend_on_the_split(tiny_spec, whole, name, split, dtype, tolerance):
    expected = whole[name, dtype]
    found = gradient(tiny_spec, OBJECTIVES[name], dtype, **SPLITS[split])
    assert expected.norm() > 1e-3
    assert (found - expected).norm() <= tolerance * expected.norm()


def test_a_wrong_denominator_would_be_noticed(tiny_spec, whole):
    settings = replace(OBJECTIVES["acr"], loss_mean="sequence")
    found = gradient(tiny_spec, settings, torch.float64)
    expected = whole["acr", torch.float64]
    assert (found - expected).norm() > 0.01 * expected.norm()
