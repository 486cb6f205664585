"""Ids for which the tokenizer has no text: nobody draws them, and engine and learner leave them out alike."""

import json

import numpy as np
import pytest
import torch
from transformers import AutoTokenizer

from qurl_ray.data.answers import answer_text
from qurl_ray.policy.load import empty_model, load_model, load_tokenizer
from qurl_ray.policy.logprobs import log_softmax, score_states, textless, token_logprobs
from qurl_ray.policy.save import save_policy
from qurl_ray.types import PolicySpec
from tests.conftest import requests_for
from tests.engines.test_torch_engine import engine_with

PADDED = 64
"""Rows of the embedding beyond the tokenizer's 18 ids."""


@pytest.fixture(params=["behind", "between"])
def padded(request, model, tokenizer, tmp_path):
    """A policy whose head likes best the ids that have no text, (spec, those ids): behind all others, or also one
    between them."""
    save_policy(model, tokenizer, tmp_path / "policy")
    hidden = list(range(18, 18 + PADDED))
    file = tmp_path / "policy" / "tokenizer.json"
    if request.param == "between":
        whole = json.loads(file.read_text())
        vocabulary = whole["model"]["vocab"]
        vocabulary[max(vocabulary, key=vocabulary.get)] = 23
        file.write_text(json.dumps(whole))
        hidden = [17, *range(18, 23), *range(24, 18 + PADDED)]
    model.resize_token_embeddings(18 + PADDED, mean_resizing=False)
    with torch.no_grad():
        model.get_output_embeddings().weight[18:] = 3 * model.get_output_embeddings().weight[:18].repeat(4, 1)[:PADDED]
    save_policy(model, AutoTokenizer.from_pretrained(tmp_path / "policy"), tmp_path / "policy")
    return PolicySpec(source=str(tmp_path / "policy")), hidden


def test_they_are_the_rows_that_no_token_of_the_tokenizer_has(padded, tiny_spec):
    spec, hidden = padded
    for make in (load_model, empty_model):
        assert textless(make(spec)).tolist() == hidden
    assert textless(load_model(tiny_spec)) is None


@pytest.mark.parametrize("temperature", [0.0, 0.7, 1.0])
@pytest.mark.parametrize("format_name", ["none", "int8"])
def test_none_is_drawn_and_every_answer_has_a_text(padded, temperature, format_name):
    spec, hidden = padded
    tokenizer = load_tokenizer(spec)
    engine = engine_with(spec, load_model(spec), format_name)
    requests = requests_for(tokenizer, 10, 2, temperature=temperature, ignore_eos=True, max_new_tokens=12)
    for completion in engine.generate(requests, version=1):
        assert not np.isin(completion.token_ids, hidden).any()
        assert all(answer_text(completion.token_ids[i : i + 1], tokenizer, ())[0] for i in range(12))


@pytest.mark.equal_bits
@pytest.mark.parametrize("temperature", [0.7, 1.0])
def test_engine_and_learner_leave_them_out_alike(padded, temperature):
    """Bit for bit."""
    spec, _ = padded
    tokenizer, model = load_tokenizer(spec), load_model(spec)
    requests = requests_for(tokenizer, 8, 2, temperature=temperature, ignore_eos=True)
    completions = engine_with(spec, model, "none").generate(requests, version=1)
    for request, completion in zip(requests, completions, strict=True):
        ids = np.concatenate([request.prompt_ids, completion.token_ids])
        mask = np.arange(len(ids)) >= len(request.prompt_ids)
        with torch.no_grad():
            found = token_logprobs(model, torch.tensor(ids)[None].long(), torch.tensor(mask)[None], temperature)
        np.testing.assert_array_equal(found[0, mask].numpy(), completion.logprobs)


@pytest.mark.parametrize("entropy", ["value", "gradient"])
def test_scores_and_entropies_are_those_of_the_ids_with_text_alone(padded, entropy):
    spec, hidden = padded
    model = load_model(spec)
    kept = [token for token in range(18 + PADDED) if token not in hidden]
    states = torch.randn(6, model.config.hidden_size, requires_grad=True)
    ids = torch.tensor(kept[:6])
    logprobs, entropies = score_states(model, states, ids, 0.7, entropy=entropy)
    expected = log_softmax(model.get_output_embeddings()(states)[:, kept], 0.7)
    torch.testing.assert_close(logprobs, expected[range(6), range(6)])
    torch.testing.assert_close(entropies, -(expected.exp() * expected).sum(dim=1), check_stride=False)
    total = logprobs.sum() + (entropies.sum() if entropy == "gradient" else 0)
    total.backward()
    assert states.grad.isfinite().all()
    rows = model.get_output_embeddings().weight.grad
    assert not rows[hidden].any()
    assert rows[kept].any()
