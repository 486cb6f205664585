"""Copies of a run in object storage (`checkpoint.upload`), and a run's folder from there when this machine's is gone.

    <address>/<name>/
        owner.json       which run it is, and when it was last active; 0 once it has ended
        config.yaml, metrics.jsonl, samples.jsonl, prompts.jsonl, …   as of the last copy
        checkpoints/step-000040/…, manifest.json                      the manifest is copied last
        policy/, policy-int8/, summary.json, report.html              when the run has ended

A checkpoint without a manifest is one whose copy was interrupted; it is never resumed, as its local twin would not be.
A restored checkpoint is compared with the manifest's checksums, like any other.
"""

import json
import shutil
import socket
import threading
import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import fsspec

from qurl_ray.config import RunConfig
from qurl_ray.config.shown import reason, redacted
from qurl_ray.errors import CheckpointError, ConfigError, QurlError
from qurl_ray.policy.save import replaced
from qurl_ray.runs.checkpoint import verify
from qurl_ray.types import Event, Outcome

_ACTIVE_S = 300.0
"""Age of the owner's last sign below which another run is taken to be going on."""
_BEAT_S = 60.0
_RETRY_S = (1.0, 60.0)
"""First and longest pause between two attempts, in seconds."""
_CLOSE_S = 600.0
"""Longest time that the end of a run waits for its last copies."""
_ID = "upload_id"
_LOGS = (
    "config.yaml",
    "metrics.jsonl",
    "samples.jsonl",
    "prompts.jsonl",
    "timeline.jsonl",
    "mlflow_run_id",
    "wandb_run_id",
)
_RESULTS = ("summary.json", "report.html")
_MANIFEST = "manifest.json"


