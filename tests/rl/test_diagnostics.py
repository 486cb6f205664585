"""Every logged figure against its definition in rl.diagnostics, in plain Python over the tokens of a batch."""

import dataclasses
import itertools
import math

import pytest
import torch

from qurl_ray.rl.corrections import CorrectionSettings
from qurl_ray.rl.diagnostics import policy_metrics
from qurl_ray.rl.objective import Denominators, ObjectiveSettings, objective
from qurl_ray.rl.reduce import as_floats, merge
from qurl_ray.rl.surrogate import cispo, gspo, ppo

CAP, LOW, HIGH, DUAL = 1.3, 0.2, 0.1, 2.5
ACR = CorrectionSettings(
    weight="token", cap=CAP, adaptive_clip=True, reject="k3", reject_high=0.35, veto=0.3, band=(0.4, 2.5)
)
SETTINGS = ObjectiveSettings(correction=ACR, clip_low=LOW, clip_high=HIGH, dual_clip=DUAL)


def batch(seed: int = 0, rows: int = 40, width: int = 6):
    """(theta, p, b, reference, entropy, A, mask): one A per sequence, and a few sequences without tokens."""
    generator = torch.Generator().manual_seed(seed)
    normal = lambda *shape: torch.randn(*shape, generator=generator, dtype=torch.float64)  # noqa: E731
    p = -0.3 - normal(rows, width).abs()
    lengths = torch.randint(0, width + 1, (rows, 1), generator=generator)
    moved = [p + 0.5 * normal(rows, width) for _ in range(3)]
    return moved[0], p, moved[1], moved[2], normal(rows, width).abs(), normal(rows), torch.arange(width) < lengths


def sums_of(rows, settings=SETTINGS) -> dict[str, float]:
    theta, p, b, reference, entropy, advantages, mask = rows
    counts = Denominators(tokens=1, sequences=1)
    extra = {"reference_BT": reference, "entropy_BT": entropy}
    return as_floats(objective(theta, p, b, advantages, mask, counts, settings, **extra)[1])


def expected(rows, *, adaptive=True, naive=False) -> dict[str, float]:
    theta, p, b, reference, entropy, advantages, mask = (x.tolist() for x in rows)
    sequences = [
        [(theta[i][t], p[i][t], b[i][t], reference[i][t], entropy[i][t], advantages[i]) for t in range(len(m)) if m[t]]
        for i, m in enumerate(mask)
        if any(m)
    ]
    m, tokens, dropped, rejected, vetoed, gap = len(sequences), [], 0, 0, 0, 0.0
    for sequence in sequences:
        rhos = [math.exp(p - b) for _, p, b, *_ in sequence]
        length = len(sequence)
        veto = any(rho < ACR.veto for rho in rhos)
        reject = veto or sum(rho - 1 - math.log(rho) for rho in rhos) / length > ACR.reject_high
        out = [reject or not ACR.band[0] <= rho <= ACR.band[1] for rho in rhos]
        vetoed, rejected, dropped = vetoed + veto, rejected + reject, dropped + sum(out)
        gap += math.exp(-sum(x[1] for x in sequence) / length) - math.exp(-sum(x[2] for x in sequence) / length)
        tokens += [(*x, rho, 0.0 if o else min(rho, CAP)) for x, rho, o in zip(sequence, rhos, out, strict=True)]
    n = len(tokens)
    rhos = [x[6] for x in tokens]
    moves = [x[0] - x[1] for x in tokens]
    found = {
        "mismatch/kl": sum(rho - 1 - math.log(rho) for rho in rhos) / n,
        "mismatch/kl_k1": sum(-math.log(rho) for rho in rhos) / n,
        "mismatch/mean_rho": sum(rhos) / n,
        "mismatch/max_rho": max(rhos),
        "mismatch/truncated": sum(rho > CAP for rho in rhos) / n,
        "mismatch/ess": sum(rhos) ** 2 / (n * sum(rho**2 for rho in rhos)),
        "mismatch/weight_ess": sum(x[7] for x in tokens) ** 2 / (n * sum(x[7] ** 2 for x in tokens)),
        "mismatch/chi2": sum(rho**2 for rho in rhos) / n - 1,
        "mismatch/perplexity_gap": gap / m,
        "mismatch/abs_logprob_gap": sum(abs(math.log(rho)) for rho in rhos) / n,
        "mismatch/exp_abs_gap": sum(math.exp(abs(math.log(rho))) for rho in rhos) / n,
        "mismatch/dropped": dropped / n,
        "mismatch/rejected": rejected / m,
        "mismatch/vetoed": vetoed / m,
        "policy/kl": sum(math.exp(x) - 1 - x for x in moves) / n,
        "policy/kl_k1": sum(-x for x in moves) / n,
        "policy/max_ratio": math.exp(max(moves)),
        "policy/entropy": sum(x[4] for x in tokens) / n,
        "policy/kl_reference": sum(math.exp(x[3] - x[0]) - 1 - (x[3] - x[0]) for x in tokens) / n,
    }
    counts = dict.fromkeys(("upper", "lower", "upper_negative", "lower_positive", "dual"), 0)
    active, mass, admitted_mass = 0, 0.0, 0.0
    for theta, p, b, _, _, a, rho, weight in tokens:
        ratio, low, high = math.exp(theta - (b if naive else p)), 1 - LOW, 1 + HIGH
        bound = high * max(1.0, rho / CAP) if adaptive else high
        counts["upper"] += a > 0 and ratio > bound
        counts["lower"] += a < 0 and ratio < low
        counts["upper_negative"] += a < 0 and ratio > bound
        counts["lower_positive"] += a > 0 and ratio < low
        counts["dual"] += a < 0 and ratio > DUAL
        teaches = ratio <= bound if a > 0 else low <= ratio <= DUAL
        slope = weight * ratio * abs(a) if teaches else 0.0
        admitted = a > 0 and high < ratio <= bound and weight > 0
        active, mass, admitted_mass = active + admitted, mass + slope, admitted_mass + admitted * slope
    found |= {f"clip/{name}": count / n for name, count in counts.items()}
    return found | {"acr_active_tokens": active, "clip/admitted_gradient": admitted_mass / mass}


