"""Requests to stop."""

import os
import signal
import subprocess
import sys
import threading
from contextlib import suppress

import pytest

from qurl_ray.signals import StopRequests

ALL = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


@pytest.fixture(autouse=True)
def heard():
    """Hang-ups are not ignored, as they are if nohup runs the tests."""
    before = signal.signal(signal.SIGHUP, signal.SIG_DFL)
    yield
    signal.signal(signal.SIGHUP, before)


@pytest.mark.parametrize("number", ALL)
def test_a_request_raises_and_sets_the_exit_status(number):
    stops = StopRequests()
    with stops.caught(), pytest.raises(KeyboardInterrupt):
        os.kill(os.getpid(), number)
    assert stops.exit_status == 128 + number


def test_only_the_first_request_raises_unless_the_next_one_may():
    stops = StopRequests()
    with stops.caught():
        with pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), signal.SIGTERM)
        os.kill(os.getpid(), signal.SIGINT)
        stops.raising = True
        with pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), signal.SIGINT)
    assert stops.signals == [signal.SIGTERM, signal.SIGINT, signal.SIGINT]
    assert stops.exit_status == 143


def test_handlers_are_put_back_and_installed_again():
    before = {number: signal.getsignal(number) for number in ALL}
    stops = StopRequests()
    with stops.caught():
        with stops.kept():
            signal.signal(signal.SIGTERM, lambda *_: None)
        with pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), signal.SIGTERM)
    assert {number: signal.getsignal(number) for number in ALL} == before


ENDS = """
import os, signal, sys, time
from qurl_ray.signals import StopRequests
stops = StopRequests()
try:
    with stops.caught(then_exit=True):
        if len(sys.argv) > 1:
            os.kill(os.getpid(), signal.SIGINT)
except KeyboardInterrupt:
    pass
os.kill(os.getpid(), signal.SIGTERM)
time.sleep(0.1)
sys.exit(stops.exit_status)
"""


def test_a_process_that_was_asked_to_end_keeps_its_exit_status():
    """Whatever it is sent while it ends; one that was not asked ends as any other."""
    assert subprocess.run([sys.executable, "-c", ENDS, "asked"]).returncode == 128 + signal.SIGINT
    assert subprocess.run([sys.executable, "-c", ENDS]).returncode == -signal.SIGTERM


ARMED = """
import os, signal, sys
from qurl_ray.signals import StopRequests
signal.signal(signal.SIGALRM, lambda *_: None)
stops = StopRequests()
with stops.caught():
    signal.alarm(int(sys.argv[1]))
    try:
        os.kill(os.getpid(), signal.SIGTERM)
    except KeyboardInterrupt:
        print(signal.getitimer(signal.ITIMER_REAL)[0] > 0)
"""


@pytest.mark.parametrize(("seconds", "left"), [(3, False), (60, True)])
def test_ray_does_not_abort_what_takes_longer_than_its_alarm(seconds, left):
    """Ray's C++ handler sets an alarm of three seconds before ours is called; a longer one stays."""
    command = [sys.executable, "-c", ARMED, str(seconds)]
    assert subprocess.run(command, capture_output=True, text=True, check=True).stdout == f"{left}\n"


FORKS = """
import os, signal, sys, time
from qurl_ray.signals import StopRequests
stops = StopRequests()
os.register_at_fork(after_in_parent=lambda: (os.kill(os.getpid(), signal.SIGTERM), time.sleep(0.1)))
with stops.caught():
    try:
        with stops.kept():
            signal.signal(signal.SIGTERM, lambda number, _: sys.exit(number))  # as ray.init does
            if not os.fork():
                os._exit(0)
            time.sleep(600)
    except KeyboardInterrupt:
        print(stops.signals)
"""


def test_a_request_while_ray_starts_a_process_is_not_lost():
    """Python drops what a handler raises in a hook of a fork."""
    ended = subprocess.run([sys.executable, "-c", FORKS], capture_output=True, text=True, check=True)
    assert (ended.stdout, ended.stderr) == (f"{[signal.SIGTERM]}\n", "")


def test_a_request_whose_exception_was_dropped_counts_at_the_end_of_rays_start():
    stops = StopRequests()
    with stops.caught():
        with suppress(KeyboardInterrupt):
            os.kill(os.getpid(), signal.SIGTERM)
        with pytest.raises(KeyboardInterrupt), stops.kept():
            pass


def test_an_ignored_hang_up_stays_ignored():
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        stops = StopRequests()
        with stops.caught():
            os.kill(os.getpid(), signal.SIGHUP)
        assert stops.signals == []
        assert signal.getsignal(signal.SIGHUP) == signal.SIG_IGN
    finally:
        signal.signal(signal.SIGHUP, before)


def test_off_the_main_thread_nothing_is_caught():
    before = {number: signal.getsignal(number) for number in ALL}
    found = []

    def look():
        with StopRequests().caught():
            found.append({number: signal.getsignal(number) for number in ALL})

    thread = threading.Thread(target=look)
    thread.start()
    thread.join()
    assert found == [before]
