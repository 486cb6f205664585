"""A run that hangs names the stage, within its deadline, and leaves nothing running."""

import json
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from qurl_ray.errors import DeadlineExceeded
from qurl_ray.training.deadlines import Watchdog, stage_deadline
from tests.training.runs import ALONE, ROOT, WHOLE, alive, descendants, start_job

FOLDER = Path(__file__).with_name("stall")


# --- the watchdog --------------------------------------------------------------------------------------------------


def late_error(tmp_path, work) -> DeadlineExceeded | None:
    """The error of a watchdog over `work(watchdog)`, which ends when it is there; None if it ends before."""
    told, there = [], threading.Event()

    def late(error):
        told.append(error)
        there.set()

    watchdog = Watchdog(late=late, folder=tmp_path / "logs")
    work(watchdog, there)
    watchdog.close()
    return told[0] if told else None


def test_a_stage_without_progress_is_told_with_the_place_where_it_hangs(tmp_path):
    def hangs(watchdog, there):
        watchdog.begin("loading the policy", 0.05)
        there.wait()

    error = late_error(tmp_path, hangs)
    assert str(error).startswith("loading the policy: no progress for 0.05 s, at ")
    assert "in hangs" in str(error)
    (calls,) = (tmp_path / "logs").iterdir()
    assert str(calls) in str(error)
    assert "in hangs" in calls.read_text()


def test_a_stage_that_gets_on_or_has_ended_is_not_late(tmp_path):
    def moves(watchdog, there):
        watchdog.begin("learning", 600.0)
        watchdog.progress()
        watchdog.begin("a stage that is short", 0.2)
        watchdog.rest()
        assert not there.wait(0.5)

    assert late_error(tmp_path, moves) is None


def test_progress_postpones_the_deadline(tmp_path):
    began = time.monotonic()

    def moves_and_hangs(watchdog, there):
        watchdog.begin("learning", 0.4)
        for _ in range(5):
            time.sleep(0.1)
            watchdog.progress()
        there.wait()

    assert late_error(tmp_path, moves_and_hangs)
    assert time.monotonic() - began >= 0.9


@pytest.mark.parametrize("blocked", [lambda: time.sleep(1e6), lambda: socket.create_server(("", 0)).accept()])
def test_whatever_the_main_thread_waits_for_it_gets_the_error(blocked):
    with (
        pytest.raises(DeadlineExceeded, match=r"^starting Ray: no progress for 0\.1 s, at "),
        stage_deadline("starting Ray", 0.1),
    ):
        blocked()


def test_a_process_that_ignores_the_error_ends_with_it():
    code = """
import time
from qurl_ray.training import deadlines
deadlines._GIVE_UP_S = 0.2
def work():
    while True:
        try:
            time.sleep(1e6)
        except Exception:
            pass
with deadlines.stage_deadline("starting Ray", 0.1):
    work()
"""
    done = subprocess.run([sys.executable, "-c", code], env=ALONE, capture_output=True, text=True)
    assert done.returncode == 1
    assert done.stderr.startswith("error: starting Ray: no progress for 0.1 s, at ")


def test_another_thread_than_the_main_one_is_left_alone():
    def run():
        with stage_deadline("starting Ray", 0.01):
            time.sleep(0.1)
        ended.append(True)

    ended: list[bool] = []
    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    assert ended == [True]


# --- whole runs ----------------------------------------------------------------------------------------------------

TRAINING = "qurl_ray.training"
STALLS = {
    "problems": (
        f"{TRAINING}.driver.early:check_early sleep",
        {f"{TRAINING}.deadlines:PROBLEMS_S": 2.0},
        [],
        "the check of folders, problems and functions: no progress for 2 s",
    ),
    "model": (
        f"{TRAINING}.driver.prepare:check_model child",
        {f"{TRAINING}.deadlines:MODEL_S": 40.0},
        [],
        "importing transformers, and checking the model: no progress for 40 s",
    ),
    "cluster": (
        "qurl_ray.actors.cluster:_start socket",
        {f"{TRAINING}.driver.run:_RAY_S": 5.0},
        [],
        "starting Ray: no progress for 5 s",
    ),
    "placement": (
        "qurl_ray.actors.worker_group:WorkerGroup.start sleep",
        {f"{TRAINING}.driver.run:_MARGIN_S": 5.0},
        ["rollout.start_timeout_s=5"],
        "placing and starting rollout workers: no progress for 10 s",
    ),
    "ranks": (
        f"{TRAINING}.rank.train:train_loop socket",
        {},
        ["learner.timeout_s=30", "rollout.start_timeout_s=20"],
        "placing and starting the learner's ranks: none has begun within 80 s",
    ),
    "policy": (
        "qurl_ray.policy.load:load_model sleep",
        {},
        ["learner.timeout_s=40"],
        "rank 0 of the learner, loading the policy: no progress for 40 s",
    ),
    "engine": (
        "qurl_ray.engines.torch.engine:TorchEngine.__init__ sleep",
        {},
        ["rollout.start_timeout_s=30"],
        "waited 30 s for any rollout worker to come back",
    ),
    "engine that dies": (
        "qurl_ray.engines.torch.engine:TorchEngine.__init__ die",
        {},
        ["rollout.start_timeout_s=30"],
        "waited 30 s for any rollout worker to come back",
    ),
    "weights": (
        "qurl_ray.engines.torch.engine:TorchEngine.load sleep",
        {},
        ["sync.timeout_s=10", "rollout.start_timeout_s=60"],
        "no rollout worker could take weights 1: waited 10 s",
    ),
    "probe": (
        "qurl_ray.engines.torch.engine:TorchEngine.generate socket",
        {},
        ["sync.timeout_s=10", "rollout.start_timeout_s=60"],
        "no rollout worker could take weights 1: waited 10 s",
    ),
    "evaluation": (
        "qurl_ray.actors.rollout_worker:RolloutWorker.generate sleep",
        {},
        ["rollout.timeout_s=5", "rollout.start_timeout_s=60"],
        "waited 5 s for rollouts",
    ),
    "learning": (
        "qurl_ray.learner.learner:PolicyLearner.learn sleep",
        {},
        ["learner.timeout_s=40"],
        "rank 0 of the learner, learning in step 1: no progress for 40 s",
    ),
    "checkpoint": (
        f"{TRAINING}.rank.saver:Saver.checkpoint sleep",
        {f"{TRAINING}.rank.train:_SAVE_S": 20.0},
        ["learner.timeout_s=20"],
        "rank 0 of the learner, writing a checkpoint: no progress for 20 s",
    ),
}


@pytest.mark.slow
@pytest.mark.ray
@pytest.mark.parametrize("name", STALLS)
def test_a_stall_in_any_stage_is_named_and_ends_the_run(tmp_path, name):
    stall, limits, settings, named = STALLS[name]
    path = f"{FOLDER}:{ROOT}"
    job = start_job(
        *WHOLE, f"output_dir={tmp_path}", *settings, STALL=stall, LIMITS=json.dumps(limits), PYTHONPATH=path
    )
    below: dict[int, str] = {}
    while job.poll() is None:
        below |= dict(descendants(job.pid))
        time.sleep(0.5)
    output = job.stdout.read()
    assert job.returncode == 2, output
    assert named in output
    assert "Traceback" not in output
    until = time.monotonic() + 20
    while left := {pid: command for pid, command in below.items() if alive(pid)}:
        assert time.monotonic() < until, left
        time.sleep(0.2)
