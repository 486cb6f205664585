"""The app as clients see it: a real one on a local Ray, asked by the openai client, unchanged."""

import asyncio
import json
import re
import socket
import time

import httpx
import openai
import pytest

from qurl_ray.config.serving import ServingConfig
from qurl_ray.engines.requests import derive_seed
from qurl_ray.errors import ConfigError
from qurl_ray.policy.load import load_tokenizer
from qurl_ray.serving.load import load_policy
from qurl_ray.serving.record import read_record
from qurl_ray.types import PolicySpec, Request, SamplingParams
from tests.serving import damage
from tests.serving.apps import KEY, SUM, streamed
from tests.serving.conftest import QUEUE, SLOTS

pytestmark = [pytest.mark.ray]


@pytest.fixture(scope="module")
def client(server):
    return server.client()


@pytest.fixture(scope="module")
def loaded(runs):
    """The same policy in an engine of this process."""
    return load_policy(runs / "first" / "policy-int8", ServingConfig())


def expected(loaded, prompt: str, *, seed: int, number: int = 0, **sampling) -> list[int]:
    """Tokens that the engine draws for this request alone."""
    params = {"max_new_tokens": 40, "stop_ids": loaded.stop_ids} | sampling
    ids = loaded.tokenizer(prompt, return_tensors="np").input_ids[0].astype("int32")
    drawn = derive_seed("serving", seed, number)
    request = Request(uid="x", prompt_ids=ids, seed=drawn, sampling=SamplingParams(**params))
    return loaded.engine.generate([request], version=1)[0].token_ids.tolist()


def text_of(loaded, tokens: list[int]) -> str:
    return loaded.tokenizer.decode(tokens, skip_special_tokens=True)


def chat(client, **options):
    return client.chat.completions.create(**{"model": "first", "messages": SUM, "seed": 5, "max_tokens": 40} | options)


# --- answers -------------------------------------------------------------------------------------------------------


def test_models_are_named_with_and_without_their_version(client, loaded):
    names = [model.id for model in client.models.list()]
    assert names == ["first", f"first@{loaded.fingerprint[:8]}"]
    assert client.models.retrieve(names[1]).id == names[1]
    with pytest.raises(openai.NotFoundError):
        client.models.retrieve("second")


def test_a_chat_is_answered_with_what_the_engine_draws_alone(client, loaded):
    tokens = expected(loaded, "12+34=", seed=5)
    reply = chat(client)
    assert reply.choices[0].message.content == text_of(loaded, tokens)
    assert reply.choices[0].finish_reason in ("stop", "length")
    usage = reply.usage
    assert (usage.prompt_tokens, usage.completion_tokens, usage.total_tokens) == (6, len(tokens), 6 + len(tokens))
    assert reply.model == f"first@{loaded.fingerprint[:8]}"
    assert reply.system_fingerprint == f"fp_{loaded.fingerprint}"


def test_a_stream_adds_up_to_the_whole_and_ends_with_the_usage(client):
    whole = chat(client)
    chunks = list(chat(client, stream=True, stream_options={"include_usage": True}))
    assert streamed(chunks) == whole.choices[0].message.content
    assert chunks[0].choices[0].delta.role == "assistant"
    assert [c.choices[0].finish_reason for c in chunks[:-1] if c.choices[0].finish_reason] == [
        whole.choices[0].finish_reason
    ]
    assert chunks[-1].choices == []
    assert chunks[-1].usage == whole.usage
    assert all(chunk.usage is None for chunk in chunks[:-1])
    assert {chunk.model for chunk in chunks} == {whole.model}


def test_choices_have_seeds_of_their_own(client, loaded):
    reply = chat(client, n=3, extra_body={"ignore_eos": True})
    told = [choice.message.content for choice in reply.choices]
    alone = [expected(loaded, "12+34=", seed=5, number=i, ignore_eos=True) for i in range(3)]
    assert told == [text_of(loaded, tokens) for tokens in alone]
    assert len(set(told)) == 3
    assert reply.usage.completion_tokens == 120
    chunks = list(chat(client, n=3, stream=True, extra_body={"ignore_eos": True}))
    for index in range(3):
        own = [c for chunk in chunks for c in chunk.choices if c.index == index]
        assert "".join(c.delta.content or "" for c in own) == told[index]


