"""Prompts as tokens, and whether they fit."""

import numpy as np
import pytest
from tokenizers import Regex, Tokenizer, models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

from qurl_ray.config.task import ArithmeticTask
from qurl_ray.data import prompts
from qurl_ray.data.prompts import check_chat, check_lengths, encode_prompt, prompt_notes
from qurl_ray.data.turns import TurnEncoder
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


def task(**fields):
    return ArithmeticTask(**fields)


def text(ids):
    return "".join(sorted(set(LETTERS))[index] for index in ids)


def test_a_prompt_becomes_int32_tokens(tokenizer):
    ids = encode_prompt(problem("12+34="), tokenizer, task(template="{prompt}", chat=False))
    assert (ids.dtype, ids.shape, text(ids)) == (np.int32, (6,), "12+34=")


def test_in_a_template_only_the_prompt_is_special(tokenizer):
    template = r"Q: {prompt} \boxed{}"
    assert (
        text(encode_prompt(problem("1+2={}"), tokenizer, task(template=template, chat=False))) == r"Q: 1+2={} \boxed{}"
    )


def test_chat_opens_the_assistants_turn_and_ignores_the_template(tokenizer):
    tokenizer.chat_template = CHAT
    ids = encode_prompt(problem("1+2="), tokenizer, task(template="Q: {prompt}", chat=True))
    assert (ids.dtype, text(ids)) == (np.int32, "<user>1+2=<ai>")


@pytest.mark.parametrize("chat_template", [None, CHAT])
def test_the_template_serves_where_chat_is_off(tokenizer, chat_template):
    tokenizer.chat_template = chat_template
    assert text(encode_prompt(problem("1+2="), tokenizer, task(template="Q:{prompt}", chat=False))) == "Q:1+2="


def talk(*messages, uid="train-0"):
    found = [{"role": role, "content": content} for role, content in messages]
    return Problem(uid=uid, prompt="", answer="", messages=found)


@pytest.mark.parametrize("chat", [True, False])
def test_messages_go_through_the_chat_template_whatever_the_settings(tokenizer, chat):
    tokenizer.chat_template = CHAT
    prompt = talk(("user", "1+1="), ("ai", "2"), ("user", "1+2="))
    assert text(encode_prompt(prompt, tokenizer, task(chat=chat))) == "<user>1+1=<ai>2<user>1+2=<ai>"


def test_an_answer_continues_the_assistants_own_words(tokenizer):
    tokenizer.chat_template = CHAT
    prompt = talk(("user", "1+1="), ("assistant", "= 2"))
    assert list(encode_prompt(prompt, tokenizer, task())) == tokenizer("<user>1+1=<assistant>= 2")["input_ids"]


def test_a_system_prompt_comes_first_unless_the_messages_have_one(tokenizer):
    tokenizer.chat_template = CHAT
    setting = task(chat=True, system_prompt="x")
    assert text(encode_prompt(problem("1"), tokenizer, setting)).startswith(text(tokenizer("<system>")["input_ids"]))
    own = encode_prompt(talk(("system", "1"), ("user", "2")), tokenizer, setting)
    assert list(own) == tokenizer("<system>1<user>2<ai>")["input_ids"]


def test_variables_reach_the_chat_template(tokenizer):
    tokenizer.chat_template = CHAT + "{% if think %}Q{% endif %}"
    asked = task(chat=True, chat_template_args={"think": True})
    assert text(encode_prompt(problem("1"), tokenizer, asked)).endswith("<ai>Q")
    check_chat(asked, tokenizer, [problem("1")])


@pytest.mark.parametrize(
    ("fields", "template", "message"),
    [
        ({"chat": True, "chat_template_args": {"thinc": True}}, CHAT, "no variable 'thinc'"),
        ({"chat_template_args": {"think": True}}, CHAT, "with task.chat=true"),
        ({"system_prompt": "x"}, CHAT, "with task.chat=true"),
        ({"system_prompt": "x", "chat": True}, None, "the tokenizer has no chat template"),
        ({"chat": True}, None, "task.chat=true: the tokenizer has no chat template"),
        ({"chat": True, "chat_template_args": {"tokenize": False}}, CHAT, "'tokenize' is no variable"),
    ],
)
def test_chat_settings_without_effect_are_an_error(tokenizer, fields, template, message):
    tokenizer.chat_template = template
    with pytest.raises(DataError, match=message):
        check_chat(task(**fields), tokenizer, [problem("1")])


