"""Adapters beside one served policy: each answer is that of a server with its adapter alone, whatever else goes on."""

import asyncio
import random
import threading
from pathlib import Path

import pytest
import torch

from qurl_ray.config.serving import ServingConfig
from qurl_ray.errors import ConfigError
from qurl_ray.learner.flow import FrozenCodes, UnifiedFlow
from qurl_ray.policy.adapters import SavedAdapter, add_adapters, save_adapter
from qurl_ray.policy.load import load_model
from qurl_ray.policy.ranges import measured_factors
from qurl_ray.quant.units import units
from qurl_ray.serving.policies import pin
from qurl_ray.types import Adapters, PolicySpec
from tests.conftest import taken
from tests.serving.test_service import client_of, service_of

COUNT = 8
KEEP = (r"lm_head\.", r"embed_tokens\.")
SHAPES = [
    Adapters(rank=2, alpha=4.0, targets=("all_linear",)),
    Adapters(rank=5, alpha=8.0, targets=("q_proj", "down_proj")),
]


def save(folder: Path, base: Path, seed: int, *, format_name: str | None = "int8") -> Path:
    """An adapter of random values over the base's codes, or of no codes."""
    model = load_model(PolicySpec(source=str(base)))
    quantized, shape, coded = units(model, KEEP), SHAPES[seed % len(SHAPES)], None
    factors = measured_factors(model, quantized)
    modules = add_adapters(model, shape)
    if format_name:
        flow = UnifiedFlow(fmt=taken(format_name), quantized=quantized, backward="straight_through")
        coded = FrozenCodes(model, flow, factors, "cpu").record
    generator = torch.Generator().manual_seed(seed)
    values = {
        f"{name}.{factor}.weight": torch.randn(
            model.get_submodule(f"{name}.{factor}").weight.shape, generator=generator
        )
        * 0.1
        for name in modules
        for factor in ("lora_A", "lora_B")
    }
    save_adapter(folder, SavedAdapter(adapters=shape, base=str(base), parameters=values, coded=coded), modules)
    return folder


@pytest.fixture(scope="module")
def folders(runs, tmp_path_factory) -> dict[str, Path]:
    """Adapters by name, and two more to swap in, over the policy of the run "first"."""
    place = tmp_path_factory.mktemp("adapters")
    return {f"a{n}": save(place / f"a{n}", runs / "first" / "policy", n) for n in range(COUNT + 2)}


def beside(runs, **settings):
    """A service of the base policy, unless the settings give one, with room for all requests."""
    return service_of(runs, **{"policy": None, "slots": 6, "queue": 300} | settings)


def request(name: str, number: int) -> dict:
    first, second = divmod(number * 37 % 400, 20)
    messages = [{"role": "user", "content": f"{first}+{second}="}]
    # Few prompts, so that requests of several adapters share one.
    return {"model": name, "messages": messages, "max_tokens": 12 + number % 9, "seed": number % 5, "ignore_eos": True}


async def answer(client, asked: dict) -> str:
    reply = await client.post("/v1/chat/completions", json=asked)
    assert reply.status_code == 200, reply.text
    return reply.json()["choices"][0]["message"]["content"]


async def alone(folder: Path, runs: Path, asked: list[dict]) -> list[str]:
    """What a server with one adapter answers to these requests, one after the other."""
    async with beside(runs, policy=str(folder)) as service, client_of(service) as client:
        return [await answer(client, one | {"model": "policy"}) for one in asked]


@pytest.mark.equal_bits
def test_each_answer_is_that_of_a_server_with_its_adapter_alone(folders, runs):
    """200 requests at random over 8 adapters, two of which are exchanged while requests go on. Servers with one adapter
    answer those of one that stays, one that is exchanged, and the one in its place."""
    names = [f"a{n}" for n in range(COUNT)]
    chosen = random.Random(0)
    plan = [(chosen.choice(names), number) for number in range(200)]
    after = {name: str(folders[name]) for name in names} | {"a0": str(folders["a8"]), "a1": str(folders["a9"])}

    async def main():
        settings = {"adapters": {name: str(folders[name]) for name in names}}
        async with beside(runs, **settings) as service, client_of(service) as client:
            listed = [model["id"] for model in (await client.get("/v1/models")).json()["data"]]
            assert {"policy", *names} <= set(listed)
            tasks = [asyncio.ensure_future(answer(client, request(name, number))) for name, number in plan[:120]]
            await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            await service.swap(pin(service.config.model_copy(update={"adapters": after})))
            assert not all(task.done() for task in tasks), "nothing went on during the exchange"
            tasks += [asyncio.ensure_future(answer(client, request(name, number))) for name, number in plan[120:]]
            answers = await asyncio.gather(*tasks)
            held = service.current.loaded.engine._adapters
            await service.current.stream.drained()
            await answer(client, request("a2", 1))  # the step after which what nobody has is forgotten
            assert len(held) == COUNT
            return answers

    answers = asyncio.run(main())
    wanted: dict[int, str] = {}
    for name in ("a0", "a2", "a8"):
        index = [i for i, (asked, _) in enumerate(plan) if used(asked, i) == name]
        found = asyncio.run(alone(folders[name], runs, [request(*plan[i]) for i in index]))
        wanted |= dict(zip(index, found, strict=True))
    assert len(set(answers)) > 100
    assert len(wanted) > 30
    assert {i: answers[i] for i in wanted} == wanted