def test_a_seed_repeats_and_none_does_not(client):
    assert chat(client, seed=9).choices == chat(client, seed=9).choices
    assert len({chat(client, seed=openai.omit).choices[0].message.content for _ in range(4)}) > 1


@pytest.mark.parametrize("stream", [False, True])
def test_an_answer_ends_before_its_stop_sequence(client, loaded, stream):
    whole = text_of(loaded, expected(loaded, "12+34=", seed=5, max_new_tokens=60, ignore_eos=True))
    stop = whole[20:22]
    cut = whole[: whole.find(stop)]
    options = {"stop": ["no such", stop], "max_tokens": 60, "extra_body": {"ignore_eos": True}}
    if stream:
        chunks = list(chat(client, stream=True, **options))
        found, finish = streamed(chunks), chunks[-1].choices[0].finish_reason
    else:
        choice = chat(client, **options).choices[0]
        found, finish = choice.message.content, choice.finish_reason
    assert (found, finish) == (cut, "stop")


def test_log_probs_of_a_chat(client):
    reply = chat(client, temperature=0, logprobs=True, top_logprobs=3, max_tokens=12, extra_body={"ignore_eos": True})
    told = reply.choices[0].logprobs.content
    assert "".join(one.token for one in told if one.bytes and not one.token.startswith("<")) == (
        reply.choices[0].message.content
    )
    assert len(told) == 12
    for one in told:
        assert [top.logprob for top in one.top_logprobs] == sorted((t.logprob for t in one.top_logprobs), reverse=True)
        assert (one.top_logprobs[0].token, one.top_logprobs[0].logprob) == (one.token, one.logprob)  # greedy
        assert one.logprob < 0
    chunks = chat(
        client,
        temperature=0,
        logprobs=True,
        top_logprobs=3,
        max_tokens=12,
        stream=True,
        extra_body={"ignore_eos": True},
    )
    assert [one for c in chunks if c.choices and c.choices[0].logprobs for one in c.choices[0].logprobs.content] == told


def test_completions_of_texts_and_of_tokens(client, loaded):
    options = {"model": "first", "max_tokens": 10, "seed": 3, "logprobs": 2, "extra_body": {"ignore_eos": True}}
    reply = client.completions.create(prompt=["1+2=", "30+4="], n=2, **options)
    assert [choice.index for choice in reply.choices] == [0, 1, 2, 3]
    for choice, (prompt, number) in zip(
        reply.choices, [(p, n) for p in ("1+2=", "30+4=") for n in (0, 1)], strict=True
    ):
        tokens = expected(loaded, prompt, seed=3, number=number, max_new_tokens=10, ignore_eos=True)
        assert choice.text == text_of(loaded, tokens)
        assert len(choice.logprobs.tokens) == len(choice.logprobs.token_logprobs) == 10
        assert all(2 <= len(top) <= 3 for top in choice.logprobs.top_logprobs)
    assert reply.usage.prompt_tokens == 4 + 5
    same = client.completions.create(prompt=loaded.tokenizer("1+2=").input_ids, **options)
    assert same.choices[0].text == reply.choices[0].text
    chunks = list(client.completions.create(prompt="1+2=", stream=True, **options))
    assert "".join(choice.text for chunk in chunks for choice in chunk.choices) == same.choices[0].text


def test_sixteen_streams_at_once_tell_what_each_tells_alone(server):
    async def one(client, seed: int) -> str:
        stream = await client.chat.completions.create(
            model="first", messages=SUM, seed=seed, max_tokens=60, stream=True, extra_body={"ignore_eos": True}
        )
        return "".join([chunk.choices[0].delta.content or "" async for chunk in stream])

    async def main():
        async with server.async_client(max_retries=20) as client:
            together = await asyncio.gather(*(one(client, seed) for seed in range(16)))
            return together, [await one(client, seed) for seed in range(16)]

    together, alone = asyncio.run(main())
    assert together == alone
    assert len(set(alone)) == 16


