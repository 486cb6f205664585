"""The fleet with workers that answer by rule and die, hang and refuse on demand; every request is answered once."""

import asyncio
import time

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from ray.exceptions import ActorUnavailableError

from qurl_ray.actors.fleet import Fleet
from qurl_ray.actors.health import Health, Heartbeat, Member
from qurl_ray.actors.local import LocalActor
from qurl_ray.config.rollout import RolloutConfig
from qurl_ray.errors import DeadlineExceeded, EngineError
from qurl_ray.types import Completion, Manifest, Request, SamplingParams

LENGTH = 8
CONFIG = RolloutConfig(heartbeat_s=0.01, silent_s=0.4, timeout_s=20, start_timeout_s=5, slots=4)


def token(seed: int, t: int) -> int:
    return (seed * 31 + t * 7) % 97


def asked(count: int) -> list[Request]:
    sampling = SamplingParams(max_new_tokens=LENGTH)
    prompt = np.array([1, 2], np.int32)
    return [Request(uid=f"p{i // 2}/{i % 2}", prompt_ids=prompt, seed=i, sampling=sampling) for i in range(count)]


class Worker:
    """Draws a token of each request every `pace` seconds."""

    def __init__(self, pace: float = 0.001) -> None:
        self.pace, self.boots, self.version = pace, 0, None
        self.dead = self.hung = asyncio.Event()
        self.cancelled: set[str] = set()
        self.calls = self.naps = self.cancels = self.pulses = 0
        self.begin()

    def begin(self) -> None:
        """A new process."""
        self.boots += 1
        self.version = None
        self.dead, self.hung = asyncio.Event(), asyncio.Event()

    async def living(self, what):
        """What comes of a call, unless the process dies before."""
        dies = asyncio.ensure_future(self.dead.wait())
        call = asyncio.ensure_future(what)
        await asyncio.wait({call, dies}, return_when=asyncio.FIRST_COMPLETED)
        dies.cancel()
        if call.done() and not self.dead.is_set():
            return call.result()
        call.cancel()
        raise ActorUnavailableError("killed", bytes(16))

    async def heartbeat(self) -> Heartbeat:
        self.pulses += 1

        async def answer():
            while self.hung.is_set():
                await asyncio.sleep(0.01)
            return Heartbeat(boot=str(self.boots), pid=self.boots, node="n", version=self.version, log="log")

        return await self.living(answer())

    async def generate(self, requests, version, deadline_s):
        return await self.living(self._generate(requests, version))

    async def _generate(self, requests, version):
        assert version == self.version
        self.calls += 1
        self.cancelled = set()
        drawn = 0
        wanted = {request.uid: request.sampling.max_new_tokens for request in requests}
        cut: dict[str, int] = {}
        while len(cut) < len(requests):
            await asyncio.sleep(self.pace)
            while self.hung.is_set():
                await asyncio.sleep(0.01)
            drawn += 1
            for uid, length in wanted.items():
                if uid not in cut and (drawn >= length or uid in self.cancelled):
                    cut[uid] = drawn
        return [self._completion(request, min(cut[request.uid], wanted[request.uid]), version) for request in requests]

    def _completion(self, request, count, version):
        whole = count == request.sampling.max_new_tokens
        return Completion(
            uid=request.uid,
            token_ids=np.array([token(request.seed, request.drawn + t) for t in range(count)], np.int32),
            logprobs=np.zeros(count, np.float32),
            versions=np.full(count, version, np.int32),
            finish="length" if whole else "cancelled",
        )

    def cancel(self, uids) -> None:
        self.cancelled |= set(uids)
        self.cancels += 1

    async def sleep(self) -> None:
        self.naps += 1


