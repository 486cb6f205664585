import itertools
import math
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.stats import permutation_test

from qurl_ray.evaluation.statistics import (
    accuracy_with_interval,
    mean_with_bootstrap_interval,
    paired_p_value,
    paired_test,
    pass_at_k,
    reward_with_interval,
    wilson_interval,
)

counts = st.integers(1, 2000).flatmap(lambda n: st.tuples(st.integers(0, n), st.just(n)))
answers = st.lists(st.booleans(), min_size=1, max_size=40)


@pytest.mark.parametrize(
    ("successes", "n", "low", "high"),
    # Newcombe 1998, Statistics in Medicine 17:857, table I, method 3 (score, no continuity correction)
    [(81, 263, 0.2553, 0.3662), (15, 148, 0.0624, 0.1605), (0, 20, 0.0, 0.1611), (1, 29, 0.0061, 0.1718)],
)
def test_wilson_gives_the_published_intervals(successes, n, low, high):
    assert wilson_interval(successes, n) == pytest.approx((low, high), abs=5e-5)


@settings(max_examples=200, deadline=None)
@given(counts, st.sampled_from([(0.9, 1.6448536269514722), (0.95, 1.959963984540054), (0.99, 2.5758293035489004)]))
def test_the_ends_of_wilson_are_where_the_score_test_turns(count, level):
    """An end p0 solves |p - p0| = z·sqrt(p0(1 - p0)/n): the interval is the inverted score test."""
    (successes, n), (confidence, z) = count, level
    p = successes / n
    for end in wilson_interval(successes, n, confidence):
        assert abs(p - end) == pytest.approx(z * math.sqrt(end * (1 - end) / n), abs=1e-9) or end in (0.0, 1.0)


@settings(max_examples=200, deadline=None)
@given(counts)
def test_wilson_holds_the_estimate_stays_in_range_and_mirrors(count):
    successes, n = count
    low, high = wilson_interval(successes, n)
    assert 0 <= low <= successes / n <= high <= 1
    assert low < high
    assert wilson_interval(n - successes, n) == pytest.approx((1 - high, 1 - low), abs=1e-12)


def test_wilson_covers_the_truth_about_as_often_as_it_says():
    """Exact coverage at n = 50, averaged over p; single p oscillate around it."""
    n, covered = 50, []
    intervals = [wilson_interval(k, n) for k in range(n + 1)]
    for p in np.linspace(0.02, 0.98, 97):
        chances = [math.comb(n, k) * p**k * (1 - p) ** (n - k) for k in range(n + 1)]
        covered.append(sum(c for c, (low, high) in zip(chances, intervals, strict=True) if low <= p <= high))
    assert np.mean(covered) == pytest.approx(0.95, abs=0.01)


@pytest.mark.parametrize(("successes", "n", "confidence"), [(0, 0, 0.95), (3, 2, 0.95), (-1, 2, 0.95), (1, 2, 1.0)])
def test_wilson_refuses_counts_that_cannot_be(successes, n, confidence):
    with pytest.raises(ValueError, match=r"need|confidence"):
        wilson_interval(successes, n, confidence)


def test_accuracy_is_the_share_of_true_with_wilsons_interval():
    estimate = accuracy_with_interval(np.array([True, False, True, True]))
    assert (estimate.value, estimate.n) == (0.75, 4)
    assert (estimate.low, estimate.high) == wilson_interval(3, 4)


@pytest.mark.parametrize("correct", [[], [0.7, 1.0], [[True], [False]], [float("nan")]])
def test_accuracy_refuses_what_is_no_list_of_truth_values(correct):
    with pytest.raises(ValueError, match="truth value"):
        accuracy_with_interval(correct)


@pytest.mark.parametrize("n", range(1, 9))
def test_pass_at_k_counts_the_subsets_with_a_correct_sample(n):
    for c, k in itertools.product(range(n + 1), range(1, n + 1)):
        subsets = list(itertools.combinations([i < c for i in range(n)], k))
        expected = Fraction(sum(any(subset) for subset in subsets), len(subsets))
        assert pass_at_k(n, c, k) == float(expected)


