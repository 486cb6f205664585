"""The HTTP app and its service in this process, without Ray: what an address, a swap and a dead engine change."""

import asyncio
import contextlib
import json
import shutil
import subprocess
import sys
import threading

import httpx
import pytest

import qurl_ray.serving.service as service_module
from qurl_ray.config.serving import ServingConfig
from qurl_ray.errors import EngineError, QurlError
from qurl_ray.serving.http import digest, http_app
from qurl_ray.serving.meters import Meters
from qurl_ray.serving.policies import Pinned, pin
from qurl_ray.serving.service import Service
from tests.serving.apps import BREAKING, save_run

JSON = {"content-type": "application/json"}
ASKED = {"model": "policy", "messages": [{"role": "user", "content": "12+34="}], "max_tokens": 8, "seed": 1}


@contextlib.asynccontextmanager
async def service_of(runs, **settings):
    """A service that answers with the run "first"; both engines' threads end with it."""
    config = ServingConfig(**{"output_dir": runs, "policy": "first", "slots": 4, "queue": 20} | settings)
    service = Service(config, name="policy", meters=Meters())
    await service.swap(pin(config))
    try:
        yield service
    finally:
        await service.current.stream.drained()
        service.current.close()


def client_of(service, *, key: str | None = None, host: str = "127.0.0.1") -> httpx.AsyncClient:
    app = http_app(service, key_digest=digest(key) if key else None)
    transport = httpx.ASGITransport(app, client=(host, 4711), raise_app_exceptions=False)
    return httpx.AsyncClient(transport=transport, base_url="http://app")


def pinned(runs, name: str) -> Pinned:
    return pin(ServingConfig(output_dir=runs, policy=name))


def test_without_a_key_only_this_machine_is_answered(runs):
    async def main():
        async with service_of(runs) as service:
            found = []
            for host in ("127.0.0.1", "::1", "192.168.1.7", "10.0.0.1"):
                async with client_of(service, host=host) as client:
                    found.append((await client.get("/v1/models")).status_code)
                    assert (await client.get("/health")).status_code == 200
            async with client_of(service, host="192.168.1.7", key="k") as client:
                headers = {"authorization": "Bearer k"}
                found.append((await client.get("/v1/models", headers=headers)).status_code)
        async with service_of(runs, open=True) as service, client_of(service, host="192.168.1.7") as client:
            found.append((await client.get("/v1/models")).status_code)
        return found

    assert asyncio.run(main()) == [200, 200, 401, 401, 200, 200]


def test_what_no_program_can_read_is_one_line_in_the_log(runs, caplog):
    template = {name: [{"role": "user", "content": name}] for name in BREAKING}
    bodies = {
        b'{"model": "policy", "messages": [{"role": "user", "content": "\xed\xa0\x80"}]}': "surrogate",
        b'{"model": "policy", "messages": [': "JSON object in UTF-8",
        json.dumps(ASKED | {"messages": template["1/0"]}).encode(): "ZeroDivisionError: ",
        json.dumps(ASKED | {"messages": template["1+none"]}).encode(): "TypeError: ",
        json.dumps(ASKED | {"messages": template["10^9"]}).encode(): "OverflowError: ",
        json.dumps(
            ASKED | {"messages": template["refused"]}
        ).encode(): "the chat template refuses the messages: no such",
    }

    async def main():
        async with service_of(runs) as service, client_of(service) as client:
            for body, named in bodies.items():
                caplog.clear()
                found = await client.post("/v1/chat/completions", content=body, headers=JSON)
                assert (found.status_code, named in found.json()["error"]["message"]) == (400, True), found.text
                (line,) = caplog.messages
                assert "\n" not in line
                assert named in line
                assert not caplog.records[0].exc_info

    asyncio.run(main())


def test_variables_of_a_request_reach_the_chat_template(runs):
    async def main():
        async with service_of(runs) as service, client_of(service) as client:
            asked = ASKED | {"chat_template_kwargs": {"enable_thinking": False}}
            return (await client.post("/v1/chat/completions", json=asked)).json()["error"]

    error = asyncio.run(main())
    assert "chat template has no variable 'enable_thinking'" in error["message"]
    assert error["param"] == "chat_template_kwargs"