class Rig:
    """A fleet of such workers, and what it says."""

    def __init__(self, *workers: Worker, config: RolloutConfig = CONFIG) -> None:
        self.workers, self.said = list(workers), []
        self.fleet = Fleet([LocalActor(w) for w in workers], config, lambda kind, message: self.said.append(message))

    async def refit(self, version: int) -> None:
        await self.fleet.some_alive()
        for member in self.fleet.those(Health.HEALTHY, Health.STALE):
            self.workers[member.index].version = version
            member.turn(Health.STALE)
            self.fleet.holds(member, version)

    async def kill(self, index: int, down_s: float = 0.02) -> None:
        """Kill a process; another one is up a little later."""
        worker = self.workers[index]
        worker.dead.set()
        await asyncio.sleep(down_s)
        worker.begin()

    async def keep_fit(self, version: int = 1) -> None:
        """What the learner does while it waits."""
        while True:
            if self.fleet.those(Health.STALE):
                await self.refit(version)
            await asyncio.sleep(0.005)


def check(requests, completions):
    assert [c.uid for c in completions] == [r.uid for r in requests]
    for request, completion in zip(requests, completions, strict=True):
        assert completion.token_ids.tolist() == [token(request.seed, t) for t in range(LENGTH)]
        assert len(completion.logprobs) == len(completion.versions) == LENGTH


def run(scenario):
    """A scenario in a loop of its own, which ends with it."""

    async def bounded():
        return await asyncio.wait_for(scenario, 30)

    return asyncio.run(bounded())


@settings(max_examples=25, deadline=None)
@given(
    workers=st.integers(1, 4),
    count=st.integers(1, 40),
    kills=st.lists(st.tuples(st.integers(0, 3), st.floats(0, 0.02)), max_size=6),
    pauses=st.integers(0, 2),
)
def test_every_request_is_answered_once_whoever_dies_and_however_often_weights_change(workers, count, kills, pauses):
    async def scenario():
        rig = Rig(*(Worker() for _ in range(workers)))
        await rig.fleet.started()
        await rig.refit(1)
        requests = asked(count)
        keeper = asyncio.ensure_future(rig.keep_fit())
        call = asyncio.ensure_future(rig.fleet.generate(requests))
        for index, after in kills:
            await asyncio.sleep(after)
            await rig.kill(index % workers)
        for _ in range(pauses):
            await rig.fleet.pause()
            assert not rig.fleet._busy
            rig.fleet.resume()
        check(requests, await call)
        keeper.cancel()

    run(scenario())


def test_what_was_drawn_before_new_weights_is_kept_with_its_version():
    async def scenario():
        rig = Rig(Worker(pace=0.02))
        await rig.fleet.started()
        await rig.refit(1)
        requests = asked(3)
        call = asyncio.ensure_future(rig.fleet.generate(requests))
        await asyncio.sleep(0.07)
        await rig.fleet.pause()
        await rig.refit(2)
        assert not call.done()
        rig.fleet.resume()
        completions = await call
        check(requests, completions)
        for completion in completions:
            assert set(completion.versions.tolist()) == {1, 2}
            assert sorted(completion.versions.tolist()) == completion.versions.tolist()
        assert rig.fleet.counts.repeated == 3

    run(scenario())


def test_a_straggler_is_asked_for_by_an_idle_worker_and_the_first_answer_counts():
    async def scenario():
        rig = Rig(Worker(), Worker(pace=5.0))
        await rig.fleet.started()
        await rig.refit(1)
        requests = asked(8)
        check(requests, await rig.fleet.generate(requests))
        assert rig.fleet.counts.hedged == 1
        assert rig.workers[0].calls == 2
        check(requests[:1], await rig.fleet.generate(requests[:1]))  # the loser does not block the fleet

    run(scenario())


def test_what_many_workers_do_wakes_up_no_more_of_the_others_than_there_is_work_for():
    async def scenario():
        rig, began = Rig(*(Worker(pace=0.002 + 0.0005 * index) for index in range(64))), time.monotonic()
        await rig.fleet.started()
        await rig.refit(1)
        looks, look = [], rig.fleet._next
        rig.fleet._next = lambda member: looks.append(member.index) or look(member)
        check(requests := asked(32), await rig.fleet.generate(requests))
        assert len(looks) < 2 * 64 + 32  # each once for this work, and after it; 32 * 32 if each end woke all up
        generating = asyncio.ensure_future(rig.fleet.generate(asked(64)))
        await asyncio.sleep(0.005)
        await rig.fleet.pause()
        assert {worker.cancels for worker in rig.workers} == {1}
        rig.fleet.resume()
        await generating
        assert sum(worker.pulses for worker in rig.workers) <= 2 * 64 + (time.monotonic() - began) / 0.002

    run(scenario())


