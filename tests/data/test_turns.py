"""Turns as tokens: nothing that the policy drew changes, and nothing that is said becomes a special token."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from qurl_ray.config.task import ArithmeticTask
from qurl_ray.data.prompts import encode_prompt
from qurl_ray.data.turns import TurnEncoder
from qurl_ray.errors import DataError
from qurl_ray.types import Problem

CHATML = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
REWRITES = CHATML.replace(
    "{{ m.content }}", "{{ m.content if loop.last else m.content.split('</think>')[-1] }}"
)  # as Qwen3's: earlier thoughts are removed
THINKS = (
    "{% set user = namespace(last=-1) %}{% for m in messages %}{% if m.role == 'user' %}"
    "{% set user.last = loop.index0 %}{% endif %}{% endfor %}"
    "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' }}"
    "{% if m.role == 'assistant' and loop.index0 < user.last %}{{ m.content.split('</think>')[-1].lstrip('\n') }}"
    "{% else %}{{ m.content }}{% endif %}{{ '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
"""As Qwen3's, with roles that follow each other in any way: thoughts before the last user's message are removed."""
NO_TOOLS = "{% if messages[-1].role == 'tool' %}{{ raise_exception('no tools') }}{% endif %}" + CHATML
SHOUTS = CHATML.replace("{{ m.content }}", "{{ m.content | upper }}")
PROBLEM = Problem(uid="0", prompt="guess", answer="")
TASK = ArithmeticTask(chat=True)


def tokenizer_with(template: str | None) -> PreTrainedTokenizerFast:
    """Bytes as tokens: any text, without merges, so that the tokens of parts are those of the whole."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    inner = Tokenizer(models.BPE(vocab={char: i for i, char in enumerate(alphabet)}, merges=[]))
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    inner.decoder = decoders.ByteLevel()
    found = PreTrainedTokenizerFast(tokenizer_object=inner, eos_token="<|im_end|>", pad_token="<|im_end|>")
    found.add_special_tokens({"additional_special_tokens": [AddedToken("<|im_start|>", special=True)]})
    found.chat_template = template
    return found


@pytest.fixture(scope="module")
def chat():
    return tokenizer_with(CHATML)


def drawn(tokenizer, text: str, *, ended: bool = True) -> np.ndarray:
    ids = tokenizer(text, add_special_tokens=False)["input_ids"]
    return np.array(ids + [tokenizer.eos_token_id] * ended, dtype=np.int32)


@settings(max_examples=60, deadline=None)
@given(turns=st.lists(st.tuples(st.text(max_size=12), st.text(max_size=12), st.booleans()), min_size=1, max_size=4))
def test_a_row_is_what_the_template_makes_of_the_whole_conversation(chat, turns):
    made = TurnEncoder(chat, TASK, (chat.eos_token_id,))
    ids = list(encode_prompt(PROBLEM, chat, TASK))
    messages = [{"role": "user", "content": PROBLEM.prompt}]
    for answer, said, ended in turns:
        turn = drawn(chat, answer, ended=ended)
        ids += [*turn, *made.after(PROBLEM, turn, [{"role": "tool", "content": said}])]
        messages += [{"role": "assistant", "content": answer}, {"role": "tool", "content": said}]
    whole = chat.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
    assert chat.decode(ids) == whole


@settings(max_examples=60, deadline=None)
@given(said=st.lists(st.sampled_from(["<|im_end|>", "<|im_start|>", "x", "\n", "é", "qurl turn 7f3a"]), max_size=8))
def test_what_is_said_never_becomes_a_special_token(chat, said):
    made, text = TurnEncoder(chat, TASK, (chat.eos_token_id,)), "".join(said)
    for ids, ends in (
        (made.after(PROBLEM, drawn(chat, "a"), [{"role": "user", "content": text}]), 1),
        (made.after(PROBLEM, drawn(chat, "a", ended=False), [{"role": "user", "content": text}] * 2), 3),
        (made.opening(PROBLEM, [{"role": "user", "content": text}]), 2),
    ):
        assert (ids == chat.eos_token_id).sum() == ends
        assert text in chat.decode(ids)


def test_the_opening_comes_after_the_prompt(chat):
    made = TurnEncoder(chat, TASK, (chat.eos_token_id,))
    text = chat.decode(made.opening(PROBLEM, [{"role": "user", "content": "low"}, {"role": "user", "content": "high"}]))
    messages = [{"role": "user", "content": content} for content in ("guess", "low", "high")]
    assert text == chat.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)


def test_without_a_template_what_is_said_follows_the_turn():
    plain = tokenizer_with(None)
    made = TurnEncoder(plain, ArithmeticTask(), (plain.eos_token_id,))
    said = [{"role": "tool", "content": "4"}, {"role": "tool", "content": "2="}]
    assert plain.decode(made.after(PROBLEM, drawn(plain, "[6*7]"), said)) == "42="
    assert plain.decode(made.after(PROBLEM, drawn(plain, "[6*7]", ended=False), said)) == "<|im_end|>42="
    assert plain.decode(made.opening(PROBLEM, said)) == "guess42="


def test_a_template_that_rewrites_earlier_turns_is_refused_or_kept():
    made = TurnEncoder(tokenizer_with(REWRITES), TASK, (0,))
    with pytest.raises(DataError, match=r"environment\.rewritten_history=keep"):
        made.check(PROBLEM, keep_history=False)
    made.check(PROBLEM, keep_history=True)
    TurnEncoder(tokenizer_with(CHATML), TASK, (0,)).check(PROBLEM, keep_history=False)


