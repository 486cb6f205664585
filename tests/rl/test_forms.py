"""Every form, correction and mean: values token by token in plain Python, gradients in closed form, and no nan."""

import dataclasses
import itertools
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from qurl_ray.rl.corrections import CorrectionSettings
from qurl_ray.rl.objective import Denominators, ObjectiveSettings, objective
from qurl_ray.rl.ratios import kl_estimate
from qurl_ray.rl.reduce import merge
from qurl_ray.rl.surrogate import cispo, gspo, ppo
from qurl_ray.tables import OBJECTIVES

CORRECTIONS = {
    "ignore": CorrectionSettings(),
    "naive": CorrectionSettings(ratio="behavior"),
    "decoupled": CorrectionSettings(weight="token"),
    "tis": CorrectionSettings(weight="token", cap=1.5),
    "acr": CorrectionSettings(weight="token", cap=1.2, adaptive_clip=True),
    "mis": CorrectionSettings(weight="token", band=(0.5, 2.0)),
    "sequence": CorrectionSettings(weight="sequence", cap=2.0, veto=0.05),
    "geometric": CorrectionSettings(weight="geometric", reject="geometric", reject_low=0.5, reject_high=2.0),
    "k3": CorrectionSettings(weight="token", cap=2.0, reject="k3", reject_high=0.5),
}
FORMS = {"ppo": ppo, "gspo": gspo, "cispo": cispo}
MEANS = ("token", "sequence", "fixed")
every_form = pytest.mark.parametrize("form", FORMS)
every_correction = pytest.mark.parametrize("name", CORRECTIONS)


def batch(rows: int, width: int, seed: int, spread: float = 0.5):
    """theta, p, b (log-probs), A per token, mask; float64. The first row is full, the second (if any) has no token."""
    generator = torch.Generator().manual_seed(seed)
    normal = lambda: torch.randn(rows, width, generator=generator, dtype=torch.float64)  # noqa: E731
    p = -0.5 - normal().abs()
    lengths = torch.randint(0, width + 1, (rows, 1), generator=generator)
    lengths[0] = width
    lengths[1:2] = 0
    return p + spread * normal(), p, p + spread * normal(), normal(), torch.arange(width)[None] < lengths


def by_hand(theta, p, b, advantages, mask, denominators, s: ObjectiveSettings, reference=None, entropy=None) -> float:
    """The loss, from the definitions; `mix` of AIS apart."""
    total, c = 0.0, s.correction
    for i, keep in enumerate(mask.tolist()):
        tokens = [t for t, kept in enumerate(keep) if kept]
        if not tokens:
            continue
        n, log_rho = len(tokens), {t: (p[i, t] - b[i, t]).item() for t in tokens}
        log_r = {t: (theta[i, t] - (b if c.ratio == "behavior" else p)[i, t]).item() for t in tokens}
        k3 = sum(math.exp(x) - 1 - x for x in log_rho.values()) / n
        geometric = math.exp(sum(log_rho.values()) / n)
        value = {"none": None, "geometric": geometric, "k3": k3}[c.reject]
        rejected = value is not None and not c.reject_low <= value <= c.reject_high
        rejected |= any(math.exp(x) < c.veto for x in log_rho.values())
        terms = []
        for t in tokens:
            a, rho = advantages[i, t].item(), math.exp(log_rho[t])
            raw = {"none": 1.0, "token": rho, "geometric": geometric, "sequence": math.exp(sum(log_rho.values()))}
            w = min(raw[c.weight], c.cap)
            if rejected or (c.band and not c.band[0] <= raw[c.weight] <= c.band[1]):
                w = 0.0
            low, high = 1 - s.clip_low, (1 + s.clip_high) * (max(1, rho / c.cap) if c.adaptive_clip else 1)
            ratio = math.exp(sum(log_r.values()) / n if s.form is gspo else log_r[t])
            clipped = min(max(ratio, low), high)
            if s.form is cispo:
                f = clipped * a * log_r[t]
            else:
                f = min(ratio * a, clipped * a)
                if s.dual_clip and a < 0:
                    f = max(f, s.dual_clip * a)
            f *= w
            if reference is not None:
                d = (theta[i, t] - reference[i, t]).item()
                f -= s.kl_coef * {"k1": d, "k2": d * d / 2, "k3": math.exp(-d) - 1 + d}[s.kl_estimator]
            if entropy is not None:
                f += s.entropy_coef * entropy[i, t].item()
            terms.append(f)
        total += sum(terms) / (n if s.loss_mean == "sequence" else 1)
    sequences = denominators.sequences
    return (
        -total / {"token": denominators.tokens, "sequence": sequences, "fixed": sequences * s.fixed_length}[s.loss_mean]
    )


