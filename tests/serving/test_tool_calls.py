"""Tools in the API: what was trained to call them can be used, by the openai client, unchanged."""

import asyncio
import json

import httpx
import openai
import pytest

from qurl_ray.config.serving import ServingConfig
from qurl_ray.engines.torch.batch import Draw
from qurl_ray.serving.choice import AnswerPart, Choice
from qurl_ray.serving.http import http_app
from qurl_ray.serving.meters import Meters
from qurl_ray.serving.policies import pin
from qurl_ray.serving.service import Service
from qurl_ray.tools.calls import ToolCall
from qurl_ray.tools.registry import Registry
from tests.serving.test_service import ASKED as SUM
from tests.serving.test_service import JSON, client_of, service_of
from tests.tools.policy import ANSWER, ARGUMENTS, ASKED, FUNCTION, save_calling_policy
from tests.tools.templates import HERMES, tokenizer_with

TOOLS = Registry([FUNCTION]).schemas()
CALL = '<tool_call>{"name": "multiply", "arguments": {"a": 6}}</tool_call>'


def parts_of(text: str, *, stops=(), cut=False, special=()) -> list[AnswerPart]:
    """The parts of an answer that is drawn byte by byte."""
    tokenizer = tokenizer_with(HERMES)
    tokenizer.add_special_tokens({"additional_special_tokens": ["<|im_start|>", *special]})
    choice = Choice(tokenizer, stops=stops, stop_ids=[tokenizer.eos_token_id], logprobs=False, calls="hermes")
    ids = tokenizer(text, add_special_tokens=False)["input_ids"] + ([] if cut else [tokenizer.eos_token_id])
    draws = [Draw(token=token, logprob=None, top=()) for token in ids]
    last = len(draws) - 1
    return [choice.feed([draw], ("length" if cut else "stop") if i == last else None) for i, draw in enumerate(draws)]


def told(parts: list[AnswerPart]) -> tuple:
    return (
        "".join(part.text for part in parts),
        [call for part in parts for call in part.calls],
        next(p.finish for p in parts if p.finish),
    )


def test_calls_leave_the_text_as_soon_as_they_are_whole():
    parts = parts_of(f"Well.\n{CALL}\n{CALL} Ü")
    call = ToolCall(name="multiply", arguments={"a": 6})
    assert told(parts) == ("Well. Ü", [(0, call), (1, call)], "tool_calls")
    at = [number for number, part in enumerate(parts) if part.calls]
    assert at == [len(f"Well.\n{CALL}") - 1, len(f"Well.\n{CALL}\n{CALL}") - 1]
    assert not any("<" in part.text for part in parts)


@pytest.mark.parametrize("text", ["<tool_call>{}</tool_call>", "a <tool", "1 < 2", CALL.removesuffix("</tool_call>")])
def test_what_is_no_call_stays_text(text):
    assert told(parts_of(text)) == (text, [], "stop")


def test_marks_of_calls_may_be_special_tokens():
    text, calls, finish = told(parts_of(f"a {CALL}", special=["<tool_call>", "</tool_call>"]))
    assert (text, len(calls), finish) == ("a", 1, "tool_calls")


def test_an_answer_that_is_cut_says_so_though_it_has_a_call():
    assert told(parts_of(CALL + "and", cut=True))[2] == "length"


def test_a_stop_sequence_ends_the_text_before_a_call():
    assert told(parts_of(f"a END {CALL}", stops=["END"])) == ("a", [], "stop")


@pytest.fixture(scope="module")
def calling(tmp_path_factory):
    """Settings of a service of a policy that calls a tool."""
    folder = tmp_path_factory.mktemp("calling")
    save_calling_policy(folder / "run" / "policy")
    (folder / "run" / "config.yaml").write_text("name: run")
    (folder / "run" / "summary.json").write_text(json.dumps({"name": "run", "steps": 1, "interrupted": False}))
    return ServingConfig(output_dir=folder, policy="run", slots=2, queue=20)


