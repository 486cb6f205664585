"""Folders that one process fills for all: who runs alone, who beside others, and who after one that failed or died."""

import itertools
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from qurl_ray.files import first_alone

HOLDS = "import sys, time; from pathlib import Path; from qurl_ray.files import first_alone\n"
HOLDS += "with first_alone(Path(sys.argv[1])): print('inside', flush=True); time.sleep(60)"


def run_three(folder) -> None:
    """The first finds nobody beside it, and the other two find each other."""
    numbers, together = itertools.count(), threading.Barrier(2)

    def work(_: int) -> int:
        with first_alone(folder):
            number = next(numbers)
            if number:
                together.wait(10)
                return number
            time.sleep(0.2)
            assert next(numbers) == 1, "another came in meanwhile"
            return number

    with ThreadPoolExecutor(3) as pool:
        assert sorted(pool.map(work, range(3))) == [0, 2, 3]


def test_the_first_runs_alone_and_the_others_beside_each_other(tmp_path):
    run_three(tmp_path / "made" / "here")


def test_after_a_failure_the_next_one_is_the_first(tmp_path):
    with pytest.raises(ZeroDivisionError), first_alone(tmp_path):
        _ = 1 / 0
    run_three(tmp_path)


def test_a_process_that_is_killed_makes_way(tmp_path):
    holder = subprocess.Popen([sys.executable, "-c", HOLDS, str(tmp_path)], stdout=subprocess.PIPE, text=True)
    assert holder.stdout.readline() == "inside\n"
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(run_three, tmp_path)
        time.sleep(0.3)
        assert not waiting.done()
        holder.kill()
        waiting.result(20)
    holder.wait()
    holder.stdout.close()