def test_pages_of_others_cannot_ask(runs):
    """A browser asks without a preflight if there is no content type, and for pages whose name means this machine."""
    body = json.dumps(ASKED).encode()

    async def main():
        async with service_of(runs) as service, client_of(service) as client, client_of(service, key="k") as keyed:

            async def post(client=client, **headers: str) -> int:
                named = {name.replace("_", "-"): value for name, value in headers.items()}
                return (await client.post("/v1/chat/completions", content=body, headers=named)).status_code

            assert await post() == 400
            assert await post(content_type="text/plain") == 400
            assert await post(content_type="application/json") == 200
            for origin in ("https://evil.example", "http://10.0.0.1:8000", "null", "http://[bad"):
                assert await post(content_type="application/json", origin=origin) == 401
                assert (
                    await post(keyed, content_type="application/json", origin=origin, authorization="Bearer k") == 200
                )
            assert await post(content_type="application/json", sec_fetch_site="cross-site") == 401
            assert (
                await post(
                    content_type="application/json", origin="http://localhost:3000", sec_fetch_site="same-origin"
                )
                == 200
            )

    asyncio.run(main())


def test_requests_in_flight_end_with_the_policy_that_they_began_with(runs):
    async def main():
        async with service_of(runs) as service, client_of(service) as client:
            old = service.current
            long = ASKED | {"max_tokens": 300, "ignore_eos": True}
            alone = (await client.post("/v1/chat/completions", json=long)).json()
            running = [asyncio.ensure_future(client.post("/v1/chat/completions", json=long)) for _ in range(6)]
            while not old.stream.running:
                await asyncio.sleep(0.001)
            await service.swap(pinned(runs, "second"))
            assert old.stream.running, "all had ended before"
            new = (await client.post("/v1/chat/completions", json=long)).json()
            before = [(await one).json() for one in running]
            await asyncio.wait_for(asyncio.gather(*service._leaving.values()), 10)
            assert old.stream._engine.version is None, "the old engine was not closed"
            return alone, before, new

    alone, before, new = asyncio.run(main())
    for one in before:
        assert (one["choices"], one["system_fingerprint"]) == (alone["choices"], alone["system_fingerprint"])
    assert new["system_fingerprint"] != alone["system_fingerprint"]
    assert new["choices"] != alone["choices"]


def test_a_policy_that_is_refused_leaves_the_old_one(runs, tmp_path):
    async def main():
        async with service_of(runs) as service, client_of(service) as client:
            old = service.current
            await service.swap(Pinned(source=str(tmp_path), name="nothing", folder=str(tmp_path), sha256=""))
            assert service.current is old
            assert "config.json is missing" in service.status()["refused"]
            assert (await client.post("/v1/chat/completions", json=ASKED)).status_code == 200
            await service.swap(pinned(runs, "second"))
            assert service.status()["refused"] is None

    asyncio.run(main())


def test_files_that_change_while_they_are_loaded_are_not_served(runs, monkeypatch):
    """As by a new run of the same name, in the middle."""
    run = save_run(runs, "replaced", seed=3)
    load = service_module.load_policy

    def loads(folder, *args, **kwargs):
        shutil.rmtree(run)
        save_run(runs, "replaced", seed=4)
        return load(folder, *args, **kwargs)

    async def main():
        async with service_of(runs) as service:
            old = service.current
            monkeypatch.setattr(service_module, "load_policy", loads)
            await service.swap(pinned(runs, "replaced"))
            assert service.current is old
            return service.status()["refused"]

    try:
        assert "have changed since" in asyncio.run(main())
    finally:
        shutil.rmtree(run)


def test_without_any_policy_a_replica_does_not_start(tmp_path):
    async def main():
        service = Service(ServingConfig(output_dir=tmp_path), name="policy", meters=Meters())
        async with client_of(service) as client:
            assert (await client.get("/health")).status_code == 503
            with pytest.raises(QurlError, match=r"config\.json is missing"):
                await service.swap(Pinned(source=str(tmp_path), name="nothing", folder=str(tmp_path), sha256=""))

    asyncio.run(main())


