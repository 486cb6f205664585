"""The pool of environments: one state for each trajectory; what hangs, dies or floods costs its own trajectory."""

import asyncio
import os
import random
import time
from collections import Counter

import pytest
import ray
from ray.exceptions import RayActorError

from qurl_ray.actors.environments import (
    EnvironmentHost,
    EnvironmentPool,
    end_environments,
    start_environments,
)
from qurl_ray.actors.local import LocalActor, pool_here
from qurl_ray.config.environment import EnvironmentConfig
from qurl_ray.environments.process import CallFailed
from qurl_ray.environments.protocol import Step
from qurl_ray.errors import EnvironmentFailed
from qurl_ray.types import Problem
from tests.environments.test_environment_process import alive

BAD = "tests.environments.bad_environments"
PROBLEM = Problem(uid="0", prompt="1*1", answer="1")
FAULTS = {"hang": "timeout", "exit": "died", "flood": "died", "raise": "error"}
"""Answers that misbehave, and the kind of failure."""


def config(name: str, **settings) -> EnvironmentConfig:
    return EnvironmentConfig(**({"type": f"{BAD}:{name}", "timeout_s": 20.0, "memory_gb": 1.0} | settings))


async def conversation(pool: EnvironmentPool, name: str, answers: list[str], *, pause_s: float = 0.0):
    """Outcomes of the turns of one trajectory, up to the first that failed; and how often it was replayed."""
    async with pool.lease(name) as lease:
        outcomes = [(await lease.give(PROBLEM)).outcome]
        for answer in answers:
            if isinstance(outcomes[-1], CallFailed):
                break
            await asyncio.sleep(pause_s)
            outcomes.append((await lease.give(answer)).outcome)
        return outcomes, lease.replays


def play(settings: EnvironmentConfig, talk, hosts: int = 1):
    """Result of `talk(pool)`, with hosts in this process."""

    async def bounded():
        made = [EnvironmentHost(settings) for _ in range(hosts)]
        try:
            async with asyncio.timeout(120):
                return await talk(EnvironmentPool([LocalActor(host, threaded=True) for host in made], settings))
        finally:
            for host in made:
                host.close()

    return asyncio.run(bounded())


def said(outcomes) -> list[str]:
    return [message["content"] for step in outcomes if isinstance(step, Step) for message in step.messages]


@pytest.mark.parametrize("name", ["Counts", "Misbehaves"])
def test_many_trajectories_at_once_have_a_state_each(name):
    async def talk(pool):
        turns = {f"t{i}": [f"{i}.{t}" for t in range(i % 4)] + ["end"] for i in range(24)}
        found = await asyncio.gather(*(conversation(pool, one, answers) for one, answers in turns.items()))
        for (outcomes, replays), answers in zip(found, turns.values(), strict=True):
            assert outcomes[0] == []
            assert said(outcomes[1:]) == [f"{t + 1}: {answer}" for t, answer in enumerate(answers[:-1])]
            assert (outcomes[-1].done, outcomes[-1].reward, replays) == (True, len(answers), 0)
        return pool.deterministic

    assert play(config(name, concurrency=6), talk, hosts=2) == (name == "Counts")


def test_trajectories_of_one_name_have_a_state_each():
    """A step may hold a problem twice."""

    async def talk(pool):
        return await asyncio.gather(*(conversation(pool, "same", ["a", "b", "end"]) for _ in range(3)))

    for outcomes, replays in play(config("Counts"), talk):
        assert (said(outcomes[1:]), outcomes[-1].reward, replays) == (["1: a", "2: b"], 3.0, 0)


def test_a_host_without_ray_says_at_once_that_an_environment_cannot_be_imported():
    settings = config("Nowhere")

    async def talk():
        async with pool_here(EnvironmentHost(settings), settings).lease("t") as lease:
            await lease.give(PROBLEM)

    with pytest.raises(EnvironmentFailed, match="has no Nowhere"):
        asyncio.run(asyncio.wait_for(talk(), 30))


@pytest.mark.parametrize("method", ["submit", "collect"])
def test_any_error_of_a_host_reaches_all_who_wait_for_it(method):
    """Also one that no host should have."""

    class Broken(EnvironmentHost):
        pass

    def fail(*_):
        raise KeyError("lost its place")

    setattr(Broken, method, fail)
    settings = config("Counts")

    async def talk():
        pool = EnvironmentPool([LocalActor(Broken(settings), threaded=True)], settings)
        return await asyncio.gather(*(conversation(pool, f"t{i}", ["end"]) for i in range(3)), return_exceptions=True)

    errors = asyncio.run(asyncio.wait_for(talk(), 15))
    assert [str(error) for error in errors] == ["'lost its place'"] * 3


