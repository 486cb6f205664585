"""The objective's gradient as an estimator, exactly: every sequence of a three-token language, weighted by its odds.

Policies are tables of logits, one row per prefix: b draws, p is to be improved, theta is p or has moved away from it.
"""

import itertools
import math

import pytest
import torch

from qurl_ray.rl.corrections import CorrectionSettings, correct
from qurl_ray.rl.objective import Denominators, ObjectiveSettings, objective
from qurl_ray.rl.ratios import log_ratio

VOCABULARY = 3
SEED = 9
ONE = Denominators(tokens=1, sequences=1)


class Language:
    """All sequences of `length` tokens, a reward for each, and tables of logits for p and b."""

    def __init__(self, length: int, noise: float = 0.7) -> None:
        generator = torch.Generator().manual_seed(SEED + length)
        normal = lambda *shape: torch.randn(*shape, generator=generator, dtype=torch.float64)  # noqa: E731
        self.length = length
        self.sequences = list(itertools.product(range(VOCABULARY), repeat=length))
        prefixes = [prefix for n in range(length) for prefix in itertools.product(range(VOCABULARY), repeat=n)]
        self.row_of = {prefix: row for row, prefix in enumerate(prefixes)}
        self.p = normal(len(prefixes), VOCABULARY)
        self.b = self.p + noise * normal(len(prefixes), VOCABULARY)
        self.moved = self.p + 0.6 * normal(len(prefixes), VOCABULARY)
        self.rewards = normal(len(self.sequences))

    def logprobs(self, logits: torch.Tensor) -> torch.Tensor:
        """[sequences, length]"""
        table = logits.log_softmax(dim=1)
        rows = [[self.row_of[y[:t]] for t in range(self.length)] for y in self.sequences]
        return table[torch.tensor(rows), torch.tensor(self.sequences)]

    def policy_gradient(self) -> torch.Tensor:
        """Of the expected reward under p."""
        logits = self.p.clone().requires_grad_()
        (self.logprobs(logits).sum(dim=1).exp() * self.rewards).sum().backward()
        return logits.grad.flatten()

    def scores(self, logits: torch.Tensor) -> torch.Tensor:
        """grad log of each token's probability, [sequences, length, parameters]."""
        jacobian = torch.autograd.functional.jacobian(self.logprobs, logits)
        return jacobian.flatten(start_dim=2)

    def odds(self) -> tuple[torch.Tensor, torch.Tensor]:
        """p and b of each token, [sequences, length]."""
        return self.logprobs(self.p).exp(), self.logprobs(self.b).exp()

    def samples(
        self,
        correction: CorrectionSettings,
        *,
        theta: torch.Tensor | None = None,
        loss_mean: str = "fixed",
        clip: tuple[float, float] = (0.2, 0.28),
    ) -> torch.Tensor:
        """The gradient (of what is maximised, summed over tokens) that each sequence alone gives: [sequences, P]."""
        settings = ObjectiveSettings(
            correction=correction,
            clip_low=clip[0],
            clip_high=clip[1],
            loss_mean=loss_mean,
            fixed_length=self.length,
        )
        denominators = Denominators(tokens=self.length, sequences=1)
        mask = torch.ones(1, self.length, dtype=torch.bool)
        logits = (self.p if theta is None else theta).clone().requires_grad_()
        new, p, b, gradients = self.logprobs(logits), self.logprobs(self.p), self.logprobs(self.b), []
        for i in range(len(self.sequences)):
            one = slice(i, i + 1)
            loss, _ = objective(new[one], p[one], b[one], self.rewards[one], mask, denominators, settings)
            gradients.append(torch.autograd.grad(loss, logits, retain_graph=True)[0].flatten())
        return -self.length * torch.stack(gradients)

    def expectation(self, samples: torch.Tensor) -> torch.Tensor:
        return self.logprobs(self.b).sum(dim=1).exp() @ samples

    def variance(self, samples: torch.Tensor) -> float:
        """Of one draw, all parameters together."""
        return (self.expectation(samples.square()) - self.expectation(samples).square()).sum().item()


def same(found: torch.Tensor, expected: torch.Tensor) -> None:
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-12)


def token(cap: float = math.inf, **more) -> CorrectionSettings:
    return CorrectionSettings(weight="token", cap=cap, **more)


# --- uncapped weights -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("loss_mean", ["fixed", "token"])
@pytest.mark.parametrize("weight", ["token", "sequence"])
def test_uncapped_weights_of_one_token_are_unbiased(weight, loss_mean):
    language = Language(1)
    samples = language.samples(CorrectionSettings(weight=weight), loss_mean=loss_mean)
    same(language.expectation(samples), language.policy_gradient())


