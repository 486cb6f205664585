"""Messages of any source become what a chat template makes of plain ones, in training, turns and serving alike."""

import copy
import json

import pyarrow
import pyarrow.parquet
import pytest

from qurl_ray.config.task import CustomTask, DatasetTask
from qurl_ray.data.prompts import check_chat, encode_prompt
from qurl_ray.data.tasks import load_task
from qurl_ray.data.trained import keep_settings
from qurl_ray.data.turns import TurnEncoder
from qurl_ray.errors import DataError
from qurl_ray.serving.prompts import chat_prompt_ids
from qurl_ray.serving.protocol import ApiError, ChatRequest
from qurl_ray.tools.messages import read_message, read_tools
from tests.tools.templates import HERMES, tokenizer_with

USER = {"role": "user", "content": "What is 6 times 7?"}
CALL = {"type": "function", "function": {"name": "multiply", "arguments": {"a": 6, "b": 7}}}
LOOK = {"type": "function", "function": {"name": "look", "arguments": {"place": "here", "deep": {"far": 1}}}}
PLAIN = [
    USER,
    {"role": "assistant", "content": "", "tool_calls": [CALL]},
    {"role": "tool", "content": "42"},
    {"role": "assistant", "content": "", "tool_calls": [LOOK]},
    {"role": "tool", "content": "dark"},
]
"""As a chat template takes them."""
TOOL = {
    "type": "function",
    "function": {
        "name": "multiply",
        "description": "Multiply.",
        "parameters": {"type": "object", "properties": {"a": {"type": "integer"}}},
    },
}
THINKS = HERMES + "{% if enable_thinking is defined and not enable_thinking %}{{ '<think></think>' }}{% endif %}"


@pytest.fixture
def tokenizer():
    return tokenizer_with(HERMES)


def rendered(tokenizer, messages, **variables) -> list[int]:
    """Independent of the package: transformers' own function on plain values."""
    return tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=False, **variables)


def write(path, rows) -> str:
    if path.suffix == ".parquet":
        pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), path)
    else:
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def problems(path, rows, **fields):
    train = write(path, [row | {"answer": "42"} for row in rows])
    held_out = write(path.with_name("held_out.jsonl"), [{"prompt": "other", "answer": "1"}])
    return load_task(DatasetTask(path=train, held_out_path=held_out, **fields), eval_problems=1).train


def served(messages, tokenizer, **more) -> list[int]:
    request = ChatRequest.model_validate(json.loads(json.dumps({"model": "m", "messages": messages} | more)))
    tools, variables = request.callable_tools, request.chat_template_kwargs
    return chat_prompt_ids(request.messages, tokenizer, tools=tools, variables=variables).tolist()


def with_calls(change):
    """The plain messages, each call changed."""
    found = copy.deepcopy(PLAIN)
    for message in found:
        for call in message.get("tool_calls", ()):
            change(message, call)
    return found


def as_text(message, call):
    call["function"]["arguments"] = json.dumps(call["function"]["arguments"])


def without_content(message, call):
    message["content"] = None


def flat(message, call):
    call |= call.pop("function")


def all_as_text(message, call):
    message["tool_calls"] = json.dumps(message["tool_calls"])


@pytest.mark.parametrize("suffix", [".jsonl", ".parquet"])
@pytest.mark.parametrize("change", [lambda *_: None, as_text, without_content, flat, all_as_text])
def test_a_conversation_with_calls_is_rendered_as_plain_values_are(tokenizer, tmp_path, suffix, change):
    """Parquet gives each call the keys of the other one."""
    messages = with_calls(change)
    (problem,) = problems(tmp_path / f"d{suffix}", [{"prompt": messages}])
    assert encode_prompt(problem, tokenizer, DatasetTask(path="")).tolist() == rendered(tokenizer, PLAIN)


def test_text_in_parts_is_the_text(tokenizer, tmp_path):
    parts = [{"type": "text", "text": "What is "}, {"type": "text", "text": "6 times 7?"}]
    for suffix in (".jsonl", ".parquet"):
        (problem,) = problems(tmp_path / f"d{suffix}", [{"prompt": [{"role": "user", "content": parts}]}])
        assert encode_prompt(problem, tokenizer, DatasetTask(path="")).tolist() == rendered(tokenizer, [USER])


