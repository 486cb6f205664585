"""The run's folder, and whether a run resumes there. Light: imports neither torch nor Ray."""

import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

import yaml

from qurl_ray.config import RunConfig
from qurl_ray.config.load import read_settings, validated_run, with_absolute_paths
from qurl_ray.config.shown import shown, write_settings
from qurl_ray.errors import ConfigError
from qurl_ray.loop.checkpoint import Checkpoint, latest
from qurl_ray.report.run_files import read_summary

_MARKER = "config.yaml"
"""The file that makes a folder a run's: it is written first, and only a folder with it is ever moved."""
_MAY_DIFFER = ("name", "output_dir", "tracking", "checkpoint")
"""Sections and settings that a resumed run may change, because they do not change what is learned. Deadlines and
threads may differ as well."""
_MAY_DIFFER_ANYWHERE = ("timeout_s", "start_timeout_s", "threads")


@dataclass(frozen=True, slots=True, kw_only=True)
class RunDir:
    """A run's folder, and the checkpoint that the run resumes from."""

    path: Path
    resume: Checkpoint | None = None
    notes: list[str] = field(default_factory=list)
    """Sentences on what was found in the folder and what was done about it."""


@contextmanager
def open_run_dir(config: RunConfig, *, fresh: bool = False) -> Iterator[RunDir]:
    """Open <output_dir>/<name> and lock it for this run while the context lasts.

    An unfinished run of the same name and settings resumes from its latest whole checkpoint. The folder of a start that
    failed before its first step is used again. Any other run, and with `fresh` every run, is moved to <name>.<n>, never
    overwritten. What is no run is left alone.

    Raises:
        CheckpointError: the run has checkpoints, and none of them can be used.
        ConfigError: a run of that name is still active there, an unfinished one has other settings, or the folder
            cannot be created.
    """
    assert config.output_dir is not None, "resolve() comes first"
    run_dir = config.output_dir / config.name
    try:
        config.output_dir.mkdir(parents=True, exist_ok=True)
        lock = (config.output_dir / f".{config.name}.lock").open("w")
    except OSError as error:
        raise ConfigError(f"cannot write to {config.output_dir}: {error.strerror}; set output_dir") from None
    with lock:
        _take(lock, fcntl.LOCK_EX, run_dir)
        yield _resume_or_create(config, run_dir, fresh)


def look_at_run_dir(config: RunConfig, *, fresh: bool = False) -> tuple[str, Checkpoint | None]:
    """Return what `open_run_dir` would do, in words, and the checkpoint that the run would resume from. Nothing is
    changed.

    Raises:
        CheckpointError, ConfigError: see `open_run_dir`.
    """
    assert config.output_dir is not None, "resolve() comes first"
    run_dir = config.output_dir / config.name
    there = next(folder for folder in (config.output_dir, *config.output_dir.parents) if folder.exists())
    if not there.is_dir() or not os.access(there, os.W_OK | os.X_OK):
        raise ConfigError(f"cannot write to {config.output_dir}: {there} is no folder to write in; set output_dir")
    if (lock := config.output_dir / f".{config.name}.lock").is_file():
        with lock.open() as held:
            _take(held, fcntl.LOCK_SH, run_dir)
    _check_is_run(run_dir)
    if run_dir.exists() and not fresh and not _finished(run_dir):
        checkpoint, _ = latest(run_dir, set_aside=False)
        if checkpoint:
            _check_same(config, run_dir)
            return f"the folder {run_dir} (its run resumes after step {checkpoint.step})", checkpoint
    return f"the folder {run_dir} ({'its run is moved aside' if _has_steps(run_dir) else 'new'})", None


def _take(lock: IO[str], kind: int, run_dir: Path) -> None:
    try:
        fcntl.flock(lock, kind | fcntl.LOCK_NB)
    except BlockingIOError:
        raise ConfigError(f"a run named {run_dir.name} is still going on in {run_dir}; set another name") from None


def _check_is_run(run_dir: Path) -> None:
    if run_dir.exists() and not (run_dir / _MARKER).is_file() and not _empty(run_dir):
        raise ConfigError(f"{run_dir} is there and is no run (it has no {_MARKER}): set another name or output_dir")


