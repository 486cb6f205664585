import threading
import time

import pytest

from qurl_ray.tracking.background import Background


def start(first=lambda: None, **settings) -> Background:
    return Background("server", first=first, is_transient=lambda error: isinstance(error, ConnectionError), **settings)


def fail(error: Exception):
    raise error


def test_operations_run_in_order_and_drain_waits_for_them():
    seen = []
    background = start()
    for i in range(100):
        background.offer(lambda i=i: seen.append(i))
    background.drain(5.0)
    assert seen == list(range(100))
    assert background.notices() == []


def test_a_passing_failure_is_tried_again_and_announced_once():
    tries = []

    def flaky():
        tries.append(1)
        if len(tries) < 3:
            raise ConnectionError("refused")

    background = start(retry_delays_s=(0.01, 0.01, 0.01))
    background.offer(flaky)
    background.drain(5.0)
    assert len(tries) == 3
    (notice,) = background.notices()
    assert "server failed (ConnectionError: refused); retrying" in notice


def test_a_refused_operation_is_skipped_and_counted():
    seen = []
    background = start()
    background.offer(lambda: fail(ValueError("bad name")))
    background.offer(lambda: seen.append("next"))
    background.drain(5.0)
    assert seen == ["next"]
    announced, lost = background.notices()
    assert "ValueError: bad name" in announced
    assert "lacks 1 of this run's records" in lost


def test_nothing_runs_after_a_first_operation_that_failed():
    seen = []
    background = start(lambda: fail(ValueError("no such server")))
    background.offer(lambda: seen.append(1))
    background.drain(5.0)
    assert seen == []
    assert len(background.notices()) == 1


def test_a_full_queue_drops_instead_of_blocking():
    gate, seen = threading.Event(), []
    background = start(capacity=5)
    background.submit(gate.wait)
    for i in range(50):
        background.offer(lambda i=i: seen.append(i))
    gate.set()
    background.drain(5.0)
    assert len(seen) <= 6
    assert seen == sorted(seen)
    (lost,) = background.notices()
    assert f"lacks {50 - len(seen)} of" in lost


@pytest.mark.parametrize("error", [ConnectionError("down"), None])
def test_drain_ends_at_its_deadline_though_the_server_is_silent(error):
    """None hangs inside the operation, without end; an error is met again at every try."""
    released = threading.Event()
    background = start()
    background.offer((lambda: fail(error)) if error else released.wait)
    background.offer(lambda: None)
    background.drain(1.0)
    assert "lacks" in background.notices()[-1]
    released.set()


def test_a_server_that_never_answered_is_not_passed_over_in_silence():
    released = threading.Event()
    background = start(released.wait)
    background.drain(0.2)
    (notice,) = background.notices()
    assert "lacks 1 of" in notice
    released.set()


def test_a_first_operation_is_tried_for_as_long_as_the_run_lasts():
    tries, seen = [], []

    def first():
        tries.append(1)
        if len(tries) < 20:
            raise ConnectionError("refused")

    background = start(first, retry_delays_s=(0.001, 0.002))
    background.offer(lambda: seen.append(1))
    deadline = time.monotonic() + 120.0
    while not seen and time.monotonic() < deadline:
        time.sleep(0.01)
    background.drain(5.0)
    assert seen == [1]


def test_a_server_that_fails_as_the_run_ends_is_given_seconds_and_one_that_comes_back_the_whole_deadline(monkeypatch):
    monkeypatch.setattr("qurl_ray.tracking.background._LAST_CHANCE_S", 1.0)
    background = start()
    for _ in range(100):
        background.offer(lambda: fail(ConnectionError("down")))
    background.drain(3000.0)  # before the first failure is known
    down, seen = [1], []

    def operation():
        if down:
            raise ConnectionError(str(down.pop()))
        time.sleep(0.1)
        seen.append(1)

    background = start()
    for _ in range(20):
        background.offer(operation)
    background.drain(30.0)
    assert len(seen) == 20  # two seconds of work


def test_what_an_operation_makes_good_is_not_lost():
    background = start(recourse="it is elsewhere")
    background.offer(lambda: fail(ValueError("bad")))
    background.submit(lambda: background.made_good() if background.lost == 1 else None)
    background.drain(5.0)
    assert len(background.notices()) == 1
    background = start(recourse="it is elsewhere")
    background.offer(lambda: fail(ValueError("bad")))
    background.drain(5.0)
    assert background.notices()[-1] == "server lacks 1 of this run's records; it is elsewhere"


def test_what_takes_much_memory_is_queued_only_behind_little():
    gate, seen = threading.Event(), []
    background = start()
    background.submit(gate.wait)
    for i in range(20):
        background.offer(lambda i=i: seen.append(("large", i)), 5)
        background.offer(lambda i=i: seen.append(("small", i)))
    gate.set()
    background.drain(5.0)
    assert [i for kind, i in seen if kind == "small"] == list(range(20))
    assert 1 <= sum(kind == "large" for kind, _ in seen) <= 5
