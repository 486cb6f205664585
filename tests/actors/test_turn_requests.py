"""Turns on their way through a fleet: each is answered once, by the worker that keeps its row if that one is free."""

import asyncio
import random
from collections import Counter
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from qurl_ray.actors.health import Health
from qurl_ray.actors.trajectories import Played
from qurl_ray.actors.turn_requests import TurnsWork
from qurl_ray.actors.work import Chunk
from qurl_ray.engines.requests import continued
from qurl_ray.environments.protocol import Step
from qurl_ray.types import Completion, Problem, Request, SamplingParams
from tests.actors.test_fleet import Rig, run, token
from tests.actors.test_fleet import Worker as Counts
from tests.actors.test_trajectories import Seats, player, requests
from tests.data.test_turns import tokenizer_with


def a_request(uid: str, *, tokens: int = 2, continues: bool = True) -> Request:
    sampling = SamplingParams(max_new_tokens=tokens)
    return Request(uid=uid, prompt_ids=np.array([1], np.int32), seed=0, sampling=sampling, continues=continues)


def completion(request: Request, finish: str = "length") -> Completion:
    left = request.sampling.max_new_tokens
    count = left if finish == "length" else min(1, left - 1)
    ids = np.arange(request.drawn, request.drawn + count, dtype=np.int32)
    zeros = np.zeros(count, np.float32)
    return Completion(uid=request.uid, token_ids=ids, logprobs=zeros, versions=np.full(count, 1), finish=finish)


def work_of(free=lambda index: True, *, workers: int = 2, size: int = 8) -> TurnsWork:
    return TurnsWork(size=size, workers=lambda: workers, free=free, offer=lambda: None)


def uids(work: TurnsWork, chunk) -> list[str]:
    return [request.uid for request in work.requests(chunk)] if chunk else []


def serve(work: TurnsWork, worker: int) -> list[str]:
    """Have a worker answer its share; return what it was."""
    chunk = work.next(worker, 0.0, 9.0)
    asked = work.requests(chunk)
    work.take(chunk, worker, [completion(request) for request in asked], 1.0)
    return [request.uid for request in asked]


def test_a_row_goes_back_to_the_worker_that_keeps_it_whoever_looks_first():
    work = work_of(workers=3)
    for uid in "abc":
        work.add(a_request(uid))
    owners = {uid: index for index in (2, 0, 1) for uid in serve(work, index)}
    assert sorted(owners) == ["a", "b", "c"]
    for uid in "bca":
        work.add(a_request(uid))
    for index in (1, 0, 2):
        assert {owners[uid] for uid in uids(work, work.next(index, 0.0, 9.0))} == {index}


def test_a_worker_takes_its_own_rows_and_new_ones_within_its_share_the_oldest_first():
    work = work_of()
    for uid in "abcd":
        work.add(a_request(uid))
    assert serve(work, 0) == ["a", "b"]
    assert serve(work, 1) == ["c"]
    for uid in ("e", "a", "b", "f"):
        work.add(a_request(uid))
    assert uids(work, work.next(0, 0.0, 9.0)) == ["d", "a", "b"]  # of d, e, a, b, f: half, rounded up
    assert uids(work, work.next(1, 0.0, 9.0)) == ["e"]


def test_no_row_waits_for_its_first_turn_until_others_have_had_their_last():
    work = work_of(workers=1, size=2)
    for uid in "abcdef":
        work.add(a_request(uid))
    seen = []
    for _ in range(4):
        seen.append(serve(work, 0))
        for uid in seen[-1]:
            work.add(a_request(uid))
    assert seen == [["a", "b"], ["c", "d"], ["e", "f"], ["a", "b"]]


def test_an_idle_worker_takes_what_a_busy_or_lost_one_keeps_and_leaves_what_a_free_one_does():
    free = {0: True, 1: True}
    work = work_of(lambda index: free[index])
    work.add(a_request("a"))
    assert serve(work, 1) == ["a"]
    work.add(a_request("a"))
    assert work.next(0, 0.0, 9.0) is None
    free[1] = False
    assert uids(work, work.next(0, 0.0, 9.0)) == ["a"]


def test_a_row_that_cannot_be_continued_is_kept_by_nobody():
    work = work_of()
    work.add(a_request("a", continues=False))
    assert serve(work, 1) == ["a"]
    work.add(a_request("a"))
    assert uids(work, work.next(0, 0.0, 9.0)) == ["a"]


