"""Requests to stop a run, at all of its times: what they leave, and that nothing outlives the driver."""

import json
import os
import signal
import subprocess
import time
from pathlib import Path

import pytest
from transformers import AutoModelForCausalLM

from qurl_ray.runs.checkpoint import latest
from tests.training.runs import SMALL, alive, descendants, events, start_job, wait_for_steps

pytestmark = pytest.mark.ray

STEPS = ["steps=500", "checkpoint.every=0"]
LONG = [*STEPS, "model.max_length=256", "rollout.max_new_tokens=240", "rollout.ignore_eos=true"]
INTERRUPT = pytest.param(signal.SIGINT, marks=pytest.mark.slow)
HANG_UP = pytest.param(signal.SIGHUP, marks=pytest.mark.slow)


def wait_for(path: Path, text: str, job: subprocess.Popen) -> None:
    """Wait until a file of the run holds a text."""
    deadline = time.monotonic() + 120
    while not path.is_file() or text not in path.read_text():
        assert job.poll() is None, job.communicate()[0]
        assert time.monotonic() < deadline
        time.sleep(0.02)


def end(job: subprocess.Popen, *numbers: signal.Signals, group: bool = False) -> str:
    """Send the signals, and return the job's output. Nothing that it started is left after a moment.

    Args:
        group: send them to all processes of the job's group, as a closing terminal and `timeout` do.
    """
    below = [pid for pid, _ in descendants(job.pid)]
    for number in numbers:
        (os.killpg if group else os.kill)(job.pid, number)
        time.sleep(0.1 * (len(numbers) > 1))  # two signals of one kind at once are one signal
    output, _ = job.communicate(timeout=120)
    assert job.returncode == 128 + numbers[0], output
    assert "Traceback" not in output
    deadline = time.monotonic() + 10
    while left := [pid for pid in below if alive(pid)]:
        assert time.monotonic() < deadline, left
        time.sleep(0.1)
    return output


@pytest.mark.slow
@pytest.mark.parametrize("number", [INTERRUPT, signal.SIGTERM, HANG_UP])
def test_a_request_ends_the_run_after_its_step_with_a_checkpoint(tmp_path, number):
    job = start_job(*SMALL, *STEPS, f"output_dir={tmp_path}")
    wait_for_steps(tmp_path / "run", 2, job)
    end(job, number, group=True)
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    checkpoint, notes = latest(tmp_path / "run")
    assert (summary["interrupted"], notes) == (True, [])
    assert 2 <= checkpoint.step == summary["steps"] < 500
    assert summary["accuracy_after"] is not None
    assert AutoModelForCausalLM.from_pretrained(tmp_path / "run" / "policy")
    (said,) = [line["message"] for line in events(tmp_path / "run", "info") if "stopping" in line["message"]]
    assert said == f"{number.name}: stopping after this step, within 1800 s; once more aborts the run"


@pytest.mark.slow
def test_a_request_to_a_run_that_just_resumed_changes_nothing_of_what_it_had(tmp_path):
    job = start_job(*SMALL, *STEPS, f"output_dir={tmp_path}")
    wait_for_steps(tmp_path / "run", 2, job)
    end(job, signal.SIGTERM)
    before = json.loads((tmp_path / "run" / "summary.json").read_text())
    job = start_job(*SMALL, *STEPS, f"output_dir={tmp_path}")
    wait_for(tmp_path / "run" / "metrics.jsonl", "resuming after step", job)
    end(job, signal.SIGTERM)
    assert latest(tmp_path / "run")[0].step == before["steps"]


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_a_second_request_aborts_the_run(tmp_path, number):
    job = start_job(*SMALL, *LONG, f"output_dir={tmp_path}")
    wait_for_steps(tmp_path / "run", 1, job)
    started = time.monotonic()
    assert "aborted" in end(job, number, number)
    assert time.monotonic() - started < 30
    assert not (tmp_path / "run" / "summary.json").exists()


@pytest.mark.slow
def test_the_grace_period_ends(tmp_path):
    job = start_job(*SMALL, *LONG, "rollout.prompts_per_step=32", "checkpoint.grace_s=0.3", f"output_dir={tmp_path}")
    wait_for_steps(tmp_path / "run", 1, job)
    assert "aborted" in end(job, signal.SIGTERM)
    told = [line["message"] for line in events(tmp_path / "run", "info")]
    assert told[-1] == "the run has not stopped within checkpoint.grace_s=0.3 and is aborted"


@pytest.mark.slow
@pytest.mark.parametrize("numbers", [[signal.SIGTERM], [signal.SIGHUP], [signal.SIGINT, signal.SIGTERM]], ids=str)
@pytest.mark.parametrize("when", ["imports", "cold start", "ray", "first evaluation", "saving"])
def test_a_request_at_any_time_ends_the_job_and_leaves_a_run_that_goes_on(tmp_path, when, numbers):
    metrics = tmp_path / "run" / "metrics.jsonl"
    teach = ["model.cold_start=true", f"model.seed={os.getpid()}"] if when == "cold start" else []
    often = ["checkpoint.every=1"] if when == "saving" else []
    settings = [*SMALL, "steps=500", *teach, *often, f"output_dir={tmp_path}"]
    job = start_job(*settings)
    if when == "imports":
        time.sleep(1.0)
    elif when == "cold start":
        wait_for(metrics, "cold start: step", job)
    elif when == "saving":
        while not (list(tmp_path.glob("run/checkpoints/.step-*")) and list(tmp_path.glob("run/checkpoints/step-*"))):
            assert job.poll() is None
            time.sleep(0.001)
    else:
        wait_for(metrics, "bits" if when == "ray" else '"before"', job)
        time.sleep(1.0 if when == "ray" else 0.0)
    if when == "imports":
        job.send_signal(numbers[0])
        job.communicate(timeout=60)
        assert job.returncode in (128 + numbers[0], -numbers[0])
    else:
        end(job, *numbers)
    assert not (tmp_path / "run.1").exists()
    metrics.unlink(missing_ok=True)  # what it holds from here on is of the second start
    again = start_job(*settings)
    if when == "cold start":
        wait_for(metrics, "cold start: step", again)
    else:
        wait_for_steps(tmp_path / "run", 1, again)
    end(again, signal.SIGTERM)
    assert not (tmp_path / "run.1").exists()
