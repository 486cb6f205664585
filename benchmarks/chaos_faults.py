"""Faults: functions that inject one into a training job, wait until the job has recovered, and return a record of
it."""

import os
import random
import shutil
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from chaos_jobs import STEPS, Finding, Job, Place, Row, Strike, Stuck, Told, import_paths, title_of

from qurl_ray.actors.rollout_worker import RolloutWorker

_JOBS = 8  # largest number of jobs for one row of the table
_LAST = 4  # steps at the end of a job, without faults
_DISK_MB = 256
_ROOM_KB = 384  # left free on a full disk: less than a checkpoint, enough for the lines of some steps


@contextmanager
def here(place: Place) -> Iterator[Place]:
    """Yield `place` as it is: jobs run in the runs folder, each with its own Ray instance."""
    yield place


@contextmanager
def small_disk(place: Place) -> Iterator[Place]:
    """Yield a place whose runs are on a small file system of their own. Needs the right to mount one."""
    folder = place.runs / "disk"
    folder.mkdir(parents=True, exist_ok=True)
    _mount("-t", "tmpfs", "-o", f"size={_DISK_MB}m", "tmpfs", folder)
    try:
        yield Place(runs=folder, logs=place.logs)
    finally:
        _unmount(folder)


@contextmanager
def own_cluster(place: Place, cpus: int = 2) -> Iterator[Place]:
    """Yield a place with a Ray cluster of one node, which is never killed. Other nodes may be added to it."""
    from ray.cluster_utils import Cluster

    os.environ |= import_paths()
    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": cpus, "include_dashboard": False})
    try:
        yield Place(runs=place.runs, logs=place.logs, cluster=cluster)
    finally:
        cluster.shutdown()


def _text(told: Told | None) -> str:
    return told.text if told else "nothing"


def _mount(*arguments: str | Path) -> None:
    found = subprocess.run(["mount", *map(str, arguments)], capture_output=True, text=True, check=False)
    if found.returncode:
        raise PermissionError(f"not measured: {found.stderr.strip()}")


def _unmount(folder: Path) -> None:
    subprocess.run(["umount", "--lazy", folder], check=True)  # lazy: a process that still uses it may continue


# --- processes -------------------------------------------------------------------------------------------------------


def worker(method: Callable | None, doing: str = "") -> Callable[[Job], Strike | None]:
    """Return a fault that SIGKILLs a rollout worker while it runs a method, for which messages of the fleet have the
    word `doing`, or while it is idle."""
    title = f"ray::RolloutWorker.{method.__name__}" if method else "ray::RolloutWorker"

    def hurt(job: Job) -> Strike | None:
        if not job.whole():
            return None
        _pause(1.0)
        step, at = job.step, time.time()
        caught = _catch(job, title)
        if caught is None:
            return None
        pid, meanwhile = caught
        death = rf"rollout worker (\d+) \(pid {pid}, (\w+).* died.*"
        found = job.until(lambda: job.told(death, at), f"the run to notice that process {pid} died")
        index, noticed = found.groups if found else ("", "")
        back = found and job.until(
            lambda: job.told(rf"rollout worker {index} \(.* is back after ([\d.]+) s", at),
            f"worker {index} to come back",
        )
        return Strike(
            what=f"SIGKILL {title} (pid {pid})",
            step=step,
            meanwhile=meanwhile,
            said=_text(found),
            recovery_s=float(back.groups[0]) if back else None,
            # Before its death is noticed, an idle worker may have been called to load. (A heartbeat that ends removes
            # the title of a method that still runs: a worker that looked idle but died in generate was not idle.)
            counts=noticed in ([doing] if method else ["idle", "load"]),
        )

    return hurt


def _catch(job: Job, title: str) -> tuple[int, str] | None:
    """SIGKILL the first rollout worker whose process has this title.

    Returns its pid, and what the other workers did at that time. None if the job ended before.
    """
    while not job.ended:
        pids, until = job.titled("ray::RolloutWorker"), time.monotonic() + 1.0
        while time.monotonic() < until:
            for pid in pids:
                if title_of(pid) == title:
                    os.kill(pid, signal.SIGKILL)
                    return pid, job.meanwhile(but=pid)
            time.sleep(0.0005)
    return None


