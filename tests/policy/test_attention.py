"""The shared attention is right, and no result depends on what else was computed with it."""

from unittest.mock import patch

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.flop_counter import FlopCounterMode

from qurl_ray.numerics.rules import Rule
from qurl_ray.policy import attention
from qurl_ray.policy.attention import KEY_CHUNK, QUERY_CHUNK, Packing, invariant_attention, round_up, varlen_attention
from tests.policy.memory import LargestTensor, kept_for_backward
from tests.policy.test_logprobs import assert_close


def random_heads(seed: int, *, length: int, batch=2, heads=4, kv_heads=2, size=32):
    generator = torch.Generator().manual_seed(seed)
    shapes = [(batch, heads, length, size), (batch, kv_heads, length, size), (batch, kv_heads, length, size)]
    return [torch.randn(shape, generator=generator) for shape in shapes]


def packing_of(*lengths: int) -> Packing:
    return Packing(lengths=lengths, bounds=torch.tensor([0, *lengths]).cumsum(0).int())


def positions_of(*lengths: int) -> torch.Tensor:
    return torch.cat([torch.arange(length) for length in lengths])[None]


def chunks_of(queries: int):
    return patch.object(attention, "QUERY_CHUNK", queries)


def gradients(out, *inputs):
    """Of a sum with fixed random weights."""
    weights = torch.randn(out.shape, generator=torch.Generator().manual_seed(9)).to(out)
    return torch.autograd.grad((out * weights).sum(), inputs)


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


SINKS = torch.tensor([-3.0, 0.5, 2.0, 9.0])


@pytest.mark.parametrize("window", [None, 20])
@pytest.mark.parametrize(("length", "chunk"), [(1, 256), (16, 256), (45, 256), (150, 64)])
def test_a_sink_takes_its_share_of_each_heads_probability(length, chunk, window):
    """Independent: a softmax over scores and sink in float64, and its gradient by autograd."""
    parts = [part.requires_grad_() for part in (*random_heads(3, length=length, kv_heads=2), SINKS.clone())]
    query, key, value, sinks = (part.double() for part in parts)
    scores = query @ key.repeat_interleave(2, dim=1).transpose(2, 3) * 32**-0.5
    places = torch.arange(length)
    hidden = places > places[:, None]
    if window:
        hidden |= places <= places[:, None] - window
    scores = scores.masked_fill(hidden, -torch.inf)
    all_scores = torch.cat([scores, sinks.view(1, 4, 1, 1).expand(2, 4, length, 1)], dim=-1)
    expected = (all_scores.softmax(-1)[..., :-1] @ value.repeat_interleave(2, dim=1)).transpose(1, 2)
    with chunks_of(chunk):
        found = attend(*parts[:3], places[None], s_aux=parts[3], sliding_window=window)
        torch.testing.assert_close(found.double(), expected, rtol=1e-5, atol=1e-6)
        for own, reference in zip(gradients(found, *parts), gradients(expected, *parts), strict=True):
            torch.testing.assert_close(own, reference, rtol=1e-3, atol=1e-4)


@pytest.mark.equal_bits
@pytest.mark.parametrize("window", [None, 20])
def test_with_sinks_no_bit_depends_on_what_else_is_computed(window):
    query, key, value = random_heads(4, length=300, kv_heads=2)
    options = {"s_aux": SINKS, "sliding_window": window}
    whole = attend(query, key, value, torch.arange(300)[None], **options)
    for at in (0, 3, 15, 16, 47, 127, 128, 255, 256, 299):  # a decode step: one query, keys up to it, other rows beside
        parts = query[:, :, at : at + 1], key[:, :, : at + 1], value[:, :, : at + 1]
        assert torch.equal(attend(*parts, torch.tensor([[at]]), **options), whole[:, at : at + 1])
        alone = (part[:1] for part in parts)
        assert torch.equal(attend(*alone, torch.tensor([[at]]), **options), whole[:1, at : at + 1])
    rows = [torch.cat([part[:1, :, :70], part[1:, :, :33]], dim=2) for part in (query, key, value)]
    packed = attend(*rows, positions_of(70, 33), packing=packing_of(70, 33), **options)
    assert torch.equal(packed[0], torch.cat([whole[0, :70], whole[1, :33]]))


@pytest.mark.equal_bits
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


@pytest.mark.parametrize("length", [1, 7, 250, 256])
def test_a_head_alone_is_computed_once_where_the_rule_asks_for_two_products_at_once(monkeypatch, length):
    heads = random_heads(3, length=length, batch=1, heads=1, kv_heads=1)
    expected = attend(*heads, positions_of(length))
    monkeypatch.setattr(attention, "_rule", lambda _: Rule(kernel="mkl", rows=4, batch=2))
    with FlopCounterMode(display=False) as counter:
        found = attend(*heads, positions_of(length))
    torch.testing.assert_close(found, expected)
    rows = max(8, length + length % 2)
    assert counter.get_total_flops() == 2 * 2 * rows * round_up(length) * 32


def test_a_batch_of_one_gives_the_bits_of_a_large_batch():
    query, key, value = random_heads(3, length=50, batch=64)
    whole = attend(query, key, value, torch.arange(50)[None])
    for row in (0, 17, 63):
        alone = attend(query[row : row + 1], key[row : row + 1], value[row : row + 1], torch.arange(50)[None])
        assert torch.equal(alone[0], whole[row])


