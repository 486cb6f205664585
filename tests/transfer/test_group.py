"""Groups over gloo: all get the first one's bytes, and nobody waits for ever for one that is gone."""

import multiprocessing
import time

import pytest
import torch

from qurl_ray.errors import DeadlineExceeded, SyncError
from qurl_ray.transfer.group import broadcast, join, lead, within

CPU = torch.device("cpu")


def follow(pipe, meeting, rank: int, times: int) -> None:
    group = join(meeting, rank, CPU)
    for _ in range(times):
        memory = torch.zeros(1000, dtype=torch.uint8)
        try:
            broadcast(group, memory)
            pipe.send(memory.tolist())
        except SyncError as error:
            pipe.send(str(error))


@pytest.fixture
def followers():
    """Starts processes that join a group."""
    context = multiprocessing.get_context("spawn")
    started = []

    def start(meeting, count: int, times: int = 1):
        for rank in range(1, count + 1):
            pipe, theirs = context.Pipe()
            process = context.Process(target=follow, args=(theirs, meeting, rank, times))
            process.start()
            started.append((process, pipe))
        return started

    yield start
    for process, _ in started:
        process.kill()
        process.join()


def test_all_get_what_the_first_sends(followers):
    store, meeting = lead("127.0.0.1", 3, 60)
    others = followers(meeting, 2, times=2)
    group = join(meeting, 0, CPU, store)
    for value in (7, 9):
        broadcast(group, torch.full((1000,), value, dtype=torch.uint8))
        assert [pipe.recv() for _, pipe in others] == [[value] * 1000] * 2


def test_one_that_never_joins_is_an_error_after_the_deadline():
    store, meeting = lead("127.0.0.1", 2, 1.0)
    with pytest.raises(SyncError, match=r"no group of 2 processes for weights at 127\.0\.0\.1"):
        join(meeting, 0, CPU, store)


def test_one_that_dies_is_an_error_for_the_others(followers):
    store, meeting = lead("127.0.0.1", 2, 60)
    ((process, pipe),) = followers(meeting, 1, times=2)
    group = join(meeting, 0, CPU, store)
    broadcast(group, torch.ones(1000, dtype=torch.uint8))
    assert pipe.recv() == [1] * 1000
    process.kill()
    process.join()

    def until_it_fails() -> None:
        for _ in range(100):
            broadcast(group, torch.ones(10_000_000, dtype=torch.uint8))

    with pytest.raises(SyncError, match="the broadcast of weights failed"):
        until_it_fails()


def test_work_that_hangs_is_left_after_the_deadline():
    with pytest.raises(DeadlineExceeded, match=r"waited 0\.2 s for a broadcast"):
        within(0.2, CPU, "a broadcast", lambda: time.sleep(600))
    with pytest.raises(ZeroDivisionError):
        within(60, CPU, "a broadcast", lambda: 1 // 0)
