"""The app under load while it is swapped, struck and ended: no request is lost."""

import asyncio
import os
import signal
import threading
import time
from collections import Counter

import httpx
import httpx2  # the openai client's own
import openai
import pytest
from mlflow.tracking import MlflowClient

from tests.serving.apps import KEY, SUM, save_run, serving, started
from tests.training.runs import alive, descendants

LONG = {"model": "first", "messages": SUM, "max_tokens": 600, "extra_body": {"ignore_eos": True}}
SETTINGS = ("slots=4", "queue=40", "max_choices=8")

pytestmark = [pytest.mark.ray]


class Load:
    """Clients that ask all the time, one after the other each, half of them for streams.

    Args:
        retries: times that a client asks again when an answer broke off in the middle.
    """

    def __init__(self, server, *, clients: int, retries: int = 0, tokens: int = 120) -> None:
        self._server, self._clients, self._retries, self._tokens = server, clients, retries, tokens
        self.models: list[tuple[float, set[str]]] = []
        """When an answer was whole, and the models that it named."""
        self.lost: list[Exception] = []
        self.again = 0
        self._end = threading.Event()
        self._thread = threading.Thread(target=lambda: asyncio.run(self._run()))

    async def _run(self) -> None:
        async with self._server.async_client(max_retries=20, timeout=120) as client:
            await asyncio.gather(*(self._ask(client, number) for number in range(self._clients)))

    async def _ask(self, client, number: int) -> None:
        seed = number
        while not self._end.is_set():
            seed += self._clients
            for attempt in range(self._retries + 1):
                try:
                    self.models.append((time.monotonic(), await self._once(client, seed, stream=bool(number % 2))))
                    break
                except (openai.APIError, httpx2.HTTPError, OSError) as error:
                    self.again += 1
                    if attempt == self._retries:
                        self.lost.append(error)

    async def _once(self, client, seed: int, *, stream: bool) -> set[str]:
        reply = await client.chat.completions.create(
            model="first",
            messages=SUM,
            seed=seed,
            max_tokens=self._tokens,
            stream=stream,
            extra_body={"ignore_eos": True},
        )
        if not stream:
            assert reply.usage.completion_tokens == self._tokens
            return {reply.model}
        chunks = [chunk async for chunk in reply]
        if chunks[-1].choices[0].finish_reason != "length":
            raise OSError("the stream broke off")
        return {chunk.model for chunk in chunks}

    def __enter__(self) -> "Load":
        self._thread.start()
        return self

    def __exit__(self, *_) -> None:
        self._end.set()
        self._thread.join()


def wait_for(condition, seconds: float, what: str) -> None:
    until = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < until, what
        time.sleep(0.1)


def versions(client) -> list[str]:
    """The model's name, and its name with the version that answers."""
    return [model.id for model in client.models.list()]


@pytest.mark.slow
def test_a_swap_under_load_loses_no_request_and_mixes_no_answer(server):
    with server.client() as client:
        before = versions(client)[1]
        replicas = server.replicas()
        with Load(server, clients=8) as load:
            wait_for(lambda: len(load.models) > 10, 60, "no answers")
            swapped = server.swap("second")
            done = time.monotonic()
            wait_for(lambda: load.models[-1][0] > done + 2, 60, "no answers after the swap")
        assert swapped.returncode == 0, swapped.stderr
        assert load.lost == []
        after = versions(client)[1]
        assert before != after
        named = Counter(name for _, names in load.models for name in names)
        assert set(named) == {before, after}
        assert all(len(names) == 1 for _, names in load.models), "an answer of two policies"
        assert {name for at, names in load.models if at > done + 1 for name in names} == {after}
        assert server.replicas() == replicas, "the process stays"
        with pytest.raises(openai.NotFoundError):
            client.chat.completions.create(model=before, messages=SUM, max_tokens=4)
        assert server.swap("first").returncode == 0
        assert versions(client)[1] == before


@pytest.mark.slow
def test_a_registered_model_takes_the_place_of_a_run(server, runs):
    registry = MlflowClient(f"sqlite:///{runs / 'mlflow.db'}")
    registry.create_registered_model("sums")
    registry.create_model_version("sums", (runs / "second" / "policy-int8").as_uri())
    with server.client() as client:
        assert server.swap("second").returncode == 0
        expected = versions(client)
        assert server.swap("models:/sums/latest").returncode == 0
        assert versions(client)[1].rpartition("@")[2] == expected[1].rpartition("@")[2], "the same weights"
        assert client.chat.completions.create(model="first", messages=SUM, max_tokens=4).choices
        assert server.swap("first").returncode == 0


@pytest.mark.slow
def test_a_policy_that_cannot_be_loaded_changes_nothing(server, runs):
    save_run(runs, "broken", seed=3)
    (runs / "broken" / "policy-int8" / "model.safetensors").write_bytes(b"no tensors")
    with server.client() as client:
        before = versions(client)
        refused = server.swap("broken")
        assert refused.returncode == 2
        assert "still answers" in refused.stderr
        assert "Traceback" not in refused.stderr
        assert versions(client) == before
        assert client.chat.completions.create(model=before[1], messages=SUM, max_tokens=4).model == before[1]


@pytest.mark.slow
def test_a_replica_that_is_killed_costs_retries_and_no_request(server):
    (killed,) = server.replicas()
    with Load(server, clients=8, retries=20) as load:
        wait_for(lambda: len(load.models) > 10, 60, "no answers")
        os.kill(killed, signal.SIGKILL)
        wait_for(lambda: len(set(server.replicas()) - {killed}) == 1, 90, "no new replica")
        count = len(load.models)
        wait_for(lambda: len(load.models) > count + 10, 90, "no answers after the strike")
    assert load.again > 0, "nothing was in it"
    assert load.lost == []
    with server.http() as http:
        assert http.get("/health").status_code == 200