def options(form="ppo", correction="ignore", **more) -> ObjectiveSettings:
    defaults = {"clip_low": 0.2, "clip_high": 0.28, "dual_clip": None if form == "cispo" else 2.0, "fixed_length": 7}
    return ObjectiveSettings(form=FORMS[form], correction=CORRECTIONS[correction], **(defaults | more))


def test_every_objective_that_settings_name_is_tested_here():
    assert {OBJECTIVES.load(name) for name in OBJECTIVES.entries} == set(FORMS.values())


@every_form
@every_correction
@pytest.mark.parametrize("loss_mean", MEANS)
def test_matches_the_definition(form, name, loss_mean):
    for seed in range(6):
        rows = batch(8, 5, seed)
        extra = {"reference": rows[1] - 0.3, "entropy": rows[3].abs()}
        s = options(form, name, loss_mean=loss_mean, kl_coef=0.1, kl_estimator=f"k{seed % 3 + 1}", entropy_coef=0.01)
        counts = Denominators(tokens=41, sequences=9)
        named = {f"{key}_BT": value for key, value in extra.items()}
        loss, _ = objective(*rows, counts, s, **named)
        assert loss.item() == pytest.approx(by_hand(*rows, counts, s, **extra), rel=1e-11, abs=1e-12)


@settings(max_examples=120, deadline=None)
@given(
    form=st.sampled_from(list(FORMS)),
    name=st.sampled_from(list(CORRECTIONS)),
    loss_mean=st.sampled_from(MEANS),
    seed=st.integers(0, 10_000),
    cuts=st.sets(st.integers(1, 6), max_size=3),
    strength=st.sampled_from([1.0, 0.4]),
)
def test_micro_batches_add_up(form, name, loss_mean, seed, cuts, strength):
    rows, s = batch(7, 4, seed), options(form, name, loss_mean=loss_mean, kl_coef=0.2, entropy_coef=0.1)
    counts = Denominators(tokens=19, sequences=7)

    def run(start, stop):
        part = [x[start:stop] for x in rows]
        theta = part[0].clone().requires_grad_()
        loss, sums = objective(theta, *part[1:], counts, s, reference_BT=part[1], entropy_BT=-theta, strength=strength)
        return loss.item(), torch.autograd.grad(loss, theta)[0], {k: float(v) for k, v in sums.items()}

    whole, edges = run(0, 7), [0, *sorted(cuts), 7]
    parts = [run(*edge) for edge in itertools.pairwise(edges)]
    assert sum(part[0] for part in parts) == pytest.approx(whole[0], rel=1e-12, abs=1e-13)
    torch.testing.assert_close(torch.cat([part[1] for part in parts]), whole[1], rtol=1e-12, atol=1e-14)
    assert merge(part[2] for part in parts) == pytest.approx(whole[2], rel=1e-9, abs=1e-12)


def test_one_advantage_per_sequence_is_that_of_each_token():
    theta, p, b, a, mask = batch(6, 4, 3)
    counts = Denominators(tokens=9, sequences=6)
    for form in FORMS:
        found = [
            objective(theta, p, b, x, mask, counts, options(form, "tis"))[0] for x in (a[:, 0], a[:, :1].expand(6, 4))
        ]
        assert found[0] == found[1]
        assert objective(theta, p, b, a, mask, counts, options(form, "tis"))[0] != found[0]


# --- gradients --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("form", ["ppo", "gspo"])
@every_correction
def test_gradients_are_those_of_the_value(form, name):
    """For gspo where a sequence has one weight and one advantage."""
    if form == "gspo" and CORRECTIONS[name].weight == "token":
        return
    *rows, mask = batch(5, 4, 11)
    theta, advantages = rows[0].clone().requires_grad_(), rows[3] if form == "ppo" else rows[3][:, 0]
    for estimator, loss_mean in zip(("k1", "k2", "k3"), MEANS, strict=True):
        s = options(form, name, loss_mean=loss_mean, kl_coef=0.3, kl_estimator=estimator, entropy_coef=0.2)

        def loss(x, entropy, s=s):
            extra = {"reference_BT": rows[1] - 0.4, "entropy_BT": entropy}
            return objective(x, *rows[1:3], advantages, mask, Denominators(tokens=11, sequences=5), s, **extra)[0]

        assert torch.autograd.gradcheck(loss, (theta, rows[3].clone().requires_grad_()), atol=1e-8)


