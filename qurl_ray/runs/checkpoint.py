"""Checkpoints on disk: contents, verification, and which ones are kept. Light: imports neither torch nor Ray.

    checkpoints/step-000040/
        manifest.json    step, mean held-out reward if it was measured there, SHA-256 of every other file
        learner/         parameters, optimizer, schedule, random states, by rows (learner.state)
        loop.json        state of the coordinator
        policy/          the policy at this step, for AutoModelForCausalLM.from_pretrained

A checkpoint is written to a folder whose name begins with a dot, and renamed when its manifest is complete. Nothing is
loaded from a folder whose files differ from its manifest. This detects damage, half-written files, and foreign files
beside our own. It does not protect against someone who may write to the run folder.
"""

import hashlib
import json
import os
import shutil
import stat
import tempfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

from qurl_ray.errors import CheckpointError

LOOP = "loop.json"
"""Name of the file with the coordinator's state."""
_MANIFEST = "manifest.json"
_OLD = ".old-"
"""Beginning of the names of folders that are being removed."""
_DAMAGE = (FileNotFoundError, IsADirectoryError, NotADirectoryError)
"""Errors of reading that are about the contents of a folder; any other OSError is about the access to it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Checkpoint:
    """A complete checkpoint, as its manifest describes it."""

    folder: Path
    step: int
    reward: float | None
    """Mean held-out reward of the weights at this step; None if it was not measured."""

    @property
    def learner(self) -> Path:
        return self.folder / "learner"

    def state(self) -> dict[str, Any]:
        """Return the coordinator's state: see Session.state."""
        return json.loads((self.folder / LOOP).read_text())


def partial_folder(run_dir: Path, step: int) -> Path:
    """Folder to which the checkpoint of a step is written before it is complete."""
    return run_dir / "checkpoints" / f".step-{step:06d}"