# --- refusals ------------------------------------------------------------------------------------------------------

GOOD = {"model": "first", "messages": SUM, "max_tokens": 4}
TEXT = {"model": "first", "prompt": "1+2=", "max_tokens": 4}


@pytest.mark.parametrize(
    ("path", "body", "status", "named"),
    [
        ("chat/completions", b"{", 400, "JSON"),
        ("chat/completions", b"\xff\xfe", 400, "JSON"),
        ("chat/completions", b"[" * 60_000, 400, "cannot be read"),
        ("chat/completions", b"[]", 400, "object"),
        ("chat/completions", b"", 400, "JSON"),
        ("chat/completions", {"model": "first"}, 400, "messages"),
        ("chat/completions", GOOD | {"messages": []}, 400, "messages"),
        ("chat/completions", GOOD | {"messages": "hi"}, 400, "messages"),
        ("chat/completions", GOOD | {"messages": [{"role": "user", "content": 5}]}, 400, "content of message 1"),
        ("chat/completions", GOOD | {"messages": [{"role": "user", "content": ""}]}, 400, "conversation is empty"),
        (
            "chat/completions",
            GOOD | {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}]},
            400,
            "image_url",
        ),
        (
            "chat/completions",
            b'{"model": "first", "messages": [{"role": "user", "content": "\\ud800"}]}',
            400,
            "surrogate",
        ),
        ("chat/completions", GOOD | {"n": 0}, 400, "n"),
        ("chat/completions", GOOD | {"n": 9}, 400, "1 to 8 answers"),
        ("chat/completions", GOOD | {"n": "2"}, 400, "n"),
        ("chat/completions", GOOD | {"temperature": -1}, 400, "temperature"),
        ("chat/completions", GOOD | {"temperature": "hot"}, 400, "temperature"),
        ("chat/completions", b'{"model":"first","messages":[{"role":"user","content":"1"}],"top_p":NaN}', 400, "top_p"),
        ("chat/completions", GOOD | {"stop": ["a"] * 5}, 400, "stop"),
        ("chat/completions", GOOD | {"stop": ""}, 400, "stop"),
        ("chat/completions", GOOD | {"seed": 2**70}, 400, "seed"),
        ("chat/completions", GOOD | {"max_tokens": 0}, 400, "max_tokens"),
        ("chat/completions", GOOD | {"max_tokens": 10**9}, 400, "max_tokens"),
        ("chat/completions", GOOD | {"top_logprobs": 2}, 400, "logprobs"),
        ("chat/completions", GOOD | {"tools": [{"type": "function"}]}, 400, "tools"),
        ("chat/completions", GOOD | {"response_format": {"type": "json_object"}}, 400, "response_format"),
        ("chat/completions", GOOD | {"temprature": 1}, 400, "temprature"),
        ("chat/completions", GOOD | {"stream_options": {"include_usage": True}}, 400, "stream"),
        ("chat/completions", GOOD | {"messages": [{"role": "user", "content": "1" * 2000}]}, 400, "context"),
        ("chat/completions", GOOD | {"model": "gpt-4"}, 404, "model"),
        ("chat/completions", GOOD | {"messages": [{"role": "user", "content": "1" * 70_000}]}, 413, "65536 bytes"),
        ("completions", TEXT | {"prompt": []}, 400, "answers"),
        ("completions", TEXT | {"prompt": [10**6]}, 400, "prompt"),
        ("completions", TEXT | {"prompt": [1, "a"]}, 400, "prompt"),
        ("completions", TEXT | {"prompt": ["a"] * 9}, 400, "1 to 8 answers"),
        ("completions", TEXT | {"logprobs": 6}, 400, "logprobs"),
        ("completions", TEXT | {"echo": True}, 400, "echo"),
        ("completions", TEXT | {"best_of": 3}, 400, "best_of"),
        ("embeddings", TEXT, 404, "unknown path"),
    ],
)
def test_bad_requests_are_refused_in_openais_shape(server, path, body, status, named):
    content = body if isinstance(body, bytes) else json.dumps(body).encode()
    with server.http() as http:
        found = http.post(f"/v1/{path}", content=content, headers={"content-type": "application/json"})
    assert (found.status_code, named in found.text) == (status, True), found.text
    assert_shape(found)


