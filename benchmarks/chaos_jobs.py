"""Training jobs that get faults while they run: started, watched, and compared with an undisturbed job."""

import json
import os
import re
import shutil
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from resume import parameters
from shared import ROOT

sys.path.append(str(ROOT))
from tests.training.runs import descendants

STEPS = 40
SETTINGS = (
    f"steps={STEPS}",
    "model.cold_start=false",
    "model.layers=2",
    "model.hidden_size=128",
    "model.intermediate_size=256",
    "task.max_operand=30",
    "task.reward=chaos_rewards:parity",
    "rollout.workers=2",
    "rollout.prompts_per_step=16",
    "rollout.samples_per_prompt=8",
    "rollout.max_new_tokens=48",
    "rollout.threads=1",
    "rollout.start_timeout_s=900",
    "learner.threads=1",
    "learner.lr=1e-3",
    "learner.max_failures=100",
    "checkpoint.every=2",
    "checkpoint.keep=3",
    "evaluation.problems=20",
    "tracking.mlflow=false",
    "tracking.console=none",
)
"""Settings of all jobs that are compared. Thread counts are fixed, because another number may round differently."""
_LOG = re.compile(r"; log [^)]*")  # where a process logs, in a message: of no use later
_STUCK_S = 900.0
_LOOK_S = 0.1
_GONE_S = 60.0


class Stuck(Exception):
    """An expected event does not happen, and the job still runs."""


@dataclass(slots=True, kw_only=True)
class Place:
    """Folders of runs and logs, and the Ray cluster if the jobs share one."""

    runs: Path
    logs: Path
    cluster: Any = None
    """A ray.cluster_utils.Cluster; with None, each job starts its own Ray instance."""
    node: Any = None
    """Second node of the cluster."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Told:
    """A message that the run logged."""

    text: str
    at: float
    """Time of the message, in Unix seconds."""
    groups: tuple[str, ...]
    """Groups of the pattern that matched the message."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Strike:
    """One injected fault, and how the run reported it."""

    what: str
    step: int
    """Last step that was done before the fault."""
    meanwhile: str
    """Methods that the other rollout workers ran at that time; those of all workers if none was killed."""
    said: str
    recovery_s: float | None
    """Seconds until the run reported its recovery, or made its next step; None if it ended before."""
    counts: bool = True
    """False if the fault came too late for its target."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """A job that has ended, compared with the undisturbed one."""

    job: str
    status: int
    """Exit status of the job."""
    answers: bool
    """True if both jobs had the same prompts in the same steps, each once, with as many samples and tokens."""
    parameters: bool
    """True if the final parameters are equal, bit for bit."""

    @property
    def ok(self) -> bool:
        return self.status == 0 and self.answers and self.parameters


class Job:
    """jobs/qurl_dapo.py in a process of its own, which may be started several times."""

    def __init__(self, place: Place, name: str, *settings: str) -> None:
        self.place, self.name, self.run_dir = place, name, place.runs / name
        self.log = place.logs / f"{name}.log"
        self._settings = [*SETTINGS, *settings, f"name={name}", f"output_dir={place.runs}"]
        self._told: dict[tuple[float, str], None] = {}
        self.process: subprocess.Popen | None = None

    def begin(self) -> "Job":
        """Start from the first step, without the files of an earlier run."""
        shutil.rmtree(self.run_dir, ignore_errors=True)
        self.log.unlink(missing_ok=True)
        return self.start()

    def start(self) -> "Job":
        """Start from the latest checkpoint."""
        environment = {key: value for key, value in os.environ.items() if key != "RAY_ADDRESS"} | import_paths()
        if self.place.cluster:
            environment["RAY_ADDRESS"] = self.place.cluster.address
        self.log.parent.mkdir(parents=True, exist_ok=True)
        with self.log.open("a") as log:
            self.process = subprocess.Popen(
                [sys.executable, "jobs/qurl_dapo.py", *self._settings],
                cwd=ROOT,
                env=environment,
                stdout=log,
                stderr=subprocess.STDOUT,
            )
        return self

    def lines(self, kind: str | None = None) -> list[dict[str, Any]]:
        """Return the lines of metrics.jsonl, of one kind if it is given. Lines after a checkpoint that the run resumed
        from are gone."""
        path = self.run_dir / "metrics.jsonl"
        text = path.read_text() if path.is_file() else ""
        found = [json.loads(line) for line in text.splitlines(keepends=True) if line.endswith("}\n")]
        self._told |= {(line["time"], line["message"]): None for line in found if line["message"]}
        return [line for line in found if kind in (None, line["kind"])]

    def told(self, pattern: str, since: float) -> Told | None:
        """Return the first message after the time `since` whose beginning matches the pattern; None without one."""
        self.lines()
        for at, message in sorted(self._told):
            if at > since and (found := re.match(pattern, message, re.DOTALL)):
                return Told(text=message, at=at, groups=found.groups())
        return None

    @property
    def step(self) -> int:
        """Number of the last step that is done; 0 if none is."""
        return max((line["step"] for line in self.lines("step")), default=0)

    def stepped(self, since: float) -> float | None:
        """Time at which the first step after the time `since` was done; None if there is none."""
        return next((line["time"] for line in self.lines("step") if line["time"] > since), None)

    @property
    def ended(self) -> bool:
        return self.process.poll() is not None

    def until(self, condition: Callable[[], Any], what: str) -> Any:
        """Wait until the condition is true, and return its value; return its last value if the job ended before.

        Raises:
            Stuck: neither happens.
        """
        deadline = time.monotonic() + _STUCK_S
        while True:
            ended = self.ended
            if (found := condition()) or ended:
                return found
            if time.monotonic() > deadline:
                raise Stuck(f"{self.name}: waited {_STUCK_S:g} s for {what}; its log is {self.log}")
            time.sleep(_LOOK_S)

    def reaches(self, step: int) -> bool:
        """Wait until the job has done this step. Return False if it ended before."""
        return self.until(lambda: self.step >= step, f"step {step}")

    def whole(self) -> bool:
        """Wait until both rollout workers were healthy at the end of the last step. False if the job ended before."""

        def fit() -> bool:
            steps = self.lines("step")
            return bool(steps) and steps[-1]["values"]["fleet/healthy"] == 2

        return self.until(fit, "two fit rollout workers") and not self.ended

    def processes(self) -> list[tuple[int, str]]:
        """Return (pid, title) of all processes of the run."""
        root = os.getpid() if self.place.cluster else self.process.pid
        return [(pid, command.rstrip("\0")) for pid, command in descendants(root) if pid != os.getpid()]

    def titled(self, prefix: str) -> list[int]:
        """Return the pids of processes whose title begins with `prefix`."""
        return [pid for pid, title in self.processes() if title.startswith(prefix)]

    def meanwhile(self, *, but: int = 0) -> str:
        """Return the methods that the rollout workers (except `but`) run now, which Ray puts into process titles."""
        found = [title for pid, title in self.processes() if title.startswith("ray::RolloutWorker") and pid != but]
        return ", ".join(sorted(title.partition(".")[2] or "idle" for title in found))

    def kill(self) -> list[int]:
        """SIGKILL the driver. Return the pids that it leaves behind, except Ray's own agents, which end later."""
        below = [pid for pid, title in self.processes() if pid != self.process.pid and not title.endswith("Agent")]
        self.process.kill()
        self.process.wait()
        deadline = time.monotonic() + _GONE_S
        while (left := [pid for pid in below if title_of(pid)]) and time.monotonic() < deadline:
            time.sleep(_LOOK_S)
        return left

    def end(self) -> int:
        """Wait until the job has ended, and return its exit status."""
        self.until(lambda: self.ended, "its end")
        return self.process.wait()

    def abandon(self) -> None:
        """Kill the job if it still runs, with all its processes if its Ray instance is its own."""
        if not self.ended:
            for pid in [self.process.pid] if self.place.cluster else [pid for pid, _ in self.processes()]:
                if title_of(pid):
                    os.kill(pid, signal.SIGKILL)

    def compared(self, other: Path) -> Finding:
        """Wait until the job has ended, and compare it with the run in another folder."""
        status = self.end()
        same = status == 0 and torch.equal(parameters(self.run_dir / "policy"), parameters(other / "policy"))
        return Finding(job=self.name, status=status, answers=_answers(self.run_dir) == _answers(other), parameters=same)

    def last_words(self) -> str:
        """Return the last line of the job's output."""
        return next((line for line in reversed(self.log.read_text().splitlines()) if line.strip()), "")