def asked(config: ServingConfig, ask):
    """What `ask` finds with a client of a service."""

    async def main():
        service = Service(config, name="policy", meters=Meters())
        await service.swap(pin(config))
        transport = httpx.ASGITransport(http_app(service, key_digest=None), client=("127.0.0.1", 1))
        try:
            async with httpx.AsyncClient(transport=transport) as http:
                return await ask(openai.AsyncOpenAI(api_key="x", base_url="http://app/v1", http_client=http))
        finally:
            await service.current.stream.drained()
            service.current.close()

    return asyncio.run(main())


GREEDY = {"model": "policy", "temperature": 0, "max_tokens": 200, "tools": TOOLS}


def test_a_conversation_with_a_tool(calling):
    async def ask(client):
        messages = [{"role": "user", "content": ASKED}]
        first = (await client.chat.completions.create(messages=messages, **GREEDY)).choices[0]
        (call,) = first.message.tool_calls
        messages += [first.message.model_dump(), {"role": "tool", "tool_call_id": call.id, "content": "42"}]
        return first, (await client.chat.completions.create(messages=messages, **GREEDY)).choices[0]

    first, second = asked(calling, ask)
    assert (first.finish_reason, first.message.content) == ("tool_calls", None)
    (call,) = first.message.tool_calls
    assert (call.type, call.function.name, json.loads(call.function.arguments)) == ("function", "multiply", ARGUMENTS)
    assert (second.finish_reason, second.message.content, second.message.tool_calls) == ("stop", ANSWER, None)


def test_a_stream_has_the_same_calls(calling):
    async def ask(client):
        stream = await client.chat.completions.create(
            messages=[{"role": "user", "content": ASKED}], stream=True, **GREEDY
        )
        return [chunk.choices[0] async for chunk in stream if chunk.choices]

    chunks = asked(calling, ask)
    (delta,) = (call for chunk in chunks for call in chunk.delta.tool_calls or [])
    assert (delta.index, delta.function.name, json.loads(delta.function.arguments)) == (0, "multiply", ARGUMENTS)
    assert not "".join(chunk.delta.content or "" for chunk in chunks)
    assert chunks[-1].finish_reason == "tool_calls"


def test_with_tool_choice_none_there_are_no_calls(calling):
    async def ask(client):
        messages = [{"role": "user", "content": ASKED}]
        return (await client.chat.completions.create(messages=messages, tool_choice="none", **GREEDY)).choices[0]

    assert asked(calling, ask).message.tool_calls is None


@pytest.mark.parametrize(
    ("options", "param"),
    [
        ({"tool_choice": "required"}, "tool_choice"),
        ({"tool_choice": {"type": "function", "function": {"name": "multiply"}}}, "tool_choice"),
        ({"parallel_tool_calls": False}, "parallel_tool_calls"),
        ({"tools": [{"type": "retrieval"}]}, "tools"),
        ({"messages": [{"role": "user"}]}, "messages"),
        ({"messages": [{"role": "assistant", "tool_calls": [
            {"id": "1", "function": {"name": "f", "arguments": "[]"}}]}]}, "messages"),
    ],
)  # fmt: skip
def test_bad_requests_are_refused_by_name(calling, options, param):
    async def ask(client):
        body = {"messages": [{"role": "user", "content": "a"}], **GREEDY, **options}
        return await client.post("/chat/completions", body=body, cast_to=object)

    with pytest.raises(openai.BadRequestError) as caught:
        asked(calling, ask)
    assert caught.value.param == param


def test_a_policy_whose_template_knows_no_tools_refuses_them(runs):
    async def main():
        async with service_of(runs) as service, client_of(service) as client:
            found = await client.post("/v1/chat/completions", content=json.dumps(SUM | {"tools": TOOLS}), headers=JSON)
            return found.status_code, found.json()["error"]

    status, error = asyncio.run(main())
    assert (status, error["param"], error["code"]) == (400, "tools", "unsupported_parameter")