def test_every_figure_is_what_its_definition_says():
    shown = set()
    for seed in range(5):
        rows = batch(seed)
        found = policy_metrics(sums_of(rows))
        assert found == pytest.approx(expected(rows), rel=1e-10)
        shown |= {key for key, value in found.items() if value}
    assert shown == found.keys()  # each was put to the test


def test_without_acr_nothing_is_admitted():
    rows = batch(3)
    tis = dataclasses.replace(SETTINGS, correction=dataclasses.replace(ACR, adaptive_clip=False))
    found = policy_metrics(sums_of(rows, tis))
    assert found == pytest.approx(expected(rows, adaptive=False), rel=1e-10)
    assert found["acr_active_tokens"] == found["clip/admitted_gradient"] == 0
    single = [x.float() if x.is_floating_point() else x for x in rows]
    assert policy_metrics(sums_of(single, tis))["acr_active_tokens"] == 0


def test_naive_ratios_are_clipped_against_the_behavior_and_the_rest_stays():
    rows = batch(4)
    found = policy_metrics(
        sums_of(rows, dataclasses.replace(SETTINGS, correction=CorrectionSettings(ratio="behavior")))
    )
    by_hand = expected(rows, adaptive=False, naive=True)
    undone = {f"mismatch/{name}" for name in ("truncated", "dropped", "rejected", "vetoed", "weight_ess")}
    compared = [key for key in by_hand if key not in undone]
    assert [found[key] for key in compared] == pytest.approx([by_hand[key] for key in compared], rel=1e-10)
    assert found["mismatch/weight_ess"] == 1
    assert not any(found[key] for key in undone - {"mismatch/weight_ess"})


@pytest.mark.parametrize("form", [ppo, gspo, cispo])
def test_the_gradient_s_mass_is_that_of_the_loss(form):
    """|d loss / d log theta| as autograd finds it, summed over tokens, and over those that ACR admits."""
    theta, p, b, _, _, advantages, mask = batch(6)
    correction = ACR if form is not gspo else dataclasses.replace(ACR, adaptive_clip=False)
    leaf, s = theta.clone().requires_grad_(), dataclasses.replace(SETTINGS, form=form, correction=correction)
    loss, sums = objective(leaf, p, b, advantages, mask, Denominators(tokens=1, sequences=1), s)
    loss.backward()
    assert sums["gradient_mass"].item() == pytest.approx(leaf.grad.abs().sum().item(), rel=1e-10)
    if form is not gspo:
        ratio, rho = (theta - p).exp(), (p - b).exp()
        admitted = mask & (advantages[:, None] > 0) & (ratio > 1 + HIGH)
        admitted &= ratio <= (1 + HIGH) * (rho / CAP).clamp(min=1)
        assert sums["admitted_mass"].item() == pytest.approx(leaf.grad[admitted].abs().sum().item(), rel=1e-10)


@pytest.mark.parametrize("cuts", [[1], [7, 8], [3, 20, 21, 39]])
def test_merged_figures_do_not_depend_on_the_split(cuts):
    rows, edges = batch(2), [0, *cuts, 40]
    parts = [[x[start:stop] for x in rows] for start, stop in itertools.pairwise(edges)]
    assert policy_metrics(merge(map(sums_of, parts))) == pytest.approx(policy_metrics(sums_of(rows)), rel=1e-10)


def test_figures_of_the_whole_step_are_handed_through():
    found = policy_metrics(sums_of(batch()) | {"max_strength": 0.25, "max_clip_low": 0.3, "max_clip_high": 0.4})
    assert (found["mismatch/strength"], found["clip/calibrated_low"], found["clip/calibrated_high"]) == (0.25, 0.3, 0.4)
    assert "mismatch/strength" not in policy_metrics(sums_of(batch()))
    assert policy_metrics({"tokens": 0.0}) == {}


def test_sums_merge_by_adding_and_maxima_by_comparing():
    parts = [{"a": 1.0, "max_x": 5.0}, {"a": 2.0, "max_x": -1.0, "late": 3.0}]
    assert merge(parts) == {"a": 3.0, "max_x": 5.0, "late": 3.0}
    assert merge([]) == {}
    assert parts[0] == {"a": 1.0, "max_x": 5.0}