@pytest.mark.equal_bits
@pytest.mark.parametrize("kv_heads", [1, 3, 6], ids=["one key head", "grouped", "ungrouped"])
@settings(max_examples=25, deadline=None)
@given(
    seed=st.integers(0, 2**31),
    length=st.integers(1, 3 * KEY_CHUNK),
    chunk=st.integers(1, 2 * KEY_CHUNK),
    size=st.sampled_from([16, 64, 80]),
    window=st.none() | st.integers(1, 200),
    transposed=st.booleans(),
)
def test_chunks_of_queries_change_no_bit(kv_heads, seed, length, chunk, size, window, transposed):
    heads = random_heads(seed, length=length, heads=6, kv_heads=kv_heads, size=size)
    if transposed:  # as projections leave them
        heads = [part.transpose(1, 2).contiguous().transpose(1, 2) for part in heads]
    with chunks_of(length):
        whole = attend(*heads, torch.arange(length)[None], sliding_window=window)
    with chunks_of(chunk):
        assert torch.equal(attend(*heads, torch.arange(length)[None], sliding_window=window), whole)


@pytest.mark.equal_bits
@pytest.mark.parametrize("length", [QUERY_CHUNK, QUERY_CHUNK + 1, 4 * QUERY_CHUNK + 7])
def test_long_sequences_have_the_bits_of_all_scores_at_once(length):
    heads = random_heads(5, length=length)
    with chunks_of(length):
        whole = attend(*heads, torch.arange(length)[None])
    assert torch.equal(attend(*heads, torch.arange(length)[None]), whole)


@pytest.mark.equal_bits
@pytest.mark.parametrize("kv_heads", [2, 4], ids=["grouped", "ungrouped"])
@settings(max_examples=25, deadline=None)
@given(
    seed=st.integers(0, 2**31),
    lengths=st.lists(st.integers(1, 40) | st.integers(1, 300), min_size=1, max_size=5),
    chunk=st.integers(1, 300),
)
def test_a_packed_sequence_has_the_bits_of_the_sequence_alone(kv_heads, seed, lengths, chunk):
    heads = random_heads(seed, length=sum(lengths), batch=1, kv_heads=kv_heads)
    with chunks_of(chunk):
        packed = attend(*heads, positions_of(*lengths), packing=packing_of(*lengths))
    start = 0
    for length in lengths:
        own = slice(start, start + length)
        alone = attend(*(part[:, :, own].contiguous() for part in heads), torch.arange(length)[None])
        assert torch.equal(packed[:, own], alone)
        start += length


def test_chunks_of_queries_and_packing_have_the_gradient_of_plain_attention():
    lengths = (130, 1, 70)
    heads = [part.requires_grad_() for part in random_heads(6, length=sum(lengths), batch=1)]
    own = torch.block_diag(*(torch.ones(length, length) for length in lengths)).bool().tril()
    plain = torch.nn.functional.scaled_dot_product_attention(*heads, attn_mask=own, enable_gqa=True).transpose(1, 2)
    expected = gradients(plain, *heads)
    for chunk in (32, QUERY_CHUNK):
        with chunks_of(chunk):
            found = attend(*heads, positions_of(*lengths), packing=packing_of(*lengths))
            assert_close(gradients(found, *heads), expected, relative=1e-6)


def test_scores_of_a_long_sequence_never_exist_together():
    heads = [part.requires_grad_() for part in random_heads(7, length=1024, batch=1)]
    with chunks_of(64), LargestTensor() as largest:
        gradients(attend(*heads, torch.arange(1024)[None]), *heads)
    assert largest.numbers == 4 * 64 * 1024  # heads · chunk · keys
    with chunks_of(64), kept_for_backward() as kept:
        attend(*heads, torch.arange(1024)[None])
    assert max(kept.values()) == heads[0].numel()  # the queries


@pytest.mark.parametrize("lengths", [(40,), (1, 33, 2), (300, 5)], ids=str)
def test_the_fused_attention_is_the_invariant_one_to_rounding(lengths):
    heads = [part.requires_grad_() for part in random_heads(8, length=sum(lengths), batch=1)]
    options = {"packing": packing_of(*lengths)} if len(lengths) > 1 else {}
    expected = attend(*heads, positions_of(*lengths), **options)
    found, _ = varlen_attention(torch.nn.Identity(), *heads, scaling=32**-0.5, **options)
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)
    assert_close(gradients(found, *heads), gradients(expected, *heads), relative=1e-6)


def test_the_fused_attention_takes_the_type_of_autocast():
    query, key, value = random_heads(8, length=20)
    with torch.autocast(
        "cpu", torch.bfloat16
    ):  # the model's projection gives value in it, rotary the others in float32
        found, _ = varlen_attention(torch.nn.Identity(), query, key, value.bfloat16(), scaling=32**-0.5)
    assert found.dtype == torch.bfloat16
    torch.testing.assert_close(found.float(), attend(query, key, value, positions_of(20)), rtol=0.02, atol=0.02)


def test_the_fused_attention_refuses_what_it_does_not_compute():
    query, key, value = random_heads(4, length=8)
    with pytest.raises(ValueError, match="takes whole sequences, got 1 queries and 8 keys"):
        varlen_attention(torch.nn.Identity(), query[:, :, :1], key, value, scaling=1.0)
    with pytest.raises(ValueError, match="8 tokens exceed 5; use qurl_invariant"):
        varlen_attention(torch.nn.Identity(), query, key, value, scaling=1.0, sliding_window=5)
    varlen_attention(torch.nn.Identity(), query, key, value, scaling=1.0, sliding_window=8)


@pytest.mark.parametrize("function", [invariant_attention, varlen_attention])
@pytest.mark.parametrize(
    "option", [{"attention_mask": torch.ones(2, 1, 8, 8)}, {"dropout": 0.1}], ids=["mask", "dropout"]
)
def test_masks_and_dropout_are_refused(function, option):
    heads = random_heads(4, length=8)
    with pytest.raises(ValueError, match="causal by position_ids"):
        function(torch.nn.Identity(), *heads, scaling=1.0, position_ids=torch.arange(8)[None], **option)