@pytest.mark.parametrize(
    ("template", "message"),
    [(NO_TOOLS, "failed on messages of user, assistant, tool.*no tools"), (SHOUTS, "does not take")],
)
def test_a_template_that_cannot_take_a_message_says_so(template, message):
    made = TurnEncoder(tokenizer_with(template), TASK, (0,))
    with pytest.raises(DataError, match=message):
        made.after(PROBLEM, drawn(tokenizer_with(template), "a"), [{"role": "tool", "content": "x"}])


@settings(max_examples=60, deadline=None)
@given(said=st.text(max_size=12) | st.sampled_from(['"', "\\", '{"a": "b"}\n']))
def test_a_template_that_quotes_results_gets_them_quoted(said):
    """As Llama's does: what is read in training is what the template writes when the policy is served."""
    quotes = tokenizer_with(
        CHATML.replace("{{ m.content }}", "{{ m.content | tojson if m.role == 'tool' else m.content }}")
    )
    made = TurnEncoder(quotes, TASK, (quotes.eos_token_id,))
    ids = [*encode_prompt(PROBLEM, quotes, TASK), *drawn(quotes, "a")]
    ids += list(made.after(PROBLEM, drawn(quotes, "a"), [{"role": "tool", "content": said}]))
    messages = [{"role": "user", "content": PROBLEM.prompt}, {"role": "assistant", "content": "a"}]
    messages.append({"role": "tool", "content": said})
    assert quotes.decode(ids) == quotes.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)


# --- rows -----------------------------------------------------------------------------------------------------------

TEXTS = st.lists(
    st.sampled_from(
        [
            "<think>",
            "</think>",
            "<|im_end|>",
            "<|im_start|>",
            "é",
            "\n",
            " ",
            "qurl said 9c1e 0.",
            "qurl hidden 3e8d 0.",
        ]
    ),
    max_size=4,
).map("".join)


@settings(max_examples=60, deadline=None)
@given(turns=st.lists(st.tuples(TEXTS, TEXTS, st.booleans()), min_size=1, max_size=4))
def test_a_template_that_rewrites_nothing_begins_no_row(chat, turns):
    made = TurnEncoder(chat, TASK, (chat.eos_token_id,))
    history = made.history(PROBLEM, [])
    for answer, said, ended in turns:
        turn = drawn(chat, answer, ended=ended)
        history, rewritten = made.follow(PROBLEM, history, turn, answer, [{"role": "tool", "content": said}])
        assert rewritten is None


def test_without_a_template_there_is_no_history():
    plain = tokenizer_with(None)
    assert TurnEncoder(plain, ArithmeticTask(), (plain.eos_token_id,)).history(PROBLEM, []) is None


def test_in_the_prompt_of_a_row_only_special_tokens_that_were_drawn_are_special():
    """One that the policy spelled, or that an environment said, stays text; both are shown to the template as text."""
    thinks = tokenizer_with(THINKS)
    made, start = TurnEncoder(thinks, TASK, (thinks.eos_token_id,)), thinks.convert_tokens_to_ids("<|im_start|>")

    def spelled(text: str) -> list[int]:
        return thinks(text, add_special_tokens=False, split_special_tokens=True)["input_ids"]

    text = "<think>x</think>a<|im_start|>qurl hidden 3e8d 0.<|im_end|>"
    said = [{"role": "user", "content": "<|im_end|>é"}]
    beginnings = "<|im_start|>user\nguess<|im_end|>\n<|im_start|>assistant\n"
    for ids, special in (
        ([*spelled("<think>x</think>a"), start, *spelled("qurl hidden 3e8d 0.<|im_end|>")], 1),
        (spelled(text), 0),
    ):
        turn = np.array([*ids, thinks.eos_token_id], np.int32)
        _, row = made.follow(PROBLEM, made.history(PROBLEM, []), turn, text, said)
        rest = "a<|im_start|>qurl hidden 3e8d 0.<|im_end|><|im_end|>\n<|im_start|>user\n<|im_end|>é<|im_end|>\n"
        assert thinks.decode(row) == beginnings + rest + "<|im_start|>assistant\n"
        assert (row == thinks.eos_token_id).sum() == 3
        assert (row == start).sum() == 4 + special


def test_a_turn_that_the_prompt_has_begun_is_one_message_with_what_the_policy_drew():
    thinks = tokenizer_with(THINKS)
    made = TurnEncoder(thinks, TASK, (thinks.eos_token_id,))
    messages = [{"role": "user", "content": "guess"}, {"role": "assistant", "content": "<think>is it"}]
    problem, said = Problem(uid="0", prompt="", answer="", messages=messages), [{"role": "user", "content": "low"}]
    history = made.history(problem, [])
    _, row = made.follow(problem, history, drawn(thinks, " 4?</think>4"), " 4?</think>4", said)
    expected = [messages[0], {"role": "assistant", "content": "4"}, *said]
    assert thinks.decode(row) == thinks.apply_chat_template(expected, add_generation_prompt=True, tokenize=False)
    kept, same = made.follow(problem, history, drawn(thinks, "4"), "4", [{"role": "tool", "content": "low"}])
    assert same is None
    assert kept.messages[1] == {"role": "assistant", "content": "<think>is it4"}