def test_a_worker_that_joins_works_once_it_has_weights():
    async def scenario():
        rig = Rig(Worker())
        await rig.fleet.started()
        await rig.refit(1)
        rig.workers.append(Worker())
        rig.fleet.join(LocalActor(rig.workers[1]))
        await rig.fleet.started()
        assert rig.fleet.members[1].health is Health.STALE
        await rig.fleet.generate(asked(8))
        assert rig.workers[1].calls == 0
        await rig.refit(2)
        await rig.fleet.generate(asked(8))
        assert rig.workers[1].calls == 1

    run(scenario())


def test_a_suspect_that_answers_again_is_given_what_came_meanwhile():
    async def scenario():
        rig = Rig(Worker())
        await rig.fleet.started()
        await rig.refit(1)
        rig.workers[0].hung.set()
        while not rig.fleet.those(Health.SUSPECT):
            await asyncio.sleep(0.01)
        generating = asyncio.ensure_future(rig.fleet.generate(requests := asked(4)))
        await asyncio.sleep(0.02)
        rig.workers[0].hung.clear()
        check(requests, await asyncio.wait_for(generating, 5))

    run(scenario())


def test_what_a_worker_that_is_taken_away_had_to_do_is_done_by_others():
    async def scenario():
        rig = Rig(Worker(), Worker(pace=5.0))
        await rig.fleet.started()
        await rig.refit(1)
        requests = asked(8)
        generating = asyncio.ensure_future(rig.fleet.generate(requests))
        await asyncio.sleep(0.05)
        assert rig.workers[1].calls == 1
        rig.fleet.leave()
        check(requests, await generating)
        assert [member.index for member in rig.fleet.members] == [0]
        assert rig.fleet.counts.hedged == 0
        rig.workers[1] = Worker()
        rig.fleet.join(LocalActor(rig.workers[1]))  # in its place
        await rig.fleet.started()
        await rig.refit(2)
        check(requests, await rig.fleet.generate(requests))
        assert rig.workers[1].calls == 1
        assert not rig.said

    run(scenario())


def test_those_that_are_awake_are_put_to_sleep_when_nothing_runs_any_more():
    async def scenario():
        rig = Rig(Worker(), Worker(pace=5.0))
        await rig.fleet.started()
        await rig.refit(1)
        await rig.fleet.generate(asked(8))  # the second worker was hedged, and is still being interrupted
        await asyncio.gather(rig.fleet.rest(5), rig.fleet.rest(5))  # every rank asks
        assert not rig.fleet._busy
        assert [worker.naps for worker in rig.workers] == [1, 1]
        await rig.fleet.rest(5)  # nobody is awake
        rig.workers[1].pace = 0.001
        await rig.fleet.generate(asked(1))
        await rig.fleet.rest(5)
        assert sum(worker.naps for worker in rig.workers) == 3  # one was asked for something

    run(scenario())


def test_one_that_dies_while_it_falls_asleep_is_no_reason_to_stop():
    async def scenario():
        rig = Rig(Worker(), Worker())
        await rig.fleet.started()
        await rig.refit(1)

        async def die():
            rig.workers[1].dead.set()
            raise ActorUnavailableError("killed", bytes(16))

        rig.workers[1].sleep = die
        await rig.fleet.rest(5)
        assert rig.workers[0].naps == 1
        assert rig.fleet.counts.deaths == 1

    run(scenario())


def test_a_worker_that_was_moved_begins_in_the_place_of_the_old_one():
    async def scenario():
        rig = Rig(Worker(), Worker())
        await rig.fleet.started()
        await rig.refit(1)
        rig.fleet.restart()
        old, rig.workers[1] = rig.workers[1], Worker()
        rig.fleet.replace(1, LocalActor(rig.workers[1]))
        old.dead.set()
        await rig.fleet.started()
        await rig.refit(2)
        requests = asked(8)
        check(requests, await rig.fleet.generate(requests))
        assert [worker.calls for worker in (old, *rig.workers)] == [0, 1, 1]
        assert rig.fleet.counts.deaths == 0
        assert len(rig.fleet.members) == 2

    run(scenario())


