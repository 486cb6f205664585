"""Resources that a long run holds, and the cost of fault tolerance."""

import json
import os
import random
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import matplotlib
from chaos_faults import own_cluster
from chaos_jobs import Job, Place
from shared import ROOT

matplotlib.use("agg")
from matplotlib import pyplot as plt

_EVERY_S = 5.0
_KILL_EVERY_S = 120.0
_PAGE = os.sysconf("SC_PAGE_SIZE")
_FLAT = 1.05
_ROLES = ("driver", "coordinator", "learner", "rollout workers", "verifiers", "Ray")
_TITLES = {
    "ray::Coordinator": "coordinator",
    "ray::RayTrainWorker": "learner",
    "ray::RolloutWorker": "rollout workers",
    "ray::Verifier": "verifiers",
}
_PANELS = {
    "rss_mb": "resident memory, MB",
    "files": "open files",
    "actors": "actors",
    "object_store_mb": "object store, MB",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """Resources that all processes of a run hold at one time."""

    minutes: float
    step: int
    rss_mb: float
    """Resident memory of all processes together, in MB. Shared memory is counted for each process."""
    roles_mb: dict[str, float]
    files: int
    actors: int
    """Number of Ray processes that run a task or hold an actor."""
    object_store_mb: float


def soak(place: Place, minutes: float) -> list[Sample]:
    """Sample a run for `minutes`. A rollout worker is killed every two minutes.

    Whatever is lost with a worker must come back completely, and nothing beyond that.
    """
    import ray

    samples: list[Sample] = []
    with own_cluster(place, cpus=3) as inside:
        job = Job(inside, "soak", "steps=1000000", "learner.lr=1e-5").begin()
        ray.init(inside.cluster.address, log_to_driver=False, logging_level="ERROR")
        try:
            job.whole()
            began = killed = time.monotonic()
            while (now := time.monotonic()) < began + 60 * minutes and not job.ended:
                samples.append(_sample(job, (now - began) / 60))
                pids = job.titled("ray::RolloutWorker")
                if now - killed > _KILL_EVERY_S and len(pids) == 2:
                    killed = now
                    os.kill(random.choice(pids), signal.SIGKILL)
                time.sleep(_EVERY_S)
            job.process.send_signal(signal.SIGINT)
            if (status := job.end()) != 130:
                raise SystemExit(f"the soaked run ended with status {status}; its log is {job.log}")
        finally:
            ray.shutdown()
            job.abandon()
    return samples


def _sample(job: Job, minutes: float) -> Sample:
    import ray

    roles, files, actors = dict.fromkeys(_ROLES, 0.0), 0, 0
    for pid, title in job.processes():
        try:
            resident = int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * _PAGE / 1e6
            files += len(os.listdir(f"/proc/{pid}/fd"))
        except OSError:
            continue  # the process has ended meanwhile
        actors += title.startswith("ray::") and title != "ray::IDLE"
        found = "driver" if pid == job.process.pid else "Ray"
        roles[next((role for prefix, role in _TITLES.items() if title.startswith(prefix)), found)] += resident
    key = "object_store_memory"
    used = ray.cluster_resources().get(key, 0) - ray.available_resources().get(key, 0)
    return Sample(
        minutes=minutes,
        step=job.step,
        rss_mb=sum(roles.values()),
        roles_mb=roles,
        files=files,
        actors=actors,
        object_store_mb=used / 1e6,
    )


def soak_lines(samples: Sequence[Sample]) -> list[str]:
    """Return a Markdown table: medians of the first and of the last third of the samples."""
    first, last = samples[: len(samples) // 3], samples[-(len(samples) // 3) :]
    lines = [
        f"**{samples[-1].minutes:.0f} minutes, {samples[-1].step} steps, a rollout worker killed every "
        f"{_KILL_EVERY_S / 60:.0f} minutes**",
        "",
        "| | first third, median | last third, median | ratio | flat |",
        "|---|---|---|---|---|",
    ]
    for name, early, late in _pairs(first, last):
        ratio = late / early if early else float(late > 0) + 1
        lines.append(f"| {name} | {early:.4g} | {late:.4g} | {ratio:.3f} | {'yes' if ratio <= _FLAT else 'NO'} |")
    return lines


def _pairs(first: Sequence[Sample], last: Sequence[Sample]) -> Iterator[tuple[str, float, float]]:
    for key, label in _PANELS.items():
        yield label, *(statistics.median(getattr(one, key) for one in part) for part in (first, last))
    for role in _ROLES:
        yield f"memory of {role}, MB", *(statistics.median(s.roles_mb[role] for s in part) for part in (first, last))


def draw(samples: Sequence[Sample], path: Path) -> None:
    """Draw one panel for each quantity that should be flat."""
    figure, axes = plt.subplots(1, len(_PANELS), figsize=(3.6 * len(_PANELS), 3), constrained_layout=True)
    minutes = [sample.minutes for sample in samples]
    for axis, (key, label) in zip(axes, _PANELS.items(), strict=True):
        axis.plot(minutes, [getattr(sample, key) for sample in samples], color="#0072B2", linewidth=1)
        axis.set(title=label, xlabel="minutes")
        axis.set_ylim(bottom=0)
        axis.grid(alpha=0.3)
    figure.savefig(path, dpi=120)


# --- overhead --------------------------------------------------------------------------------------------------------


def overhead(runs: Path, against: Path, pairs: int) -> list[float]:
    """Return ratios of train_seconds, this tree over another checkout, of jobs that take turns."""
    trees = {"here": ROOT, "there": against.resolve()}
    ratios = []
    for pair in range(pairs):
        order = list(trees) if pair % 2 == 0 else list(reversed(trees))
        seconds = {which: _train_seconds(trees[which], runs, f"overhead-{which}-{pair}") for which in order}
        ratios.append(seconds["here"] / seconds["there"])
        print(
            f"pair {pair}: {seconds['here']:.1f} s here, {seconds['there']:.1f} s there: {ratios[-1]:.3f}", flush=True
        )
    return ratios


def _train_seconds(tree: Path, runs: Path, name: str) -> float:
    """Return the training time of a shorter quickstart in seconds, without evaluation."""
    own = tree / ".venv" / "bin" / "python"
    python = str(own) if own.exists() else sys.executable
    environment = {k: v for k, v in os.environ.items() if k != "RAY_ADDRESS"} | {"PYTHONPATH": str(tree)}
    asked = [python, "-c", "import qurl_ray; print(qurl_ray.__file__)"]
    found = subprocess.run(asked, cwd=tree, env=environment, check=True, capture_output=True, text=True).stdout
    if not Path(found.strip()).is_relative_to(tree):
        raise SystemExit(f"{python} imports {found.strip()}, not the package in {tree}")
    settings = (
        "steps=60",
        "evaluation.problems=100",
        "tracking.mlflow=false",
        "tracking.console=none",
        f"output_dir={runs}",
        f"name={name}",
    )
    command = [python, "jobs/qurl_dapo.py", "--config", "qurl_ray/configs/quickstart.yaml", "--fresh", *settings]
    subprocess.run(command, cwd=tree, env=environment, check=True)
    return json.loads((runs / name / "summary.json").read_text())["train_seconds"]
