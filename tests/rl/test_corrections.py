"""Weights, rejection and strength against their formulas, token by token in plain Python."""

import dataclasses
import math

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from qurl_ray.rl.corrections import CorrectionSettings, correct, strength
from qurl_ray.rl.objective import Denominators, ObjectiveSettings, objective
from qurl_ray.rl.reduce import as_floats, moments

log_rho = st.floats(-3, 3).map(lambda x: round(x, 3) + 1e-5)  # away from the bounds below
batches = st.lists(st.lists(log_rho, min_size=0, max_size=5), min_size=1, max_size=5)
corrections = st.builds(
    CorrectionSettings,
    weight=st.sampled_from(["none", "token", "sequence", "geometric"]),
    cap=st.sampled_from([math.inf, 1.0, 2.0, 8.0]),
    band=st.sampled_from([None, (0.5, 2.0), (0.9, 5.0)]),
    adaptive_clip=st.booleans(),
    veto=st.sampled_from([0.0, 0.1, 0.4]),
) | st.builds(
    lambda rule, **more: CorrectionSettings(reject=rule[0], reject_low=rule[1], reject_high=rule[2], **more),
    rule=st.sampled_from([("geometric", 0.7, 1.4), ("k2", 0.0, 0.5), ("k3", 0.0, 0.5), ("k3", 0.05, 2.0)]),
    weight=st.sampled_from(["token", "sequence"]),
    cap=st.sampled_from([math.inf, 2.0]),
    veto=st.sampled_from([0.0, 0.1]),
)


def padded(rows, width=None):
    """[B, T] in float64, 0 where masked."""
    width = width or max(1, *map(len, rows))
    values = [row + [0.0] * (width - len(row)) for row in rows]
    mask = [[True] * len(row) + [False] * (width - len(row)) for row in rows]
    return torch.tensor(values, dtype=torch.float64), torch.tensor(mask)


def by_hand(rows, s: CorrectionSettings, mix: float):
    """(weights, widenings) per token of each row, and the sums."""
    weights, widenings = [], []
    sums = dict.fromkeys(("truncated", "dropped", "rejected_sequences", "vetoed_sequences"), 0)
    for row in rows:
        n = max(1, len(row))
        raw = {
            "sequence": [math.exp(min(20, max(-20, sum(row))))] * len(row),
            "geometric": [math.exp(sum(row) / n)] * len(row),
        }.get(s.weight, [math.exp(x) for x in row])
        inside = [s.weight == "none" or not s.band or s.band[0] <= w <= s.band[1] for w in raw]
        value = {
            "none": (s.reject_low + s.reject_high) / 2,
            "geometric": math.exp(sum(row) / n),
            "k2": sum(x * x / 2 for x in row) / n,
            "k3": sum(math.exp(x) - 1 - x for x in row) / n,
        }[s.reject]
        vetoed = any(math.exp(x) < s.veto for x in row)
        rejected = vetoed or not s.reject_low <= value <= s.reject_high
        kept = [ok and not rejected for ok in inside]
        mixed = [1 - mix + mix * (1.0 if s.weight == "none" else min(w, s.cap)) for w in raw]
        weights.append([w if ok else 0.0 for w, ok in zip(mixed, kept, strict=True)])
        widenings.append([1 - mix + mix * max(1.0, w / s.cap) if s.adaptive_clip else 1.0 for w in raw])
        sums["truncated"] += sum(w > s.cap for w in raw)
        sums["dropped"] += sum(not ok for ok in kept)
        sums["rejected_sequences"] += rejected and bool(row)
        sums["vetoed_sequences"] += vetoed
    return weights, widenings, sums


@settings(max_examples=300, deadline=None)
@given(rows=batches, s=corrections, mix=st.sampled_from([1.0, 0.0, 0.3]))
def test_weights_follow_the_formulas(rows, s, mix):
    assume(s.reject != "k3" or s.reject_low == 0 or all(rows))  # see the test of rows without tokens
    log_rho_BT, mask_BT = padded(rows)
    found = correct(log_rho_BT, mask_BT, s, mix)
    weights, widenings, sums = by_hand(rows, s, mix)
    for i, row in enumerate(rows):
        assert found.weight_BT[i, : len(row)].tolist() == pytest.approx(weights[i], rel=1e-12)
        assert found.widening_BT[i, : len(row)].tolist() == pytest.approx(widenings[i], rel=1e-12)
    assert {key: int(found.sums[key]) for key in sums} == sums
    applied = [w for row in weights for w in row]
    assert found.sums["weight"].item() == pytest.approx(sum(applied), rel=1e-10)
    assert found.sums["weight_squared"].item() == pytest.approx(sum(w * w for w in applied), rel=1e-10)


