"""The text that a reward function gets of an answer."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from qurl_ray.config.task import ArithmeticTask
from qurl_ray.data.answers import answer_text, items_to_judge
from qurl_ray.types import Completion, Problem

PAD, EOS, UNK = 0, 1, 2
LETTERS = dict(zip(range(3, 13), "0123456789", strict=True)) | {PAD: "<pad>", UNK: "<unk>"}
"""Of the tiny policy's tokens, as they are written."""


def ids(*tokens: int) -> np.ndarray:
    return np.array(tokens, dtype=np.int32)


@pytest.mark.parametrize(
    ("tokens", "text", "truncated"),
    [
        (ids(4, 6, EOS), "13", False),
        (ids(4, PAD, 6, EOS), "1<pad>3", False),
        (ids(UNK, 4, 6, PAD, EOS), "<unk>13<pad>", False),
        (ids(4, 6), "13", True),
        (ids(4, 6, EOS, 9, EOS), "13", False),  # ignore_eos draws on
        (ids(EOS), "", False),
        (ids(), "", True),
    ],
)
def test_an_answer_ends_before_its_end_token_and_keeps_special_tokens(tokenizer, tokens, text, truncated):
    assert answer_text(tokens, tokenizer, (EOS,)) == (text, truncated)


def test_any_of_several_end_tokens_ends_an_answer(tokenizer):
    assert answer_text(ids(4, UNK, 6, EOS), tokenizer, (EOS, UNK)) == ("1", False)


@given(drawn=st.lists(st.integers(0, 12), max_size=12))
def test_no_token_before_the_end_is_lost(tokenizer, drawn):
    before = drawn[: drawn.index(EOS)] if EOS in drawn else drawn
    expected = "".join(LETTERS[token] for token in before)
    assert answer_text(ids(*drawn), tokenizer, (EOS,)) == (expected, EOS not in drawn)


def test_a_reward_function_is_told_of_an_answer_without_its_end(tokenizer):
    problem = Problem(uid="train-0", prompt="6+7=", answer="13", meta={"entry": 1})
    drawn = [ids(4, 6, EOS), ids(4, 6)]
    completions = [
        Completion(uid="", token_ids=tokens, logprobs=-tokens, versions=tokens, finish="stop") for tokens in drawn
    ]
    whole, cut = items_to_judge(completions, [problem] * 2, tokenizer, (EOS,), ArithmeticTask())
    assert whole == ("13", problem)
    assert cut == ("13", Problem(uid="train-0", prompt="6+7=", answer="13", meta={"entry": 1, "truncated": True}))
    assert problem.meta == {"entry": 1}  # samples of one prompt share it


def judged_meta(tokenizer, task):
    completion = Completion(uid="", token_ids=ids(4, EOS), logprobs=ids(0, 0), versions=ids(0, 0), finish="stop")
    problem = Problem(uid="train-0", prompt="6+7", answer="13")
    ((_, judged),) = items_to_judge([completion], [problem], tokenizer, (EOS,), task)
    return judged.meta


class Spelled:
    """A tokenizer with a token for each character."""

    chat_template = bos_token_id = None

    def __call__(self, text):
        return {"input_ids": [ord(character) for character in text]}

    def decode(self, token_ids, skip_special_tokens):
        return "".join(map(chr, token_ids))


@pytest.mark.parametrize(
    ("template", "reasoning", "meta"),
    [
        ("{prompt}<think>\n", None, {"reasoning_required": True}),
        ("{prompt}<think>\n", False, {"reasoning_required": False}),
        ("{prompt}<think>\n\n</think>\n\n", None, {}),
        ("Use <think>. {prompt}", None, {}),
        ("{prompt}", True, {"reasoning_required": True}),
    ],
)
def test_a_reward_function_is_told_whether_the_answer_has_to_end_a_reasoning(template, reasoning, meta):
    assert judged_meta(Spelled(), ArithmeticTask(template=template, reasoning=reasoning)) == meta
