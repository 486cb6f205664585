"""Small runs, what they left, and how to hurt them: for the tests of this folder."""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM

ROOT = Path(__file__).parents[2]

SMALL = [
    "rollout.start_timeout_s=900",  # on a busy machine a start may take any time
    "sync.delta=true",
    "sync.probe_every=1",
    "model.cold_start=false",
    "model.layers=2",
    "model.hidden_size=128",
    "model.intermediate_size=256",
    "task.max_operand=30",
    "task.reward=tests.training.rewards:length",
    "rollout.prompts_per_step=8",
    "rollout.samples_per_prompt=4",
    "rollout.max_new_tokens=6",
    "evaluation.problems=40",
    "learner.lr=1e-3",
    "tracking.mlflow=false",
    "tracking.console=none",
]

WHOLE = [*SMALL, "steps=4", "checkpoint.every=1", "checkpoint.keep=3", "evaluation.every=3"]
FOLDED = [*WHOLE, "quantization.uaq_scale=1.5", "learner.lr_final_share=0.1"]
CERTIFIED = [*FOLDED, "evaluation.certificate={every: 2, prompts: 4}"]

ALONE = {name: value for name, value in os.environ.items() if name != "RAY_ADDRESS"} | {"PYTHONPATH": str(ROOT)}
"""Environment of jobs that start a Ray of their own."""
JOBS: list[subprocess.Popen] = []
"""Jobs that the current test has started. Those that still run at its end are killed."""


def events(run_dir: Path, kind: str) -> list[dict]:
    lines = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    return [line for line in lines if line["kind"] == kind]


def prompts(run_dir: Path) -> list[str]:
    """Uids of all that were drawn, in their order."""
    lines = (run_dir / "prompts.jsonl").read_text().splitlines()
    return [uid for line in lines for uid in json.loads(line)["uids"]]


def parameters(folder: Path) -> torch.Tensor:
    return torch.cat([p.detach().reshape(-1) for p in AutoModelForCausalLM.from_pretrained(folder).parameters()])


def forget_after(run_dir: Path, step: int) -> None:
    """Leave a run as if it had been killed soon after the checkpoint of `step`."""
    (run_dir / "summary.json").unlink()
    for folder in (run_dir / "checkpoints").iterdir():
        if int(folder.name.removeprefix("step-")) > step:
            shutil.rmtree(folder)


def start_job(*settings: str, address: str | None = None, **environment: str) -> subprocess.Popen:
    """jobs/qurl_dapo.py in a process group of its own; `address`: of this process's cluster, that it attaches to."""
    # Once this process has started a Ray by `ray.init`, its clusters ask for a token.
    attached = {"RAY_ADDRESS": address, "RAY_AUTH_MODE": os.environ.get("RAY_AUTH_MODE", "disabled")}
    job = subprocess.Popen(
        [sys.executable, "jobs/qurl_dapo.py", *settings],
        cwd=ROOT,
        env=ALONE | (attached if address else {}) | environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    JOBS.append(job)
    return job


def wait_for_steps(run_dir: Path, count: int, job: subprocess.Popen) -> None:
    deadline = time.monotonic() + 120
    while not (run_dir / "metrics.jsonl").is_file() or len(events(run_dir, "step")) < count:
        assert job.poll() is None, job.communicate()[0]
        assert time.monotonic() < deadline
        time.sleep(0.05)


def alive(pid: int) -> bool:
    """True if there is such a process, and it is not dead already."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def descendants(pid: int) -> Iterator[tuple[int, str]]:
    """(pid, command line) of all processes below `pid`."""
    parents, names = {}, {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            parents[int(stat.parent.name)] = int(stat.read_text().rpartition(")")[2].split()[1])
            names[int(stat.parent.name)] = (stat.parent / "cmdline").read_bytes().decode()
        except (OSError, IndexError):
            continue  # ended meanwhile
    for candidate, command in names.items():
        ancestor = candidate
        while ancestor in parents and ancestor != pid:
            ancestor = parents[ancestor]
        if ancestor == pid:
            yield candidate, command


def kill_all(process: subprocess.Popen) -> None:
    """Kill a process and all that it has started."""
    for pid in [process.pid, *(pid for pid, _ in descendants(process.pid))]:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


def strike(job: subprocess.Popen, name: str, with_signal: int = signal.SIGKILL) -> int:
    """Send a signal to the process of a job whose command line begins with `name`."""
    deadline = time.monotonic() + 60
    while True:
        for pid, command in descendants(job.pid):
            if command.startswith(name):
                os.kill(pid, with_signal)
                return pid
        assert time.monotonic() < deadline, f"no {name} below {job.pid}"
        time.sleep(0.05)