def _resume_or_create(config: RunConfig, run_dir: Path, fresh: bool) -> RunDir:
    notes: list[str] = []
    _check_is_run(run_dir)
    if run_dir.exists() and not fresh and not _finished(run_dir):
        checkpoint, notes = latest(run_dir)
        if checkpoint:
            _check_same(config, run_dir)
            _write_settings(config, run_dir)  # those that may differ, such as the name
            notes.append(f"resuming after step {checkpoint.step} of {config.steps}")
            return RunDir(path=run_dir, resume=checkpoint, notes=notes)
    if (run_dir / _MARKER).exists():
        if _has_steps(run_dir):
            notes.append(f"the run that was in {run_dir} is now in {_move_aside(run_dir)}")
        else:
            (run_dir / "mlflow_run_id").unlink(missing_ok=True)  # the settings may be others
    _write_settings(config, run_dir)
    return RunDir(path=run_dir, notes=notes)


def _write_settings(config: RunConfig, run_dir: Path) -> None:
    try:
        run_dir.mkdir(exist_ok=True)
        settings = config.model_dump(mode="json")
        write_settings(run_dir / _MARKER, settings_text(settings), private=shown(settings) != settings)
    except OSError as error:
        raise ConfigError(f"cannot make the run folder {run_dir}: {error.strerror}; set output_dir") from None


def _empty(folder: Path) -> bool:
    return folder.is_dir() and not any(folder.iterdir())


def _has_steps(run_dir: Path) -> bool:
    """True if something was learned or saved there: a start that failed leaves messages, and no more."""
    prompts = run_dir / "prompts.jsonl"  # which each step adds a line to
    drew = prompts.is_file() and prompts.stat().st_size > 0
    return drew or any((run_dir / made).exists() for made in ("checkpoints", "policy"))


def _finished(run_dir: Path) -> bool:
    """True if summary.json says so, and agrees with itself and with the settings beside it. Else the run resumes, which
    for one that did finish repeats only its end."""
    try:
        found, asked = read_summary(run_dir) or {}, read_settings(run_dir / _MARKER).get("steps")
    except (OSError, ConfigError):
        return False
    over = "steps" in found and found["steps"] in (asked, found.get("target_reached_at_step"))
    return over and found.get("interrupted") is False


def _check_same(config: RunConfig, run_dir: Path) -> None:
    try:
        old = read_settings(run_dir / _MARKER)
    except ConfigError as error:
        raise ConfigError(f"{run_dir} holds an unfinished run, but its config.yaml cannot be read: {error}") from None
    try:  # settings that were added since then get their defaults
        known = validated_run(old, "config.yaml")
    except ConfigError as error:
        raise ConfigError(
            f"{run_dir} holds an unfinished run of another version, whose settings are not all known here: {error}. "
            "Set another name, or start again with --fresh (the old run is kept)"
        ) from None
    before, now = (with_absolute_paths(settings).model_dump(mode="json") for settings in (known, config))
    differing = differences(before, now)
    if differing:
        raise ConfigError(
            f"{run_dir} holds an unfinished run with other settings: {'; '.join(differing)}. "
            "Give those to resume it, set another name, or start again with --fresh (the old run is kept)"
        )


def differences(old: dict[str, Any], new: dict[str, Any]) -> list[str]:
    """Settings that change what is learned and that differ, as `key: old → new`."""
    before, now = dict(_leaves(old)), dict(_leaves(new))
    keys = [key for key in {**before, **now} if before.get(key) != now.get(key)]
    return [
        f"{key}: {shown(before.get(key, 'absent'), key)} → {shown(now.get(key, 'absent'), key)}"
        for key in keys
        if key.split(".")[0] not in _MAY_DIFFER and key.split(".")[-1] not in _MAY_DIFFER_ANYWHERE
    ]


def _leaves(section: dict[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in section.items():
        if isinstance(value, dict) and value:
            yield from _leaves(value, f"{prefix}{key}.")
        else:
            yield prefix + key, value


def _move_aside(run_dir: Path) -> Path:
    number = 1
    while (older := run_dir.with_name(f"{run_dir.name}.{number}")).exists():
        number += 1
    try:
        return run_dir.rename(older)
    except OSError as error:
        raise ConfigError(f"cannot move {run_dir} aside: {error.strerror}; set another name") from None


def settings_text(settings: dict[str, Any]) -> str:
    """The settings, as plain nested values, as YAML."""
    return yaml.safe_dump(settings, sort_keys=False, allow_unicode=True)


def submitted() -> bool:
    """Return True if this driver runs as a Ray job."""
    return "RAY_JOB_CONFIG_JSON_ENV_VAR" in os.environ
