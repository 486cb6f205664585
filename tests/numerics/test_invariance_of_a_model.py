"""What a run is told of equal bits on its machine."""

import pytest
import torch

from qurl_ray.config.model import TinyModel
from qurl_ray.numerics import invariance
from qurl_ray.numerics.invariance import invariance_for, invariance_of
from qurl_ray.numerics.rules import Rule
from qurl_ray.planning.shapes import configured_shape
from qurl_ray.policy.tiny import make_model, make_tokenizer

TWO, FOUR = Rule(kernel="onednn", rows=2), Rule(kernel="mkl", rows=4, batch=2)
NARROW = Rule(kernel="mkl", rows=4, outputs=192)


@pytest.fixture
def rules(monkeypatch):
    """The machine's rules: of linears by outputs (TWO if not named), and of attention."""
    found = {"attention": FOUR}
    monkeypatch.setattr(invariance, "linear_rule", lambda inner, outputs: found.get(outputs, TWO))
    monkeypatch.setattr(invariance, "attention_rule", lambda head_dim: found["attention"])
    return found


LINEARS = {(256, 768): 6, (256, 18): 1}


def test_rules_for_everything_keep_bits_equal(rules):
    found = invariance_of(LINEARS, head_dim=32)
    assert found.kept
    assert "linears onednn, at least 2 rows; attention mkl, at least 4 rows" in found.sentence()


def test_different_rules_are_told_apart(rules):
    rules[18] = NARROW
    found = invariance_of(LINEARS, head_dim=32)
    assert found.kept
    assert "onednn, at least 2 rows (1 shape)" in found.sentence()
    assert "mkl, at least 4 rows, at least 192 outputs (1 shape)" in found.sentence()


@pytest.mark.parametrize(("what", "named"), [(18, "products of 256 → 18"), ("attention", "attention with heads of 32")])
def test_what_has_no_rule_is_named_and_nothing_is_promised(rules, what, named):
    rules[what] = None
    found = invariance_of(LINEARS, head_dim=32)
    assert not found.kept
    assert "not promised" in found.sentence()
    assert named in found.sentence()
    assert "sync/probe_gap" in found.sentence()


def test_rules_that_cost_a_twentieth_of_a_step_are_not_followed(rules):
    rules[18] = NARROW
    found = invariance_of({(256, 768): 1, (256, 18): 1}, head_dim=32)
    assert found.cost == pytest.approx((192 - 18) / (768 + 18))
    assert not found.kept
    assert "add 22% to a decode step of 32 rows" in found.sentence()


def test_the_planners_shape_of_a_model_has_its_linears(rules):
    with torch.device("meta"):
        model = make_model(TinyModel(), make_tokenizer())
    assert invariance_for(model, head_dim=64) == invariance_of(configured_shape(TinyModel()).linears(), head_dim=64)