def complete(partial: Path, *, step: int, reward: float | None) -> Checkpoint:
    """Flush the files of `partial` to disk, write their checksums to the manifest, and give the folder its final
    name."""
    manifest: dict[str, Any] = {"step": step, "reward": reward, "sha256": _sums(partial)}
    manifest["manifest_sha256"] = _own_sum(manifest)
    with (partial / _MANIFEST).open("w") as file:
        json.dump(manifest, file, indent=1)
        file.flush()
        os.fsync(file.fileno())
    folder = partial.with_name(partial.name.removeprefix("."))
    if folder.exists():  # of a run that continued a little after it was given up
        discard(folder)
    partial.rename(folder)
    descriptor = os.open(folder.parent, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
    return Checkpoint(folder=folder, step=step, reward=reward)


def discard(folder: Path) -> None:
    """Remove a folder; its name is free at once. Files that cannot be removed, such as files that a reader holds open
    on NFS, stay in a hidden folder beside it, whose name begins with `.old-`.

    Raises:
        OSError: the folder cannot be renamed.
    """
    hidden = Path(tempfile.mkdtemp(dir=folder.parent, prefix=_OLD))
    folder.rename(hidden)
    shutil.rmtree(hidden, ignore_errors=True)


def step_folders(run_dir: Path) -> list[Path]:
    """Return the folders of complete checkpoints, the oldest first; none if the run has made none.

    Raises:
        OSError: the folder of checkpoints cannot be read.
    """
    return _listed(run_dir / "checkpoints", "step-")


def verify(folder: Path) -> Checkpoint:
    """Return the checkpoint in `folder`, after comparing every file with the manifest.

    Raises:
        CheckpointError: a file is missing, damaged, or not in the manifest.
        OSError: a file cannot be read.
    """
    checkpoint, expected = _read(folder)
    sums = _sums(folder)
    for name in sorted(set(expected) | set(sums)):
        if name not in sums:
            raise CheckpointError(f"{folder}: {name} is missing")
        if name not in expected:
            raise CheckpointError(f"{folder}: {name} is not in the manifest")
        if sums[name] != expected[name]:
            raise CheckpointError(f"{folder}: {name} is damaged: its SHA-256 is not the manifest's")
    return checkpoint


def latest(run_dir: Path, *, set_aside: bool = True) -> tuple[Checkpoint | None, list[str]]:
    """Return the newest whole checkpoint of a run (None if it has made none), and one sentence on each newer one that
    was rejected.

    Rejected ones are renamed to damaged.step-<n>, so that `prune` does not keep them in place of later checkpoints;
    with `set_aside=False` nothing is renamed.

    Raises:
        CheckpointError: a checkpoint cannot be read, which says nothing about its contents, or none is whole. Nothing
            is renamed.
    """
    rejected: dict[Path, CheckpointError] = {}
    try:
        for folder in reversed(step_folders(run_dir)):
            try:
                checkpoint = verify(folder)
            except CheckpointError as error:
                rejected[folder] = error
                continue
            for damaged in rejected if set_aside else ():
                aside = damaged.with_name(f"damaged.{damaged.name}")
                if aside.exists():
                    discard(aside)
                damaged.rename(aside)
            return checkpoint, [f"checkpoint passed over: {error}" for error in rejected.values()]
    except OSError as error:
        raise CheckpointError(
            f"{error.filename or run_dir / 'checkpoints'} cannot be read ({error.strerror}), so it is not known "
            "whether the run can resume: make it readable and give the same command again, or start again with --fresh"
        ) from error
    if rejected:
        reasons = "; ".join(map(str, rejected.values()))
        raise CheckpointError(f"no checkpoint of {run_dir} is whole: {reasons}. Start again with --fresh")
    return None, []


def prune(run_dir: Path, keep: int) -> None:
    """Delete all checkpoints except the latest `keep` and the one with the best held-out reward. Half-written ones are
    deleted, too. A folder that cannot be deleted stays until the next call and is no error."""
    checkpoints = []
    with suppress(OSError):
        for folder in step_folders(run_dir):
            with suppress(CheckpointError, OSError):  # left for the user to inspect
                checkpoints.append(_read(folder)[0])
    measured = [checkpoint for checkpoint in checkpoints if checkpoint.reward is not None]
    kept = {checkpoint.step for checkpoint in checkpoints[-keep:]}
    if measured:
        kept.add(max(measured, key=lambda checkpoint: (checkpoint.reward, checkpoint.step)).step)
    for checkpoint in checkpoints:
        if checkpoint.step not in kept:
            with suppress(OSError):
                discard(checkpoint.folder)
    with suppress(OSError):
        for left in _listed(run_dir / "checkpoints", ".step-", _OLD):
            shutil.rmtree(left, ignore_errors=True)


def _listed(folder: Path, *prefixes: str) -> list[Path]:
    """Sorted entries of a folder whose names begin with a prefix; none if the folder is absent. Unlike Path.glob, this
    raises if the folder cannot be read."""
    try:
        return sorted(folder / name for name in os.listdir(folder) if name.startswith(prefixes))
    except FileNotFoundError:
        return []


def _read(folder: Path) -> tuple[Checkpoint, dict[str, str]]:
    try:
        manifest = json.loads((folder / _MANIFEST).read_text())
        if manifest.pop("manifest_sha256", None) != _own_sum(manifest):
            raise ValueError("its own SHA-256 differs, or is absent, as in checkpoints of an earlier version")
        checkpoint = Checkpoint(folder=folder, step=manifest["step"], reward=manifest["reward"])
        if folder.name != f"step-{checkpoint.step:06d}":
            raise ValueError(f"it is of step {checkpoint.step}")
        return checkpoint, dict(manifest["sha256"])
    except (*_DAMAGE, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise CheckpointError(f"{folder}: no readable {_MANIFEST} ({type(error).__name__}: {error})") from None


def _own_sum(manifest: dict[str, Any]) -> str:
    """SHA-256 of the manifest's other contents."""
    return hashlib.sha256(json.dumps(manifest, sort_keys=True).encode()).hexdigest()


def _sums(folder: Path) -> dict[str, str]:
    """SHA-256 of every file except the manifest and leftovers of file systems, by relative path. Each file is flushed
    to disk first: a checksum would be worth nothing if a power cut then emptied the file."""
    paths = sorted(path for path in _files(folder) if path != folder / _MANIFEST)
    with ThreadPoolExecutor(min(8, os.cpu_count() or 1)) as pool:  # hashing releases the interpreter's lock
        return dict(zip([str(path.relative_to(folder)) for path in paths], pool.map(_sum, paths), strict=True))


def _files(folder: Path) -> Iterator[Path]:
    """Yield the files below a folder, except leftovers of file systems. Unlike Path.rglob, this raises if a folder
    cannot be read."""

    def fail(error: OSError) -> NoReturn:
        raise error

    for parent, _, names in os.walk(folder, onerror=fail):
        for path in (Path(parent, name) for name in names if not name.startswith((".nfs", ".DS_Store"))):
            with suppress(*_DAMAGE):  # a link to nothing
                if stat.S_ISREG(path.stat().st_mode):
                    yield path


def _sum(path: Path) -> str:
    with path.open("rb") as file:
        os.fsync(file.fileno())
        return hashlib.file_digest(file, "sha256").hexdigest()
