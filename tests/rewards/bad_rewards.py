"""Reward functions that misbehave when the answer says so, and score like `exact` otherwise."""

import os
import re
import signal
import subprocess
import sys
import threading
import time

NOT_A_FUNCTION = 3


def _exact(answer, problem):
    return float(answer == problem.answer)


def hangs(answer, problem):
    if answer == "hang":
        time.sleep(60)
    return _exact(answer, problem)


def hangs_in_a_thread(answer, problem):
    if answer == "hang":
        thread = threading.Thread(target=time.sleep, args=(60,))
        thread.start()
        thread.join()
    return _exact(answer, problem)


def holds_the_interpreter_lock(answer, problem):
    if answer == "hang":
        re.fullmatch(r"(a+)+b", "a" * 60)
    return _exact(answer, problem)


def ignores_signals(answer, problem):
    if answer == "hang":
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGALRM):
            signal.signal(number, signal.SIG_IGN)
        time.sleep(60)
    return _exact(answer, problem)


def forks_and_dies(answer, problem):
    """The fork keeps every open file of the dead process, the socket to the parent among them."""
    if answer == "fork":
        if os.fork() == 0:
            time.sleep(60)
        os._exit(3)
    return _exact(answer, problem)


def forks_and_hangs(answer, problem):
    if answer == "fork":
        subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
        os.fork()
        time.sleep(60)
    return _exact(answer, problem)


def returns_from_both_sides_of_a_fork(answer, problem):
    if answer == "fork":
        os.fork()
    return _exact(answer, problem)


def exits(answer, problem):
    if answer == "exit":
        os._exit(3)
    if answer == "segfault":
        os.kill(os.getpid(), signal.SIGSEGV)
    if answer == "close":
        os.closerange(3, 256)
        time.sleep(0.2)
    if answer == "sys.exit":
        sys.exit(3)
    return _exact(answer, problem)


def prints(answer, problem):
    if answer == "print":
        for _ in range(50):
            sys.stdout.write("x" * 2**20)
            sys.stderr.write("y" * 2**20)
        os.write(1, b'[0, 7.0, "ok", ""]\n')
    return _exact(answer, problem)


def reads(answer, problem):
    return float(sys.stdin.read() == "") * _exact(answer, problem)


def eats_memory(answer, problem):
    if answer == "eat":
        return len(bytearray(8 * 2**30))
    return _exact(answer, problem)


def returns_odd_values(answer, problem):
    odd = {"nan": float("nan"), "inf": float("inf"), "str": "1.0", "none": None, "huge": 10**400}
    return odd.get(answer, _exact(answer, problem))


def raises(answer, problem):
    if answer == "raise":
        raise KeyError("no such key \ud800")
    return _exact(answer, problem)


def takes_one_argument(answer):
    return 1.0


def tells_if_torch_is_loaded(answer, problem):
    return float("torch" in sys.modules or "ray" in sys.modules)