def without_places(text: str, runs: Path) -> str:
    """Return `text` without the paths of runs and logs on this machine."""
    return _LOG.sub("", text).replace(str(runs), "runs")


def import_paths() -> dict[str, str]:
    """Environment variables with which processes of a run find the rewards of this folder."""
    return {"PYTHONPATH": f"{ROOT}{os.pathsep}{ROOT / 'benchmarks'}"}


def title_of(pid: int) -> str:
    """Title of a process; "" if it has ended."""
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().decode().rstrip("\0")
    except OSError:
        return ""


def _answers(run_dir: Path) -> list[tuple]:
    """Return the prompts of each step, and the number of samples and tokens of each step."""
    prompts = [json.loads(line) for line in (run_dir / "prompts.jsonl").read_text().splitlines()]
    steps = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    counts = [
        (line["step"], line["values"]["rollout/samples"], line["values"]["rollout/tokens"])
        for line in steps
        if line["kind"] == "step"
    ]
    return [[(line["step"], line["uids"]) for line in prompts], counts]


@dataclass(slots=True, kw_only=True)
class Row:
    """One row of the table."""

    label: str
    times: int
    """Number of repetitions that were requested."""
    strikes: list[Strike] = field(default_factory=list)
    jobs: list[Finding] = field(default_factory=list)
    result: str = ""
    """Result of rows that are compared in another way; an error message if there was an error."""
    ok: bool = True

    @property
    def counted(self) -> int:
        return sum(strike.counts for strike in self.strikes)

    def markdown(self) -> str:
        """Return the row as one line of the Markdown table."""
        seconds = [strike.recovery_s for strike in self.strikes if strike.recovery_s is not None]
        recovery = f"{statistics.median(seconds):.1f} ({max(seconds):.1f})" if seconds else "–"
        share = [f"{sum(values)} of {len(self.jobs)}" for values in self._columns()] if self.jobs else ["–"] * 3
        done = f"{self.counted} of {self.times}" if self.strikes or self.jobs else str(self.times)
        cells = [
            self.label,
            done,
            *share,
            recovery,
            f"{'yes' if self.ok else 'NO'}{': ' if self.result else ''}{self.result}",
        ]
        return "| " + " | ".join(cells) + " |"

    def _columns(self) -> Sequence[list[bool]]:
        return [job.status == 0 for job in self.jobs], [j.answers for j in self.jobs], [j.parameters for j in self.jobs]

    def details(self) -> list[str]:
        """Return one line per strike."""
        lines = []
        for strike in self.strikes:
            seconds = "–" if strike.recovery_s is None else f"{strike.recovery_s:.1f} s"
            late = "" if strike.counts else " (too late, not counted)"
            lines.append(
                f"- after step {strike.step}, {strike.what}{late}; workers: {strike.meanwhile}; "
                f"recovered after {seconds}: {strike.said}"
            )
        return lines
