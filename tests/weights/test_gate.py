"""The gate by itself: a fleet that does what the test says, and messages of two ranks."""

import asyncio
from types import SimpleNamespace

import numpy as np
import pytest

from qurl_ray.errors import EngineError, SyncError
from qurl_ray.types import Completion, StagedBucket, TensorRecord
from qurl_ray.weights.floor import ProbeFloor
from qurl_ray.weights.gate import WeightGate
from qurl_ray.weights.messages import Begin, Commit, Gap, Header, LoadReport, Put, Scored

FIT, UNFIT = Gap(mean=0.01, largest=0.1), Gap(mean=0.9, largest=2.0)


class FakeFleet:
    """Workers that take what they are sent, but for those with an error. It writes down what is asked of it."""

    def __init__(self, workers: int) -> None:
        self.members = [SimpleNamespace(index=i, refusals=0, alive=True, state="healthy") for i in range(workers)]
        self.errors: dict[int, Exception] = {}
        self.calls: list = []

    async def pause(self):
        self.calls.append("pause")

    async def some_alive(self): ...

    def resume(self):
        self.calls.append("resume")

    def takers(self):
        return [member for member in self.members if member.state in ("healthy", "stale")]

    def stale(self):
        return [member for member in self.members if member.state == "stale"]

    def distrust(self, member):
        member.state = "stale"

    def leave_out(self, member):
        member.state, member.alive = "out", False

    def holds(self, member, version):
        member.state, member.refusals = "healthy", 0
        self.calls.append(("holds", member.index, version))

    @property
    def serving(self):
        return any(member.state == "healthy" for member in self.members)

    @property
    def hopeless(self):
        return all(member.state == "out" for member in self.members)

    def _replies(self, members, reply):
        return {member.index: self.errors.get(member.index, reply) for member in members}

    async def begin(self, members, version, format_name, timeout_s):
        self.calls.append(("begin", version, format_name))
        return self._replies(members, ("a process", 1))

    async def put(self, indices, bucket, timeout_s):
        self.calls.append(("put", bucket.number, dict(bucket.source)))
        return {index: self.errors[index] for index in indices if index in self.errors}

    async def commit(self, members, manifest, tickets, probe, timeout_s):
        self.calls.append(("commit", [member.index for member in members], tickets))
        none = np.zeros(0, np.int32)
        drawn = [Completion(uid="p", token_ids=none, logprobs=none, versions=none, finish="length")]
        return self._replies(members, LoadReport(kernels=["fbgemm"], hardware="a CPU", probe=drawn))


def header(rank: int, version: int = 1, attempt: int = 0) -> Header:
    return Header(version=version, attempt=attempt, rank=rank, format="int8", weight_max_code=127)


def commit(rank: int, version: int = 1, attempt: int = 0, **fields) -> Commit:
    name, shape = f"{rank}.q_proj.weight", (2, 2)
    record = TensorRecord(name=name, shape=shape, format="int8", fingerprint=rank, bytes=10)
    tickets = None if "failed" in fields or fields.pop("direct", False) else [f"ticket {rank}"]
    return Commit(header=header(rank, version, attempt), records=(record,), tickets=tickets, **fields)


def scored(rank: int, *gaps: Gap, version: int = 1, attempt: int = 0) -> Scored:
    return Scored(header=header(rank, version, attempt), gaps=gaps)


@pytest.fixture
def made():
    def make(workers: int = 2):
        said: list = []
        fleet = FakeFleet(workers)
        gate = WeightGate(
            fleet,
            ranks=2,
            timeout_s=1,
            probe=[],
            tolerance=0.2,
            floor=ProbeFloor(),
            warn=said.append,
            verified=lambda version: said.append(version),
        )
        return gate, fleet, said

    return make


async def of_all(gate, message, **fields):
    """Replies to a message of both ranks, which must be equal."""
    first, second = await asyncio.gather(*(gate.receive(message(rank, **fields)) for rank in (1, 0)))
    assert first == second
    return first


def both(make, *gaps, **fields):
    return lambda rank, **more: make(rank, *gaps, **fields, **more)


def test_a_version_waits_for_all_ranks_and_has_the_tickets_of_all_in_their_order(made):
    async def play():
        gate, fleet, said = made()
        late = asyncio.ensure_future(gate.receive(commit(1)))
        await asyncio.sleep(0)
        assert fleet.calls == []
        await gate.receive(commit(0))
        assert len(await late) == 2
        assert fleet.calls == ["pause", ("commit", [0, 1], ["ticket 0", "ticket 1"])]
        assert not await of_all(gate, both(scored, FIT, FIT))
        assert fleet.calls[2:] == [("holds", 0, 1), ("holds", 1, 1), "resume"]
        assert (said, gate.kernels, gate.metrics["sync/refits"]) == ([1], ["fbgemm"], 0)

    asyncio.run(play())


