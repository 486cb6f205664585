"""The pool of verifiers: one hang, crash or dead actor costs its own answers and a bounded time."""

import asyncio
import os
import time

import pytest
import ray

from qurl_ray.actors.verifier import _PIECE, Verifier, VerifierPool, _Run, start_verifiers
from qurl_ray.errors import DeadlineExceeded, RewardError
from tests.rewards.verdicts import PROBLEM, statuses

REWARDS = "tests.rewards.bad_rewards"


def items(answers):
    return [(answer, PROBLEM) for answer in answers]


GOOD, WRONG, LATE, ERROR = (1.0, "ok"), (0.0, "ok"), (0.0, "timeout"), (0.0, "error")


# --- one verifier, without Ray -----------------------------------------------------------------------------------


@pytest.fixture
def verifier(request):
    spec, timeout_s = request.param
    found = Verifier(f"{REWARDS}:{spec}", timeout_s)
    found.check()
    yield found
    found.close()


@pytest.mark.slow
@pytest.mark.parametrize("verifier", [("hangs", 10.0)], indirect=True)
def test_while_a_hang_waits_for_its_deadline_another_process_judges_the_next_answers(verifier, monkeypatch):
    """So a hang costs a quarter of its deadline, and not the whole."""
    order, put = [], _Run.put
    monkeypatch.setattr(_Run, "put", lambda run, verdict: order.append(verdict.status) or put(run, verdict))
    assert statuses(verifier.judge_many(items(["2", "hang", "2", "3"]))) == [GOOD, LATE, GOOD, WRONG]
    assert order == ["ok", "ok", "ok", "timeout"]
    answers = ["2", *["hang", "2", "3"] * 2]
    assert statuses(verifier.judge_many(items(answers))) == [GOOD, *[LATE, GOOD, WRONG] * 2]


@pytest.mark.parametrize("verifier", [("exits", 5.0)], indirect=True)
def test_a_crash_costs_its_answer(verifier):
    answers = ["2", *["exit", "2", "segfault", "3"] * 5]
    assert statuses(verifier.judge_many(items(answers))) == [GOOD, *[ERROR, GOOD, ERROR, WRONG] * 5]


def test_a_reward_that_cannot_be_resolved_says_so():
    verifier = Verifier(f"{REWARDS}:no_such_function", 1.0)
    for act in (verifier.check, lambda: verifier.judge_many(items(["2"]))):
        with pytest.raises(RewardError, match="no_such_function"):
            act()
    verifier.close()


# --- the pool ----------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module", autouse=True)
def cluster():
    ray.init("local", num_cpus=2, include_dashboard=False, log_to_driver=False)
    yield
    ray.shutdown()


@pytest.fixture
def pool(request):
    function, count, timeout_s = request.param
    found = start_verifiers(count, f"{REWARDS}:{function}", timeout_s)
    yield found
    found.close()


def judged(pool: VerifierPool, answers, deadline_s=60.0):
    async def run():
        return await pool.judge(items(answers), deadline_s)

    return statuses(asyncio.run(run()))


@pytest.mark.parametrize("pool", [("hangs", 2, 1.0)], indirect=True)
def test_verdicts_come_in_the_order_of_the_answers(pool):
    answers = ["2", "3", "3", "hang", "2"] * 9
    assert judged(pool, answers) == [GOOD, WRONG, WRONG, LATE, GOOD] * 9
    assert judged(pool, []) == []
    with pytest.raises(DeadlineExceeded, match=r"0\.2 s for 1 rewards"):
        judged(pool, ["hang"], deadline_s=0.2)


@pytest.mark.parametrize("pool", [("kills_its_caller", 2, 5.0)], indirect=True)
def test_a_dead_verifier_costs_the_pieces_that_it_had_and_comes_back(pool):
    answers = ["2"] * (16 * _PIECE)
    answers[5] = "kill caller"
    found = judged(pool, answers)
    lost = found.count(ERROR)
    assert found[5] == ERROR
    assert lost <= 4 * _PIECE  # in flight at the dead one
    assert found.count(GOOD) == len(answers) - lost
    assert judged(pool, ["2"] * (4 * _PIECE)) == [GOOD] * (4 * _PIECE)


@pytest.mark.parametrize("pool", [("no_such_function", 1, 1.0)], indirect=True)
def test_a_reward_that_cannot_be_resolved_ends_judging(pool):
    with pytest.raises(RewardError, match="no_such_function"):
        judged(pool, ["2"])


@pytest.mark.parametrize("pool", [("tells_its_process", 2, 5.0)], indirect=True)
def test_nothing_is_left_of_a_closed_pool(pool):
    async def run():
        return await pool.judge(items(["2"] * (4 * _PIECE)), 60.0)

    processes = {int(verdict.reward) for verdict in asyncio.run(run())}
    assert len(processes) == 2  # both worked
    pool.close()
    deadline = time.monotonic() + 10
    while any(os.path.exists(f"/proc/{process}") for process in processes) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not any(os.path.exists(f"/proc/{process}") for process in processes)
