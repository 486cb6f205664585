"""Bounds on what quantization costs: the formula once more, coverage at every look, and figures worked out by hand."""

import json
import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.optimize import brentq

from qurl_ray.evaluation.certificate import (
    CostSequence,
    UpperSequence,
    certificate_figures,
    certificate_sentence,
)

looks = st.lists(
    st.lists(st.sampled_from([-2.0, -0.5, 0.0, 0.3, 2.0]), min_size=1, max_size=30), min_size=1, max_size=6
)


def reference(of_looks: list[list[float]], width: float) -> float:
    """The bound from all pairs at once, value by value, with scipy's root."""
    seen: list[float] = []
    spread = 0.0
    for values in of_looks:
        expected = max(0.0, math.fsum(seen) / len(seen)) if seen else 0.0
        spread += math.fsum((x / width - expected) ** 2 for x in values)
        seen += [x / width for x in values]

    def missing(s: float) -> float:
        """Logarithm of 20 over the wealth."""
        bets = [(0.99 * 0.7**k, 1 / ((k + 1) * (k + 2))) for k in range(20)]
        powers = [bet * s + (math.log(1 - bet) + bet) * spread + math.log(w) for bet, w in bets]
        return math.log(20) - max(powers) - math.log(math.fsum(math.exp(power - max(powers)) for power in powers))

    s = brentq(missing, 0, 1e5)
    return width * min(1.0, (math.fsum(seen) + s) / len(seen))


@settings(max_examples=60, deadline=None)
@given(looks)
def test_the_bound_is_where_the_wealth_reaches_20(of_looks):
    sequence = UpperSequence()
    for values in of_looks:
        sequence = sequence.add(np.array(values), width=2.0)
    assert sequence.bound(width=2.0) == pytest.approx(reference(of_looks, 2.0), abs=1e-9)


def steady(rng, _, size):
    return 0.2, rng.choice([-1.0, 0.0, 1.0], size=size, p=[0.2, 0.4, 0.4])


def rare(rng, _, size):
    return 0.02, rng.choice([0.0, 1.0], size=size, p=[0.98, 0.02])


def adversary(rng, luck, size):
    """As long as the draws were below their mean, go on with rare losses; else stand still, and keep the distance."""
    if luck > 2.5:
        return 0.0, np.zeros(size)
    return 0.1, rng.choice([0.0, 1.0], size=size, p=[0.9, 0.1])


def changing(rng, luck, size):
    """Mean and spread follow the draws so far."""
    p = 0.5 if luck > 0 else 0.05
    return p - (1 - p) * 0.3, rng.choice([-0.3, 1.0], size=size, p=[1 - p, p])


@pytest.mark.parametrize("stream", [steady, rare, adversary, changing])
def test_no_look_of_95_of_100_streams_is_below_the_mean(stream):
    """Whatever the expectations are, and however they follow the draws before. 5 % of 150 and three deviations: 15."""
    wrong = 0
    for seed in range(150):
        rng, sequence, expected = np.random.default_rng(seed), UpperSequence(), 0.0
        for _ in range(12):
            mean, values = stream(rng, expected - sequence.total, 16)
            expected += mean * len(values)
            sequence = sequence.add(values, width=1.0)
            if sequence.bound(width=1.0) < expected / sequence.count - 1e-12:
                wrong += 1
                break
    assert wrong <= 15


def test_equal_answers_leave_a_cost_of_less_than_four_pairs():
    """ln 20 of evidence, ln 2 for the choice of the bet, over 0.99."""
    sequence = UpperSequence()
    for _ in range(5):
        sequence = sequence.add(np.zeros(128), width=1.0)
    assert 3.0 < 640 * sequence.bound(width=1.0) < math.log(40) / 0.99
    assert UpperSequence().bound(width=3.0) == 3.0


def test_both_bounds_are_mirror_images_and_survive_a_checkpoint():
    costs = np.random.default_rng(0).choice([-1.0, 0.0, 1.0], size=200, p=[0.1, 0.5, 0.4])
    once, mirrored = CostSequence().add(costs, width=1.0), CostSequence().add(-costs, width=1.0)
    bounds, other = once.bounds(width=1.0), mirrored.bounds(width=1.0)
    assert bounds["certificate/cost_least"] == -other["certificate/cost_most"] > 0.1
    assert bounds["certificate/cost_least"] < 0.3 < bounds["certificate/cost_most"]
    resumed = CostSequence.of(json.loads(json.dumps(once.state())))
    assert resumed.add(costs, width=1.0) == once.add(costs, width=1.0)
    assert CostSequence().bounds(width=1.0) == {}


def test_figures_of_a_certificate_by_hand():
    nan = math.nan
    costs_PG = np.array([[1.0, 0.0], [nan, 0.5], [nan, nan]])
    ids = [[1, 2, 3], [1, 9, 3, 4], [5], []], [[1, 2, 3], [1, 2, 3], [6], [7]]
    answers = [(np.array(full), np.array(rolled)) for full, rolled in zip(*ids, strict=True)]
    figures = certificate_figures(costs_PG, answers)
    assert figures["certificate/cost"] == 0.5  # the mean over the problems with an answer to compare
    assert figures["certificate/equal_tokens"] == (3 + 1 + 0 + 0) / (3 + 4 + 1 + 1)
    assert figures["certificate/cost_low"] == figures["certificate/cost_high"] == 0.5  # both problems have the same
    assert certificate_figures(costs_PG[2:], answers).keys() == {"certificate/equal_tokens"}


def test_the_sentence_has_what_was_measured_and_nothing_else():
    costs = np.zeros((4, 32))
    figures = certificate_figures(costs, [(np.arange(3), np.arange(3))])
    figures |= CostSequence().add(costs.ravel(), width=1.0).bounds(width=1.0) | {"certificate/pairs": 128}
    assert certificate_sentence(figures) == (
        "certificate: at 95 %, quantization costs at most 0.0279 of reward at the weights of the certificates so far "
        "(128 pairs); in this one 0 [0, 0], 100.0% of the tokens equal"
    )
    gradients = {"certificate/gradient_cosine": 0.98765, "certificate/gradient_ratio": 1.0}
    assert certificate_sentence(figures | gradients).endswith("gradients with cosine 0.988 and ratio 1.000")