def restarted_by_itself(prefix: str) -> Callable[[Job], Strike | None]:
    """Return a fault that SIGKILLs a process, after which the ranks restart."""

    def hurt(job: Job) -> Strike | None:
        _pause(2.0)
        pids = job.titled(prefix)
        if not pids:
            return None
        step, at, meanwhile = job.step, time.time(), job.meanwhile()
        os.kill(pids[0], signal.SIGKILL)
        said = job.until(lambda: job.told(r".*continues from.*", at), "the learner to restart")
        again = said and job.until(lambda: job.stepped(said.at), "a step after that")
        return Strike(
            what=f"SIGKILL {prefix} (pid {pids[0]})",
            step=step,
            meanwhile=meanwhile,
            said=_text(said),
            recovery_s=again - at if again else None,
            counts=bool(said),
        )

    return hurt


def driver(job: Job) -> Strike | None:
    """SIGKILL the driver, and start the same command again."""
    _pause(2.0)
    if job.ended:
        return None
    step, meanwhile, pid = job.step, job.meanwhile(), job.process.pid
    left = job.kill()
    behind = f"; left behind: {', '.join(map(title_of, left))}" if left else ""
    return _again(job, f"SIGKILL the driver (pid {pid}){behind}", step, meanwhile, "resuming after")


def _again(job: Job, what: str, step: int, meanwhile: str, expected: str, said: str = "") -> Strike:
    """Start a job again, wait for its next step, and return a strike with the message that the run logged."""
    at = time.time()
    job.start()
    again = job.until(lambda: job.stepped(at), "a step after the start")
    found = job.told(f".*{expected}", at)
    return Strike(
        what=what,
        step=step,
        meanwhile=meanwhile,
        said=f"{said}; {_text(found)}" if said else _text(found),
        recovery_s=again - at if again else None,
        counts=bool(found),
    )


def node(job: Job) -> Strike | None:
    """Kill the whole second node, and add a new one three steps later."""
    place = job.place
    if place.node is None:
        place.node = place.cluster.add_node(num_cpus=1)
    if not job.whole():
        return None
    step, at, meanwhile = job.step, time.time(), job.meanwhile()
    place.cluster.remove_node(place.node, allow_graceful=False)
    place.node = None
    said = job.until(lambda: job.told(".* died", at), "the run to notice the death of a node")
    without = job.reaches(step + 3)
    returned = time.time()
    place.node = place.cluster.add_node(num_cpus=1)
    # A rank that was on that node takes the room of a worker; another worker is hired in its place later.
    back = without and job.until(
        lambda: job.told(".* (is back after|joins the fleet)", returned), "a second worker to come back"
    )
    return Strike(
        what="SIGKILL the second node",
        step=step,
        meanwhile=meanwhile,
        said=_text(said),
        recovery_s=back.at - returned if back else None,
        counts=bool(said and without),
    )


# --- disks -----------------------------------------------------------------------------------------------------------


def disk_full(job: Job) -> Strike | None:
    """Fill the disk until less than a checkpoint fits. Free it when the run has ended, and start the run again."""
    filler = job.place.runs / "filler"
    step, meanwhile = job.step, job.meanwhile()
    with filler.open("wb") as file:
        os.posix_fallocate(file.fileno(), 0, shutil.disk_usage(job.place.runs).free - (_ROOM_KB << 10))
    status = job.end()
    filler.unlink()
    return _failed_checkpoint(job, f"disk full, exit status {status}", step, meanwhile)


def read_only(job: Job) -> Strike | None:
    """Mount a read-only file system over the checkpoint folder. When the run has ended, unmount it and start again."""
    folder = job.run_dir / "checkpoints"
    step, meanwhile = job.step, job.meanwhile()
    _mount("-t", "tmpfs", "-o", "ro", "tmpfs", folder)
    try:
        status = job.end()
    finally:
        _unmount(folder)
    return _failed_checkpoint(job, f"read-only folder, exit status {status}", step, meanwhile)


def _failed_checkpoint(job: Job, what: str, step: int, meanwhile: str) -> Strike | None:
    said = job.last_words()
    if "cannot be written to" not in said:
        raise Stuck(f"{job.name}: {what}, but the run said: {said}")
    return _again(job, what, step, meanwhile, "resuming after", said)