class Storage:
    """The place of one run in object storage."""

    def __init__(self, config: RunConfig) -> None:
        """Open the storage; nothing is read or written.

        Raises:
            ConfigError: the address is none, or needs a package that is not installed.
        """
        assert config.checkpoint.upload, "the caller looks"
        self.address = f"{config.checkpoint.upload.rstrip('/')}/{config.name}"
        self._own, self._beaten, self._process = "", 0.0, uuid.uuid4().hex
        """Id of the run that uses the place, and when it last said so, in monotonic seconds."""
        try:
            self._files, self._root = fsspec.core.url_to_fs(self.address)
        except (ImportError, ValueError, OSError) as error:
            raise ConfigError(f"checkpoint.upload={self._shown} cannot be opened: {reason(error)}") from None

    def restore(self, run_dir: Path) -> list[str]:
        """Make the run's folder from the newest whole checkpoint, if the folder is not there. Return sentences on the
        checkpoints that were passed over, and on the one that was restored.

        Raises:
            ConfigError: another run is going on there, or the storage cannot be read.
            CheckpointError: there are checkpoints, and none of them is whole.
        """
        if run_dir.exists() and any(run_dir.iterdir()):
            return []
        with self._explained("read"):
            owner, steps = self._owner(), self._steps()
            if owner is None or not steps:
                return []
            self._refuse_active(owner)
            notes: list[str] = []
            for step in reversed(steps):
                try:
                    with replaced(run_dir) as aside:  # or a start after a broken connection would find half of it
                        self._fetch(step, aside)
                        (aside / _ID).write_text(owner["run"] + "\n")
                except CheckpointError as error:
                    notes.append(f"a copy was passed over: {error}")
                    continue
                return [*notes, f"{run_dir} was not here: its checkpoint of step {step} came from {self._shown}"]
            raise CheckpointError(f"no checkpoint in {self._shown} is whole: {'; '.join(notes)}")

    def claim(self, run_dir: Path) -> str:
        """Write down that this run uses the place, and return the run's id.

        Raises:
            ConfigError: another run uses it, or it cannot be written.
        """
        known = run_dir / _ID
        own = known.read_text().strip() if known.is_file() else ""
        with self._explained("read"):
            owner = self._owner()
            another = owner is not None and owner["run"] != own
            kept = another and (self._steps() or self._files.exists(f"{self._root}/summary.json"))
        if owner and (another or owner["host"] != socket.gethostname()):
            self._refuse_active(owner)
        if kept:
            raise ConfigError(
                f"{self._shown} holds another run of this name: set another name or checkpoint.upload, or remove it"
            )
        self._own = own or uuid.uuid4().hex
        with self._explained("written"):
            self.beat()
        known.write_text(self._own + "\n")
        return self._own

    def beat(self) -> None:
        """Write down that the run is active now.

        Raises:
            CheckpointError: another process has taken the run over, as this one gave no sign for long.
        """
        if self._beaten and (owner := self._owner()) and owner.get("process") != self._process:
            raise CheckpointError(
                f"the run is now made on {owner['host']}, since this process could not reach {self._shown}: nothing "
                "more is copied from here"
            )
        self._sign(time.time())

    def release(self) -> None:
        """Write down that the run is not active any more: it may go on elsewhere at once."""
        self._sign(0.0)

    def _sign(self, seen: float) -> None:
        owner = {"run": self._own, "process": self._process, "host": socket.gethostname(), "seen": seen}
        self._files.makedirs(self._root, exist_ok=True)
        self._files.pipe_file(f"{self._root}/owner.json", json.dumps(owner).encode())
        self._beaten = time.monotonic()

    def copy_checkpoint(self, folder: Path) -> None:
        """Copy a checkpoint and the run's logs; the manifest last."""
        run_dir, name = folder.parents[1], f"checkpoints/{folder.name}"
        for log in _LOGS:
            if (run_dir / log).is_file():
                self._put(run_dir / log, log)
        listed = json.loads((folder / _MANIFEST).read_text())["sha256"]
        for file in [*sorted(listed), _MANIFEST]:
            self._put(folder / file, f"{name}/{file}")

    def copy_results(self, run_dir: Path) -> None:
        """Copy the logs, results and policies of a run that has ended."""
        for name in (*_LOGS, *_RESULTS):
            if (run_dir / name).is_file():
                self._put(run_dir / name, name)
        for folder in run_dir.glob("policy*"):
            for file in (path for path in folder.rglob("*") if path.is_file()):
                self._put(file, str(file.relative_to(run_dir)))

    def prune(self, keep: list[str]) -> None:
        """Delete all copies of checkpoints but the ones with these names."""
        for step in self._steps():
            name = f"step-{step:06d}"
            if name not in keep:
                folder = f"{self._root}/checkpoints/{name}"
                self._files.rm_file(f"{folder}/{_MANIFEST}")  # first: what is left is no checkpoint
                self._files.rm(folder, recursive=True)

    @property
    def _shown(self) -> str:
        return redacted(self.address)

    @contextmanager
    def _explained(self, done: str) -> Iterator[None]:
        """Turn the many errors of storages into a ConfigError."""
        try:
            yield
        except QurlError:
            raise
        except Exception as error:
            raise ConfigError(f"checkpoint.upload: {self._shown} cannot be {done}: {reason(error)}") from None

    def _refuse_active(self, owner: dict[str, Any]) -> None:
        age = time.time() - float(owner["seen"])
        if age < _ACTIVE_S:
            raise ConfigError(
                f"{self._shown} is used by a run on {owner['host']}, which was active {age:.0f} s ago: set another "
                f"name, or wait {_ACTIVE_S:.0f} s if it was killed"
            )

    def _owner(self) -> dict[str, Any] | None:
        self._files.invalidate_cache()
        try:
            return json.loads(self._files.cat_file(f"{self._root}/owner.json"))
        except FileNotFoundError:
            return None

    def _steps(self) -> list[int]:
        """Return the steps of the checkpoints that have a manifest, the oldest first."""
        self._files.invalidate_cache()
        manifests = self._files.glob(f"{self._root}/checkpoints/step-*/{_MANIFEST}")
        return sorted(int(str(path).split("/")[-2].removeprefix("step-")) for path in manifests)

    def _fetch(self, step: int, run_dir: Path) -> None:
        """Bring a checkpoint and the logs into the run's folder, and compare it with its manifest."""
        name = f"step-{step:06d}"
        folder = run_dir / "checkpoints" / name
        shutil.rmtree(folder, ignore_errors=True)
        remote = f"{self._root}/checkpoints/{name}"
        for path in self._files.find(remote):
            self._get(str(path), folder / str(path)[len(str(remote)) :].lstrip("/"))
        try:
            verify(folder)
        except CheckpointError:
            shutil.rmtree(folder)
            raise
        for log in _LOGS:
            if log == "config.yaml":  # it may hold a password
                (run_dir / log).touch(mode=0o600)
            with suppress(FileNotFoundError):
                self._get(f"{self._root}/{log}", run_dir / log)

    def _get(self, remote: str, here: Path) -> None:
        here.parent.mkdir(parents=True, exist_ok=True)
        self._files.get_file(remote, str(here))

    def _put(self, here: Path, name: str) -> None:
        if time.monotonic() - self._beaten > _BEAT_S:  # a checkpoint of many files may take long
            self.beat()
        remote = f"{self._root}/{name}"
        self._files.makedirs(remote.rpartition("/")[0], exist_ok=True)
        self._files.put_file(str(here), remote)