@pytest.mark.parametrize("length", [2, 3])
@pytest.mark.parametrize("loss_mean", ["fixed", "token"])
def test_only_sequence_weights_are_unbiased_for_longer_sequences(length, loss_mean):
    language = Language(length)
    exact = language.policy_gradient()
    found = language.expectation(language.samples(CorrectionSettings(weight="sequence"), loss_mean=loss_mean))
    same(found, exact)
    by_token = language.expectation(language.samples(token(), loss_mean=loss_mean))
    assert (by_token - exact).norm() > 0.05 * exact.norm()
    p, b = language.odds()
    weighted = torch.einsum("s,st,stp->sp", language.rewards, p / b, language.scores(language.p))
    same(by_token, b.prod(dim=1) @ weighted)


def test_the_naive_ratio_is_unbiased_until_it_is_clipped():
    language = Language(1)
    correction, exact = CorrectionSettings(ratio="behavior"), language.policy_gradient()
    same(language.expectation(language.samples(correction, clip=(1.0, 1e6))), exact)
    p, b = (x[:, 0] for x in language.odds())
    rho, reward = p / b, language.rewards
    cut = ((reward > 0) & (rho > 1.28)) | ((reward < 0) & (rho < 0.8))
    assert cut.any()
    assert not cut.all()
    expected = torch.where(cut, 0.0, p * reward) @ language.scores(language.p)[:, 0]
    same(language.expectation(language.samples(correction)), expected)


# --- bias and variance ------------------------------------------------------------------------------------------


def test_truncation_trades_variance_for_bias():
    language = Language(1, noise=1.2)
    exact, caps = language.policy_gradient(), [0.25, 0.5, 0.75, 1.0, 1.25, 1.5, 2.0, 1e3]
    p, b = (x[:, 0] for x in language.odds())
    assert (p / b).max() > 1.5
    biases, variances = [], []
    for cap in caps:
        samples = language.samples(token(cap))
        bias = language.expectation(samples) - exact
        lost = (p - cap * b).clamp(min=0) * language.rewards
        same(bias, -lost @ language.scores(language.p)[:, 0])
        biases.append(bias.norm().item())
        variances.append(language.variance(samples))
    assert biases == sorted(biases, reverse=True)
    assert biases[0] > 0.1
    assert biases[-1] < 1e-12
    assert variances == sorted(variances)
    assert variances[0] < variances[-1] / 3


@pytest.mark.parametrize("length", [1, 2, 3])
def test_ignoring_the_mismatch_is_biased_by_the_difference_of_the_policies(length):
    language = Language(length)
    p, b = (x.prod(dim=1) for x in language.odds())
    expected = ((b - p) * language.rewards) @ language.scores(language.p).sum(dim=1)
    assert expected.norm() > 1e-2
    same(language.expectation(language.samples(CorrectionSettings())) - language.policy_gradient(), expected)


@pytest.mark.parametrize("weight", ["token", "sequence"])
def test_a_band_keeps_what_lies_inside(weight):
    language, band = Language(2, noise=1.0), (0.6, 1.8)
    p, b = language.odds()
    rho = p / b if weight == "token" else (p / b).prod(dim=1, keepdim=True).expand_as(p)
    kept = (rho >= band[0]) & (rho <= band[1])
    assert kept.any()
    assert not kept.all()
    scores = language.scores(language.p)
    expected = torch.einsum("s,st,stp->p", b.prod(dim=1) * language.rewards, rho * kept, scores)
    same(language.expectation(language.samples(CorrectionSettings(weight=weight, band=band))), expected)


@pytest.mark.parametrize(("reject", "low", "high"), [("geometric", 0.8, 1.3), ("k2", 0.0, 0.1), ("k3", 0.0, 0.1)])
def test_rejection_is_the_sum_over_kept_sequences(reject, low, high):
    language = Language(2)
    p, b = language.odds()
    kept = []
    for row in (p / b).tolist():
        logs = [math.log(rho) for rho in row]
        value = {
            "geometric": math.exp(sum(logs) / 2),
            "k2": sum(x * x / 2 for x in logs) / 2,
            "k3": sum(rho - 1 - math.log(rho) for rho in row) / 2,
        }[reject]
        kept.append(low <= value <= high)
    assert any(kept)
    assert not all(kept)
    odds = b.prod(dim=1) * language.rewards * torch.tensor(kept)
    expected = torch.einsum("s,st,stp->p", odds, (p / b).clamp(max=2), language.scores(language.p))
    correction = token(2.0, reject=reject, reject_low=low, reject_high=high)
    same(language.expectation(language.samples(correction)), expected)


# --- the adaptive clip ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("length", [1, 2, 3])
def test_acr_is_tis_bit_for_bit_at_the_proximal_policy(length):
    language = Language(length)
    assert torch.equal(language.samples(token(1.1, adaptive_clip=True)), language.samples(token(1.1)))