def test_a_silent_worker_is_suspect_then_ended(monkeypatch):
    ended, kills = [], []

    async def scenario():
        rig = Rig(Worker(), Worker())

        def kill(actor, no_restart):
            assert not no_restart
            ended.append(actor.target)
            kills.append(asyncio.ensure_future(rig.kill(1)))

        monkeypatch.setattr("qurl_ray.actors.fleet.ray.kill", kill)
        await rig.fleet.started()
        await rig.refit(1)
        keeper = asyncio.ensure_future(rig.keep_fit())
        rig.workers[1].hung.set()
        requests = asked(8)
        check(requests, await rig.fleet.generate(requests))
        while not ended or rig.fleet.members[1].health is not Health.HEALTHY:
            await asyncio.sleep(0.01)
        keeper.cancel()
        assert ended == [rig.workers[1]]
        assert [text for text in rig.said if "has not answered for" in text]
        assert [text for text in rig.said if "with verified weights 1" in text]

    run(scenario())


@pytest.mark.parametrize("dies", [False, True])
def test_a_worker_lost_in_every_load_is_left_out_and_one_that_loads_is_not(monkeypatch, dies):
    manifest = Manifest(version=1, precision="int8", weight_max_code=127, tensors=())
    loads = ["lost", "lost", "done", "lost", "lost", "lost"]

    class Loads(Worker):
        async def commit(self, *_):
            return await self.living(self._load(loads.pop(0)))

        async def _load(self, end):
            if end == "lost":
                if dies:
                    kill()
                await asyncio.sleep(9)

    async def scenario():
        nonlocal rig
        rig = Rig(Loads())
        await rig.fleet.started()
        while loads:
            await rig.fleet.some_alive()
            (member,) = rig.fleet.takers()
            done = loads[0] == "done"
            found = await rig.fleet.commit([member], manifest, None, [], 0.1)
            assert isinstance(found[0], EngineError if dies else DeadlineExceeded) is not done
            if done:
                rig.fleet.holds(member, 1)
            while loads and member.health is Health.RESTARTING:
                await asyncio.sleep(0.01)
        assert rig.fleet.hopeless
        assert "rollout worker 0 (pid 5, load; log log) is left out: lost in 3 loads of weights in a row" in rig.said
        with pytest.raises(EngineError, match="no rollout worker is left"):
            await rig.fleet.some_alive()

    rig: Rig | None = None
    kills = []

    def kill(*_, **__):
        kills.append(asyncio.ensure_future(rig.kill(0)))

    monkeypatch.setattr("qurl_ray.actors.fleet.ray.kill", kill)
    run(scenario())


def test_where_no_worker_can_say_what_codes_it_takes_the_error_says_why():
    class Dies(Worker):
        async def weight_max_code(self, _):
            raise ActorUnavailableError("killed", bytes(16))

    async def scenario():
        rig = Rig(Dies())
        await rig.fleet.started()
        with pytest.raises(EngineError, match=r"rollout worker 0 .* died while it was to say what codes they take"):
            await rig.fleet.weight_max_code("int8")
        with pytest.raises(EngineError, match="no rollout worker is up: rollout worker 0"):
            await rig.fleet.weight_max_code("int8")

    run(scenario())


def test_a_short_silence_is_forgiven():
    async def scenario():
        rig = Rig(Worker())
        await rig.fleet.started()
        await rig.refit(1)
        rig.workers[0].hung.set()
        while rig.fleet.members[0].health is not Health.SUSPECT:
            await asyncio.sleep(0.01)
        rig.workers[0].hung.clear()
        while rig.fleet.members[0].health is not Health.HEALTHY:
            await asyncio.sleep(0.01)
        assert rig.fleet.counts.deaths == 0

    run(scenario())


