"""The corrections that the settings ask for, and what `tightened` makes of them, put through the real objective."""

import math
from dataclasses import replace

import pytest
import torch

from qurl_ray.config import RunConfig
from qurl_ray.config.algorithm import ACR, DAPO, MIS, PRESETS, TIS
from qurl_ray.rl.corrections import CorrectionSettings, correct
from qurl_ray.rl.objective import Denominators, ObjectiveSettings, objective
from qurl_ray.training.rank.objectives import objective_settings, tightened

RHO = (0.3, 0.6, 0.9, 1.0, 1.3, 1.9, 2.1, 4.9, 6.0, 30.0)


def configured(name: str) -> ObjectiveSettings:
    return objective_settings(RunConfig(algorithm=DAPO(correction=name)))


def weights(settings: CorrectionSettings, rho=RHO) -> list[float]:
    """Of answers with one token each."""
    log_rho_BT = torch.tensor(rho, dtype=torch.float64).log()[:, None]
    return correct(log_rho_BT, torch.ones_like(log_rho_BT, dtype=torch.bool), settings).weight_BT[:, 0].tolist()


@pytest.mark.parametrize(
    ("correction", "expected"),
    [
        (MIS(low=0.8, high=1.5), [rho if 0.8 <= rho <= 1.5 else 0.0 for rho in RHO]),
        (MIS(low=0.0, high=6.5), [rho if rho <= 6.5 else 0.0 for rho in RHO]),
        (TIS(is_cap=1.2), [min(rho, 1.2) for rho in RHO]),
        (ACR(is_cap=1.2), [min(rho, 1.2) for rho in RHO]),
        (TIS(reject="geometric", reject_low=0.5, reject_high=2.0), [min(r, 2) * (0.5 <= r <= 2) for r in RHO]),
        (TIS(veto=0.5), [min(rho, 2.0) * (rho >= 0.5) for rho in RHO]),
    ],
)
def test_the_bounds_that_the_settings_name_are_those_of_the_weights(correction, expected):
    settings = objective_settings(RunConfig(algorithm=DAPO(correction=correction)))
    assert weights(settings.correction) == pytest.approx(expected)


@pytest.mark.parametrize("name", PRESETS)
def test_what_is_kept_has_its_exact_weight_and_outliers_have_none(name):
    found = weights(tightened(configured(name)).correction)
    assert any(found) or PRESETS[name].reject != "none"
    for rho, weight in zip(RHO, found, strict=True):
        assert weight == 0 or math.isclose(weight, rho)
    assert found[0] == found[-1] == found[-2] == 0


@pytest.mark.parametrize(
    ("name", "band"),
    [
        ("ignore", (0.5, 5.0)),
        ("naive", (0.5, 5.0)),
        ("decoupled", (0.5, 5.0)),
        ("flashrl", (0.5, 2.0)),
        ("qurl", (0.5, 2.0)),
        ("monitor", (0.5, 2.0)),
        ("mis", (0.5**0.5, 5.0**0.5)),
    ],
)
def test_the_band(name, band):
    correction = tightened(configured(name)).correction
    assert correction.band == pytest.approx(band)
    kept = [rho for rho, weight in zip(RHO, weights(correction), strict=True) if weight]
    assert kept == [rho for rho in RHO if band[0] <= rho <= band[1]]


@pytest.mark.parametrize(("cap", "high"), [(1.0, 2.0), (3.0, 3.0), (8.0, 5.0)])
def test_the_band_ends_at_the_cap_within_reason(cap, high):
    correction = CorrectionSettings(weight="token", cap=cap)
    settings = ObjectiveSettings(correction=correction, clip_low=0.2, clip_high=0.2)
    assert tightened(settings).correction.band == (0.5, high)


@pytest.mark.parametrize("name", ["ignore", "naive", "qurl", "decoupled"])
def test_the_gradient_of_what_is_kept_is_that_of_answers_of_p(name):
    """Summed over all answers there are: six of one token each. p = theta; three are kept."""
    logits_V = torch.tensor([0.3, -0.2, 0.9, 0.1, -1.0, 0.5], dtype=torch.float64, requires_grad=True)
    advantages_V = torch.tensor([1.0, -0.5, 0.7, 2.0, -1.5, 0.2], dtype=torch.float64)
    p_V = logits_V.detach().softmax(0)
    rho_V = torch.tensor([1.4, 0.7, 1.1, 9.0, 0.1, 0.3], dtype=torch.float64)
    b_V = p_V / rho_V  # no distribution, and nobody asks: each answer's share of the sum is all that counts
    kept_V = (rho_V >= 0.5) & (rho_V <= 2.0)
    expected = torch.autograd.grad(-(p_V * advantages_V * kept_V * logits_V.log_softmax(0)).sum(), logits_V)[0]

    def gradient(settings: ObjectiveSettings) -> torch.Tensor:
        logprobs_B1 = logits_V.log_softmax(0)[:, None]
        # an answer's loss is multiplied by the share with which b draws it
        loss = sum(
            b_V[one]
            * objective(
                logprobs_B1[one : one + 1],
                p_V[one : one + 1, None].log(),
                b_V[one : one + 1, None].log(),
                advantages_V[one : one + 1],
                torch.ones(1, 1, dtype=torch.bool),
                Denominators(tokens=1, sequences=1),
                settings,
            )[0]
            for one in range(6)
        )
        return torch.autograd.grad(loss, logits_V)[0]

    torch.testing.assert_close(gradient(tightened(configured(name))), expected, rtol=1e-9, atol=1e-12)
    assert not torch.allclose(gradient(configured(name)), expected, rtol=0.05)


def test_the_policy_may_move_half_as_far():
    settings = replace(configured("qurl"), dual_clip=3.0)
    strict = tightened(settings)
    assert (strict.clip_low, strict.clip_high, strict.dual_clip) == (0.1, 0.14, 2.0)
    assert tightened(configured("qurl")).dual_clip is None


def test_vetoes_and_rejections_that_there_are_become_stricter():
    assert tightened(configured("qurl")).correction.veto == 1e-4
    assert tightened(configured("veto")).correction.veto == pytest.approx(1e-2)
    geometric = tightened(configured("geometric")).correction
    assert (geometric.reject_low, geometric.reject_high) == pytest.approx((0.999**0.5, 1.001**0.5))
    for name in ("k2", "k3"):
        strict = tightened(configured(name)).correction
        assert (strict.reject, strict.reject_low, strict.reject_high) == (name, 0.0, 0.005)


def test_what_the_loss_is_besides_stays():
    settings = replace(configured("ais"), kl_coef=0.1, entropy_coef=0.01, loss_mean="fixed", fixed_length=7)
    strict = tightened(settings)
    assert strict.correction.ess_floor == 0.9
    same = replace(strict, correction=settings.correction, clip_low=settings.clip_low, clip_high=settings.clip_high)
    assert same == settings