@settings(max_examples=300, deadline=None)
@given(st.integers(1, 4), st.integers(1, 5), st.integers(1, 12), st.integers(0, 2**32))
def test_every_turn_is_answered_once_and_none_waits_while_a_worker_is_idle(workers, size, rows, seed):
    """Rows of some turns each, whose environments answer at some time; workers come to look in any order, die with
    their chunks or without, come back, and are interrupted."""
    rng = random.Random(seed)
    busy: dict[int, Chunk] = {}
    dead: set[int] = set()
    work = work_of(lambda index: index not in busy and index not in dead, workers=workers, size=size)
    left = {f"r{i}": rng.randint(1, 4) for i in range(rows)}
    outside, answered = list(left), Counter()
    for _ in range(3000):
        for index in rng.sample(range(workers), workers):  # all that are free look, as after Fleet._offer
            if index not in busy and index not in dead and (chunk := work.next(index, 0.0, 9.0)):
                assert len(chunk.places) <= size
                busy[index] = chunk
        assert len(busy) + len(dead) == workers or not work.waiting
        if not (busy or dead or outside):
            break
        match rng.choice(["environment", "environment", "answer", "answer", "death", "recovery"]):
            case "environment" if outside:
                uid = outside.pop(rng.randrange(len(outside)))
                work.add(a_request(uid, tokens=3, continues=left[uid] > 1))
            case "answer" if busy:
                index = rng.choice(sorted(busy))
                chunk = busy.pop(index)
                asked = work.requests(chunk)
                parts = [completion(one, rng.choice(["length", "length", "cancelled"])) for one in asked]
                work.take(chunk, index, parts, 1.0)
                for uid in (part.uid for part in parts if part.finish == "length"):
                    answered[uid] += 1
                    left[uid] -= 1
                    outside += [uid] * (left[uid] > 0)
            case "death":
                index = rng.randrange(workers)
                dead.add(index)
                if index in busy:
                    work.give_back(busy.pop(index), index)
            case "recovery" if dead:
                dead.discard(rng.choice(sorted(dead)))
    assert set(left.values()) == {0}
    assert work.open == work.waiting == 0
    assert all(list(answer.token_ids) == [0, 1, 2] for answer in work._answers)
    assert len(work._answers) == sum(answered.values())


# --- with the fleet ------------------------------------------------------------------------------------------------


class Keeps(Counts):
    """Keeps rows as the torch engine does. Counts turns whose rows it had, and those whose rows it had not."""

    def __init__(self, pace: float = 0.001) -> None:
        self.kept: dict[str, int] = {}
        self.hits = self.misses = 0
        super().__init__(pace)

    def begin(self) -> None:
        super().begin()
        self.kept = {}

    async def _generate(self, requests, version):
        for request in requests:
            if request.drawn and self.kept.pop(request.uid, 0) == request.drawn:
                self.hits += 1
            elif request.drawn:
                self.misses += 1
        found = await super()._generate(requests, version)
        for request, one in zip(requests, found, strict=True):
            if request.continues and one.finish == "length":
                self.kept[request.uid] = request.drawn + len(one.token_ids)
        return found


def talks(turns: int):
    def make(_):
        left = iter(range(turns))
        said = [{"role": "user", "content": "xy"}]
        return (lambda answer: Step(messages=said, done=next(left) == turns - 1)), []

    return make


async def play(rig: Rig, rows: int, *, turns: int, delay_s: float) -> list[Played]:
    tokenizer = tokenizer_with(None)
    problems = [Problem(uid=f"p{i}", prompt=f"{i}", answer="") for i in range(rows)]
    settings = {"cut_turns": "close", "turn_tokens": 3, "context": 200, "max_turns": turns}
    made = player(rig.fleet, Seats(talks(turns), delay_s=delay_s), tokenizer, **settings)
    return await made.play(requests(tokenizer, problems, tokens=3 * turns), problems)


def check(played: list[Played], turns: int) -> None:
    for index, one in enumerate(played):
        expected = [token(index + 1, t) for t in range(3 * turns)]
        np.testing.assert_array_equal(one.completion.drawn_ids, expected)
        assert one.turns == turns


@pytest.mark.parametrize(("rows", "share"), [(1, 1.0), (2, 0.9), (40, 0.8)])
def test_turns_go_back_to_the_worker_that_keeps_their_rows(rows, share):
    """With few trajectories both workers are often idle, with many both are busy."""

    async def scenario():
        rig = Rig(Keeps(), Keeps())
        await rig.fleet.started()
        await rig.refit(1)
        check(await play(rig, rows, turns=8, delay_s=0.004), 8)
        hits, misses = (sum(getattr(w, name) for w in rig.workers) for name in ("hits", "misses"))
        assert hits + misses == 7 * rows
        assert hits >= share * 7 * rows
        if rows > 1:
            assert min(worker.hits for worker in rig.workers) > 0

    run(scenario())


def test_turns_of_a_worker_that_is_gone_for_good_are_drawn_by_the_other():
    async def scenario():
        rig = Rig(Keeps(), Keeps())
        await rig.fleet.started()
        await rig.refit(1)
        playing = asyncio.ensure_future(play(rig, 12, turns=6, delay_s=0.02))
        while not rig.workers[1].hits:
            await asyncio.sleep(0.005)
        await rig.kill(1)  # its next process gets no weights
        check(await asyncio.wait_for(playing, 10), 6)
        assert rig.fleet.members[1].health is not Health.HEALTHY

    run(scenario())


def test_a_turn_that_was_left_to_a_worker_just_before_it_lost_its_weights_is_drawn_by_the_other():
    async def scenario():
        rig = Rig(Keeps(), Keeps())
        await rig.fleet.started()
        await rig.refit(1)
        lies, is_free = [], rig.fleet._is_free
        rig.fleet._is_free = lambda index: lies.pop() if lies else is_free(index)
        async with rig.fleet.turns() as turns:
            rig.fleet.members[0].turn(Health.STALE)
            first = a_request("a")
            row = continued(first, await turns.generate(first))
            rig.fleet.holds(rig.fleet.members[0], 1)
            rig.fleet.members[1].turn(Health.STALE)
            lies.append(True)  # as worker 0 looks
            answer = await asyncio.wait_for(turns.generate(replace(row, sampling=first.sampling)), 5)
        assert not lies
        assert (len(answer.token_ids), rig.workers[0].misses) == (2, 1)

    run(scenario())