def weights_of(p, b, a, mask, s: ObjectiveSettings) -> torch.Tensor:
    """From ppo at theta = p without clips: its gradient is -w·R·A, where R is 1 (naive: p/b)."""
    free = dataclasses.replace(s, form=ppo, clip_low=1.0, clip_high=1e9, dual_clip=None)
    leaf = p.clone().requires_grad_()
    objective(leaf, p, b, a, mask, Denominators(tokens=1, sequences=1), free)[0].backward()
    return -leaf.grad / a / ((p - b).exp() if s.correction.ratio == "behavior" else 1)


@pytest.mark.parametrize("form", ["gspo", "cispo"])
@every_correction
def test_gradients_in_closed_form(form, name):
    """cispo: w · clip(R) · A. gspo: w · s · A of each token, where s is the sequence's ratio and the clip lets it."""
    theta, p, b, a, mask = batch(40, 5, 4, spread=0.8)
    s = options(form, name, clip_low=0.3, clip_high=0.4)
    leaf = theta.clone().requires_grad_()
    objective(leaf, p, b, a, mask, Denominators(tokens=1, sequences=1), s)[0].backward()
    moved = theta - (b if name == "naive" else p)
    if form == "gspo":
        means = [sum(row[keep].tolist()) / max(1, int(keep.sum())) for row, keep in zip(moved, mask, strict=True)]
        moved = torch.tensor(means, dtype=torch.float64)[:, None].expand_as(theta)
    ratio, lower = moved.exp(), 0.7
    upper = 1.4 * ((p - b).exp() / 1.2).clamp(min=1) if name == "acr" else torch.full_like(p, 1.4)
    if form == "cispo":
        factor = torch.minimum(ratio.clamp(min=lower), upper)
    else:
        factor = torch.where(((a > 0) & (ratio > upper)) | ((a < 0) & ((ratio < lower) | (ratio > 2))), 0.0, ratio)
    expected = torch.where(mask, -weights_of(p, b, a, mask, s) * factor * a, 0.0)
    torch.testing.assert_close(leaf.grad, expected, rtol=1e-11, atol=1e-14)
    assert (ratio[mask] > 1.4).any()
    assert (ratio[mask] < 0.7).any()


def test_cispo_has_no_dead_tokens():
    theta, p, b, a, mask = batch(8, 5, 4, spread=2.0)
    leaf = theta.clone().requires_grad_()
    objective(leaf, p, b, a, mask, Denominators(tokens=1, sequences=1), options("cispo"))[0].backward()
    assert (leaf.grad[mask] != 0).all()


@pytest.mark.parametrize("loss_mean", MEANS)
def test_gspo_s_gradient_is_the_sequence_s_ratio_shared_by_its_tokens(loss_mean):
    theta, p, b, a, mask = batch(6, 5, 2, spread=0.05)
    a = a[:, 0]
    s = options("gspo", loss_mean=loss_mean, clip_low=0.9, clip_high=9.0, dual_clip=None)
    leaf = theta.clone().requires_grad_()
    objective(leaf, p, b, a, mask, Denominators(tokens=20, sequences=6), s)[0].backward()
    for i in range(6):
        n = int(mask[i].sum())
        if n == 0:
            assert not leaf.grad[i].any()
            continue
        ratio = math.exp(sum((theta - p)[i, :n].tolist()) / n)
        # (1/|y|) s A per token of a sequence's term; the term stands n times in the sum over tokens
        slope = {"token": n / 20, "sequence": 1 / 6, "fixed": n / (6 * 7)}[loss_mean] * ratio * a[i].item() / n
        assert leaf.grad[i].tolist() == pytest.approx([-slope] * n + [0.0] * (5 - n), rel=1e-12)


