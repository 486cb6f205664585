"""Log-probs of long answers: what bounds their memory changes neither them nor their gradient."""

from contextlib import contextmanager
from unittest.mock import patch

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import AutoModelForCausalLM, LlamaConfig, Qwen2Config, Qwen3Config

from qurl_ray.policy import attention, logprobs
from qurl_ray.policy.attention import NAME, VARLEN
from qurl_ray.policy.load import with_row_rules
from qurl_ray.policy.logprobs import enable_checkpointing, score_states, token_logprobs
from tests.policy.memory import LargestTensor, kept_for_backward

SHAPE = {"vocab_size": 311, "hidden_size": 144, "intermediate_size": 100, "num_hidden_layers": 2}
CONFIGS = {
    "llama": LlamaConfig(**SHAPE, num_attention_heads=9, num_key_value_heads=3),
    "qwen2": Qwen2Config(**SHAPE, num_attention_heads=4, num_key_value_heads=2, tie_word_embeddings=True),
    "qwen3": Qwen3Config(**SHAPE, num_attention_heads=4, num_key_value_heads=1, head_dim=32),
}


def model_of(architecture: str, implementation: str = NAME):
    """Random, but far from uniform: matrices four times the initial size, biases that are not 0."""
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(CONFIGS[architecture], attn_implementation=implementation)
    if implementation == NAME:
        model = with_row_rules(model)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(4) if parameter.ndim == 2 else parameter.add_(0.1 * torch.randn(parameter.shape))
    return model.eval()


@pytest.fixture(scope="module", params=CONFIGS)
def model(request):
    return model_of(request.param)


def batch_of(*lengths: int, seed: int = 0):
    """(ids, mask, lengths): rows of these lengths, padded with random ids, of which a random part is masked True."""
    generator = torch.Generator().manual_seed(seed)
    ids_BT = torch.randint(SHAPE["vocab_size"], (len(lengths), max(lengths)), generator=generator)
    at_BT = torch.arange(max(lengths)).expand_as(ids_BT)
    first_B1 = torch.tensor([[torch.randint(1, length + 1, (), generator=generator)] for length in lengths])
    lengths_B = torch.tensor(lengths)
    return ids_BT, (at_BT >= first_B1) & (at_BT < lengths_B[:, None]), lengths_B


def pieces_of(rows: int):
    return patch.object(logprobs, "HEAD_BYTES", rows * 4 * SHAPE["vocab_size"])


def gradient(model, out_BT):
    weights = torch.randn(out_BT.shape, generator=torch.Generator().manual_seed(9))
    return torch.autograd.grad((out_BT * weights).sum(), list(model.parameters()))


def assert_close(found, expected, relative: float):
    for one, other in zip(found, expected, strict=True):
        assert (one - other).norm() <= relative * other.norm()


@contextmanager
def blocks_computed(model):
    """Counts calls of the first block's feed-forward part."""
    calls = []
    handle = model.base_model.layers[0].mlp.register_forward_pre_hook(lambda *_: calls.append(1))
    yield calls
    handle.remove()


@pytest.mark.parametrize("architecture", CONFIGS)
def test_log_probs_are_those_of_the_stock_model_row_by_row(architecture):
    ids_BT, mask_BT, lengths_B = batch_of(20, 1, 33, 2)
    stock = model_of(architecture, "sdpa")
    for options in ({}, {"lengths_B": lengths_B}):
        found_BT = token_logprobs(model_of(architecture), ids_BT, mask_BT, 0.7, **options)
        assert (found_BT[~mask_BT] == 0).all()
        for row, length in enumerate(lengths_B.tolist()):
            logits = stock(input_ids=ids_BT[row : row + 1, :length]).logits[0, :-1]
            expected = torch.log_softmax(logits.double() / 0.7, dim=-1).gather(1, ids_BT[row, 1:length, None])[:, 0]
            own = mask_BT[row, 1:length]
            torch.testing.assert_close(found_BT[row, 1:length][own].double(), expected[own], rtol=1e-4, atol=1e-4)