def corrupt_byte(job: Job) -> Strike | None:
    """SIGKILL the driver, flip one bit of its newest checkpoint, and start the job again."""
    if not job.until(lambda: len(_checkpoints(job)) >= 2, "two checkpoints") or job.ended:
        return None
    step, meanwhile = job.step, job.meanwhile()
    job.kill()
    newest = _checkpoints(job)[-1]
    path = _DRAW.choice(sorted(path for path in newest.rglob("*") if path.is_file()))
    data = bytearray(path.read_bytes())
    data[_DRAW.randrange(len(data))] ^= 1 << _DRAW.randrange(8)
    path.write_bytes(data)
    what = f"a bit of {path.relative_to(newest.parent)}"
    return _again(job, what, step, meanwhile, "checkpoint passed over")


def _checkpoints(job: Job) -> list[Path]:
    return sorted((job.run_dir / "checkpoints").glob("step-*"))


# --- rows ------------------------------------------------------------------------------------------------------------

_DRAW = random.Random(0)


def _pause(most_s: float) -> None:
    """Wait for a random time, so that a fault can happen at any moment of a step."""
    time.sleep(_DRAW.uniform(0, most_s))


@dataclass(frozen=True, slots=True, kw_only=True)
class Fault:
    """One row of the table: a fault, and the number of times that it is injected.

    Example:
        Fault(label="SIGKILL the driver, then start again", times=5, hurt=driver)
    """

    label: str
    times: int
    hurt: Callable[[Job], Strike | None]
    """Function that injects the fault into a job. It returns None if the job ended before."""
    around: Callable = here
    settings: tuple[str, ...] = ()
    steps: int = STEPS

    def measure(self, name: str, place: Place, undisturbed: Path, times: int) -> Row:
        """Run jobs until the fault was injected `times` times, and return the row."""
        row = Row(label=self.label, times=times)
        try:
            with self.around(place) as inside:
                while row.counted < times and len(row.jobs) < _JOBS:
                    row.jobs.append(self._job(f"{name}-{len(row.jobs)}", inside, undisturbed, row))
        except (Stuck, PermissionError) as error:
            row.result = str(error)
        row.ok = row.counted >= times and all(job.ok for job in row.jobs) and not row.result
        return row

    def _job(self, name: str, place: Place, undisturbed: Path, row: Row) -> Finding:
        job = Job(place, name, *self.settings, f"steps={self.steps}").begin()
        last = 1
        try:
            while row.counted < row.times:
                if not job.reaches(last + 2) or job.step > self.steps - _LAST:
                    break
                if strike := self.hurt(job):
                    row.strikes.append(strike)
                    print(f"{name}: {row.details()[-1]}", flush=True)
                last = job.step
            return job.compared(undisturbed)
        finally:
            job.abandon()


FAULTS = {
    "worker-generate": Fault(
        label="SIGKILL a rollout worker in generate", times=10, hurt=worker(RolloutWorker.generate, "generate")
    ),
    "worker-load": Fault(label="SIGKILL a rollout worker in load", times=10, hurt=worker(RolloutWorker.commit, "load")),
    "worker-idle": Fault(label="SIGKILL a rollout worker, idle", times=10, hurt=worker(None)),
    "learner": Fault(label="SIGKILL the learner", times=5, hurt=restarted_by_itself("ray::RayTrainWorker")),
    "driver": Fault(label="SIGKILL the driver, then start again", times=5, hurt=driver),
    "coordinator": Fault(label="SIGKILL the coordinator", times=5, hurt=restarted_by_itself("ray::Coordinator")),
    "node": Fault(
        label="a whole node lost, and added again",
        times=3,
        hurt=node,
        around=own_cluster,
        settings=("rollout.workers=1", "rollout.max_workers=2"),
        steps=160,  # the second worker is hired half a minute after there is room for it
    ),
    "disk-full": Fault(label="disk full at a checkpoint", times=3, hurt=disk_full, around=small_disk),
    "read-only": Fault(label="read-only checkpoint folder", times=3, hurt=read_only),
    "corrupt-byte": Fault(label="a bit of the newest checkpoint flipped", times=3, hurt=corrupt_byte),
}
