"""The objective against its formulas written out token by token in float64, and the identities that follow."""

import math
from dataclasses import replace

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from qurl_ray.rl.corrections import CorrectionSettings
from qurl_ray.rl.diagnostics import policy_metrics
from qurl_ray.rl.objective import Denominators, ObjectiveSettings, objective
from qurl_ray.rl.reduce import merge

logprob = st.floats(-6, 0)
token = st.tuples(logprob, logprob, logprob, st.floats(-3, 3), st.booleans())


def settings_of(correction="acr", *, cap=2.0, low=0.2, high=0.28, dual=None, mean="token") -> ObjectiveSettings:
    corrections = {
        "acr": CorrectionSettings(weight="token", cap=cap, adaptive_clip=True),
        "tis": CorrectionSettings(weight="token", cap=cap),
        "ignore": CorrectionSettings(),
    }
    return ObjectiveSettings(
        correction=corrections[correction], clip_low=low, clip_high=high, dual_clip=dual, loss_mean=mean
    )


def scalar(theta, prox, behavior, advantage, s: ObjectiveSettings) -> float:
    """One token's term, read off the papers: b_trunc = max(b, p/C) for ACR, min(p/b, C) for TIS."""
    p, b, ratio = math.exp(prox), math.exp(behavior), math.exp(theta - prox)
    upper, weight = 1 + s.clip_high, 1.0
    if s.correction.weight == "token":
        weight = min(p / b, s.correction.cap)
    if s.correction.adaptive_clip:
        truncated = max(b, p / s.correction.cap)
        weight, upper = p / truncated, upper / (b / truncated)
    value = min(ratio * advantage, min(max(ratio, 1 - s.clip_low), upper) * advantage)
    if s.dual_clip is not None and advantage < 0:
        value = max(value, s.dual_clip * advantage)
    return weight * value


def rows(tokens):
    """One sequence per token: [B, 1] tensors in float64."""
    theta, prox, behavior, advantage, mask = zip(*tokens, strict=True)
    column = lambda values: torch.tensor(values, dtype=torch.float64)[:, None]  # noqa: E731
    return column(theta), column(prox), column(behavior), column(advantage)[:, 0], torch.tensor(mask)[:, None]


@pytest.mark.parametrize("dual", [None, 3.0])
@pytest.mark.parametrize("correction", ["acr", "tis", "ignore"])
@settings(max_examples=150, deadline=None)
@given(tokens=st.lists(token, min_size=1, max_size=12), cap=st.sampled_from([1.0, 2.0, 8.0]))
def test_matches_the_scalar_formula(correction, dual, tokens, cap):
    s = settings_of(correction, cap=cap, dual=dual)
    expected = -math.fsum(scalar(*t[:4], s) for t in tokens if t[4]) / 7
    loss, _ = objective(*rows(tokens), Denominators(tokens=7, sequences=1), s)
    torch.testing.assert_close(loss.item(), expected, rtol=1e-9, atol=1e-9)


@settings(max_examples=60, deadline=None)
@given(
    tokens=st.lists(token, min_size=2, max_size=12), cut=st.integers(1, 11), mean=st.sampled_from(["token", "sequence"])
)
def test_micro_batches_add_up_to_the_batch(tokens, cut, mean):
    cut = min(cut, len(tokens) - 1)
    denominators, s = Denominators(tokens=len(tokens), sequences=len(tokens)), settings_of(mean=mean)
    whole, whole_sums = objective(*rows(tokens), denominators, s)
    parts = [objective(*rows(part), denominators, s) for part in (tokens[:cut], tokens[cut:])]
    torch.testing.assert_close(sum(loss for loss, _ in parts), whole, rtol=1e-12, atol=1e-12)
    merged = merge({k: float(v) for k, v in sums.items()} for _, sums in parts)
    assert merged == pytest.approx({k: float(v) for k, v in whole_sums.items()}, rel=1e-9)


