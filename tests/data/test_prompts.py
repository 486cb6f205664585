"""Prompts as tokens, and whether they fit."""

import numpy as np
import pytest
from tokenizers import Regex, Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from qurl_ray.data import prompts
from qurl_ray.data.prompts import check_lengths, encode_prompt
from qurl_ray.errors import DataError
from qurl_ray.types import Problem

LETTERS = "0123456789+=\\boxed{} Q:<>userait"
CHAT = "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}{% if add_generation_prompt %}<ai>{% endif %}"


@pytest.fixture
def tokenizer():
    """One token per character, as the tiny policy's."""
    model = models.WordLevel({letter: index for index, letter in enumerate(sorted(set(LETTERS)))}, unk_token="0")
    inner = Tokenizer(model)
    inner.pre_tokenizer = pre_tokenizers.Split(Regex("."), "isolated")
    return PreTrainedTokenizerFast(tokenizer_object=inner)


def problem(prompt, uid="train-0"):
    return Problem(uid=uid, prompt=prompt, answer="")


def text(ids):
    return "".join(sorted(set(LETTERS))[index] for index in ids)


def test_a_prompt_becomes_int32_tokens(tokenizer):
    ids = encode_prompt(problem("12+34="), tokenizer, template="{prompt}", chat=False)
    assert (ids.dtype, ids.shape, text(ids)) == (np.int32, (6,), "12+34=")


def test_in_a_template_only_the_prompt_is_special(tokenizer):
    template = r"Q: {prompt} \boxed{}"
    assert text(encode_prompt(problem("1+2={}"), tokenizer, template=template, chat=False)) == r"Q: 1+2={} \boxed{}"


def test_chat_opens_the_assistants_turn_and_ignores_the_template(tokenizer):
    tokenizer.chat_template = CHAT
    ids = encode_prompt(problem("1+2="), tokenizer, template="Q: {prompt}", chat=True)
    assert (ids.dtype, text(ids)) == (np.int32, "<user>1+2=<ai>")


@pytest.mark.parametrize(("chat", "chat_template"), [(True, None), (False, CHAT)])
def test_the_template_serves_where_chat_is_off_or_the_tokenizer_has_none(tokenizer, chat, chat_template):
    tokenizer.chat_template = chat_template
    assert text(encode_prompt(problem("1+2="), tokenizer, template="Q:{prompt}", chat=chat)) == "Q:1+2="


def test_a_prompt_without_tokens_is_an_error(tokenizer):
    with pytest.raises(DataError, match="prompt of train-0 has no tokens"):
        encode_prompt(problem(""), tokenizer, template="{prompt}", chat=False)


def encode(item):
    return np.zeros(len(item.prompt), dtype=np.int32)


def test_prompts_that_just_fit_are_fine():
    check_lengths([problem("x" * 5), problem("x" * 6)], encode, max_new_tokens=4, context=10)


def test_a_prompt_longer_than_the_context_is_named_with_its_length():
    items = [problem("x" * n, uid=f"train-{n}") for n in (5, 8, 7)]
    message = r"train-8: prompt of 8 tokens \+ max_new_tokens 4 exceeds the context 10 \(2 of 3 prompts"
    with pytest.raises(DataError, match=message):
        check_lengths(items, encode, max_new_tokens=4, context=10)


def test_of_very_many_prompts_the_longest_are_checked(monkeypatch):
    monkeypatch.setattr(prompts, "_MOST_CHECKED", 3)
    items = [problem("x" * n, uid=f"train-{n}") for n in range(1, 10)]
    encoded = []

    def counting(item):
        encoded.append(item.uid)
        return encode(item)

    with pytest.raises(DataError, match="train-9"):
        check_lengths(items, counting, max_new_tokens=2, context=10)
    assert sorted(encoded) == ["train-7", "train-8", "train-9"]
