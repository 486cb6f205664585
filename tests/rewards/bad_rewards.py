"""Reward functions that misbehave when the answer says so, and score like `exact` otherwise."""

import concurrent.futures
import contextlib
import numbers
import os
import re
import signal
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

NOT_A_FUNCTION = 3


def _exact(answer, problem):
    return float(answer == problem.answer)


def speaks(answer, problem):
    """Says what it gets; fails or dies if it is told to."""
    sys.stdout.write(f"judging {answer}\n")
    sys.stdout.flush()
    if answer == "raise":
        raise LookupError("no such answer")
    if answer == "exit":
        os._exit(3)
    return _exact(answer, problem)


def hangs(answer, problem):
    if answer == "hang":
        time.sleep(600)
    return _exact(answer, problem)


def hangs_in_a_thread(answer, problem):
    if answer == "hang":
        thread = threading.Thread(target=time.sleep, args=(600,))
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
        time.sleep(600)
    return _exact(answer, problem)


def forks_and_dies(answer, problem):
    """The fork keeps every open file of the dead process, the socket to the parent among them."""
    if answer == "fork":
        if os.fork() == 0:
            time.sleep(600)
        os._exit(3)
    return _exact(answer, problem)


def forks_and_hangs(answer, problem):
    if answer == "fork":
        subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
        os.fork()
        time.sleep(600)
    return _exact(answer, problem)


def _daemon():
    """A process that has left its session, its group and its parents: killpg does not reach it."""
    if os.fork() == 0:
        os.setsid()
        if os.fork() == 0:
            os.chdir("/")
            os.closerange(0, 256)
            for number in (signal.SIGTERM, signal.SIGHUP):
                signal.signal(number, signal.SIG_IGN)
            time.sleep(600)
        os._exit(0)
    os.wait()


def leaves_a_daemon(answer, problem):
    if answer in ("return", "hang", "die"):
        _daemon()
    if answer == "hang":
        time.sleep(600)
    if answer == "die":
        os._exit(3)
    return _exact(answer, problem)


def leaves_many_processes(answer, problem):
    if answer == "many":
        for _ in range(40):
            if os.fork() == 0:
                os.setsid()
                time.sleep(600)
                os._exit(0)
        time.sleep(1)
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
    if answer == "interrupt":
        raise KeyboardInterrupt
    if answer == "kill parent":
        os.kill(os.getppid(), signal.SIGKILL)
        time.sleep(600)
    if answer == "kill group":
        os.killpg(0, signal.SIGKILL)
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


def writes_to_every_open_file(answer, problem):
    """Among them is the socket to the parent. The answer says what is written, and how often."""
    if "*" in answer:
        text, _, times = answer.partition("*")
        places = [fd for fd in map(int, os.listdir("/dev/fd")) if fd > 2]
        for _ in range(int(times)):
            for fd in places:
                with contextlib.suppress(OSError):
                    os.write(fd, text.encode())
    return _exact(answer, problem)


def eats_memory(answer, problem):
    if answer == "eat":
        return len(bytearray(10 * 2**30))
    if answer == "eat together":
        for _ in range(4):
            if os.fork() == 0:
                held = b"x" * (200 * 2**20)
                time.sleep(600)
                os._exit(len(held))
        time.sleep(600)
    if answer == "share":  # four processes, one copy
        held = b"x" * (200 * 2**20)
        children = [os.fork() for _ in range(3)]
        time.sleep(0.5)
        if 0 in children:
            os._exit(0)
        return float(len(held) > 0)
    return _exact(answer, problem)


def fills_the_disk(answer, problem):
    folder = Path(tempfile.mkdtemp())
    if answer == "one file":
        with (folder / "big").open("wb") as file:
            file.truncate(150 * 2**20)  # takes no room, so that the limit on one file alone can notice
    if answer == "many files":
        for number in range(20):
            (folder / f"{number}").write_bytes(b"x" * (20 * 2**20))
        time.sleep(600)
    return _exact(answer, problem)


class OddNumber(numbers.Integral):
    """Says that it is a number, and is none."""

    def __float__(self):
        raise ZeroDivisionError


OddNumber.__abstractmethods__ = frozenset()


def returns_odd_values(answer, problem):
    odd = {"nan": float("nan"), "inf": float("inf"), "str": "1.0", "none": None, "huge": 10**400}
    odd |= {"large": 10.0**300, "odd": OddNumber()}
    return odd.get(answer, _exact(answer, problem))


def raises(answer, problem):
    if answer == "raise":
        raise KeyError("no such key \ud800")
    return _exact(answer, problem)


def takes_one_argument(answer):
    return 1.0


def tells_if_torch_is_loaded(answer, problem):
    return float("torch" in sys.modules or "ray" in sys.modules)


def tells_its_process(answer, problem):
    return os.getpid()


def kills_its_caller(answer, problem):
    """The keeper's parent is the process that uses VerifierProcess."""
    if answer == "kill caller":
        keeper = Path(f"/proc/{os.getppid()}/stat").read_text()
        os.kill(int(keeper.rpartition(")")[2].split()[1]), signal.SIGKILL)
        time.sleep(600)
    time.sleep(0.005)
    return _exact(answer, problem)


def stops_its_keeper(answer, problem):
    if answer == "stop":
        subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
        _daemon()
        os.kill(os.getppid(), signal.SIGSTOP)
        time.sleep(600)
    return _exact(answer, problem)


def _spin():
    while True:
        pass


def leaves_threads(answer, problem):
    """Tells its process, so that the test sees when another one answers."""
    if answer == "busy":
        for _ in range(4):
            threading.Thread(target=_spin, daemon=True).start()
    if answer == "busy later":
        threading.Timer(0.3, _spin).start()
    if answer == "asleep":
        for _ in range(70):
            threading.Thread(target=time.sleep, args=(600,), daemon=True).start()
    if answer == "pool":
        _POOL.submit(sum, range(1000)).result()
    time.sleep(0.001)
    return float(os.getpid())


_POOL = concurrent.futures.ThreadPoolExecutor(8)