def test_a_dead_engine_is_told_of_and_makes_the_replica_unhealthy(runs, monkeypatch):
    async def main():
        async with service_of(runs) as service, client_of(service) as client:
            service.check_health()
            engine = service.current.stream._engine
            monkeypatch.setattr(engine, "step", lambda *_, **__: 1 / 0)
            whole = await client.post("/v1/chat/completions", json=ASKED)
            stream = await client.post("/v1/chat/completions", json=ASKED | {"stream": True})
            with pytest.raises(EngineError, match="division by zero"):
                service.check_health()
            return whole, stream, await client.get("/health")

    whole, stream, health = asyncio.run(main())
    assert (whole.status_code, stream.status_code, health.status_code) == (503, 503, 503)
    assert whole.json()["error"]["type"] == "server_error"
    assert "division" not in whole.text + stream.text + health.text


def test_an_engine_that_dies_in_the_middle_of_a_stream_ends_it_with_an_error(runs, monkeypatch):
    async def main():
        async with service_of(runs) as service, client_of(service) as client:
            engine = service.current.stream._engine
            step, left = engine.step, iter(range(4))

            def breaks(*args, **kwargs):
                if next(left, None) is None:
                    raise ZeroDivisionError
                step(*args, **kwargs)

            monkeypatch.setattr(engine, "step", breaks)
            asked = ASKED | {"stream": True, "max_tokens": 100, "ignore_eos": True}
            return (await client.post("/v1/chat/completions", json=asked)).text

    events = asyncio.run(main()).strip().split("\n\n")
    assert '"error"' in events[-1]
    assert "[DONE]" not in events


async def unhealthy(service) -> None:
    """Return never, or raise what makes the service unhealthy."""
    while True:
        service.check_health()
        await asyncio.sleep(0.05)


def hanging(stream, monkeypatch) -> threading.Event:
    """Make an engine hang in its next step, until the event is set."""
    step, wakes = stream._engine.step, threading.Event()
    monkeypatch.setattr(stream._engine, "step", lambda *args, **kwargs: (wakes.wait(20), step(*args, **kwargs)))
    return wakes


def test_an_engine_that_is_silent_makes_the_replica_unhealthy(runs, monkeypatch):
    async def main():
        async with service_of(runs, silent_s=0.2) as service, client_of(service) as client:
            wakes = hanging(service.current.stream, monkeypatch)
            asked = asyncio.ensure_future(client.post("/v1/chat/completions", json=ASKED))
            with pytest.raises(EngineError, match="has sent no token"):
                await unhealthy(service)
            wakes.set()
            assert (await asked).status_code == 200
            service.check_health()

    asyncio.run(main())


def test_an_old_engine_that_hangs_makes_the_replica_unhealthy(runs, monkeypatch):
    async def main():
        async with service_of(runs, silent_s=0.4) as service, client_of(service) as client:
            old = service.current
            wakes = hanging(old.stream, monkeypatch)
            asked = asyncio.ensure_future(client.post("/v1/chat/completions", json=ASKED))
            while not old.stream.running:
                await asyncio.sleep(0.001)
            await service.swap(pinned(runs, "second"))
            assert service.current is not old
            with pytest.raises(EngineError, match="the engine has work, but"):
                await unhealthy(service)
            assert (await client.get("/health")).status_code == 503
            wakes.set()
            assert (await asked).status_code == 200
            await asyncio.gather(*service._leaving.values())
            service.check_health()

    asyncio.run(main())


@pytest.mark.slow
def test_loading_leaves_no_openmp_threads_that_would_slow_the_engine(runs):
    """Another thread's, that is: see Service._load. In a process of its own, as this one's main thread has some."""
    code = """
import asyncio, os, sys, torch
from tests.serving.test_service import service_of
torch.set_num_threads(2)
count = lambda: len(os.listdir("/proc/self/task"))
async def main():
    before = count()
    async with service_of(sys.argv[1], slots=512) as service:
        for _ in range(50):  # a thread takes a moment to end
            if count() - before > 1:
                await asyncio.sleep(0.1)
        print(count() - before)
asyncio.run(main())
"""
    done = subprocess.run([sys.executable, "-c", code, str(runs)], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert int(done.stdout.split()[-1]) == 1  # the engine's own
