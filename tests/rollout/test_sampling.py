"""Draws follow the distribution that their log-probs claim."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

from qurl_ray.rollout.sampling import sample, uniforms
from qurl_ray.types import SamplingParams

LOGITS = torch.tensor([2.0, -1.0, 0.5, 0.5, -3.0, 1.0])


def draw(params: SamplingParams, count: int = 40_000):
    seeds = np.arange(count, dtype=np.uint64) * 7919
    return sample(LOGITS.expand(count, -1), params, uniforms(seeds, np.zeros(count, dtype=np.int64)))


def expected_distribution(temperature: float, top_k: int, top_p: float) -> np.ndarray:
    """The textbook order: temperature, then top-k, then the smallest likeliest set that reaches top_p."""
    p = np.exp(LOGITS.double().numpy() / temperature)
    p /= p.sum()
    kept, mass = [], 0.0
    for token in np.argsort(-p, kind="stable")[: top_k or None]:
        if mass >= top_p:
            break
        kept.append(token)
        mass += p[token]
    out = np.zeros_like(p)
    out[kept] = p[kept] / p[kept].sum()
    return out


@pytest.mark.parametrize(
    ("temperature", "top_k", "top_p"), [(1.0, 0, 1.0), (0.6, 0, 1.0), (1.0, 3, 1.0), (1.3, 0, 0.8), (0.9, 4, 0.7)]
)
def test_draws_and_logprobs_follow_the_truncated_distribution(temperature, top_k, top_p):
    tokens, logprobs = draw(SamplingParams(temperature=temperature, top_k=top_k, top_p=top_p))
    expected = expected_distribution(temperature, top_k, top_p)
    counts = np.bincount(tokens.numpy(), minlength=6)
    assert counts[expected == 0].sum() == 0
    possible = expected > 0
    assert stats.chisquare(counts[possible], expected[possible] * counts.sum()).pvalue > 1e-4
    np.testing.assert_allclose(logprobs.exp().numpy(), expected[tokens.numpy()], rtol=1e-5)


def test_greedy_takes_the_likeliest_with_certainty():
    tokens, logprobs = draw(SamplingParams(temperature=0), 10)
    assert tokens.tolist() == [0] * 10
    assert logprobs.tolist() == [0] * 10


def test_draws_of_one_seed_at_different_tokens_are_independent():
    u = uniforms(np.full(20_000, 5, dtype=np.uint64), np.arange(20_000))
    assert stats.kstest(u.numpy(), "uniform").pvalue > 1e-4
    assert abs(np.corrcoef(u[:-1], u[1:])[0, 1]) < 0.03
    v = uniforms(np.arange(20_000, dtype=np.uint64), np.zeros(20_000, dtype=np.int64))
    assert stats.kstest(v.numpy(), "uniform").pvalue > 1e-4


@settings(max_examples=50, deadline=None)
@given(seed=st.integers(0, 2**64 - 1), token=st.integers(0, 2**20))
def test_a_draw_depends_on_seed_and_token_alone(seed, token):
    alone = uniforms(np.array([seed], dtype=np.uint64), np.array([token]))
    others = uniforms(np.array([1, seed, 2], dtype=np.uint64), np.array([9, token, 4]))
    assert alone[0] == others[1]
    assert 0 <= float(alone[0]) < 1