@pytest.mark.slow
def test_a_replica_that_starts_again_has_no_other_weights_than_were_chosen(server, runs):
    """If a new run of the same name has put others in their place, it answers nothing."""
    save_run(runs, "again", seed=3)
    with server.client(max_retries=20) as client:
        assert server.swap("again").returncode == 0
        chosen = versions(client)
        (runs / "again").rename(runs / "again.1")
        save_run(runs, "again", seed=4)
        (killed,) = server.replicas()
        os.kill(killed, signal.SIGKILL)
        wait_for(lambda: "have changed since" in "".join(map(logged, server.logs())), 120, "it was not refused")
        assert server.swap("again").returncode == 0
        wait_for(lambda: server.replicas(), 90, "no new replica")
        assert versions(client) != chosen
        assert server.swap("first").returncode == 0


def logged(path) -> str:
    return path.read_text(errors="replace")


def ended(server, number: signal.Signals, *, group: bool = False) -> int:
    """The status with which the job ends after a signal. Nothing that it started is left.

    Args:
        group: send it to all processes of the job's group, as a closing terminal and `timeout` do.
    """
    below = dict(descendants(server.process.pid))
    (os.killpg if group else os.kill)(server.process.pid, number)
    status = server.process.wait(240)
    deadline = time.monotonic() + 10
    while left := {pid: command for pid, command in below.items() if alive(pid)}:
        assert time.monotonic() < deadline, left
        time.sleep(0.1)
    assert "Traceback" not in server.log.read_text()
    return status


OTHERS = [pytest.param(number, marks=pytest.mark.slow) for number in (signal.SIGINT, signal.SIGHUP)]


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGTERM, *OTHERS])
def test_what_was_asked_is_answered_before_the_server_ends(runs, number):
    # Long enough for Ray's own handler to cut them off, short enough for a slow machine to end them within `drain_s`.
    asked = LONG | {"max_tokens": 250}

    async def whole(client, seed: int) -> int:
        reply = await client.chat.completions.create(**asked, seed=seed)
        return reply.usage.completion_tokens

    async def refused(server) -> int:
        """Status for those who come now."""
        async with httpx.AsyncClient(base_url=server.url, headers={"authorization": f"Bearer {KEY}"}) as client:
            while (found := await client.get("/v1/models")).status_code == 200:
                await asyncio.sleep(0.05)
        return found.status_code

    async def main(server):
        async with server.async_client(timeout=220) as client:
            wholes = [asyncio.ensure_future(whole(client, seed)) for seed in range(35)]
            streams = await asyncio.gather(*(client.chat.completions.create(**asked, stream=True) for _ in range(35)))
            began = time.monotonic()
            status = asyncio.ensure_future(asyncio.to_thread(ended, server, number, group=True))
            assert await refused(server) in (404, 503)
            finishes = [[chunk async for chunk in stream][-1].choices[0].finish_reason for stream in streams]
            took = time.monotonic() - began
            return await asyncio.gather(*wholes), finishes, took, await status

    with serving(runs, "policy=first", "slots=8", "queue=80", "drain_s=200") as server:
        tokens, finishes, took, status = asyncio.run(main(server))
        assert (tokens, finishes) == ([250] * 35, ["length"] * 35)
        assert took > 4, "Ray's own handler would have let all end in its three seconds"
        assert status == 0
        log = server.log.read_text()
        assert f"{number.name}: requests in flight end first" in log
        assert "aborted" not in log


@pytest.mark.slow
def test_a_server_says_that_it_aborted_what_took_too_long(runs):
    with serving(runs, "policy=first", "slots=1", "queue=80", "drain_s=3") as server, server.client() as client:
        streams = [client.chat.completions.create(**LONG | {"max_tokens": 1000}, stream=True) for _ in range(40)]
        assert ended(server, signal.SIGTERM) == 0
        assert "requests that had not ended after drain_s=3 s were aborted" in server.log.read_text()
        assert streams


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_second_signal_aborts_what_runs(runs, number):
    with serving(runs, "policy=first", "slots=1", "queue=80") as server, server.client() as client:
        streams = [client.chat.completions.create(**LONG | {"max_tokens": 1000}, stream=True) for _ in range(40)]
        server.process.send_signal(number)
        wait_for(lambda: "once more aborts" in server.log.read_text(), 20, "it does not drain")
        began = time.monotonic()
        assert ended(server, number) == 128 + number
        assert time.monotonic() - began < 20
        assert "aborted" in server.log.read_text()
        assert streams


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
@pytest.mark.parametrize("process", ["gcs_server", "raylet", "ray::ServeController", "ray::ServeReplica"])
def test_a_signal_while_the_server_starts_ends_it(runs, number, process):
    with started(runs, "policy=first") as server:
        below = lambda: [command for _, command in descendants(server.process.pid) if process in command]  # noqa: E731
        wait_for(below, 90, f"no {process}")
        assert ended(server, number) == 128 + number


@pytest.mark.slow
def test_replicas_come_with_what_is_asked_and_go_with_it(runs):
    settings = ("replicas=1", "max_replicas=2")
    with serving(runs, "policy=first", *SETTINGS, *settings) as server:
        assert len(server.replicas()) == 1
        with Load(server, clients=16, retries=3, tokens=400) as load:
            wait_for(lambda: len(server.replicas()) == 2, 90, "no second replica")
        assert load.lost == []
        wait_for(lambda: len(server.replicas()) == 1, 900, "the second replica stays")  # Ray Serve waits ten minutes
        with server.client() as client:
            assert client.chat.completions.create(model="first", messages=SUM, max_tokens=4).choices