@pytest.mark.parametrize("length", [1, 2, 3])
def test_acr_adds_the_gradient_of_the_tokens_it_admits_and_nothing_else(length):
    language, cap, high = Language(length, noise=1.5), 0.9, 0.05
    clip = (0.2, high)
    tis = language.samples(token(cap), theta=language.moved, clip=clip)
    acr = language.samples(token(cap, adaptive_clip=True), theta=language.moved, clip=clip)
    p, b = language.odds()
    rho, ratio = p / b, language.logprobs(language.moved).exp() / p
    admitted = (language.rewards > 0)[:, None] & (rho > cap) & (ratio > 1 + high) & (ratio < (1 + high) * rho / cap)
    assert admitted.any()
    extra = cap * language.rewards[:, None] * ratio * admitted
    same(acr - tis, torch.einsum("st,stp->sp", extra, language.scores(language.moved)))
    untouched = ~admitted.any(dim=1)
    assert untouched.any()
    assert torch.equal(acr[untouched], tis[untouched])


def test_the_weight_is_p_over_the_truncated_behavior_and_the_bound_is_divided_by_r():
    generator = torch.Generator().manual_seed(0)
    p, b = (torch.rand(64, 8, generator=generator, dtype=torch.float64) + 1e-3 for _ in range(2))
    for cap in (1.0, 2.0, 8.0):
        corrected = correct((p / b).log(), torch.ones(64, 8, dtype=torch.bool), token(cap, adaptive_clip=True))
        truncated = torch.maximum(b, p / cap)
        torch.testing.assert_close(corrected.weight_BT, p / truncated, rtol=1e-13, atol=0)
        torch.testing.assert_close(corrected.widening_BT, truncated / b, rtol=1e-13, atol=0)
        assert (corrected.widening_BT[p / b <= cap] == 1).all()


def test_weights_and_bounds_are_constants():
    leaf = torch.tensor([[0.5, 2.0]], requires_grad=True)
    corrected = correct(leaf, torch.ones(1, 2, dtype=torch.bool), token(2.0, adaptive_clip=True), 0.5)
    assert not corrected.weight_BT.requires_grad
    assert not corrected.widening_BT.requires_grad
    # and where b and p hang on theta's own graph, only R differentiates
    theta = torch.tensor([[-1.0]], dtype=torch.float64, requires_grad=True)
    settings = ObjectiveSettings(correction=token(8.0, adaptive_clip=True), clip_low=0.2, clip_high=0.2)
    mask, advantage = torch.ones(1, 1, dtype=torch.bool), torch.ones(1, dtype=torch.float64)
    loss, _ = objective(theta, 1.0 * theta, theta - 0.5, advantage, mask, ONE, settings)
    loss.backward()
    assert theta.grad.item() == pytest.approx(-math.exp(0.5), rel=1e-14)


@pytest.mark.parametrize("size", [1.0, 3.0, 8.0, 15.0])
def test_negative_advantages_are_unbounded_unless_clipped_twice(size):
    """rho = e > C = 2, A = -1 and R = e^size."""
    found = {}
    for name, adaptive, dual in (("tis", False, None), ("acr", True, None), ("tis2", False, 3.0), ("acr2", True, 3.0)):
        theta = torch.tensor([[size]], dtype=torch.float64, requires_grad=True)
        settings = ObjectiveSettings(
            correction=token(2.0, adaptive_clip=adaptive), clip_low=0.2, clip_high=0.2, dual_clip=dual
        )
        zero = torch.zeros(1, 1, dtype=torch.float64)
        loss, _ = objective(theta, zero, zero - 1, -torch.ones(1), torch.ones(1, 1, dtype=torch.bool), ONE, settings)
        loss.backward()
        found[name] = (loss.item(), theta.grad.item())
    assert found["tis"] == found["acr"]
    assert found["tis"] == pytest.approx((2 * math.exp(size), 2 * math.exp(size)), rel=1e-14)
    assert found["tis2"] == found["acr2"]
    bounded = math.exp(size) > 3
    assert found["tis2"] == pytest.approx((6.0, 0.0) if bounded else found["tis"])


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_log_ratios_are_bounded_at_20_in_float32_or_better(dtype):
    high = torch.tensor([[0.0, 30.0, 0.0, -0.1]], dtype=dtype)
    low = torch.tensor([[30.0, 0.0, 5.0, -20.05]], dtype=dtype)
    mask = torch.tensor([[True, True, False, True]])
    found = log_ratio(high, low, mask)
    assert found.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
    assert found[0, :3].tolist() == [-20.0, 20.0, 0.0]
    # the difference is taken after the conversion: no rounding to the inputs' own dtype
    assert found[0, 3].item() == (high[0, 3].to(found.dtype) - low[0, 3].to(found.dtype)).item()