@settings(max_examples=100, deadline=None)
@given(rows=batches, s=corrections, before=st.integers(0, 3), after=st.integers(0, 3))
def test_padding_never_matters(rows, s, before, after):
    assume(all(rows))
    log_rho_BT, mask_BT = padded(rows)
    wide = torch.nn.functional.pad(log_rho_BT, (before, after)), torch.nn.functional.pad(mask_BT, (before, after))
    plain, shifted = correct(log_rho_BT, mask_BT, s), correct(*wide, s)
    torch.testing.assert_close(shifted.weight_BT[wide[1]], plain.weight_BT[mask_BT], rtol=1e-12, atol=0)
    torch.testing.assert_close(shifted.widening_BT[wide[1]], plain.widening_BT[mask_BT], rtol=1e-12, atol=0)
    assert as_floats(shifted.sums) == pytest.approx(as_floats(plain.sums), rel=1e-12)


def test_a_row_without_tokens_is_not_rejected():
    log_rho_BT, mask_BT = padded([[0.2, 0.3], []])
    s = CorrectionSettings(weight="token", reject="geometric", reject_low=1.1, reject_high=2.0)
    assert int(correct(log_rho_BT, mask_BT, s).sums["rejected_sequences"]) == 0


@settings(max_examples=100, deadline=None)
@given(rows=batches, s=corrections | st.just(CorrectionSettings(ratio="behavior")), seed=st.integers(0, 99))
def test_metrics_only_measures_the_correction_and_trains_without(rows, s, seed):
    log_rho_BT, mask_BT = padded(rows)
    noise = torch.Generator().manual_seed(seed)
    theta_BT = torch.randn(log_rho_BT.shape, generator=noise, dtype=torch.float64).requires_grad_()
    advantages_B = torch.randn(len(rows), generator=noise, dtype=torch.float64)

    def run(correction):
        settings = ObjectiveSettings(correction=correction, clip_low=0.2, clip_high=0.28, dual_clip=3.0)
        zeros_BT, counts = torch.zeros_like(log_rho_BT), Denominators(tokens=9, sequences=3)
        loss, sums = objective(theta_BT, zeros_BT, -log_rho_BT, advantages_B, mask_BT, counts, settings)
        return loss, torch.autograd.grad(loss, theta_BT)[0], as_floats(sums)

    monitored, plain = run(dataclasses.replace(s, metrics_only=True)), run(CorrectionSettings())
    assert monitored[0] == plain[0]
    assert torch.equal(monitored[1], plain[1])
    if s.ratio == "proximal":  # of naive's ratio there is nothing to measure but the mismatch
        assert monitored[2] == run(s)[2]


@pytest.mark.parametrize("loss_mean", ["token", "sequence", "fixed"])
@pytest.mark.parametrize(
    "correction",
    [
        CorrectionSettings(weight="token", veto=0.1),
        CorrectionSettings(weight="token", reject="geometric", reject_low=0.5, reject_high=1.5),
        CorrectionSettings(weight="sequence", band=(0.5, 2.0)),
        CorrectionSettings(weight="token", band=(0.5, 2.0)),
    ],
)
def test_what_is_dropped_stays_in_the_denominator(correction, loss_mean):
    log_rho_BT, mask_BT = padded([[0.1, 0.2], [-2.5, -2.6, -2.7]])
    zero, advantages = torch.zeros(2, 3, dtype=torch.float64), torch.tensor([1.0, -1.0], dtype=torch.float64)
    s = ObjectiveSettings(correction=correction, clip_low=0.2, clip_high=0.2, loss_mean=loss_mean, fixed_length=4)
    loss, sums = objective(zero, zero, -log_rho_BT, advantages, mask_BT, Denominators(tokens=5, sequences=2), s)
    weights = [math.exp(0.3)] * 2 if correction.weight == "sequence" else [math.exp(0.1), math.exp(0.2)]
    denominator = {"token": 5, "sequence": 2 * 2, "fixed": 2 * 4}[loss_mean]
    assert loss.item() == pytest.approx(-sum(weights) / denominator)
    assert int(sums["dropped"]) == 3