class Uploader:
    """Sink that copies each checkpoint in a thread of its own. Steps never wait for it: while a copy goes on, only the
    newest of the checkpoints that come is kept in mind. A copy that fails is tried again, with longer and longer
    pauses, until it succeeds or a newer checkpoint is there."""

    name = "upload"

    def __init__(self, storage: Storage, run_dir: Path) -> None:
        """Prepare the thread, which the first event starts. `storage` has been claimed for the run."""
        self._storage, self._run_dir = storage, run_dir
        self._change = threading.Condition()
        self._wanted: Path | None = None
        self._results = self._closed = False
        self._notes: list[str] = []
        self._thread = threading.Thread(target=self._work, name="upload", daemon=True)

    def handle(self, event: Event, at: float) -> None:
        """Ask for a copy of a checkpoint."""
        if self._thread.ident is None:  # not before: a start that fails would leave it behind
            self._thread.start()
        if event.kind == "checkpoint":
            with self._change:
                self._wanted = Path(event.values["folder"])
                self._change.notify()

    def notices(self) -> list[str]:
        """Return sentences on failures since the last call."""
        with self._change:
            notes, self._notes = self._notes, []
        return notes

    def close(self, outcome: Outcome) -> None:
        """Make the copies that are still to be made, and copy the results of a run that did not fail."""
        with self._change:
            self._results, self._closed = outcome != "failed", True
            self._change.notify()
        if self._thread.ident is None:
            return
        self._thread.join(_CLOSE_S)
        if self._thread.is_alive():
            self._note(f"the last copies were not done within {_CLOSE_S:.0f} s; {self._run_dir} has all of it")

    # --- in the thread -------------------------------------------------------------------------------------------

    def _work(self) -> None:
        pause, told = _RETRY_S[0], False
        while True:
            with self._change:
                if self._wanted is None and not self._closed:
                    self._change.wait(_BEAT_S)
                wanted, closed = self._wanted, self._closed
            try:
                self._storage.beat()
                if wanted:
                    self._storage.copy_checkpoint(wanted)
                    folders = (self._run_dir / "checkpoints").glob("step-*")
                    self._storage.prune([folder.name for folder in folders])
                    self._forget(wanted)
                elif closed:
                    if self._results:
                        self._storage.copy_results(self._run_dir)
                    self._storage.release()
                    return
                pause, told = _RETRY_S[0], False
            except CheckpointError as error:
                self._note(str(error))
                return
            except Exception as error:  # of as many kinds as there are storages
                if wanted and not wanted.is_dir():
                    self._forget(wanted)  # a newer one has taken its place here, and comes next
                    continue
                if not told:
                    self._note(f"a copy to {self._storage.address} failed ({reason(error)}); it is tried again")
                told = True
                if closed and pause >= _RETRY_S[1]:
                    self._note(f"{self._storage.address} lacks the last copies; {self._run_dir} has all of it")
                    return
                with self._change:
                    self._change.wait(pause)
                pause = min(2 * pause, _RETRY_S[1])

    def _forget(self, folder: Path) -> None:
        with self._change:
            if self._wanted == folder:
                self._wanted = None

    def _note(self, sentence: str) -> None:
        with self._change:
            self._notes.append(redacted(sentence))