def assert_shape(found) -> None:
    error = found.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert error["message"]
    assert not re.search(rf"Traceback|File \"|/(root|work|tmp|home)/|{KEY}|pydantic|\.py", found.text)


def test_other_methods_and_kinds_of_bodies_are_refused(server):
    with server.http() as http:
        wrong = [
            http.get("/v1/chat/completions"),
            http.delete("/v1/models"),
            http.post("/v1/completions", data={"a": 1}),
        ]
    assert [found.status_code for found in wrong] == [405, 405, 400]
    for found in wrong:
        assert_shape(found)


@pytest.mark.parametrize(
    "sent", ["", "Bearer", "Bearer sk-wrong", f"Bearer {KEY[:-1]}", f"Bearer {KEY}0", f"Basic {KEY}", "Bearer ключ"]
)
def test_a_wrong_key_is_refused_everywhere_but_for_health(server, sent):
    headers = {"authorization": sent.encode()}
    with server.http() as http:
        for path in ("/v1/models", "/v1/nothing"):
            found = http.get(path, headers=headers)
            assert found.status_code == 401
            assert_shape(found)
        assert http.get("/health", headers=headers).json() == {"status": "ok"}
    with pytest.raises(openai.AuthenticationError):
        server.client(api_key="sk-wrong").models.list()


def raw(server, head: str, *pieces: bytes, pause_s: float = 0.0) -> bytes:
    """What comes back to a client that speaks HTTP by hand."""
    lines = f"{head}\r\nhost: x\r\nauthorization: Bearer {KEY}\r\ncontent-type: application/json\r\n"
    with socket.create_connection(("127.0.0.1", server.port), timeout=200) as connection:
        connection.sendall(lines.encode())
        for piece in pieces:
            connection.sendall(piece)
            time.sleep(pause_s)
        connection.shutdown(socket.SHUT_WR) if pause_s == 0 else None
        found = b""
        while part := connection.recv(65536):
            found += part
            if b"\r\n\r\n" in found and found.endswith(b"}"):
                break
        return found


def logged(server) -> list[str]:
    """Lines that replicas and proxies have written."""
    return [line for path in server.logs() for line in path.read_text(errors="replace").splitlines()]


def refused(lines: list[str]) -> int:
    return sum("refused with 400" in line for line in lines)


def test_damaged_requests_are_refused_with_a_line_each(server, client):
    before = logged(server)
    found = asyncio.run(damage.statuses(server.port, range(300)))
    assert max(found) < 500, found
    assert found[400] > 150, "they are not damaged"
    after = logged(server)
    assert 150 < refused(after) - refused(before) <= found[400]
    assert len(after) - len(before) == refused(after) - refused(before), "more than a line each"
    assert chat(client).choices


@pytest.mark.slow
def test_ten_thousand_damaged_requests_are_no_errors_of_the_server(server, client):
    found = asyncio.run(damage.statuses(server.port, range(1000, 11_000)))
    assert max(found) < 500, found
    assert found.total() == 10_000
    assert not [line for line in logged(server) if "Traceback" in line]
    assert chat(client).choices


def test_a_huge_body_is_refused_before_it_has_come(server):
    found = raw(server, "POST /v1/completions HTTP/1.1", b"content-length: 99999999999\r\n\r\n", b"{", pause_s=0.05)
    assert found.startswith(b"HTTP/1.1 413")
    chunked = b"transfer-encoding: chunked\r\n\r\n" + b"".join(b"4000\r\n" + b"1" * 0x4000 + b"\r\n" for _ in range(8))
    assert raw(server, "POST /v1/completions HTTP/1.1", chunked, pause_s=0.05).startswith(b"HTTP/1.1 411")


def test_a_truncated_body_harms_nobody(server, client):
    for _ in range(5):
        raw(server, "POST /v1/completions HTTP/1.1", b"content-length: 100\r\n\r\n{")
    assert chat(client).choices


