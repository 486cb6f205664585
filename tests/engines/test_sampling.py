"""Draws follow the distribution that their log-probs claim."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

from qurl_ray.engines.torch.sampling import _race, exponentials, noise_keys, sample
from qurl_ray.types import SamplingParams

LOGITS = torch.tensor([2.0, -1.0, 0.5, 0.5, -3.0, 1.0])


def draw(params: SamplingParams, count: int = 40_000):
    seeds = np.arange(count, dtype=np.uint64) * 7919
    return sample(LOGITS.expand(count, -1), params, noise_keys(seeds, np.zeros(count, dtype=np.int64)))


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


def test_noise_of_all_keys_and_places_is_exponential_and_independent():
    of_tokens = exponentials(noise_keys(np.full(20_000, 5, dtype=np.uint64), np.arange(20_000)), 2)
    of_seeds = exponentials(noise_keys(np.arange(20_000, dtype=np.uint64), np.zeros(20_000, dtype=np.int64)), 2)
    of_places = exponentials(noise_keys(np.array([3], dtype=np.uint64), np.array([4])), 20_000)
    for e in (of_tokens[:, 0], of_tokens[:, 1], of_seeds[:, 0], of_places[0]):
        assert stats.kstest(e, "expon").pvalue > 1e-4
        assert abs(np.corrcoef(e[:-1], e[1:])[0, 1]) < 0.03
    assert abs(np.corrcoef(of_tokens[:, 0], of_tokens[:, 1])[0, 1]) < 0.03


def test_the_least_and_the_largest_noise_are_finite_and_above_0(monkeypatch):
    for bits in (0, 2**64 - 1):
        monkeypatch.setattr("qurl_ray.engines.torch.sampling.splitmix64", lambda x, bits=bits: x * 0 + np.uint64(bits))
        (e,) = exponentials(np.array([1], dtype=np.uint64), 1)[0]
        assert 0 < e < 40


@settings(max_examples=50, deadline=None)
@given(seed=st.integers(0, 2**64 - 1), token=st.integers(0, 2**20))
def test_noise_depends_on_seed_and_token_alone(seed, token):
    alone = exponentials(noise_keys(np.array([seed], dtype=np.uint64), np.array([token])), 48)
    others = exponentials(noise_keys(np.array([1, seed, 2], dtype=np.uint64), np.array([9, token, 4])), 48)
    np.testing.assert_array_equal(alone[0], others[1])


# --- races --------------------------------------------------------------------------------------------------------


def keys(count: int) -> np.ndarray:
    return noise_keys(np.arange(count, dtype=np.uint64), np.zeros(count, dtype=np.int64))


@settings(max_examples=200, deadline=None)
@given(
    size=st.integers(1, 700),
    seed=st.integers(0, 2**32 - 1),
    zeros=st.sampled_from([0.0, 0.5, 0.99]),
    spread=st.sampled_from([0.0, 1.0, 20.0, 70.0]),
    scale=st.sampled_from([1e-30, 1.0, 1e6]),
)
def test_the_winner_is_that_of_two_races_in_plain_python(size, seed, zeros, spread, scale):
    rng = np.random.default_rng(seed)
    weights = np.exp(-spread * rng.random(size)) * scale * (rng.random(size) >= zeros)
    weights[rng.integers(size)] = scale
    weights = weights.astype(np.float32)
    key = noise_keys(np.array([seed], dtype=np.uint64), np.array([7]))
    width = min(256, -(-size // 16) * 16)
    noise = [float(e) for e in exponentials(key, 512)[0]]
    parts = [weights[start : start + width].astype(float).tolist() for start in range(0, size, width)]
    first = max(range(len(parts)), key=lambda n: sum(parts[n]) / noise[width + n])
    second = max(range(len(parts[first])), key=lambda i: parts[first][i] / noise[i])
    assert int(_race(torch.from_numpy(weights)[None], key)[0]) == first * width + second
    assert weights[first * width + second] > 0


@pytest.mark.parametrize("size", [1, 2, 127, 256, 257, 1000, 1024])
def test_a_single_token_of_any_weight_is_always_drawn(size):
    for place in {0, size // 2, size - 1}:
        for weight in (1e-45, 1e-38, 1e-7, 1.0, 1e30):
            weights = torch.zeros(3, size)
            weights[:, place] = weight
            assert _race(weights, keys(3)).tolist() == [place] * 3


@pytest.mark.parametrize("size", [131, 600, 1000])
def test_draws_over_many_blocks_have_the_frequencies_of_the_weights(size):
    rng = np.random.default_rng(size)
    weights = (rng.random(size) ** 4 * (rng.random(size) > 0.3)).astype(np.float32)
    weights[256:512] = 0  # a block of which nothing may be drawn
    count = 100_000
    parts = np.split(keys(count), 20)
    tokens = torch.cat([_race(torch.from_numpy(weights).expand(len(part), -1), part) for part in parts])
    counts = np.bincount(tokens.numpy(), minlength=size)
    assert counts[weights == 0].sum() == 0
    expected = weights.astype(np.float64) / weights.astype(np.float64).sum() * count
    often = expected > 20
    observed = np.append(counts[often], counts[~often].sum())
    assert stats.chisquare(observed, np.append(expected[often], expected[~often].sum())).pvalue > 1e-4


def test_close_distributions_mostly_draw_the_same_token():
    """One race differs with a probability of at most 2 TV / (1 + TV), two with little more."""
    random = torch.Generator().manual_seed(0)
    logits = 2 * torch.randn(1500, generator=random)
    one, other = torch.softmax(logits, 0), torch.softmax(logits + 0.2 * torch.randn(1500, generator=random), 0)
    distance = float((one - other).abs().sum() / 2)
    assert 0.05 < distance < 0.1
    drawn = [_race(weights.expand(5000, -1), keys(5000)) for weights in (one, other)]
    assert float((drawn[0] != drawn[1]).double().mean()) < 2.2 * distance


@pytest.mark.parametrize("params", [SamplingParams(), SamplingParams(top_k=3), SamplingParams(top_p=0.5)])
def test_a_row_that_is_no_distribution_yields_a_token_whose_logprob_says_so(params):
    logits = torch.randn(4, 200, generator=torch.Generator().manual_seed(0))
    expected, _ = sample(logits, params, keys(4))
    logits[1], logits[2, 7], logits[3] = torch.nan, torch.nan, torch.inf
    tokens, logprobs = sample(logits, params, keys(4))
    assert tokens[0] == expected[0]
    assert ((tokens >= 0) & (tokens < 200)).all()
    assert logprobs[0].isfinite()
    assert not logprobs[1:].isfinite().any()


def test_rows_are_drawn_as_if_alone():
    weights = torch.rand(50, 300, generator=torch.Generator().manual_seed(1)) ** 6
    alone = [int(_race(weights[i : i + 1], keys(50)[i : i + 1])[0]) for i in range(50)]
    assert _race(weights, keys(50)).tolist() == alone