@settings(max_examples=200, deadline=None)
@given(st.integers(1, 1000).flatmap(lambda n: st.tuples(st.just(n), st.integers(0, n), st.integers(1, n))))
def test_pass_at_k_equals_the_product_form_and_is_a_probability(nck):
    n, c, k = nck
    product = 1.0 - math.prod(1.0 - k / i for i in range(n - c + 1, n + 1)) if n - c >= k else 1.0
    assert pass_at_k(n, c, k) == pytest.approx(product, rel=1e-9, abs=1e-12)
    assert 0 <= pass_at_k(n, c, k) <= 1


@settings(max_examples=100, deadline=None)
@given(st.integers(2, 100).flatmap(lambda n: st.tuples(st.just(n), st.integers(0, n), st.integers(1, n - 1))))
def test_pass_at_k_grows_with_k_and_is_the_mean_at_one(nck):
    n, c, k = nck
    assert pass_at_k(n, c, 1) == pytest.approx(c / n)
    assert pass_at_k(n, c, k) <= pass_at_k(n, c, k + 1)


def test_pass_at_k_keeps_a_small_chance_that_one_minus_a_quotient_would_lose():
    n = 10**17
    assert pass_at_k(n, 1, 1) == 1e-17  # 1 - (1 - 1e-17) is 0 in float64


@pytest.mark.parametrize(("n", "c", "k"), [(4, 5, 1), (4, -1, 1), (4, 2, 0), (4, 2, 5)])
def test_pass_at_k_refuses_counts_that_cannot_be(n, c, k):
    with pytest.raises(ValueError, match="need"):
        pass_at_k(n, c, k)


def test_bootstrap_of_a_few_problems_matches_the_enumeration_of_all_resamples():
    values = [0.0, 0.25, 1.0, 0.5]
    every_mean = [np.mean(draw) for draw in itertools.product(values, repeat=4)]
    expected = np.quantile(every_mean, [0.1, 0.9])
    estimate = mean_with_bootstrap_interval(values, seed=3, resamples=40_000, confidence=0.8)
    assert estimate.value == np.mean(values)
    assert (estimate.low, estimate.high) == pytest.approx(tuple(expected), abs=0.0626)  # one step of the grid of means


def test_bootstrap_of_many_problems_matches_the_normal_interval():
    values = np.random.default_rng(0).random(400)
    half = 1.96 * values.std() / math.sqrt(400)
    estimate = mean_with_bootstrap_interval(values, resamples=4000)
    assert (estimate.low, estimate.high) == pytest.approx((values.mean() - half, values.mean() + half), abs=0.1 * half)


@settings(max_examples=50, deadline=None)
@given(st.lists(st.floats(0, 1), min_size=1, max_size=20), st.integers(0, 2**32 - 1))
def test_bootstrap_repeats_with_its_seed_and_holds_within_the_values(values, seed):
    estimate = mean_with_bootstrap_interval(values, seed=seed, resamples=200)
    assert estimate == mean_with_bootstrap_interval(values, seed=seed, resamples=200)
    assert min(values) - 1e-12 <= estimate.low <= estimate.high <= max(values) + 1e-12


def test_bootstrap_in_chunks_draws_as_many_resamples(monkeypatch):
    monkeypatch.setattr("qurl_ray.evaluation.statistics._CHUNK_VALUES", 7)
    estimate = mean_with_bootstrap_interval([0.0, 1.0, 1.0], seed=1, resamples=1001)
    assert estimate == mean_with_bootstrap_interval([0.0, 1.0, 1.0], seed=1, resamples=1001)
    assert estimate.low < estimate.value < estimate.high


@pytest.mark.parametrize("values", [[], [float("nan")], [[1.0]], [float("inf"), 0.0]])
def test_bootstrap_refuses_what_is_no_list_of_finite_values(values):
    with pytest.raises(ValueError, match="finite"):
        mean_with_bootstrap_interval(values)


@settings(max_examples=200, deadline=None)
@given(st.lists(st.tuples(st.booleans(), st.booleans()), min_size=1, max_size=60))
def test_mcnemar_is_the_two_sided_binomial_test_of_the_discordant(both):
    first, second = zip(*both, strict=True)
    b, c = both.count((True, False)), both.count((False, True))
    # Independent of the formula: add up every outcome that is at most as likely as the one seen.
    chances = [Fraction(math.comb(b + c, i), 2 ** (b + c)) for i in range(b + c + 1)]
    expected = float(sum(chance for chance in chances if chance <= chances[b]))
    result = paired_test(first, second)
    assert (result.only_first, result.only_second) == (b, c)
    assert result.p_value == pytest.approx(expected, rel=1e-12)