@pytest.mark.parametrize("advantage", [-1.5, 1.5])
@pytest.mark.parametrize("shift", [-0.02, -4e-4, -2e-4, 0.0, 3e-4, 5e-4, 8e-4, 0.02])
def test_tbpo_teaches_negative_answers_only_inside_its_band(advantage, shift):
    """gspo with εl = 3e-4, εh = 4e-4 and c = 1 + 7e-4: outside of [1-εl, c] a bad answer teaches nothing."""
    p = torch.tensor([[-1.0, -2.0, -0.5]], dtype=torch.float64)
    theta = (p + shift + torch.tensor([0.01, -0.02, 0.01])).requires_grad_()
    s = options("gspo", clip_low=3e-4, clip_high=4e-4, dual_clip=1 + 7e-4)
    a, mask = torch.tensor([advantage], dtype=torch.float64), torch.ones(1, 3, dtype=torch.bool)
    loss, sums = objective(theta, p, p, a, mask, Denominators(tokens=3, sequences=1), s)
    loss.backward()
    ratio = math.exp(shift)
    taught = ratio <= 1 + 4e-4 if advantage > 0 else 1 - 3e-4 <= ratio <= 1 + 7e-4
    bounds = (0.0, 1 + 4e-4) if advantage > 0 else (1 - 3e-4, 1 + 7e-4)
    assert loss.item() == pytest.approx(-advantage * min(max(ratio, bounds[0]), bounds[1]), rel=1e-9)
    expected = -advantage * ratio / 3 if taught else 0.0
    assert theta.grad[0].tolist() == pytest.approx([expected] * 3, rel=1e-9)
    assert int(sums["dual_clipped"]) == (3 if advantage < 0 and ratio > 1 + 7e-4 else 0)


def test_the_naive_ratio_does_not_look_at_the_proximal_policy():
    theta, p, b, a, mask = batch(6, 4, 8)
    counts = Denominators(tokens=9, sequences=6)
    for form in FORMS:
        one, other = (objective(theta, x, b, a, mask, counts, options(form, "naive"))[0] for x in (p, p - 1))
        assert one == other
        assert one == objective(theta, b, p, a, mask, counts, options(form, "ignore"))[0]


# --- divergence and entropy --------------------------------------------------------------------------------------


def three_tokens(estimator: str):
    """(expected value, gradient of the expected loss with the draws held, KL, its gradient, that of KL(ref‖theta))."""
    reference = torch.tensor([0.5, 0.2, 0.3], dtype=torch.float64).log()
    logits = torch.tensor([0.3, -0.4, 0.9], dtype=torch.float64, requires_grad=True)
    theta = logits.log_softmax(dim=0)
    odds = theta.exp()
    s = ObjectiveSettings(clip_low=0.2, clip_high=0.2, kl_coef=1.0, kl_estimator=estimator)
    zero, mask, one = torch.zeros(1), torch.ones(1, 1, dtype=torch.bool), Denominators(tokens=1, sequences=1)
    loss = 0
    for token in range(3):
        x = theta[token].view(1, 1)
        term, sums = objective(x, x, x, zero, mask, one, s, reference_BT=reference[token].view(1, 1))
        assert sums["kl_reference"].item() == pytest.approx(term.item(), rel=1e-12)
        loss = loss + odds[token].detach() * term
    reverse, forward = (odds * (theta - reference)).sum(), (reference.exp() * (reference - theta)).sum()
    grads = [torch.autograd.grad(x, logits, retain_graph=True)[0] for x in (loss, reverse, forward)]
    return loss.item(), grads[0], reverse.item(), grads[1], grads[2]


@pytest.mark.parametrize(("estimator", "unbiased"), [("k1", True), ("k2", False), ("k3", True)])
def test_values_of_the_kl_estimates(estimator, unbiased):
    value, _, exact, _, _ = three_tokens(estimator)
    assert (value == pytest.approx(exact, rel=1e-12)) == unbiased
    d = torch.tensor([-0.7, 0.0, 1.3], dtype=torch.float64)
    expected = {"k1": d, "k2": d * d / 2, "k3": torch.expm1(-d) + d}[estimator]
    torch.testing.assert_close(kl_estimate(d, estimator), expected)


def test_gradients_of_the_kl_estimates():
    _, k1, _, reverse, forward = three_tokens("k1")
    assert reverse.norm() > 0.1
    assert k1.norm() < 1e-14
    torch.testing.assert_close(three_tokens("k2")[1], reverse, rtol=1e-12, atol=1e-14)
    k3 = three_tokens("k3")[1]
    assert (k3 - reverse).norm() > 0.01
    torch.testing.assert_close(k3, forward, rtol=1e-12, atol=1e-14)


def test_corrections_weigh_neither_divergence_nor_entropy():
    theta, p, b, a, mask = batch(6, 4, 1)
    counts, extra = Denominators(tokens=9, sequences=6), {"reference_BT": p - 1, "entropy_BT": a.abs()}
    for name in CORRECTIONS:
        s = options("ppo", name, kl_coef=0.5, entropy_coef=0.25)
        plain = dataclasses.replace(s, kl_coef=0.0, entropy_coef=0.0)
        losses = [objective(theta, p, b, a, mask, counts, x, **extra)[0] for x in (s, plain)]
        d = (theta - p + 1)[mask]
        expected = (0.5 * ((-d).exp() - 1 + d) - 0.25 * a.abs()[mask]).sum() / 9
        torch.testing.assert_close(losses[0] - losses[1], expected, rtol=1e-11, atol=1e-12)


