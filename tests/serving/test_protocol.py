"""Requests as OpenAI's clients write them: what is taken, what asks for nothing, what is refused by name."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

from qurl_ray.serving.http import _explained
from qurl_ray.serving.protocol import ApiError, ChatRequest, CompletionRequest

CHAT = {"model": "m", "messages": [{"role": "user", "content": "12+34="}]}
TEXT = {"model": "m", "prompt": "12+34="}


def parse(data, kind):
    """The request, as the app validates it, or the error that a client gets."""
    try:
        return kind.model_validate(data)
    except ValidationError as error:
        raise _explained([item | {"loc": ("body", *item["loc"])} for item in error.errors()]) from None


def chat(**options) -> ChatRequest:
    return parse(CHAT | options, ChatRequest)


def completion(**options) -> CompletionRequest:
    return parse(TEXT | options, CompletionRequest)


def refusal(kind, **options) -> ApiError:
    with pytest.raises(ApiError) as caught:
        kind(**options)
    assert caught.value.status == 400
    return caught.value


def test_null_is_absent_everywhere():
    nothing = dict.fromkeys(("n", "stop", "seed", "tools", "logprobs", "stream", "max_tokens", "user", "best_of"))
    assert chat(**nothing) == chat()
    message = {"role": "assistant", "content": "46", "refusal": None, "tool_calls": None, "annotations": []}
    assert chat(messages=[*CHAT["messages"], message]).messages[1]["content"] == "46"


@pytest.mark.parametrize(
    "options",
    [
        {"frequency_penalty": 0},
        {"presence_penalty": 0.0},
        {"logit_bias": {}},
        {"tools": []},
        {"response_format": {"type": "text"}},
        {"user": "u"},
        {"metadata": {"a": "b"}},
        {"store": True},
    ],
)
def test_what_asks_for_nothing_is_taken(options):
    assert chat(**options) == chat()


@pytest.mark.parametrize(
    "options",
    [{"frequency_penalty": 0.5}, {"logit_bias": {"5": 1}}, {"functions": [{}]}, {"audio": {}}],
)
def test_what_is_not_supported_is_refused_by_name(options):
    error = refusal(chat, **options)
    assert (error.param, error.code) == (next(iter(options)), "unsupported_parameter")


def test_a_body_has_one_limit_on_tokens():
    assert chat().limit is None
    assert chat(max_tokens=5).limit == 5
    assert chat(max_tokens=5, max_completion_tokens=7).limit == 7
    assert completion().limit == 16


def test_log_probs_are_asked_for_in_two_ways():
    assert [chat().top, chat(logprobs=True).top, chat(logprobs=True, top_logprobs=4).top] == [None, 0, 4]
    assert [completion().top, completion(logprobs=0).top, completion(logprobs=3).top] == [None, 0, 3]
    assert "logprobs" in refusal(chat, top_logprobs=3).message


def test_temperatures_that_cannot_be_divided_by_are_greedy():
    assert [chat(temperature=t).sampling_temperature for t in (0, 1e-30, 0.5)] == [0.0, 0.0, 0.5]
    assert chat(top_p=0).sampling_temperature == 0.0
    assert chat().sampling_temperature == 1.0


@pytest.mark.parametrize(
    ("prompt", "prompts"), [("a", ["a"]), (["a", "b"], ["a", "b"]), ([1, 2], [[1, 2]]), ([[1], [2, 3]], [[1], [2, 3]])]
)
def test_prompts_are_texts_or_tokens_one_or_several(prompt, prompts):
    assert completion(prompt=prompt).prompts == prompts


@pytest.mark.parametrize(
    ("content", "named"),
    [
        ([{"type": "image_url", "image_url": {"url": "x"}}], "part of type 'image_url'"),
        ([{"type": "text", "text": "a"}, {"type": "input_audio"}], "part of type 'input_audio'"),
        ([{"type": "text", "text": 3}], "part of type 'text'"),
        ([5], "part of type 'int'"),
        (5, "content of message 1 is int"),
    ],
)
def test_a_content_of_another_kind_is_refused_for_what_it_is(content, named):
    found = refusal(chat, messages=[{"role": "user", "content": content}])
    assert found.param == "messages"
    assert named in found.message


@pytest.mark.parametrize(
    ("prompt", "param", "message"),
    [
        (5, "prompt", "valid string or a valid list, not a number"),
        ({"a": 1}, "prompt", "valid string or a valid list, not an object"),
        (["a", 1], "prompt[1]", "a valid string"),
        ([[1], [2, "a"]], "prompt[1][1]", "Input should be a valid integer"),
        ([None], "prompt[0]", "a valid string"),
    ],
)
def test_a_prompt_of_another_kind_is_refused_with_its_place_and_what_came(prompt, param, message):
    error = refusal(completion, prompt=prompt)
    assert error.param == param
    assert message in error.message


def test_parts_of_a_message_are_joined_and_developers_are_the_system():
    content = [{"type": "text", "text": "12"}, {"type": "text", "text": "+34="}]
    assert chat(messages=[{"role": "developer", "content": content}]).messages == [
        {"role": "system", "content": "12+34="}
    ]


def test_an_error_names_the_parameter_and_repeats_little():
    error = refusal(chat, **{"x" * 5000: 1})
    assert len(error.message) < 300
    assert error.code == "unsupported_parameter"
    assert refusal(lambda: parse({}, ChatRequest)).code == "missing_required_parameter"


values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=6,
)
names = st.sampled_from([*ChatRequest.model_fields, *CompletionRequest.model_fields, "tools", "user", "best_of", "x"])


@settings(max_examples=400, deadline=None)
@given(st.dictionaries(names, values, max_size=4), st.sampled_from([(CHAT, ChatRequest), (TEXT, CompletionRequest)]))
def test_whatever_is_sent_is_taken_or_refused(options, which):
    base, kind = which
    refused = None
    try:
        parse(base | options, kind)
    except ApiError as error:
        refused = error
    if refused:
        assert refused.status == 400
        assert set(refused.body()["error"]) == {"message", "type", "param", "code"}