@pytest.mark.parametrize("change", [as_text, without_content])
def test_serving_and_training_read_the_same_tokens(tokenizer, change):
    messages = with_calls(as_text)
    if change is without_content:
        messages = [message | {"content": message["content"] or None} for message in messages]
    for message in messages:
        for call in message.get("tool_calls", ()):
            call["id"] = "1"
    names = [message | {"name": "x"} if message["role"] == "user" else message for message in messages]
    expected = rendered(tokenizer, PLAIN, tools=[TOOL])
    assert served(names, tokenizer, tools=[TOOL]) == expected


def test_a_served_beginning_of_an_answer_goes_on_as_in_training(tokenizer, tmp_path):
    """An empty one is where the answer goes."""
    begun = [USER, {"role": "assistant", "content": "It is"}]
    expected = tokenizer.apply_chat_template(begun, continue_final_message=True, return_dict=False)
    (problem,) = problems(tmp_path / "d.jsonl", [{"prompt": begun}], last_turn="continue")
    assert encode_prompt(problem, tokenizer, DatasetTask(path="")).tolist() == expected == served(begun, tokenizer)
    begun[1]["content"] = ""
    (problem,) = problems(tmp_path / "e.jsonl", [{"prompt": begun}])
    found = encode_prompt(problem, tokenizer, DatasetTask(path="")).tolist()
    assert found == rendered(tokenizer, [USER]) == served(begun, tokenizer)


@pytest.mark.parametrize(
    ("message", "said"),
    [
        ({"role": "user", "content": None}, "m has no content"),
        ({"role": "user", "content": 3}, "the content of m is int"),
        ({"role": "user", "content": [{"type": "image_url", "image_url": "x"}]}, "a part of type 'image_url'"),
        ({"role": "user", "content": ["x"]}, "a part of type 'str'"),
        ({"role": "assistant", "tool_calls": "x"}, "the tool_calls of m are no list"),
        ({"role": "assistant", "tool_calls": [{"id": "1"}]}, "a call of m has no name"),
        (
            {"role": "assistant", "tool_calls": [{"name": "f", "arguments": "[1]"}]},
            "the arguments of f in m are no object",
        ),
        ({"role": "assistant", "tool_calls": [{"name": "f", "arguments": '{"a": "\\ud83d"}'}]}, "half of a surrogate"),
        ({"role": "assistant", "content": "", "function_call": {"name": "f"}}, "give it as tool_calls"),
    ],
)
def test_what_is_no_message_is_an_error_that_says_so(message, said):
    with pytest.raises(DataError, match=said):
        read_message(message, "m", "line 3")


def test_null_in_arguments_is_kept_where_it_was_written_as_text():
    (call,) = read_message(
        {"role": "assistant", "tool_calls": [{"name": "f", "arguments": '{"unit": null}'}]}, "m", "line 3"
    )["tool_calls"]
    assert call == {"type": "function", "function": {"name": "f", "arguments": {"unit": None}}}


# --- variables of the chat template --------------------------------------------------------------------------------


@pytest.mark.parametrize("suffix", [".jsonl", ".parquet"])
@pytest.mark.parametrize(
    "made", [lambda tool: [tool], lambda tool: json.dumps([tool]), lambda tool: [tool["function"]]]
)
def test_tools_of_a_row_are_rendered(tokenizer, tmp_path, suffix, made):
    rows = [{"prompt": [USER], "tools": made(TOOL)}, {"prompt": [USER], "tools": made(TOOL)}]
    if suffix == ".parquet" and not isinstance(rows[1]["tools"], str):
        other = copy.deepcopy(TOOL)
        other["function"]["parameters"]["properties"] = {"place": {"type": "string"}}
        rows[1]["tools"] = made(other)
    problem = problems(tmp_path / f"d{suffix}", rows)[0]
    expected = rendered(tokenizer, [USER], tools=[TOOL])
    assert encode_prompt(problem, tokenizer, DatasetTask(path="")).tolist() == expected
    turns = TurnEncoder(tokenizer, DatasetTask(path=""), (tokenizer.eos_token_id,))
    history = turns.history(problem, [])
    assert history
    assert tokenizer(history.row, add_special_tokens=False)["input_ids"] == expected


def test_the_keys_of_a_tool_come_in_one_order():
    """A template writes them as they come, so that the order decides on tokens."""
    turned = {"function": dict(reversed(TOOL["function"].items())) | {"strict": False}, "type": "function"}
    assert json.dumps(read_tools([turned], "x")) == json.dumps([TOOL])


