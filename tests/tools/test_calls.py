"""Calls in the text of a turn: read strictly, and the same however the text arrives."""

import itertools
import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from qurl_ray.tools.calls import FORMATS, BadCall, CallReader, ToolCall, read_turn
from qurl_ray.tools.template import template_format
from tests.data.test_turns import CHATML
from tests.tools.templates import HERMES, LLAMA, tokenizer_with

values = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**40), 2**40) | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3),
    max_leaves=6,
)
calls = st.builds(
    ToolCall, name=st.text(max_size=8), arguments=st.dictionaries(st.text(max_size=5), values, max_size=3)
)
PIECES = [
    "<tool_call>",
    "</tool_call>",
    '{"name": "f", "arguments": {}}',
    '{"name": "f", "parameters": {}}',
    "{",
    " ",
    "\n",
]
PIECES += ["<tool", "_call>", "</", "é", '"', "<|python_tag|>", '{"type": "function", "name"', "so: "]
hostile = st.lists(st.sampled_from(PIECES), max_size=8).map("".join)


def hermes(call: ToolCall) -> str:
    body = json.dumps({"name": call.name, "arguments": call.arguments}, ensure_ascii=False)
    return f"<tool_call>\n{body}\n</tool_call>"


@settings(max_examples=150, deadline=None)
@given(
    texts=st.lists(st.text(alphabet="ab <{é\n", max_size=6), min_size=1, max_size=4), made=st.lists(calls, max_size=4)
)
def test_calls_between_texts_are_read_as_they_were_written(texts, made):
    made = [call for call in made if "</tool_call>" not in json.dumps([call.name, call.arguments])]
    turn = "".join(text + hermes(call) for text, call in zip(texts, made, strict=False))
    assert [part for part in read_turn(turn, "hermes") if not isinstance(part, str)] == made[: len(texts)]


@settings(max_examples=150, deadline=None)
@given(call=calls, space=st.sampled_from(["", " ", "\n"]), tag=st.sampled_from(["", "<|python_tag|>"]))
def test_a_call_of_llama_is_the_whole_turn(call, space, tag):
    body = json.dumps({"name": call.name, "parameters": call.arguments})
    assert read_turn(space + tag + body + space, "llama") == [call]
    (bad,) = read_turn(f"{tag}{body}, and more", "llama")
    assert isinstance(bad, BadCall)
    assert read_turn(f"so: {body}", "llama") == [f"so: {body}"]


@settings(max_examples=400, deadline=None)
@given(text=hostile, cuts=st.lists(st.integers(0, 60), max_size=6), format=st.sampled_from(FORMATS))
def test_the_parts_are_the_same_however_the_turn_arrives(text, cuts, format):
    reader, parts = CallReader(format), []
    places = [0, *sorted(min(cut, len(text)) for cut in cuts), len(text)]
    for start, stop in itertools.pairwise(places):
        parts += reader.feed(text[start:stop])
    assert joined([*parts, *reader.end()]) == joined(read_turn(text, format))


def joined(parts):
    """Parts with neighbouring texts put together."""
    found = []
    for part in parts:
        if isinstance(part, str) and found and isinstance(found[-1], str):
            found[-1] += part
        else:
            found.append(part)
    return found


@settings(max_examples=200, deadline=None)
@given(text=hostile, format=st.sampled_from(FORMATS))
def test_no_letter_that_is_not_in_a_call_is_lost(text, format):
    told = "".join(part if isinstance(part, str) else getattr(part, "text", "") for part in read_turn(text, format))
    kept = text
    for part in read_turn(text, format):
        if isinstance(part, ToolCall):  # only this one can be read of the pieces above
            key = "arguments" if format == "hermes" else "parameters"
            kept = kept.replace(f'{{"name": "f", "{key}": {{}}}}', "", 1)
    for mark in ("<tool_call>", "</tool_call>", "<|python_tag|>"):
        kept, told = kept.replace(mark, ""), told.replace(mark, "")
    # Without their order: what was removed may be text that equals a call and stands before it.
    assert sorted("".join(told.split())) == sorted("".join(kept.split()))


@pytest.mark.parametrize(
    ("body", "problem"),
    [
        ('{"name": "f"}', '"arguments", an object'),
        ('{"name": "f", "arguments": "{}"}', '"arguments", an object'),
        ('{"name": 1, "arguments": {}}', "which is text"),
        ('{"name": "f", "arguments": {}, "id": 1}', '"arguments", an object'),
        ('{"name": "f", "name": "g", "arguments": {}}', "twice"),
        ('{"name": "f", "arguments": {"x": NaN}}', "NaN is not JSON"),
        ("{'name': 'f', 'arguments': {}}", "no JSON"),
        ("[]", "no JSON object"),
        ("", "no JSON"),
        ("[" * 100_000, "no JSON"),
    ],
)
def test_what_is_no_proper_call_says_what_is_wrong(body, problem):
    (bad,) = read_turn(f"<tool_call>{body}</tool_call>", "hermes")
    assert isinstance(bad, BadCall)
    assert problem in bad.problem
    assert bad.text == f"<tool_call>{body}</tool_call>"


def test_a_call_that_is_cut_off_is_a_bad_one():
    (text, bad) = read_turn('I look.\n<tool_call>{"name": "f"', "hermes")
    assert text == "I look."
    assert "no </tool_call>" in bad.problem


@pytest.mark.parametrize(("template", "format"), [(HERMES, "hermes"), (LLAMA, "llama"), (CHATML, None), (None, None)])
def test_the_format_of_a_template_is_found_by_rendering_a_call(template, format):
    assert template_format(tokenizer_with(template)) == format


def test_a_template_with_calls_of_another_form_has_no_known_format():
    other = HERMES.replace("<tool_call>", "[TOOL_CALLS]").replace("</tool_call>", "")
    assert template_format(tokenizer_with(other)) is None