@pytest.mark.equal_bits
@settings(max_examples=20, deadline=None)
@given(rows=st.integers(1, 70), temperature=st.sampled_from([1.0, 0.7]), packed=st.booleans())
def test_pieces_of_logits_change_no_bit(model, rows, temperature, packed):
    ids_BT, mask_BT, lengths_B = batch_of(30, 12, 41)
    options = {"lengths_B": lengths_B} if packed else {}
    whole_BT = token_logprobs(model, ids_BT, mask_BT, temperature, **options)
    with pieces_of(rows):
        assert torch.equal(token_logprobs(model, ids_BT, mask_BT, temperature, **options), whole_BT)


@pytest.mark.equal_bits
@settings(max_examples=25, deadline=None)
@given(
    lengths=st.lists(st.integers(1, 3) | st.integers(1, 200), min_size=1, max_size=6),
    seed=st.integers(0, 2**31),
    chunk=st.sampled_from([16, 50, attention.QUERY_CHUNK]),
)
def test_packed_rows_have_the_bits_of_padded_ones(model, lengths, seed, chunk):
    ids_BT, mask_BT, lengths_B = batch_of(*lengths, seed=seed)
    padded_BT = token_logprobs(model, ids_BT, mask_BT, 1.0) if max(lengths) > 1 else torch.zeros(ids_BT.shape)
    with patch.object(attention, "QUERY_CHUNK", chunk):
        assert torch.equal(token_logprobs(model, ids_BT, mask_BT, 1.0, lengths_B=lengths_B), padded_BT)


def test_packed_rows_and_pieces_have_the_gradient_of_padded_rows(model):
    ids_BT, mask_BT, lengths_B = batch_of(60, 1, 33, 90)
    expected = gradient(model, token_logprobs(model, ids_BT, mask_BT, 1.0))
    with pieces_of(7), patch.object(attention, "QUERY_CHUNK", 32):
        found = gradient(model, token_logprobs(model, ids_BT, mask_BT, 1.0, lengths_B=lengths_B))
    assert_close(found, expected, relative=1e-5)


@pytest.mark.parametrize("kept_bytes", [0, logprobs.KEPT_BYTES], ids=["computed again", "kept"])
@pytest.mark.parametrize("temperature", [1.0, 0.7])
@pytest.mark.parametrize("entropy", ["none", "value", "gradient"])
def test_gradients_of_log_probs_and_entropies_are_those_in_float64(monkeypatch, entropy, temperature, kept_bytes):
    monkeypatch.setattr(logprobs, "KEPT_BYTES", kept_bytes)
    model, generator = model_of("llama"), torch.Generator().manual_seed(1)
    states_Nd = torch.randn(50, SHAPE["hidden_size"], generator=generator).requires_grad_()
    ids_N = torch.randint(SHAPE["vocab_size"], (50,), generator=generator)
    factors = torch.randn(2, 50, generator=generator)
    with pieces_of(17):
        taken_N, entropy_N = score_states(model, states_Nd, ids_N, temperature, entropy=entropy)
    assert (entropy_N is None) == (entropy == "none")

    head = model.lm_head.weight
    logits_NV = states_Nd.double() @ head.double().T / temperature
    expected_N = logits_NV[torch.arange(50), ids_N] - logits_NV.exp().sum(1).log()
    all_NV = logits_NV - logits_NV.exp().sum(1, keepdim=True).log()
    of_entropy_N = -(all_NV.exp() * all_NV).sum(1)
    found, expected = (taken_N * factors[0]).sum(), (expected_N * factors[0]).sum()
    torch.testing.assert_close(taken_N.double(), expected_N, rtol=1e-5, atol=1e-5)
    if entropy != "none":
        torch.testing.assert_close(entropy_N.double(), of_entropy_N, rtol=1e-4, atol=1e-4)
        assert entropy_N.requires_grad == (entropy == "gradient")
    if entropy == "gradient":
        found, expected = found + (entropy_N * factors[1]).sum(), expected + (of_entropy_N * factors[1]).sum()
    inputs = [states_Nd, head]
    assert_close(torch.autograd.grad(found, inputs), torch.autograd.grad(expected, inputs), relative=1e-5)