def used(asked: str, number: int) -> str:
    """Adapter that answers a request: after the exchange, a8 and a9 have the names a0 and a1."""
    return {"a0": "a8", "a1": "a9"}.get(asked, asked) if number >= 120 else asked


@pytest.mark.equal_bits
def test_the_policy_alone_is_answered_beside_its_adapters(folders, runs):
    base = runs / "first" / "policy"
    asked = [request("policy", number) for number in range(6)]

    async def main():
        adapters = {"a2": str(folders["a2"])}
        async with beside(runs, adapters=adapters) as service, client_of(service) as client:
            mixed = [answer(client, one) for one in asked] + [answer(client, one | {"model": "a2"}) for one in asked]
            found = await asyncio.gather(*mixed)
            reply = (await client.post("/v1/chat/completions", json=request("a2", 1))).json()
            assert reply["model"].startswith("a2@")
            missing = await client.post("/v1/chat/completions", json=request("a3", 1))
            assert missing.status_code == 404
            bare = service.config.model_copy(update={"adapters": {}, "policy": str(base)})
            await service.swap(pin(bare))
            gone = await client.post("/v1/chat/completions", json=request("a2", 1))
            assert gone.status_code == 404
            after = [await answer(client, one) for one in asked]
        return found, after

    found, after = asyncio.run(main())
    assert found[:6] == after
    assert found[:6] != found[6:]


def test_adapters_of_another_base_or_shape_are_refused_and_the_others_stay(folders, runs, tmp_path):
    other = save(tmp_path / "other", runs / "second" / "policy", 0)
    config = ServingConfig(slots=2, adapters={"a0": str(folders["a0"])})

    async def main():
        async with beside(runs, adapters=config.adapters) as service, client_of(service) as client:
            before = await answer(client, request("a0", 1))
            await service.swap(pin(config.model_copy(update={"adapters": config.adapters | {"b": str(other)}})))
            assert "was trained over the codes" in str(service.status()["refused"])
            assert await answer(client, request("a0", 1)) == before
            assert (await client.post("/v1/chat/completions", json=request("b", 1))).status_code == 404

    asyncio.run(main())
    with pytest.raises(ConfigError, match="neither the folder of an adapter nor of a run"):
        pin(ServingConfig(output_dir=runs, adapters={"x": str(runs / "first")}))
    with pytest.raises(ConfigError, match="is an adapter itself"):
        asyncio.run(alone_with(folders, runs))


async def alone_with(folders, runs) -> None:
    async with beside(runs, policy=str(folders["a0"]), adapters={"a1": str(folders["a1"])}):
        pass


@pytest.mark.parametrize("fault", ["the engine cannot", "the engine dies"])
def test_an_exchange_that_fails_is_told_and_hangs_nowhere(folders, runs, fault):
    async def main():
        async with beside(runs, adapters={"a0": str(folders["a0"])}) as service:
            stream = service.current.stream

            def put(*_) -> None:
                if fault == "the engine dies":
                    stream._loop.call_soon_threadsafe(stream._break, RuntimeError("no memory"))
                    threading.Event().wait(0.5)
                raise RuntimeError("no memory")

            service.current.loaded.engine.put_adapter = put
            both = {name: str(folders[name]) for name in ("a0", "a1")}
            swap = service.swap(pin(service.config.model_copy(update={"adapters": both})))
            await asyncio.wait_for(swap, 20)
            assert "no memory" in str(service.status()["refused"])
            assert "a1" not in service.current.models
            if fault == "the engine dies":
                await asyncio.wait_for(service.swap(pin(service.config.model_copy(update={"adapters": both}))), 20)
                assert "the engine has died" in str(service.status()["refused"])

    asyncio.run(main())


def test_a_policy_whose_adapters_are_refused_leaves_no_engine(folders, runs, tmp_path):
    other = save(tmp_path / "other", runs / "second" / "policy", 0)
    before = sum(thread.name == "engine" for thread in threading.enumerate())

    async def main():
        async with beside(runs, adapters={"a": str(folders["a0"]), "b": str(other)}):
            pass

    with pytest.raises(ConfigError, match="was trained over the codes"):
        asyncio.run(main())
    assert sum(thread.name == "engine" for thread in threading.enumerate()) == before
