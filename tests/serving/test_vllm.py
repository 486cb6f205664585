"""The app with vLLM as its engine."""

import asyncio

import pytest

from tests.serving.apps import SUM, save_run, serving, streamed

pytest.importorskip("vllm", reason="needs the extra cpu or gpu")
pytestmark = [pytest.mark.ray, pytest.mark.slow]


@pytest.fixture(scope="module")
def server(tmp_path_factory, _quiet_machine):
    runs = tmp_path_factory.mktemp("runs")
    for name, seed in (("first", 1), ("second", 2)):
        save_run(runs, name, seed=seed)
    with serving(runs, "policy=first", "name=policy", "engine=vllm", "slots=4", "queue=20") as server:
        yield server


def chat(client, **options):
    asked = {"model": "policy", "messages": SUM, "seed": 5, "max_tokens": 40, "extra_body": {"ignore_eos": True}}
    return client.chat.completions.create(**asked | options)


def test_it_answers_streams_stops_and_counts(server):
    with server.client() as client:
        whole = chat(client, n=2)
        assert whole.usage.completion_tokens == 80
        assert whole.choices[0].message.content != whole.choices[1].message.content
        text = chat(client).choices[0].message.content
        assert streamed(chat(client, stream=True)) == text
        stop = text[10:12]
        assert chat(client, stop=stop).choices[0].message.content == text[: text.find(stop)]
        entries = chat(client, temperature=0, logprobs=True, top_logprobs=2).choices[0].logprobs.content
        assert len(entries) == 40
        assert all(e.logprob < 0 and e.top_logprobs[0].logprob == e.logprob for e in entries)
        assert all(len(entry.top_logprobs) == 2 for entry in entries)


def test_clients_that_leave_and_policies_that_come_lose_nothing(server):
    async def main():
        async with server.async_client(max_retries=10) as client:
            left = [await chat(client, stream=True, max_tokens=900) for _ in range(4)]
            for stream in left:
                await anext(aiter(stream))
                await stream.close()
            before = await chat(client)
            running = [asyncio.ensure_future(chat(client, max_tokens=300)) for _ in range(6)]
            await asyncio.sleep(0.2)
            swapped = await asyncio.to_thread(server.swap, "second")
            assert swapped.returncode == 0, swapped.stderr
            return before, [await one for one in running], await chat(client)

    before, running, after = asyncio.run(main())
    assert {reply.model for reply in running} <= {before.model, after.model}
    assert before.model != after.model
    assert all(reply.usage.completion_tokens == 300 for reply in running)
    assert before.choices[0].message.content != after.choices[0].message.content