@pytest.mark.parametrize(
    ("kept_bytes", "checkpoints", "times"), [(10**9, False, 1), (10**9, True, 2), (1000, False, 2)]
)
def test_logits_are_computed_once_where_they_may_be_kept(monkeypatch, kept_bytes, checkpoints, times):
    monkeypatch.setattr(logprobs, "KEPT_BYTES", kept_bytes)
    model, found = model_of("qwen2"), []
    if checkpoints:
        enable_checkpointing(model)
    multiply = model.lm_head.forward

    def counted(x):
        found.append(len(x))
        return multiply(x)

    monkeypatch.setattr(model.lm_head, "forward", counted)
    states_Nd = torch.randn(64, SHAPE["hidden_size"]).requires_grad_()
    with pieces_of(16):
        taken_N, _ = score_states(model, states_Nd, torch.zeros(64, dtype=torch.int64), 1.0)
        taken_N.sum().backward()
    assert found == [16] * 4 * times


def test_the_fused_attention_gives_the_same_to_rounding():
    model, fused = model_of("llama"), model_of("llama", VARLEN)
    ids_BT, mask_BT, lengths_B = batch_of(60, 1, 33)
    expected_BT = token_logprobs(model, ids_BT, mask_BT, 1.0)
    for options in ({}, {"lengths_B": lengths_B}):
        found_BT = token_logprobs(fused, ids_BT, mask_BT, 1.0, **options)
        torch.testing.assert_close(found_BT, expected_BT, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("packed", [False, True], ids=["padded", "packed"])
@pytest.mark.parametrize("architecture", CONFIGS)
def test_checkpointing_computes_blocks_twice_and_changes_nothing(architecture, packed):
    model = model_of(architecture)
    ids_BT, mask_BT, lengths_B = batch_of(60, 1, 33)
    options = {"lengths_B": lengths_B} if packed else {}

    def computed():
        with patch.object(attention, "QUERY_CHUNK", 32), pieces_of(20), blocks_computed(model) as calls:
            out_BT = token_logprobs(model, ids_BT, mask_BT, 1.0, **options)
            return out_BT, gradient(model, out_BT), len(calls)

    kept_BT, kept_gradient, once = computed()
    enable_checkpointing(model)
    again_BT, again_gradient, twice = computed()
    assert (once, twice) == (1, 2)
    assert torch.equal(again_BT, kept_BT)
    assert_close(again_gradient, kept_gradient, relative=1e-6)
    model.eval()
    assert computed()[2] == 1


def test_logits_of_many_tokens_never_exist_together():
    model = model_of("llama")
    ids_BT, mask_BT, lengths_B = batch_of(500, 400)
    mask_BT = torch.arange(500) < lengths_B[:, None]
    mask_BT[:, 0] = False
    short = patch.object(logprobs, "KEPT_BYTES", 0)
    with short, pieces_of(16), patch.object(attention, "QUERY_CHUNK", 16), LargestTensor() as largest:
        gradient(model, token_logprobs(model, ids_BT, mask_BT, 1.0, lengths_B=lengths_B))
    assert largest.numbers == 898 * SHAPE["hidden_size"]  # the states of all tokens; all logits would be 898 · 311
    with short, pieces_of(16), kept_for_backward() as kept:
        token_logprobs(model, ids_BT, mask_BT, 1.0, lengths_B=lengths_B)
    assert 16 * 311 not in kept.values()


@pytest.mark.parametrize("packed", [False, True], ids=["padded", "packed"])
def test_nothing_to_score_is_zeros_with_a_gradient_of_zeros(packed):
    model = model_of("qwen2")
    ids_BT, mask_BT, lengths_B = batch_of(5, 3)
    out_BT = token_logprobs(model, ids_BT, mask_BT & False, 1.0, lengths_B=lengths_B if packed else None)
    assert not out_BT.any()
    assert not any(part.any() for part in gradient(model, out_BT))


def test_a_mask_on_padding_is_an_error():
    ids_BT, mask_BT, _ = batch_of(5, 5)
    mask_BT[:] = True
    with pytest.raises(ValueError, match=r"True beyond lengths_B = \[5, 4\]"):
        token_logprobs(model_of("qwen2"), ids_BT, mask_BT, 1.0, lengths_B=torch.tensor([5, 4]))