# --- strength ---------------------------------------------------------------------------------------------------


def effective(weights, mix) -> float:
    mixed = [1 - mix + mix * w for w in weights]
    return sum(mixed) ** 2 / (len(mixed) * sum(w * w for w in mixed))


def total_of(weights) -> torch.Tensor:
    return torch.tensor([len(weights), sum(weights), sum(w * w for w in weights)], dtype=torch.float64)


weight_lists = st.lists(st.floats(1e-3, 50), min_size=1, max_size=12)


@settings(max_examples=300, deadline=None)
@given(weights=weight_lists, floor=st.floats(0.02, 0.98))
def test_strength_is_the_largest_that_keeps_the_floor(weights, floor):
    assume(abs(effective(weights, 1.0) - floor) > 1e-9)  # see the next test
    found = strength(total_of(weights), floor)
    assert 0 <= found <= 1
    if effective(weights, 1.0) >= floor:
        assert found == 1
    else:
        assert effective(weights, found) == pytest.approx(floor, rel=1e-7)
        assert effective(weights, min(1.0, found * 1.01)) < floor + 1e-9


@pytest.mark.parametrize(
    ("count", "first", "second", "floor"),
    [
        (521.0, 1092.4355678218017, 2411.1838970444337, 0.95),
        (18.0, 18.33369928248888, 54.81347014094467, 0.34067510992425676),
    ],
)
def test_strength_at_the_floor_itself(count, first, second, floor):
    """Sums one unit in the last place below the floor: their inequality and that of the means round differently."""
    found = strength(torch.tensor([count, first, second], dtype=torch.float64), floor)
    assert found <= 1
    assert found == pytest.approx(1.0)


@settings(max_examples=100, deadline=None)
@given(weights=weight_lists, floors=st.lists(st.floats(0.05, 0.95), min_size=2, max_size=5))
def test_a_higher_floor_weakens_more(weights, floors):
    assume(all(abs(effective(weights, 1.0) - floor) > 1e-9 for floor in floors))
    found = [strength(total_of(weights), floor) for floor in sorted(floors)]
    assert found == sorted(found, reverse=True)


@pytest.mark.parametrize("weights", [[], [0.0, 0.0], [3.0], [2.0, 2.0, 2.0]])
def test_nothing_to_weaken(weights):
    assert strength(total_of(weights), 0.99) == 1.0


@settings(max_examples=60, deadline=None)
@given(
    rows=batches,
    weight=st.sampled_from(["token", "sequence", "geometric"]),
    floor=st.sampled_from([0.5, 0.9]),
    band=st.sampled_from([None, (0.5, 4.0)]),
    veto=st.sampled_from([0.0, 0.2]),
)
def test_the_weights_that_are_applied_have_the_effective_sample_size(rows, weight, floor, band, veto):
    """The learner's own chain: moments over all micro-batches of the tokens that are kept, strength, correct."""
    s = CorrectionSettings(weight=weight, cap=8.0, ess_floor=floor, band=band, veto=veto)
    log_rho_BT, mask_BT = padded(rows)
    total = torch.zeros(3, dtype=torch.float64)
    for part_BT, part_mask_BT in zip(log_rho_BT.split(2), mask_BT.split(2), strict=True):
        weight_BT = correct(part_BT, part_mask_BT, s).weight_BT
        total += moments(weight_BT, part_mask_BT & (weight_BT > 0))
    mix = strength(total, floor)
    applied = [w for w in correct(log_rho_BT, mask_BT, s, mix).weight_BT[mask_BT].tolist() if w]
    assume(applied)
    assert effective(applied, 1.0) >= floor - 1e-9
    assert mix == 1 or effective(applied, 1.0) == pytest.approx(floor, rel=1e-7)


def test_strength_weakens_acr_s_bound_as_it_weakens_its_weight():
    log_rho_BT, mask_BT = padded([[math.log(6.0), math.log(0.5)]])
    s = CorrectionSettings(weight="token", cap=2.0, adaptive_clip=True)
    found = correct(log_rho_BT, mask_BT, s, 0.25)
    assert found.weight_BT[0].tolist() == pytest.approx([0.75 + 0.25 * 2, 0.75 + 0.25 * 0.5])
    assert found.widening_BT[0].tolist() == pytest.approx([0.75 + 0.25 * 3, 1.0])
