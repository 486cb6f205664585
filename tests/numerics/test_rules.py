"""Finding a rule, with products that break chosen row counts, so that no machine's own kernels matter."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from qurl_ray.numerics.rules import ROWS, WHOLE, Product, Rule, extra_cost, find_rows, least_rows
from qurl_ray.numerics.selfcheck import find_attention_rule, find_linear_rule

WEIGHT = torch.randn(24, 16, generator=torch.Generator().manual_seed(0))


def broken_at(breaks):
    """A product whose rows differ in a bit from those of other calls where breaks(rows, outputs, threads)."""

    def multiply(x, weight):
        y = (x.double() @ weight.double().transpose(-1, -2)).float()  # float64 hides the order of its own sums
        return y * (1 + 2**-20) if breaks(x.shape[-2], weight.shape[-2], torch.get_num_threads()) else y

    return multiply


def bound(*breaks):
    """The same for each form of a weight, as the self-check takes them."""
    return tuple(lambda weight, multiply=broken_at(one): lambda x: multiply(x, weight) for one in breaks)


def bmm_broken_at(breaks):
    def bmm(left, right):
        y = (left.double() @ right.double()).float()
        return y * (1 + 2**-20) if breaks(len(left), left.shape[1]) else y

    return bmm


def found(breaks, *, threads=(1,), **limits):
    x = torch.randn(WHOLE, 16, generator=torch.Generator().manual_seed(1))
    multiply = broken_at(breaks)
    return find_rows([(lambda rows: multiply(rows, WEIGHT), x)], threads=threads, **limits)


@pytest.mark.parametrize(
    ("breaks", "rule"),
    [
        (lambda M, N, t: False, (1, 1)),
        (lambda M, N, t: M < 2, (2, 1)),
        (lambda M, N, t: M < 4, (4, 1)),
        (lambda M, N, t: M % 4 > 0, (4, 4)),  # MKL's mode COMPATIBLE
        (lambda M, N, t: M == 31, (2, 2)),  # one count in the middle
        (lambda M, N, t: M % 8 > 0 and M > 16, (8, 8)),  # 20 and 28, too, which only the second look sees
        (lambda M, N, t: M < 64, None),  # more than a decode step has
        (lambda M, N, t: M < WHOLE, None),  # all but the whole
    ],
)
def test_the_rule_with_the_fewest_rows_is_found(breaks, rule):
    assert found(breaks) == rule


def test_a_rule_holds_for_every_thread_count():
    assert found(lambda M, N, t: 2 * t > M, threads=(1, 2, 4)) == (8, 1)


def test_a_result_that_depends_on_the_thread_count_has_no_rule():
    assert found(lambda M, N, t: t == 2, threads=(1, 2)) is None


def test_the_thread_count_is_put_back_even_after_an_error():
    before = torch.get_num_threads()
    with pytest.raises(ZeroDivisionError):
        found(lambda M, N, t: 1 // (t - 3), threads=(1, 3))
    assert torch.get_num_threads() == before


def test_rows_are_compared_in_other_places_than_their_own():
    """A product that treats the first row in its own way breaks no row count, but every second comparison."""
    x = torch.randn(WHOLE, 16)

    def compute(rows):
        y = rows @ WEIGHT.t().double().float()
        return torch.cat([y[:1] * (1 + 2**-20), y[1:]])

    assert find_rows([(compute, x)]) is None


def test_it_gives_up_where_more_rows_are_needed_than_allowed():
    assert found(lambda M, N, t: M < 4, at_most=2) is None
    assert found(lambda M, N, t: M < 4, at_most=4) == (4, 1)


@given(st.sets(st.sampled_from(ROWS)))
def test_no_broken_count_satisfies_the_rule(broken):
    rule = least_rows(broken, ROWS)
    if rule:
        least, multiple = rule
        assert not {rows for rows in broken if rows >= least and rows % multiple == 0}
        assert least % multiple == 0


def test_the_library_that_needs_fewer_rows_is_taken_and_mkl_where_both_need_as_many():
    one, two, four = (bound(lambda M, N, t, least=least: least > M) for least in (1, 2, 4))
    assert find_linear_rule(16, 24, {"mkl": four, "onednn": two}, (1,)) == Rule(kernel="onednn", rows=2)
    assert find_linear_rule(16, 24, {"mkl": two, "onednn": two}, (1,)) == Rule(kernel="mkl", rows=2)
    assert find_linear_rule(16, 24, {"mkl": one, "onednn": two}, (1,)) == Rule(kernel="mkl")
    assert find_linear_rule(16, 24, {"mkl": four}, (1,)) == Rule(kernel="mkl", rows=4)


def test_a_library_whose_forms_of_a_weight_differ_is_not_taken():
    sound, off = (lambda M, N, t: M < 2), (lambda M, N, t: True)
    mkl = bound(lambda M, N, t: M < 4)
    assert find_linear_rule(16, 24, {"mkl": mkl, "onednn": bound(sound, sound)}, (1,)).kernel == "onednn"
    assert find_linear_rule(16, 24, {"mkl": mkl, "onednn": bound(sound, off)}, (1,)).kernel == "mkl"


def test_narrow_products_get_more_outputs_where_rows_alone_are_too_many():
    """As MKL has it on AMD: 16 rows for 18 outputs, 4 for 192."""
    mkl = bound(lambda M, N, t: (4 if N >= 192 else 16) > M)
    assert find_linear_rule(16, 18, {"mkl": mkl}, (1,)) == Rule(kernel="mkl", rows=4, outputs=192)
    assert find_linear_rule(16, 200, {"mkl": mkl}, (1,)) == Rule(kernel="mkl", rows=4)


def test_a_product_that_always_breaks_has_no_rule():
    never = bound(lambda M, N, t: M < WHOLE)
    assert find_linear_rule(16, 24, {"mkl": never, "onednn": never}, (1,)) is None


def test_attention_computes_several_products_at_once_only_where_one_alone_needs_more_rows():
    one_is_worse = bmm_broken_at(lambda batch, M: (16 if batch == 1 else 4) > M)
    all_the_same = bmm_broken_at(lambda batch, M: M < 2)
    assert find_attention_rule(16, one_is_worse, (1,)) == Rule(kernel="mkl", rows=4, batch=2)
    assert find_attention_rule(16, all_the_same, (1,)) == Rule(kernel="mkl", rows=2)


def test_attention_takes_the_rows_that_several_products_need_even_if_one_alone_needs_fewer():
    """As on an Intel processor of model 207 without AMX."""
    several_need_two = bmm_broken_at(lambda batch, M: batch > 1 and M < 2)
    assert find_attention_rule(16, several_need_two, (1,)) == Rule(kernel="mkl", rows=2)


def test_attention_has_no_rule_where_bits_depend_on_the_number_of_products():
    assert find_attention_rule(16, bmm_broken_at(lambda batch, _: batch == 1), (1,)) == Rule(kernel="mkl", batch=2)
    assert find_attention_rule(16, bmm_broken_at(lambda batch, _: batch == 2), (1,)) is None


def test_rows_are_padded_up_to_the_least_and_to_a_multiple():
    rule = Rule(kernel="mkl", rows=4, multiple=4)
    assert [rule.padded(rows) for rows in (1, 4, 5, 8, 9)] == [4, 4, 8, 8, 12]


def test_the_cost_of_rules_is_what_they_add_to_all_products():
    wide, narrow = Product(inner=100, outputs=300, count=2), Product(inner=100, outputs=20)
    pairs = [(wide, Rule(kernel="onednn", rows=2)), (narrow, Rule(kernel="mkl", rows=4, outputs=192))]
    # At one row: 2 · 100 · 300 · (2 - 1) more, and 100 · (4 · 192 - 20) more, of 2 · 100 · 300 + 100 · 20.
    assert extra_cost(pairs, rows=1) == pytest.approx((60_000 + 74_800) / 62_000)
    assert extra_cost(pairs, rows=32) == pytest.approx(100 * 32 * (192 - 20) / (32 * 62_000))
    assert extra_cost([], rows=1) == 0