# --- robustness -------------------------------------------------------------------------------------------------

HOSTILE = [math.nan, math.inf, -math.inf, 1e38]


def hostile(rows: int, width: int, seed: int, dtype: torch.dtype):
    """As `batch`, with poison where masked, and rho and R down to 0 and up to infinity where not."""
    *tensors, mask = batch(rows, width, seed, spread=1.0)
    generator = torch.Generator().manual_seed(seed)
    kind = torch.randint(0, 24, (rows, width), generator=generator)
    far = -1e4 if dtype == torch.float16 else -1e30
    for which, value in enumerate((far, -math.inf, 3.0)):
        for policy in range(3):
            # one policy at a time: inf - inf is not a ratio
            tensors[policy] = torch.where(kind == 3 * which + policy, value, tensors[policy])
    poison = torch.tensor(HOSTILE, dtype=torch.float64)[torch.randint(0, 4, (rows, width), generator=generator)]
    return [torch.where(mask, x, poison).to(dtype) for x in tensors], mask


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
@every_form
def test_hostile_sequences_give_numbers(form, dtype):
    """12 tests of 27 settings and 32 sequences: 10 368 in all."""
    for (name, loss_mean), seed in zip(itertools.product(CORRECTIONS, MEANS), range(27), strict=True):
        (theta, p, b, a), mask = hostile(32, 6, seed, dtype)
        leaf, entropy = theta.clone().requires_grad_(), a.clone().requires_grad_()
        s = options(form, name, loss_mean=loss_mean, kl_coef=0.1, kl_estimator=f"k{seed % 3 + 1}", entropy_coef=0.1)
        counts = Denominators(tokens=max(1, int(mask.sum())), sequences=32)
        strength = 0.5 if seed % 2 else 1.0
        loss, sums = objective(leaf, p, b, a, mask, counts, s, reference_BT=p, entropy_BT=entropy, strength=strength)
        loss.backward()
        assert loss.isfinite()
        for gradient in (leaf.grad, entropy.grad):
            # e^20 · e^20 · A is beyond float16, whose gradients may be inf; they are never nan
            assert not gradient.isnan().any()
            assert dtype == torch.float16 or gradient.isfinite().all()
            assert not gradient[~mask].any()
        # see the next test for the one that is left out
        assert all(value.isfinite() for key, value in sums.items() if key != "perplexity_gap"), (name, sums)


@pytest.mark.parametrize("impossible", [-math.inf, -1e4])
def test_the_perplexity_gap_of_an_impossible_token_is_finite(impossible):
    p, b = torch.tensor([[impossible, -1.0], [-1.0, -1.0]]), torch.tensor([[-1.0, -1.0], [-1.0, -1.0]])
    mask, counts = torch.ones(2, 2, dtype=torch.bool), Denominators(tokens=4, sequences=2)
    _, sums = objective(b, p, b, torch.ones(2), mask, counts, options())
    assert sums["perplexity_gap"].isfinite()


@every_form
@every_correction
def test_what_is_masked_never_leaks(form, name):
    theta, p, b, a, mask = batch(6, 5, 9)
    s, counts = options(form, name, kl_coef=0.1, entropy_coef=0.1), Denominators(tokens=15, sequences=6)
    found = []
    for poison in (0.0, *HOSTILE):
        x = [torch.where(mask, y, poison) for y in (theta, p, b, a)]
        leaf = x[0].clone().requires_grad_()
        loss, sums = objective(leaf, *x[1:], mask, counts, s, reference_BT=x[1], entropy_BT=x[3])
        loss.backward()
        found.append([loss.detach(), leaf.grad, *sums.values()])
    for other in found[1:]:
        assert all(torch.equal(one, two) for one, two in zip(found[0], other, strict=True))


@pytest.mark.parametrize("shape", [(0, 0), (0, 3), (2, 0), (2, 3)])
@every_form
@every_correction
def test_nothing_to_learn_from(form, name, shape):
    x = torch.full(shape, math.nan, requires_grad=True)
    mask, counts = torch.zeros(shape, dtype=torch.bool), Denominators(tokens=1, sequences=1)
    s = options(form, name, kl_coef=0.1, entropy_coef=0.1)
    loss, sums = objective(x, x, x, torch.zeros(shape[0]), mask, counts, s, reference_BT=x, entropy_BT=x)
    loss.backward()
    assert loss == 0
    assert not x.grad.any()
    assert not any(value.item() for value in sums.values())