# --- one beginning token -------------------------------------------------------------------------------------------

BEGINS = "{{ bos_token }}{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}"


@pytest.fixture
def beginning():
    """A tokenizer of characters that writes <s> first, as Llama's does."""
    letters = sorted(set(LETTERS + "[]rolespt ?"))
    vocab = {letter: index for index, letter in enumerate([*letters, "<s>", "</s>"])}
    inner = Tokenizer(models.WordLevel(vocab, unk_token="?"))
    inner.pre_tokenizer = pre_tokenizers.Split(Regex("."), "isolated")
    inner.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", vocab["<s>"])])
    return PreTrainedTokenizerFast(tokenizer_object=inner, bos_token="<s>", eos_token="</s>")


@pytest.mark.parametrize(
    ("prompt", "fields"),
    [
        ("1+2=", {}),
        ("<s>1+2=", {}),
        ("<s><s>1+2=", {}),
        ("1+2=", {"template": "<s>{prompt}"}),
        ("<s>1+2=", {"template": "<s>{prompt}"}),
    ],
)
def test_a_text_has_one_beginning_token_and_the_run_says_so(beginning, prompt, fields):
    asked = task(**fields)
    ids = encode_prompt(problem(prompt), beginning, asked).tolist()
    assert ids == beginning("1+2=")["input_ids"]
    assert ids.count(beginning.bos_token_id) == 1
    twice = fields or prompt.startswith("<s>")
    said = ["1 prompts begin with '<s>', which the tokenizer writes, too: it is there once"]
    assert prompt_notes([problem(prompt)], beginning, asked) == (said if twice else [])


def test_a_chat_has_one_beginning_token_and_the_run_says_so(beginning):
    beginning.chat_template = BEGINS
    for template in (BEGINS, BEGINS.replace("[{{ m.role }}]", ""), "<s>{{ messages[0].content }}"):
        beginning.chat_template = template
        expected = beginning.apply_chat_template([{"role": "user", "content": "1+2="}], return_dict=False)
        ids = encode_prompt(problem("<s>1+2="), beginning, task(chat=True)).tolist()
        assert ids == expected
        assert ids.count(beginning.bos_token_id) == 1
        (said,) = prompt_notes([problem("<s>1+2="), problem("1+2=")], beginning, task(chat=True))
        assert "1 prompts hold special tokens, '<s>', and go through the chat template as well" in said


def test_a_beginning_token_that_a_template_writes_for_each_turn_stays(beginning):
    """As SmolLM2's, whose beginning token opens every turn."""
    beginning.chat_template = (
        "{% for m in messages %}<s>{{ m.content }}{% endfor %}{% if add_generation_prompt %}<s>{% endif %}"
    )
    ids = encode_prompt(talk(("user", "1"), ("ai", "2")), beginning, task()).tolist()
    assert ids == beginning("1<s>2<s>")["input_ids"]


def test_turns_begin_once(beginning):
    beginning.chat_template = BEGINS
    made = TurnEncoder(beginning, task(chat=True), (beginning.eos_token_id,))
    ids = made.opening(problem("<s>1+2="), [{"role": "user", "content": "1"}])
    assert ids.tolist().count(beginning.bos_token_id) == 1


def test_messages_without_a_chat_template_are_an_error(tokenizer):
    with pytest.raises(DataError, match="train-0 is a list of messages, and the tokenizer has no chat template"):
        encode_prompt(talk(("user", "1")), tokenizer, task())


def test_a_prompt_without_tokens_is_an_error(tokenizer):
    with pytest.raises(DataError, match="prompt of train-0 has no tokens"):
        encode_prompt(problem(""), tokenizer, task(template="{prompt}", chat=False))


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