def test_variables_of_a_row_come_before_those_of_the_task(tmp_path):
    tokenizer = tokenizer_with(THINKS)
    rows = [{"prompt": [USER], "chat_template_kwargs": {"enable_thinking": thinks}} for thinks in (False, True)]
    rows += [{"prompt": [USER], "chat_template_kwargs": None}]
    task = DatasetTask(path="", chat_template_args={"enable_thinking": False})
    found = problems(tmp_path / "d.parquet", rows)
    check_chat(task, tokenizer, found)
    for problem, thinks in zip(found, (False, True, False), strict=True):
        expected = rendered(tokenizer, [USER], enable_thinking=thinks)
        assert encode_prompt(problem, tokenizer, task).tolist() == expected


@pytest.mark.parametrize(
    ("row", "fields", "said"),
    [
        ({"prompt": "1+1=", "tools": [TOOL]}, {}, r"\(tools\): text goes through the template with task.chat=true"),
        ({"prompt": [USER], "chat_template_kwargs": {"thinc": 1}}, {}, "no variable 'thinc'"),
        ({"prompt": [USER], "chat_template_kwargs": {"chat_template": "x"}}, {}, "'chat_template' is no variable"),
        ({"prompt": [USER], "tools": [TOOL]}, {"chat_template_args": {"tools": [TOOL]}}, "would hide those"),
        ({"prompt": [USER], "tools": ["multiply"]}, {}, "line 1: tool 1 is no description"),
        ({"prompt": [USER], "tools": "multiply"}, {}, "line 1: tools is str"),
        ({"prompt": [USER], "chat_template_kwargs": [1]}, {}, "line 1: chat_template_kwargs is list"),
        ({"prompt": [USER], "tools": [TOOL], "chat_template_kwargs": {"tools": [TOOL]}}, {}, "tools are there twice"),
    ],
)
def test_variables_of_a_row_that_cannot_be_used_are_an_error(tokenizer, tmp_path, row, fields, said):
    task = DatasetTask(path="", **fields)
    with pytest.raises(DataError, match=said):
        check_chat(task, tokenizer, problems(tmp_path / "d.jsonl", [row]))


def asking(**fields):
    """A function of a user's own that makes problems."""
    return [{"prompt": [USER], **fields}, {"prompt": "1+1="}]


def test_problems_of_a_function_bring_tools_as_well(tokenizer):
    task = CustomTask(problems=f"{__name__}:asking", params={"tools": [TOOL]}, reward="exact")
    (problem,) = load_task(task, eval_problems=1).train
    assert encode_prompt(problem, tokenizer, task).tolist() == rendered(tokenizer, [USER], tools=[TOOL])


# --- what travels with a policy ------------------------------------------------------------------------------------


def test_a_served_policy_sees_the_settings_of_its_run_unless_a_request_has_others(tmp_path):
    from transformers import AutoTokenizer

    tokenizer = tokenizer_with(THINKS)
    given = {"enable_thinking": False, "tools": [TOOL]}
    keep_settings(tokenizer, DatasetTask(path="", system_prompt="Be brief.", chat_template_args=given))
    tokenizer.save_pretrained(tmp_path)
    loaded = AutoTokenizer.from_pretrained(tmp_path)
    brief = {"role": "system", "content": "Be brief."}
    assert served([USER], loaded) == rendered(tokenizer, [brief, USER], enable_thinking=False)
    own = [{"role": "system", "content": "Be long."}, USER]
    asked = {"chat_template_kwargs": {"enable_thinking": True}}
    assert served(own, loaded, **asked) == rendered(tokenizer, own, enable_thinking=True)
    keep_settings(loaded, DatasetTask(path=""))
    assert served([USER], loaded) == rendered(tokenizer, [USER])


@pytest.mark.parametrize(
    ("variables", "said"),
    [
        ({"thinc": 1}, "no variable 'thinc'"),
        ({"chat_template": "x"}, "is no variable"),
        ({"tokenize": False}, "is no variable"),
        ({"tools": []}, "tools are a parameter of the request"),
    ],
)
def test_variables_of_a_request_that_have_no_effect_are_refused(tokenizer, variables, said):
    with pytest.raises(ApiError, match=said) as caught:
        served([USER], tokenizer, chat_template_kwargs=variables)
    assert (caught.value.status, caught.value.param) == (400, "chat_template_kwargs")
    with pytest.raises(ApiError, match="no chat template"):
        served([USER], tokenizer_with(None), chat_template_kwargs={"a": 1})