def test_mcnemar_by_hand():
    first, second = [True] * 6 + [False, True], [False] * 6 + [True, True]
    assert paired_test(first, second).p_value == 0.125  # 2 * (C(7,0) + C(7,1)) / 2^7 = 16/128


@settings(max_examples=50, deadline=None)
@given(answers)
def test_mcnemar_of_a_policy_with_itself_is_one(correct):
    assert paired_test(correct, correct).p_value == 1.0


def test_mcnemar_refuses_answers_to_different_problems():
    with pytest.raises(ValueError, match="same problems, got 1 and 2"):
        paired_test([True], [True, False])


# --- mean rewards -------------------------------------------------------------------------------------------------

rewards = st.lists(st.tuples(*[st.sampled_from([-1.0, 0.0, 0.25, 0.5, 1.0, 2.0])] * 2), min_size=1, max_size=8)


@settings(max_examples=200, deadline=None)
@given(rewards)
def test_the_paired_test_counts_the_signs_under_which_the_difference_is_as_large(both):
    first, second = zip(*both, strict=True)
    changes = [Fraction(b) - Fraction(a) for a, b in both]
    sums = [
        sum(s * d for s, d in zip(signs, changes, strict=True))
        for signs in itertools.product((1, -1), repeat=len(both))
    ]
    expected = Fraction(sum(abs(total) >= abs(sum(changes)) for total in sums), len(sums))
    assert paired_p_value(first, second) == pytest.approx(float(expected), rel=1e-12)


def test_the_paired_test_of_many_rewards_is_scipys():
    rng = np.random.default_rng(0)
    first = rng.random(60)
    second = np.clip(first + rng.normal(0.04, 0.2, 60), 0, 1)
    expected = permutation_test(
        (second, first), lambda x, y: (x - y).sum(), permutation_type="samples", n_resamples=100_000, rng=1
    ).pvalue
    assert 0.01 < expected < 0.5
    assert paired_p_value(first, second, resamples=40_000) == pytest.approx(expected, abs=0.01)
    assert paired_p_value(first, second) == paired_p_value(first, second)


@settings(max_examples=100, deadline=None)
@given(st.lists(st.tuples(st.booleans(), st.booleans()), min_size=1, max_size=14), st.sampled_from([0.5, 3.0]))
def test_the_paired_test_of_two_rewards_alone_is_mcnemars_whatever_their_size(both, size):
    first, second = zip(*both, strict=True)
    expected = pytest.approx(paired_test(first, second).p_value, rel=1e-12)
    assert paired_p_value(first, second) == expected
    assert paired_p_value([size * a for a in first], [size * b for b in second]) == expected


def test_sums_that_are_equal_but_for_rounding_are_equal_to_the_paired_test():
    """The differences cancel, so no sum is smaller. To scipy's permutation_test, some are: it gives 0.906."""
    first, second = [0.1, 0.1, 0.8, 0.2, 0.0, 0.5], [0.4, 0.4, 0.5, 0.0, 0.2, 0.2]
    assert paired_p_value(first, second) == 1.0


def test_equal_rewards_and_a_clear_difference_are_the_ends_of_the_paired_test():
    graded = np.linspace(0.1, 0.9, 40)
    assert paired_p_value(graded, graded) == 1.0
    assert paired_p_value(graded, graded + 0.05, resamples=999) == 1 / 1000  # never 0 from samples


@pytest.mark.parametrize(
    ("first", "second"), [([0.5], [0.5, 1.0]), ([0.5, float("nan")], [0.5, 1.0]), ([[0.5]], [[0.7]]), ([0.5], [])]
)
def test_the_paired_test_refuses_what_is_no_reward_of_both_for_each_problem(first, second):
    with pytest.raises(ValueError, match="finite reward of both"):
        paired_p_value(first, second)


def test_a_mean_reward_has_wilsons_interval_where_it_is_a_share_and_else_a_bootstrapped_one():
    assert reward_with_interval([0.0, 1.0, 1.0, 1.0]) == accuracy_with_interval([False, True, True, True])
    graded = [0.0, 0.25, 1.0, 1.0]
    assert reward_with_interval(graded) == mean_with_bootstrap_interval(graded)
    with pytest.raises(ValueError, match="truth value"):
        reward_with_interval([])