def test_no_more_trajectories_than_places_have_an_environment():
    settings = config("Misbehaves", concurrency=3)

    async def talk(pool):
        await asyncio.gather(*(conversation(pool, f"t{i}", ["end"]) for i in range(9)))

    host = None

    class Counted(EnvironmentHost):
        def __init__(self, *args):
            nonlocal host
            super().__init__(*args)
            host = self

    async def run():
        pool = EnvironmentPool([LocalActor(Counted(settings), threaded=True)], settings)
        await talk(pool)
        host.close()
        return len(host._lanes)

    assert asyncio.run(run()) <= 4  # one may leave while the next comes


def test_those_that_say_they_are_deterministic_share_a_process_and_are_replayed_when_it_ends():
    async def talk(pool):
        quiet = [conversation(pool, f"t{i}", ["a", "b", "c", "end"], pause_s=0.15) for i in range(6)]
        guilty = [conversation(pool, f"x{i}", ["a", "exit"], pause_s=0.1) for i in range(2)]
        return await asyncio.gather(*quiet, *guilty)

    *quiet, _, _ = found = play(config("SharesAndMisbehaves"), talk)
    for outcomes, _ in quiet:
        assert said(outcomes[1:]) == ["1: a", "2: b", "3: c"]
        assert outcomes[-1].reward == 4.0
    assert sum(replays for _, replays in quiet) > 0
    assert [outcomes[-1].kind for outcomes, _ in found[-2:]] == ["died", "died"]


def test_an_environment_that_cannot_be_imported_is_an_error():
    with pytest.raises(EnvironmentFailed, match="has no Nowhere"):
        play(config("Nowhere"), lambda pool: conversation(pool, "t", ["end"]))


@pytest.fixture(scope="module")
def cluster():
    ray.init(num_cpus=2, include_dashboard=False, log_to_driver=False, logging_level="ERROR")
    yield
    ray.shutdown()


@pytest.mark.slow
@pytest.mark.ray
@pytest.mark.parametrize("count", [20, pytest.param(200, marks=pytest.mark.slow)])
def test_one_in_five_misbehaves_and_all_others_end_well(cluster, count, monkeypatch):
    monkeypatch.setenv("QURL_TEST_MARK", mark := f"mark-{time.time()}")
    settings = config("Misbehaves", concurrency=count, hosts=2, timeout_s=4.0 if count == 20 else 30.0)
    kinds = [*FAULTS, "fork"]
    last = {f"t{i}": kinds[i // 5 % 5] if i % 5 == 0 else "b" for i in range(count)}

    async def talk():
        actors = start_environments(settings)
        pool = EnvironmentPool(actors, settings)
        try:
            return await asyncio.gather(
                *(
                    conversation(pool, name, ["a", answer, "end"], pause_s=random.Random(name).random() / 5)
                    for name, answer in last.items()
                )
            )
        finally:
            end_environments(actors)

    found = dict(zip(last, asyncio.run(talk()), strict=True))
    failed = Counter(o[-1].kind for o, _ in found.values() if isinstance(o[-1], CallFailed))
    assert failed == Counter(FAULTS[answer] for answer in last.values() if answer in FAULTS)
    assert all(o[-1].reward == 3.0 for o, _ in found.values() if isinstance(o[-1], Step))
    deadline = time.monotonic() + 30
    while alive(mark) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert not alive(mark)


async def process_of(actor) -> int | None:
    """Process id of an actor, or None while it restarts."""
    try:
        return await actor.__ray_call__.remote(lambda _: os.getpid())
    except RayActorError:
        return None


@pytest.mark.ray
def test_a_host_that_dies_costs_nothing_if_its_environments_are_deterministic(cluster):
    settings = config("Counts")

    async def talk():
        actors = start_environments(settings)
        pool = EnvironmentPool(actors, settings)
        try:
            async with pool.lease("t") as lease:
                await lease.give(PROBLEM)
                before = (await lease.give("a")).outcome
                died = await process_of(actors[0])
                ray.kill(actors[0], no_restart=False)
                while await process_of(actors[0]) in (died, None):
                    await asyncio.sleep(0.05)
                after = (await lease.give("b")).outcome
                return before, after, lease.replays
        finally:
            end_environments(actors)

    before, after, replays = asyncio.run(talk())
    assert [said([before]), said([after])] == [["1: a"], ["2: b"]]
    assert replays >= 1
