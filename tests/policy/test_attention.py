"""The shared attention is right, and no result depends on what else was computed with it."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from qurl_ray.policy.attention import KEY_CHUNK, invariant_attention, round_up


def random_heads(seed: int, *, length: int, batch=2, heads=4, kv_heads=2, size=32):
    generator = torch.Generator().manual_seed(seed)
    shapes = [(batch, heads, length, size), (batch, kv_heads, length, size), (batch, kv_heads, length, size)]
    return [torch.randn(shape, generator=generator) for shape in shapes]


def attend(query, key, value, positions, **options):
    return invariant_attention(
        torch.nn.Identity(), query, key, value, scaling=query.shape[-1] ** -0.5, position_ids=positions, **options
    )[0]


@pytest.mark.parametrize("length", [1, 7, 16, 129, 300])
@pytest.mark.parametrize("kv_heads", [1, 2, 4])
def test_agrees_with_torchs_attention(length, kv_heads):
    query, key, value = random_heads(0, length=length, kv_heads=kv_heads)
    expected = torch.nn.functional.scaled_dot_product_attention(
        query.double(), key.double(), value.double(), is_causal=True, enable_gqa=True
    ).transpose(1, 2)
    found = attend(query, key, value, torch.arange(length)[None])
    torch.testing.assert_close(found.double(), expected, rtol=1e-5, atol=1e-6)


def test_a_sliding_window_hides_older_keys():
    query, key, value = random_heads(1, length=40)
    age = torch.arange(40)[:, None] - torch.arange(40)[None]
    expected = torch.nn.functional.scaled_dot_product_attention(
        query, key, value, attn_mask=(age >= 0) & (age < 5), enable_gqa=True
    ).transpose(1, 2)
    found = attend(query, key, value, torch.arange(40)[None], sliding_window=5)
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("kv_heads", [2, 4], ids=["grouped", "ungrouped"])
@settings(max_examples=25, deadline=None)
@given(seed=st.integers(0, 2**31), length=st.integers(2, 3 * KEY_CHUNK), at=st.floats(0, 1), data=st.data())
def test_one_query_at_a_time_gives_the_bits_of_all_at_once(kv_heads, seed, length, at, data):
    query, key, value = random_heads(seed, length=length, kv_heads=kv_heads)
    whole = attend(query, key, value, torch.arange(length)[None])
    t = int(at * (length - 1))
    # A slot row holds keys up to t, then leftovers of another sequence, which must not matter.
    visible = data.draw(st.integers(round_up(t + 1) // 16, round_up(length) // 16 + 2)) * 16
    rows = [torch.full((2, kv_heads, visible, 32), 7.0) for _ in range(2)]
    for row, part in zip(rows, (key, value), strict=True):
        row[:, :, : t + 1] = part[:, :, : t + 1]
    one = attend(query[:, :, t : t + 1], *rows, torch.full((2, 1), t))
    assert torch.equal(one[:, 0], whole[:, t])


def test_a_batch_of_one_gives_the_bits_of_a_large_batch():
    query, key, value = random_heads(3, length=50, batch=64)
    whole = attend(query, key, value, torch.arange(50)[None])
    for row in (0, 17, 63):
        alone = attend(query[row : row + 1], key[row : row + 1], value[row : row + 1], torch.arange(50)[None])
        assert torch.equal(alone[0], whole[row])


def test_masks_are_refused():
    query, key, value = random_heads(4, length=8)
    with pytest.raises(ValueError, match="causal by position_ids"):
        attend(query, key, value, torch.arange(8)[None], attention_mask=torch.ones(2, 1, 8, 8))