def test_an_engine_that_refuses_gets_the_version_again_and_is_left_out_the_second_time(made):
    async def play():
        gate, fleet, said = made()
        fleet.errors[1] = SyncError("a damaged delta")
        assert len(await of_all(gate, commit)) == 1
        assert await of_all(gate, both(scored, FIT))
        assert "rollout worker 1 is in quarantine and gets weights 1 in full: a damaged delta" in said
        assert "resume" not in fleet.calls
        assert await of_all(gate, both(commit, attempt=1)) == []
        assert fleet.calls[-1][1] == [1]  # only that one
        assert not await of_all(gate, both(scored, attempt=1))
        assert "rollout worker 1 is left out, it failed to take weights 1 twice: a damaged delta" in said
        assert fleet.calls[-1] == "resume"
        assert gate.metrics["sync/refits"] == 1

    asyncio.run(play())


@pytest.mark.parametrize("gap", [UNFIT, Gap(mean=float("nan"), largest=float("nan"))])
def test_an_engine_whose_log_probs_are_off_does_not_generate(made, gap):
    async def play():
        gate, fleet, said = made()
        await of_all(gate, commit)
        assert await of_all(gate, both(scored, FIT, gap))
        assert [member.state for member in fleet.members] == ["healthy", "stale"]
        assert any("off by" in str(message) for message in said)

    asyncio.run(play())


def test_the_run_ends_if_no_engine_takes_it(made):
    async def play():
        gate, fleet, _ = made(workers=1)
        fleet.errors[0] = SyncError("no")
        for attempt in (0, 1):
            await of_all(gate, both(commit, attempt=attempt))
            if attempt == 0:
                assert await of_all(gate, both(scored, attempt=attempt))
        with pytest.raises(SyncError, match="no rollout worker could take weights 1: no"):
            await of_all(gate, both(scored, attempt=1))

    asyncio.run(play())


def bucket(number: int, **source) -> StagedBucket:
    return StagedBucket(number=number, items=(("a", "int8", ()),), weight_max_code=127, size=8, source=source)


def test_a_direct_version_reaches_those_that_began_and_others_get_it_again(made):
    async def play():
        gate, fleet, said = made(workers=3)
        fleet.errors[2] = EngineError("it died")
        begin = lambda rank: Begin(header=header(rank))  # noqa: E731
        assert set(await of_all(gate, begin)) == {0, 1}
        put = lambda rank: Put(header=header(rank), bucket=bucket(0, memory={f"gpu {rank}": rank}))  # noqa: E731
        await of_all(gate, put)
        assert fleet.calls[-1] == ("put", 0, {"memory": {"gpu 0": 0, "gpu 1": 1}})
        fleet.errors.clear()
        assert len(await of_all(gate, both(commit, direct=True))) == 2
        assert fleet.calls[-1] == ("commit", [0, 1], None)
        assert await of_all(gate, both(scored, FIT, FIT))
        assert "rollout worker 2 is in quarantine and gets weights 1 in full: it died" in said

    asyncio.run(play())


def test_a_failed_transfer_is_sent_again_to_all(made):
    async def play():
        gate, fleet, said = made()
        await of_all(gate, lambda rank: Begin(header=header(rank)))
        assert await of_all(gate, lambda rank: commit(rank, failed="ipc: no" if rank else None)) == []
        assert fleet.calls[-1] == ("commit", [], None)
        assert await of_all(gate, scored)
        assert sum("ipc: no" in str(message) for message in said) == 2

    asyncio.run(play())


def test_a_group_that_lost_an_engine_is_an_error_and_buckets_of_memory_go_on(made):
    async def play():
        gate, fleet, _ = made()
        await of_all(gate, lambda rank: Begin(header=header(rank)))
        fleet.errors[1] = EngineError("it died")
        await of_all(gate, lambda rank: Put(header=header(rank), bucket=bucket(0, memory={f"gpu {rank}": rank})))
        fleet.errors[0] = EngineError("and this one")
        with pytest.raises(EngineError, match="and this one"):
            await gate.receive(Put(header=header(0), bucket=bucket(1, group=(1, 2))))

    asyncio.run(play())


def test_ranks_that_staged_different_tensors_are_an_error(made):
    async def play():
        gate, _, _ = made()
        await of_all(gate, lambda rank: Begin(header=header(rank)))
        one, other = bucket(0, memory={"a": 1}), bucket(0, memory={"b": 1})
        object.__setattr__(other, "items", (("other", "int8", ()),))
        found = await asyncio.gather(
            *(gate.receive(Put(header=header(r), bucket=b)) for r, b in enumerate((one, other))), return_exceptions=True
        )
        assert all("staged different tensors in bucket 0" in str(error) for error in found)

    asyncio.run(play())
