"""Calibrated bounds: nominal without noise, and with it the quantile and the balance of the tokens themselves."""

import math

import numpy as np
import pytest
import torch

from qurl_ray.rl.calibration import calibrated, clip_histogram

LOW, HIGH = 0.2, 0.28


def tokens(count: int, *, move: float, noise: float, seed: int = 0):
    """(noisy log ratio, exact log ratio, A), float64 [1, count]."""
    generator = torch.Generator().manual_seed(seed)
    normal = lambda: torch.randn(1, count, generator=generator, dtype=torch.float64)  # noqa: E731
    exact = move * normal()
    return exact + noise * normal(), exact, normal()


def histogram(log_ratio, advantages):
    return clip_histogram(log_ratio, advantages, torch.ones_like(log_ratio, dtype=torch.bool))


def balance(log_ratio, advantages, lower: float, upper: float) -> float:
    ratio = log_ratio.exp()
    gained = (advantages * ratio.clamp(max=upper))[advantages > 0].sum()
    return (gained / (-advantages * ratio.clamp(min=lower))[advantages < 0].sum()).item()


@pytest.mark.parametrize("bounds", [(0.2, 0.28), (0.1, 0.1), (0.4, 0.8)])
@pytest.mark.parametrize("move", [0.3, 0.6])
def test_without_noise_the_bounds_are_the_nominal_ones(bounds, move):
    noisy, exact, advantages = tokens(100_000, move=move, noise=0.0)
    found = calibrated(histogram(noisy, advantages), histogram(exact, advantages), *bounds)
    assert found == pytest.approx(bounds, abs=2e-3)


@pytest.mark.parametrize("move", [0.0, 0.02, 0.05])
def test_without_noise_the_bounds_are_the_nominal_ones_though_nothing_reaches_them(move):
    noisy, exact, advantages = tokens(20_000, move=move, noise=0.0)
    found = calibrated(histogram(noisy, advantages), histogram(exact, advantages), LOW, HIGH)
    assert found == pytest.approx((LOW, HIGH), abs=2e-3)


@pytest.mark.parametrize(("move", "noise"), [(0.2, 0.1), (0.2, 0.3), (0.4, 0.2), (0.15, 0.05)])
def test_noisy_bounds_cut_as_much_as_the_nominal_ones_of_exact_ratios(move, noise):
    noisy, exact, advantages = tokens(200_000, move=move, noise=noise)
    low, high = calibrated(histogram(noisy, advantages), histogram(exact, advantages), LOW, HIGH)
    assert low > LOW + 1e-3  # noise spreads the ratios
    negative = advantages < 0
    share_exact = (exact[negative] < math.log(1 - LOW)).double().mean().item()
    share_noisy = (noisy[negative] < math.log(1 - low)).double().mean().item()
    assert share_noisy == pytest.approx(share_exact, abs=5e-4, rel=0.01)
    assert 1 - low == pytest.approx(np.quantile(noisy[negative].exp().numpy(), share_exact), abs=2e-3)
    wanted = balance(exact, advantages, 1 - LOW, 1 + HIGH)
    assert balance(noisy, advantages, 1 - low, 1 + high) == pytest.approx(wanted, rel=0.01)
    assert balance(noisy, advantages, 1 - low, 1 + 3 * high) > wanted + 0.003  # the bound matters to it


@pytest.mark.parametrize("sign", [1, -1])
def test_one_sign_alone_leaves_the_nominal_bounds(sign):
    noisy, exact, advantages = tokens(1000, move=0.3, noise=0.2)
    one = sign * advantages.abs()
    assert calibrated(histogram(noisy, one), histogram(exact, one), LOW, HIGH) == (LOW, HIGH)
    nothing = torch.zeros(2, 3, 4000, dtype=torch.float64)
    assert calibrated(nothing, nothing, LOW, HIGH) == (LOW, HIGH)


def test_bounds_never_lie_beyond_one():
    """Ratios that are all above, or all below 1: the bounds stay on their own sides."""
    advantages = torch.tensor([[1.0, -1.0] * 500], dtype=torch.float64)
    exact = tokens(1000, move=0.3, noise=0.0)[1]
    for shift in (1.5, -1.5):
        found = calibrated(histogram(exact + shift, advantages), histogram(exact, advantages), LOW, HIGH)
        assert all(bound >= 0 for bound in found)
        assert found[0] <= 1


def test_histograms_count_tokens_and_sum_sizes_by_sign():
    advantages = torch.tensor([[2.0, -3.0, 0.0, 0.5, -1.0, 9.0]])
    log_ratio = torch.tensor([[0.1, -0.4, 0.2, 5.0, -7.0, math.nan]])
    mask = torch.tensor([[True, True, True, True, True, False]])
    found = clip_histogram(log_ratio, advantages, mask)
    assert found.shape[:2] == (2, 3)
    ratio = [math.exp(x) for x in (0.1, 5.0, -0.4, -7.0)]
    assert found.sum(dim=2).flatten().tolist() == pytest.approx(
        [2, 2.5, 2 * ratio[0] + 0.5 * ratio[1], 2, 4, 3 * ratio[2] + ratio[3]], rel=1e-6
    )
    assert (found[0, 0, -1], found[1, 0, 0]) == (1, 1)  # beyond the ends: in the last bins, with their own ratios
    assert found[0, 0].nonzero()[0].item() == int((2 + 0.1) / 4 * found.shape[2])


def test_histograms_add_up_over_batches_and_bounds_with_them():
    noisy, _, advantages = tokens(5000, move=0.3, noise=0.1)
    parts = zip(noisy.split(1300, dim=1), advantages.split(1300, dim=1), strict=True)
    torch.testing.assert_close(sum(histogram(*part) for part in parts), histogram(noisy, advantages))