def test_sequence_mean_weighs_sequences_and_not_tokens():
    mask = torch.tensor([[True, False, False, False], [True, True, True, True]])
    zeros = torch.zeros(2, 4, dtype=torch.float64)
    advantages = torch.tensor([1.0, -1.0], dtype=torch.float64)
    run = lambda mean: objective(  # noqa: E731
        zeros, zeros, zeros, advantages, mask, Denominators(tokens=5, sequences=2), settings_of(mean=mean)
    )[0].item()
    assert run("sequence") == pytest.approx(-(1 - 1) / 2)
    assert run("token") == pytest.approx(-(1 - 4) / 5)


# --- the six consequences of ACR --------------------------------------------------------------------------------


def gradient(theta, prox, behavior, advantage, s):
    logprobs = torch.tensor([[theta]], dtype=torch.float64, requires_grad=True)
    other = [torch.tensor([[x]], dtype=torch.float64) for x in (prox, behavior)]
    adv = torch.tensor([advantage], dtype=torch.float64)
    loss, sums = objective(
        logprobs, *other, adv, torch.ones(1, 1, dtype=torch.bool), Denominators(tokens=1, sequences=1), s
    )
    loss.backward()
    return loss.item(), logprobs.grad.item(), sums


@settings(max_examples=150, deadline=None)
@given(t=token, cap=st.sampled_from([1.0, 2.0, 8.0]))
def test_acr_is_tis_where_rho_is_below_the_cap(t, cap):
    theta, prox, behavior, advantage, _ = t
    assume(math.exp(prox - behavior) <= cap or advantage < 0)
    acr = gradient(theta, prox, behavior, advantage, settings_of("acr", cap=cap))
    tis = gradient(theta, prox, behavior, advantage, settings_of("tis", cap=cap))
    assert acr[:2] == tis[:2]


@settings(max_examples=50, deadline=None)
@given(prox=logprob, behavior=logprob, advantage=st.floats(-3, 3))
def test_acr_is_tis_in_the_first_update(prox, behavior, advantage):
    acr = gradient(prox, prox, behavior, advantage, settings_of("acr"))
    assert acr[:2] == gradient(prox, prox, behavior, advantage, settings_of("tis"))[:2]


def test_acr_lets_through_what_tis_clips_away():
    # rho = 4, C = 2: the upper bound doubles to 2.56. R = 2 lies between 1.28 and 2.56.
    prox, behavior, theta = math.log(0.4), math.log(0.1), math.log(0.8)
    _, tis, _ = gradient(theta, prox, behavior, 1.5, settings_of("tis"))
    _, acr, sums = gradient(theta, prox, behavior, 1.5, settings_of("acr"))
    assert tis == 0
    assert acr == pytest.approx(-2 * 1.5 * 2.0)  # -C · A · R, the gradient of -C·R·A with respect to log theta
    assert int(sums["acr_active"]) == 1
    assert int(gradient(math.log(0.4), prox, behavior, 1.5, settings_of("acr"))[2]["acr_active"]) == 0


def test_rho_weight_and_bound_carry_no_gradient():
    # With log theta as the only leaf, the gradient of the loss is exactly -weight·R·A.
    _, found, _ = gradient(-1.0, -1.1, -1.5, 0.7, settings_of("acr", cap=8.0))
    assert found == pytest.approx(-math.exp(0.4) * math.exp(0.1) * 0.7, rel=1e-12)
    prox = torch.tensor([[-1.1]], requires_grad=True)
    behavior = torch.tensor([[-1.5]], requires_grad=True)
    theta = torch.tensor([[-1.0]], requires_grad=True)
    mask = torch.ones(1, 1, dtype=torch.bool)
    loss, _ = objective(
        theta, prox, behavior, torch.tensor([0.7]), mask, Denominators(tokens=1, sequences=1), settings_of("acr")
    )
    loss.backward()
    assert prox.grad is None
    assert behavior.grad is None


