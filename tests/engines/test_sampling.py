"""Draws follow the distribution that their log-probs claim."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

from qurl_ray.engines.torch.sampling import _invert, sample, uniforms
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


# --- inversion ----------------------------------------------------------------------------------------------------

LAST = 1 - 2.0**-53  # the largest number that is drawn


def assert_inverse(weights: np.ndarray, u: float) -> None:
    """The token's share of the cumulative distribution, in plain float64 over the whole row, holds u (to float32)."""
    token = int(_invert(torch.from_numpy(weights)[None], torch.tensor([u], dtype=torch.float64))[0])
    assert 0 <= token < len(weights)
    assert weights[token] > 0
    ends = np.cumsum(weights.astype(np.float64))
    start = ends[token - 1] if token else 0.0
    assert start / ends[-1] - 1e-6 <= u <= ends[token] / ends[-1] + 1e-6


@settings(max_examples=300, deadline=None)
@given(
    size=st.integers(1, 700),
    seed=st.integers(0, 2**32 - 1),
    zeros=st.sampled_from([0.0, 0.5, 0.99]),
    spread=st.sampled_from([0.0, 1.0, 20.0, 70.0]),
    scale=st.sampled_from([1e-30, 1.0, 1e6]),
    u=st.one_of(st.floats(0, LAST), st.sampled_from([0.0, 5e-324, 0.5, LAST])),
)
def test_inversion_is_that_of_the_cumulative_sum_over_the_whole_row(size, seed, zeros, spread, scale, u):
    rng = np.random.default_rng(seed)
    weights = np.exp(-spread * rng.random(size)) * scale * (rng.random(size) >= zeros)
    weights[rng.integers(size)] = scale
    assert_inverse(weights.astype(np.float32), u)


@pytest.mark.parametrize("size", [1, 2, 127, 128, 129, 256, 1000, 1024])
@pytest.mark.parametrize("u", [0.0, 5e-324, 0.25, LAST])
def test_a_single_token_of_any_weight_is_always_drawn(size, u):
    for place in {0, size // 2, size - 1}:
        for weight in (1e-45, 1e-38, 1e-7, 1.0, 1e30):
            weights = np.zeros(size, dtype=np.float32)
            weights[place] = weight
            assert_inverse(weights, u)


@pytest.mark.parametrize("size", [131, 384, 1000])
def test_draws_over_many_blocks_have_the_frequencies_of_the_weights(size):
    rng = np.random.default_rng(size)
    weights = (rng.random(size) ** 4 * (rng.random(size) > 0.3)).astype(np.float32)
    weights[128:256] = 0  # a block of which nothing may be drawn
    count = 200_000
    u = uniforms(np.arange(count, dtype=np.uint64), np.zeros(count, dtype=np.int64))
    tokens = torch.cat([_invert(torch.from_numpy(weights).expand(len(part), -1), part) for part in u.split(5000)])
    counts = np.bincount(tokens.numpy(), minlength=size)
    assert counts[weights == 0].sum() == 0
    expected = weights.astype(np.float64) / weights.astype(np.float64).sum() * count
    often = expected > 20
    observed = np.append(counts[often], counts[~often].sum())
    assert stats.chisquare(observed, np.append(expected[often], expected[~often].sum())).pvalue > 1e-4


@pytest.mark.parametrize("params", [SamplingParams(), SamplingParams(top_k=3), SamplingParams(top_p=0.5)])
def test_a_row_that_is_no_distribution_yields_a_token_whose_logprob_says_so(params):
    logits = torch.randn(4, 200, generator=torch.Generator().manual_seed(0))
    expected, _ = sample(logits, params, torch.full((4,), 0.3, dtype=torch.float64))
    logits[1], logits[2, 7], logits[3] = torch.nan, torch.nan, torch.inf
    tokens, logprobs = sample(logits, params, torch.full((4,), 0.3, dtype=torch.float64))
    assert tokens[0] == expected[0]
    assert ((tokens >= 0) & (tokens < 200)).all()
    assert logprobs[0].isfinite()
    assert not logprobs[1:].isfinite().any()


def test_rows_are_drawn_as_if_alone():
    weights = torch.rand(50, 300, generator=torch.Generator().manual_seed(1)) ** 6
    u = uniforms(np.arange(50, dtype=np.uint64), np.zeros(50, dtype=np.int64))
    together = _invert(weights, u)
    alone = [int(_invert(weights[i : i + 1], u[i : i + 1])[0]) for i in range(50)]
    assert together.tolist() == alone
