"""Products by rule: right values, right gradients, and rows that do not depend on the batch, on this machine."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn import functional

from qurl_ray.cache import read_only
from qurl_ray.errors import StaleWeights
from qurl_ray.numerics import products
from qurl_ray.numerics.activations import GELU, SiLU, gelu, shares_of_gelu, shares_of_silu, sigmoid, silu, whole_rows
from qurl_ray.numerics.products import Linear, bound, linear, queries_to_add
from qurl_ray.numerics.rules import Rule
from qurl_ray.numerics.selfcheck import linear_rule, onednn_packed, onednn_product

RULES = [
    Rule(kernel="mkl"),
    Rule(kernel="onednn", rows=2),
    Rule(kernel="mkl", rows=4, multiple=4, outputs=192),
    Rule(kernel="onednn", rows=3, outputs=40),
    None,
]


@pytest.fixture(params=RULES, ids=str)
def rule(request, monkeypatch):
    monkeypatch.setattr(products, "linear_rule", lambda inner, outputs: request.param)
    return request.param


def tensors(*shape, inner, outputs):
    """(x [*shape, inner], weight, bias)."""
    generator = torch.Generator().manual_seed(outputs)
    return [torch.randn(size, generator=generator) for size in ((*shape, inner), (outputs, inner), (outputs,))]


@pytest.mark.parametrize("shape", [(1,), (7,), (2, 3), (1, 1), (0,)])
@pytest.mark.parametrize("with_bias", [True, False])
def test_values_and_gradients_are_those_of_the_product(rule, shape, with_bias):
    drawn = tensors(*shape, inner=20, outputs=30)
    given = [part.clone().requires_grad_() for part in drawn]
    wanted = [part.double().requires_grad_() for part in drawn]
    found = linear(given[0], given[1], given[2] if with_bias else None)
    expected = functional.linear(wanted[0], wanted[1], wanted[2] if with_bias else None)
    assert found.shape == expected.shape
    torch.testing.assert_close(found.double(), expected, rtol=1e-5, atol=1e-5)
    dy = torch.randn(expected.shape, generator=torch.Generator().manual_seed(3))
    found.backward(dy)
    expected.backward(dy.double())
    for one, other in zip(given[: 2 + with_bias], wanted, strict=False):
        torch.testing.assert_close(one.grad.double(), other.grad, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("shape", [(1,), (7,), (2, 3), (40,)])
@pytest.mark.parametrize("with_bias", [True, False])
def test_a_weight_that_is_used_often_gives_the_same_bits(rule, shape, with_bias):
    x, weight, bias = tensors(*shape, inner=20, outputs=30)
    bias = bias if with_bias else None
    with torch.no_grad():
        assert torch.equal(bound(weight, bias)(x), linear(x, weight, bias))


ONEDNN = Rule(kernel="onednn", rows=2)


@pytest.mark.parametrize("fault", ["another weight", "other products"])
def test_a_weight_that_packing_changes_is_an_error(monkeypatch, fault):
    monkeypatch.setattr(products, "linear_rule", lambda *_: ONEDNN)
    if fault == "another weight":
        monkeypatch.setattr(products, "onednn_packed", lambda weight: onednn_packed(weight + 1))
    else:
        broken = lambda x, weight, bias: onednn_product(x, weight, bias) * (1.5 if weight.is_mkldnn else 1)  # noqa: E731
        monkeypatch.setattr(products, "onednn_product", broken)
    product, x = bound(torch.randn(30, 20), None), torch.randn(2, 20)
    for _ in range(products.PACK_FLOATS_AFTER - 1):
        product(x)
    with pytest.raises(StaleWeights, match="is another one, or gives other products"):
        product(x)


def test_a_weight_that_is_packed_gives_the_bits_that_it_gave_before(monkeypatch):
    monkeypatch.setattr(products, "linear_rule", lambda *_: ONEDNN)
    weight, bias, x = torch.randn(30, 20), torch.randn(30), torch.randn(5, 20)
    product = bound(weight, bias)
    found = [product(x) for _ in range(2 * products.PACK_FLOATS_AFTER)]
    assert all(torch.equal(y, linear(x, weight, bias)) for y in found)


def test_gradients_are_only_made_where_they_are_wanted():
    x, weight = torch.randn(4, 20), torch.randn(30, 20, requires_grad=True)
    products._OneDnnLinear.apply(x, weight, None).sum().backward()
    torch.testing.assert_close(weight.grad, torch.ones(4, 30).t() @ x)
    assert x.grad is None


@pytest.mark.parametrize(
    ("vectors", "family", "kernels"),
    [
        ("AVX2", "25", ("linear", "linear")),
        ("AVX512", "25", ("onednn_product", "linear")),
        ("AVX512", "26", ("onednn_product", "onednn_product")),
    ],
)
def test_the_processor_decides_how_gradients_are_multiplied(monkeypatch, vectors, family, kernels):
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: vectors)
    monkeypatch.setattr(products, "cpuinfo", lambda: {"cpu family": family})
    products._gradient_products.cache_clear()
    try:
        assert tuple(one.__name__ for one in products._gradient_products()) == kernels
    finally:
        products._gradient_products.cache_clear()


def test_other_types_and_autocast_are_left_to_torch(rule):
    x, weight = torch.randn(3, 20), torch.randn(30, 20)
    assert torch.equal(linear(x.double(), weight.double()), functional.linear(x.double(), weight.double()))
    with torch.autocast("cpu", torch.bfloat16):
        assert linear(x, weight).dtype == torch.bfloat16


@pytest.mark.equal_bits
@settings(max_examples=40, deadline=None)
@given(
    shape=st.sampled_from([(256, 18), (256, 1), (704, 256), (100, 24), (1537, 66)]),
    rows=st.integers(1, 70),
    start=st.integers(0, 20),
    threads=st.sampled_from([1, 2, 4, 8, 16]),
    other_threads=st.sampled_from([1, 2, 4, 8, 16]),
)
def test_a_row_has_the_same_bits_whatever_rows_and_threads_are_beside_it(shape, rows, start, threads, other_threads):
    inner, outputs = shape
    x, weight, bias = tensors(100, inner=inner, outputs=outputs)
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(other_threads)
        whole = linear(x, weight, bias)
        torch.set_num_threads(threads)
        assert torch.equal(linear(x[start : start + rows], weight, bias), whole[start : start + rows])
        assert torch.equal(bound(weight, bias)(x[start : start + rows]), whole[start : start + rows])
        with torch.enable_grad():
            learned = linear(x[start : start + rows], weight.requires_grad_(), bias)
        assert torch.equal(learned, whole[start : start + rows])
    finally:
        torch.set_num_threads(before)


def test_rows_that_the_rule_adds_never_come_back():
    layer = Linear(20, 30)
    assert layer(torch.randn(1, 20)).shape == (1, 30)


@pytest.mark.parametrize("shape", [(1,), (1, 5), (300,)])
def test_onednn_takes_factors_that_are_not_contiguous(shape):
    x, weight = torch.randn(20, 50).t(), torch.randn(20, 30).t()
    torch.testing.assert_close(onednn_product(x, weight), x @ weight.t(), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(("rows", "multiple"), [(1, 1), (2, 1), (4, 1), (4, 4), (8, 8)])
@pytest.mark.parametrize("heads", [1, 2, 3, 7])
@pytest.mark.parametrize("queries", [1, 2, 5])
@pytest.mark.parametrize("pieces", [1, 2])
def test_queries_are_added_until_the_rows_satisfy_the_rule_and_no_more(rows, multiple, heads, queries, pieces):
    rule = Rule(kernel="mkl", rows=rows, multiple=multiple, batch=2)
    added = queries_to_add(rule, queries, heads, 3 - pieces)
    wanted = [n for n in range(rows, 1000) if n % multiple == 0]  # rows of a piece
    fits = [heads * n in [pieces * one for one in wanted] for n in range(queries, queries + added + 1)]
    assert fits == [False] * added + [True]


def test_a_rule_is_measured_once_and_then_read_from_the_cache(tmp_path, monkeypatch):
    from qurl_ray.numerics import selfcheck

    calls = []

    def measure(*arguments):
        calls.append(arguments)
        return Rule(kernel="onednn", rows=2) if arguments[1] == 30 else None

    monkeypatch.setattr(selfcheck, "find_linear_rule", measure)
    monkeypatch.setattr(selfcheck, "_file", lambda: tmp_path / "new" / "rules.json")
    with read_only():  # in a dry run
        assert linear_rule(20, 32) is None
    assert not any(tmp_path.iterdir())
    calls.clear()
    for _ in range(2):
        selfcheck.linear_rule.cache_clear()  # as another process would
        assert linear_rule(20, 30) == Rule(kernel="onednn", rows=2)
        assert linear_rule(20, 31) is None
    selfcheck.linear_rule.cache_clear()
    assert len(calls) == 2


# --- activation functions ---------------------------------------------------------------------------------------------


FUNCTIONS = {
    "silu": (silu, SiLU(), functional.silu),
    "sigmoid": (sigmoid, sigmoid, torch.sigmoid),
    "gelu": (gelu, GELU("none"), functional.gelu),
    "gelu_tanh": (lambda x: gelu(x, "tanh"), GELU("tanh"), lambda x: functional.gelu(x, approximate="tanh")),
}


@pytest.mark.parametrize("name", FUNCTIONS)
@pytest.mark.parametrize("shape", [(1, 704), (3, 5, 96), (130, 704), (2, 70), (2, 40_000), (0, 32)])
def test_activations_have_torchs_values_and_gradients(name, shape):
    function, module, reference = FUNCTIONS[name]
    x = torch.randn(shape, requires_grad=True)
    expected = reference(x)
    (wanted,) = torch.autograd.grad(expected.sum(), x)
    for found in (function(x), module(x)):
        torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-6)
        (gradient,) = torch.autograd.grad(found.sum(), x)
        torch.testing.assert_close(gradient, wanted, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("name", FUNCTIONS)
@pytest.mark.parametrize("width", [704, 96, 100, 18, 1])
@pytest.mark.parametrize("threads", [1, 2, 3, 4, 5, 8, 16])
def test_an_element_has_the_same_bits_whatever_rows_and_threads_are_beside_it(name, width, threads):
    function = FUNCTIONS[name][0]
    x = 4 * torch.randn(200, width, generator=torch.Generator().manual_seed(width))
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    alone = torch.cat([function(row) for row in x.split(1)])
    try:
        torch.set_num_threads(threads)
        for rows in (200, 199, 187, 101, 47, 3):
            assert torch.equal(function(x[:rows]), alone[:rows])
        gate = torch.cat([x, x], dim=1)[:, :width]  # as half of a fused product: not contiguous
        assert torch.equal(function(gate), alone)
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize("divide", [shares_of_silu, shares_of_gelu])
@given(rows=st.integers(1, 600), width=st.integers(1, 80).map(lambda n: 32 * n), threads=st.integers(1, 17))
def test_rows_are_taken_whose_shares_end_with_vectors(divide, rows, width, threads):
    count = whole_rows(rows, width, lambda elements: divide(elements, threads))
    assert count <= rows
    shares = divide(max(1, count) * width, threads)
    assert not count or -(-count * width // shares) % 32 == 0
    more = [n for n in range(count + 1, rows + 1) if (n * width // 32) % divide(n * width, threads) == 0]
    assert more == []


def test_a_row_of_more_than_one_share_is_computed_a_share_at_a_time():
    width = 32 * 1251  # odd: two threads would divide it inside a vector
    assert whole_rows(3, width, lambda elements: shares_of_silu(elements, 2)) == 2
    assert whole_rows(1, width, lambda elements: shares_of_silu(elements, 2)) == 0
    x = 4 * torch.randn(3, width, generator=torch.Generator().manual_seed(0))
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(2)
        found = silu(x)
        torch.set_num_threads(1)
        assert torch.equal(found, silu(x))
    finally:
        torch.set_num_threads(before)