def test_without_workers_the_deadline_names_them(monkeypatch):
    monkeypatch.setattr("qurl_ray.actors.fleet._MARGIN_S", 0.1)

    async def scenario():
        rig = Rig(Worker(pace=9), config=CONFIG.model_copy(update={"timeout_s": 0.5}))
        await rig.fleet.started()
        await rig.refit(1)
        with pytest.raises(DeadlineExceeded, match=r"2 of 2 requests .* rollout worker 0 \(pid 1, generate; log log\)"):
            await rig.fleet.generate(asked(2))
        rig.workers[0].dead.set()
        rig.fleet._config = CONFIG.model_copy(update={"start_timeout_s": 0.2})
        while rig.fleet.those(Health.HEALTHY, Health.SUSPECT):
            await asyncio.sleep(0.01)
        with pytest.raises(DeadlineExceeded, match="for any rollout worker to come back: rollout worker 0"):
            await rig.fleet.some_alive()

    run(scenario())


def test_another_format_restarts_engines_that_hold_one_says_so_and_has_the_time_of_a_start(monkeypatch):
    limits = []

    async def gather(self, calls, timeout_s, what, span):
        limits.append(timeout_s)
        return {}

    monkeypatch.setattr(Fleet, "_gather", gather)
    settings = {"engine": "vllm", "device": "cuda", "dtype": "bfloat16", "quantization": "fp8", "start_timeout_s": 50}

    async def scenario(said):
        for config in (RolloutConfig(**settings), RolloutConfig(quantization="fp8")):
            fleet = Fleet([], config, lambda kind, message: said.append((kind, message)))
            for precision in ("fp8", "none", "none", "fp8", "fp8"):
                await fleet.commit(
                    [], Manifest(version=1, precision=precision, weight_max_code=0, tensors=()), None, [], 7
                )

    run(scenario(said := []))
    # In full precision, an engine that died meanwhile starts in the run's format, and is restarted once more.
    assert limits == [7, 57, 57, 57, 7] + [7] * 5
    assert said == [
        ("info", "engines restart, as planned: from format fp8 to none"),
        ("info", "engines restart, as planned: from format none to fp8"),
    ]


def test_work_of_a_learner_that_died_is_dropped_and_versions_go_up():
    async def scenario():
        rig = Rig(Worker(pace=0.05))
        await rig.fleet.started()
        await rig.refit(7)
        await asyncio.sleep(0.05)
        call = asyncio.ensure_future(rig.fleet.generate(asked(4)))
        await asyncio.sleep(0.02)
        assert rig.fleet.restart() == 7
        with pytest.raises(EngineError, match="restarted"):
            await call
        assert rig.fleet.members[0].health is Health.STALE
        await rig.fleet.pause()
        rig.fleet.resume()
        await rig.refit(8)
        check(asked(2), await rig.fleet.generate(asked(2)))

    run(scenario())


def test_only_a_verified_refit_makes_a_worker_healthy():
    member = Member(index=0, actor=None)
    for health in (Health.HEALTHY, Health.SUSPECT):
        with pytest.raises(ValueError, match="cannot become"):
            member.turn(health)
    member.turn(Health.STALE)
    member.turn(Health.HEALTHY)
    member.turn(Health.DEAD)
    with pytest.raises(ValueError, match="is dead: it cannot become healthy"):
        member.turn(Health.HEALTHY)


def test_a_fleet_tells_what_its_workers_did_and_when_one_was_dead():
    async def scenario() -> list[dict]:
        rig = Rig(Worker(), Worker())
        await rig.refit(1)
        rig.fleet.spans.step = 4
        await rig.fleet.generate(asked(6))
        await rig.kill(1)
        async with asyncio.timeout(10):
            while not any("needs weights" in sentence for sentence in rig.said):
                await asyncio.sleep(0.01)
        return [span for event in rig.fleet.spans.events() for span in event.values["spans"]]

    found = asyncio.run(scenario())
    started = [span["lane"] for span in found if span["name"] == "start"]
    assert sorted(started) == ["worker 0", "worker 1"]
    pieces = [span for span in found if span["name"] == "generate"]
    assert sum(span["requests"] for span in pieces) == 6
    assert sum(span["tokens"] for span in pieces) == 6 * 8
    assert {span["version"] for span in pieces} == {1}
    assert {span["step"] for span in pieces} == {4}
    (dead,) = [span for span in found if span["name"] == "dead"]
    assert dead["lane"] == "worker 1"
    assert 0.01 < dead["seconds"] < 1