@pytest.mark.slow
def test_too_many_are_turned_away_and_told_when_to_come_back(server):
    long = {"model": "first", "messages": SUM, "extra_body": {"ignore_eos": True}}

    async def one(client, tokens: int):
        try:
            return await client.chat.completions.create(max_tokens=tokens, **long)
        except openai.RateLimitError as error:
            return error

    async def main():
        async with server.async_client() as client:
            found = await asyncio.gather(*(one(client, 1000) for _ in range(SLOTS + QUEUE + 6)))
        async with server.async_client(max_retries=30) as client:  # the client's own patience
            return found, await asyncio.gather(*(one(client, 100) for _ in range(SLOTS + QUEUE + 6)))

    found, patient = asyncio.run(main())
    refused = [one for one in found if isinstance(one, openai.RateLimitError)]
    assert len(refused) == 6
    for error in refused:
        assert error.response.headers["retry-after"] == "1"
        assert error.code == "rate_limit_exceeded"
    assert all(one.usage.completion_tokens == 100 for one in patient)


def test_who_hangs_up_leaves_the_slots_to_others(server):
    """Without it, a request would wait for three rounds of whole answers."""
    long = {"model": "first", "messages": SUM, "max_tokens": 1000, "extra_body": {"ignore_eos": True}}

    async def main():
        async with server.async_client(max_retries=10) as client:
            began = time.monotonic()
            await asyncio.gather(*(client.chat.completions.create(**long) for _ in range(SLOTS)))
            round_s = time.monotonic() - began
        async with server.async_client() as client:
            streams = [await client.chat.completions.create(**long, stream=True) for _ in range(SLOTS + QUEUE)]
            for stream in streams:
                await anext(aiter(stream))
                await stream.close()
        async with server.async_client(max_retries=10) as client:
            began = time.monotonic()
            await client.chat.completions.create(model="first", messages=SUM, max_tokens=4)
            return time.monotonic() - began, round_s

    waited_s, round_s = asyncio.run(main())
    assert waited_s < round_s


def test_the_scraper_finds_what_was_answered(server, client, loaded):
    chat(client)
    wanted = [
        "ray_qurl_serving_tokens_total",
        "ray_qurl_serving_first_token_seconds_bucket",
        "ray_qurl_serving_next_token_seconds_count",
        "ray_qurl_serving_running",
        "ray_serve_num_http_requests",
    ]
    url = re.search(r"metrics at (http://\S+)", server.log.read_text())[1]
    until = time.monotonic() + 60
    while not all(name in (page := httpx.get(url).text) for name in wanted):
        assert time.monotonic() < until, [line for line in page.splitlines() if "qurl" in line]
        time.sleep(0.5)
    assert f'version="first@{loaded.fingerprint[:8]}"' in page


@pytest.mark.slow
def test_another_policy_is_swapped_in_and_out_by_a_second_command(server, client):
    before = [model.id for model in client.models.list()]
    swapped = server.swap("second")
    assert swapped.returncode == 0, swapped.stderr
    assert re.fullmatch(r"first now uses the policy \S+/second/policy-int8 \([\d.]+ s\)\n", swapped.stdout)
    after = [model.id for model in client.models.list()]
    assert (after[0], after[1] != before[1]) == ("first", True), "clients need not know"
    assert chat(client).model == after[1]
    assert server.swap("first").returncode == 0
    assert [model.id for model in client.models.list()] == before


def test_where_nothing_is_served_nothing_is_swapped(server):
    with pytest.raises(ConfigError, match=f"serves nothing on port {server.port + 1} of this machine"):
        read_record(server.port + 1)


def test_answers_in_the_test_process_are_of_the_same_policy(loaded, runs):
    """What `expected` compares with is no other policy that says the same."""
    other = load_tokenizer(PolicySpec(source=str(runs / "first" / "policy")))
    assert other.get_vocab() == loaded.tokenizer.get_vocab()
    assert loaded.engine.kernels()
    assert expected(loaded, "1+2=", seed=1) != expected(loaded, "1+2=", seed=2)