def test_dual_clip_bounds_negative_advantages():
    loss, slope, sums = gradient(-0.1, -3.1, -3.1, -1.0, settings_of("tis", dual=3.0))
    assert loss == pytest.approx(3.0)
    assert slope == 0
    assert int(sums["dual_clipped"]) == 1
    assert gradient(-0.1, -3.1, -3.1, -1.0, settings_of("tis"))[0] == pytest.approx(math.exp(3))


def test_masked_tokens_may_hold_nan_and_still_give_a_finite_gradient():
    theta = torch.tensor([[-1.0, math.nan]], requires_grad=True)
    other = torch.tensor([[-1.2, math.nan]])
    mask = torch.tensor([[True, False]])
    loss, sums = objective(
        theta, other, other, torch.tensor([1.0]), mask, Denominators(tokens=1, sequences=1), settings_of()
    )
    loss.backward()
    assert loss.isfinite()
    assert theta.grad.isfinite().all()
    assert theta.grad[0, 1] == 0
    assert int(sums["tokens"]) == 1


def test_infinite_ratios_are_bounded():
    theta = torch.tensor([[-200.0]], requires_grad=True)
    loss, _ = objective(
        theta,
        torch.tensor([[0.0]]),
        torch.tensor([[-300.0]]),
        torch.tensor([1.0]),
        torch.tensor([[True]]),
        Denominators(tokens=1, sequences=1),
        settings_of(),
    )
    assert loss.isfinite()


# --- metrics ----------------------------------------------------------------------------------------------------


def test_metrics_do_not_depend_on_how_tokens_are_split_into_micro_batches():
    tokens = [(-1.0, -1.0, -1.0 + 0.3 * i, 1.0, True) for i in range(4)]
    run = lambda part: {  # noqa: E731
        k: float(v) for k, v in objective(*rows(part), Denominators(tokens=4, sequences=4), settings_of())[1].items()
    }
    whole = policy_metrics(run(tokens))
    assert policy_metrics(merge([run(tokens[:1]), run(tokens[1:])])) == pytest.approx(whole)
    rho = [math.exp(-0.3 * i) for i in range(4)]
    assert whole["mismatch/ess"] == pytest.approx(sum(rho) ** 2 / (4 * sum(r * r for r in rho)))
    assert whole["mismatch/max_rho"] == pytest.approx(1.0)
    assert whole["mismatch/kl"] == pytest.approx(sum(r - 1 - math.log(r) for r in rho) / 4)


def test_k3_estimates_the_divergence_of_behavior_from_prox():
    behavior, prox = torch.tensor([0.5, 0.3, 0.2]), torch.tensor([0.4, 0.4, 0.2])
    draws = torch.multinomial(behavior, 200_000, replacement=True, generator=torch.Generator().manual_seed(0))
    columns = prox.log()[draws][:, None], behavior.log()[draws][:, None]
    mask, zeros = torch.ones(len(draws), 1, dtype=torch.bool), torch.zeros(len(draws))
    _, sums = objective(columns[0], *columns, zeros, mask, Denominators(tokens=1, sequences=1), settings_of())
    exact = (behavior * (behavior / prox).log()).sum().item()
    assert policy_metrics({k: float(v) for k, v in sums.items()})["mismatch/kl"] == pytest.approx(exact, rel=0.03)


@pytest.mark.parametrize("asked", ["kl_coef", "entropy_coef"])
def test_a_penalty_without_its_tensor_is_an_error(asked):
    zeros, mask = torch.zeros(1, 1), torch.ones(1, 1, dtype=torch.bool)
    with pytest.raises(ValueError, match=r"needs reference_BT, an entropy bonus entropy_BT"):
        objective(
            zeros,
            zeros,
            zeros,
            zeros[0],
            mask,
            Denominators(tokens=1, sequences=1),
            replace(settings_of(), **{asked: 0.1}),
        )
