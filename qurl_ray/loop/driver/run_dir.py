"""The run's folder, and whether a run resumes there. Light: a dry run needs neither torch nor Ray."""

import fcntl
import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from qurl_ray.config import RunConfig, resolve
from qurl_ray.config.load import read_settings, validated_run
from qurl_ray.config.shown import redacted, write_settings
from qurl_ray.errors import ConfigError
from qurl_ray.loop.checkpoint import Checkpoint, latest

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

    An unfinished run of the same name and settings resumes from its latest whole checkpoint. A finished run, a run
    without a checkpoint, or with `fresh` any run, is moved to <name>.<n>, never overwritten. What is no run is left
    alone.

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
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ConfigError(f"a run named {config.name} is still going on in {run_dir}; set another name") from None
        yield _resume_or_create(config, run_dir, fresh)


def _resume_or_create(config: RunConfig, run_dir: Path, fresh: bool) -> RunDir:
    notes: list[str] = []
    if run_dir.exists() and not (run_dir / _MARKER).is_file() and not _empty(run_dir):
        raise ConfigError(f"{run_dir} is there and is no run (it has no {_MARKER}): set another name or output_dir")
    if run_dir.exists() and not fresh and not _finished(run_dir):
        checkpoint, notes = latest(run_dir)
        if checkpoint:
            _check_same(config, run_dir)
            notes.append(f"resuming after step {checkpoint.step} of {config.steps}")
            return RunDir(path=run_dir, resume=checkpoint, notes=notes)
    if (run_dir / _MARKER).exists():
        notes.append(f"the run that was in {run_dir} is now in {_move_aside(run_dir)}")
    try:
        run_dir.mkdir(exist_ok=True)
        write_settings(run_dir / _MARKER, settings_text(config))
    except OSError as error:
        raise ConfigError(f"cannot make the run folder {run_dir}: {error.strerror}; set output_dir") from None
    return RunDir(path=run_dir, notes=notes)


def _empty(folder: Path) -> bool:
    return folder.is_dir() and not any(folder.iterdir())


def _finished(run_dir: Path) -> bool:
    try:
        return not json.loads((run_dir / "summary.json").read_text()).get("interrupted", False)
    except (OSError, ValueError):
        return False


def _check_same(config: RunConfig, run_dir: Path) -> None:
    try:
        old = read_settings(run_dir / _MARKER)
    except ConfigError as error:
        raise ConfigError(f"{run_dir} holds an unfinished run, but its config.yaml cannot be read: {error}") from None
    try:  # settings that were added since then get their defaults
        known = validated_run(old, "config.yaml").model_dump(mode="json")
    except ConfigError as error:
        raise ConfigError(
            f"{run_dir} holds an unfinished run of another version, whose settings are not all known here: {error}. "
            "Set another name, or start again with --fresh (the old run is kept)"
        ) from None
    differing = differences(known, config.model_dump(mode="json"))
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
        f"{key}: {before.get(key, 'absent')} → {now.get(key, 'absent')}"
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


def settings_text(config: RunConfig) -> str:
    """The resolved settings as YAML."""
    return yaml.safe_dump(config.model_dump(mode="json"), sort_keys=False, allow_unicode=True)


def dry_run(config: RunConfig) -> str:
    """Save and return the resolved settings; they were validated when they were read."""
    config = resolve(config, submitted=submitted())
    assert config.output_dir is not None
    run_dir = config.output_dir / f"{config.name}.dry-run"
    run_dir.mkdir(parents=True, exist_ok=True)
    text = settings_text(config)
    write_settings(run_dir / "config.yaml", text)
    return redacted(text)


def submitted() -> bool:
    """Return True if this driver runs as a Ray job."""
    return "RAY_JOB_CONFIG_JSON_ENV_VAR" in os.environ
