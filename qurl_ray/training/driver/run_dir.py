"""The run's folder, and whether a run resumes there. Light: imports neither torch nor Ray."""

import fcntl
import json
import os
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

import yaml

from qurl_ray.config import RunConfig
from qurl_ray.config.load import read_settings, validated_run, with_absolute_paths
from qurl_ray.config.shown import shown, write_settings
from qurl_ray.errors import ConfigError
from qurl_ray.files import PART
from qurl_ray.runs.checkpoint import LOOP, Checkpoint, latest, step_folders
from qurl_ray.runs.files import finite, has_finished, lines, read_summary
from qurl_ray.training.driver.room import check_writable

_MARKER = "config.yaml"
"""The file that makes a folder a run's: it is written first, and only a folder with it is ever moved."""
_MARKER_PARTS = f".{_MARKER}.*{PART}"
_KEYS = frozenset({"name", "steps", "model", "task", "rollout", "algorithm", "learner"})
"""Keys that the marker has in runs of every version, as it holds all settings. A file without them is not ours."""
_LOGS = ("metrics.jsonl", "samples.jsonl", "prompts.jsonl")
"""Files with lines for each step."""
_OF_A_START = (*_LOGS, "timeline.jsonl", "mlflow_run_id", "wandb_run_id", "summary.json")
"""Files that a failed start leaves, and that the next one must not append to or read."""
_MAY_DIFFER = ("name", "output_dir", "tracking", "checkpoint")
"""Sections and settings that a resumed run may change, because they do not change what is learned. Deadlines and
threads may differ as well, and settings that only decide when the run ends: evaluation.target_reward, and `steps`
where the learning rates so far do not depend on it."""
_MAY_DIFFER_ANYWHERE = ("timeout_s", "start_timeout_s", "threads", "kept_keys_gb", "hosts", "concurrency")
_OTHER_SUMS = (
    "learner.workers",
    "learner.backend",
    "learner.zero_stage",
    "learner.sequence_parallel",
    "learner.offload_while_waiting",  # at ZeRO 3 it decides whose Adam makes the steps
)
"""Settings that a resumed run may change, too: the same is learned, but numbers are added in another order."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunDir:
    """A run's folder, and the checkpoint that the run resumes from."""

    path: Path
    resume: Checkpoint | None = None
    notes: list[str] = field(default_factory=list)
    """Sentences on the contents of the folder and what was done about them."""
    older: Path | None = None
    """Folder to which the run that was there has been moved."""
    before: dict[str, bytes] = field(default_factory=dict)
    """Settings and summary of the run that resumes, as they were."""


@contextmanager
def open_run_dir(config: RunConfig, *, fresh: bool = False, extend: bool = False) -> Iterator[RunDir]:
    """Open <output_dir>/<name> and lock it for this run while the context lasts.

    An unfinished run of the same name and settings, with `extend` a finished one, too, resumes from its latest whole
    checkpoint. The folder of a start that failed before its first step is used again. Any other run, and with `fresh`
    every run, is moved to <name>.<n>, never overwritten; it is moved back if the block fails before its first step.
    A folder that is no run's is left alone.

    Raises:
        CheckpointError: the run has checkpoints, and none of them can be used.
        ConfigError: a run of that name is still active there, an unfinished one has other settings, or the folder
            is no run's, or cannot be created or read.
    """
    assert config.output_dir is not None, "resolve() comes first"
    run_dir = config.output_dir / config.name
    try:
        config.output_dir.mkdir(parents=True, exist_ok=True)
        lock = (config.output_dir / f".{config.name}.lock").open("w")
    except OSError as error:
        raise ConfigError(f"cannot write to {config.output_dir}: {error.strerror}; set output_dir") from None
    with lock:
        with _explained(run_dir):
            _take(lock, fcntl.LOCK_EX, run_dir)
            place = _resume_or_create(config, run_dir, fresh=fresh, extend=extend)
        with _put_back_on_failure(run_dir, place.older), _as_before_on_failure(place):
            yield place


def look_at_run_dir(config: RunConfig, *, fresh: bool = False, extend: bool = False) -> tuple[str, Checkpoint | None]:
    """Return what `open_run_dir` would do, in words, and the checkpoint that the run would resume from. Nothing is
    changed.

    Raises:
        CheckpointError, ConfigError: see `open_run_dir`.
    """
    assert config.output_dir is not None, "resolve() comes first"
    run_dir = config.output_dir / config.name
    with _explained(run_dir):
        check_writable(config)
        if (lock := config.output_dir / f".{config.name}.lock").is_file():
            with lock.open() as held:
                _take(held, fcntl.LOCK_SH, run_dir)
        old = _settings_of_run(run_dir)
        if old and _goes_on(config, run_dir, old, fresh=fresh, extend=extend):
            checkpoint, _ = latest(run_dir, set_aside=False)
            if checkpoint:
                _check_same(config, run_dir, old, checkpoint)
                return f"the folder {run_dir} (its run resumes after step {checkpoint.step})", checkpoint
        _check_nothing_asked(run_dir, extend)
        return f"the folder {run_dir} ({'its run is moved aside' if _has_steps(run_dir) else 'new'})", None


def forget_summary(run_dir: Path) -> None:
    """Remove the summary of a run that was stopped and now resumes."""
    with _explained(run_dir):
        (run_dir / "summary.json").unlink(missing_ok=True)


@contextmanager
def _explained(run_dir: Path) -> Iterator[None]:
    """Turn errors of the file system into a ConfigError that names the path."""
    try:
        yield
    except OSError as error:
        raise ConfigError(
            f"the run folder {run_dir} cannot be used: {error.filename or run_dir}: {error.strerror}; mend that, or "
            "set another name or output_dir"
        ) from error


def _take(lock: IO[str], kind: int, run_dir: Path) -> None:
    try:
        fcntl.flock(lock, kind | fcntl.LOCK_NB)
    except BlockingIOError:
        raise ConfigError(f"a run named {run_dir.name} is still going on in {run_dir}; set another name") from None


def _settings_of_run(run_dir: Path) -> dict[str, Any] | None:
    """Return the settings of the run in a folder; None if the folder is absent or empty.

    Raises:
        ConfigError: the folder holds something else than a run.
    """
    marker = run_dir / _MARKER
    if not run_dir.exists():
        return None
    if run_dir.is_dir() and all(path.match(_MARKER_PARTS) for path in run_dir.iterdir()):
        return None  # empty, but for settings that were not written to their end
    if not marker.is_file():
        raise ConfigError(f"{run_dir} is there and is no run (it has no {_MARKER}): set another name or output_dir")
    try:
        settings = read_settings(marker)
    except ConfigError as error:
        raise ConfigError(
            f"{run_dir} is there, and its {_MARKER} cannot be read as a run's settings: {error}; set another name or "
            "output_dir"
        ) from None
    if absent := sorted(_KEYS - settings.keys()):
        lacks = f"its {_MARKER} lacks {', '.join(absent)}"
        raise ConfigError(f"{run_dir} is there and is no run ({lacks}): set another name or output_dir")
    return settings


def _goes_on(config: RunConfig, run_dir: Path, old: dict[str, Any], *, fresh: bool, extend: bool) -> bool:
    """True if the run in the folder, of settings `old`, is to resume, provided that it has a checkpoint."""
    finished = _finished(run_dir, old)
    if extend and finished and config.steps <= old["steps"]:
        raise ConfigError(f"{run_dir} holds a finished run of {old['steps']} steps: --extend needs more steps")
    if finished and not (fresh or extend) and config.steps > old["steps"] and _only_longer(config, old):
        raise ConfigError(
            f"{run_dir} holds a finished run of {old['steps']} steps with these settings: --extend goes on to "
            f"{config.steps}, --fresh starts again (the old run is kept)"
        )
    return not fresh and (extend or not finished)


def _only_longer(config: RunConfig, old: dict[str, Any]) -> bool:
    """True if the settings of a run differ from those of an older one only in the number of steps."""
    try:
        known = validated_run(old, _MARKER)
    except ConfigError:
        return False
    before, now = (with_absolute_paths(settings).model_dump(mode="json") for settings in (known, config))
    return not differences(before, now, ["steps", "evaluation.target_reward"])


def _resume_or_create(config: RunConfig, run_dir: Path, *, fresh: bool, extend: bool) -> RunDir:
    notes: list[str] = []
    old = _settings_of_run(run_dir)
    if old and _goes_on(config, run_dir, old, fresh=fresh, extend=extend):
        checkpoint, notes = latest(run_dir)
        if checkpoint:
            other = _check_same(config, run_dir, old, checkpoint)
            kept = (run_dir / name for name in (_MARKER, "summary.json"))
            before = {file.name: file.read_bytes() for file in kept if file.is_file()}
            _write_settings(config, run_dir)  # some may differ, such as the name
            notes.append(f"resuming after step {checkpoint.step} of {config.steps}")
            if other:
                notes.append(f"gradients are added in another order from here on: {'; '.join(other)}")
            return RunDir(path=run_dir, resume=checkpoint, notes=notes, before=before)
    _check_nothing_asked(run_dir, extend)
    older = None
    if old and _has_steps(run_dir):
        older = _move_aside(run_dir)
        notes.append(f"the run that was in {run_dir} is now in {older}")
    elif old:
        for name in _OF_A_START:
            (run_dir / name).unlink(missing_ok=True)
    with _put_back_on_failure(run_dir, older):
        _write_settings(config, run_dir)
    return RunDir(path=run_dir, notes=notes, older=older)


def _check_nothing_asked(run_dir: Path, extend: bool) -> None:
    if extend:
        raise ConfigError(
            f"{run_dir} holds no checkpoint from which a run could be extended: one is written every checkpoint.every "
            "steps, and where a run is stopped before its last"
        )


@contextmanager
def _put_back_on_failure(run_dir: Path, older: Path | None) -> Iterator[None]:
    """Move an older run back to its folder if the block fails and the new run has made no step. The error says where
    both are."""
    try:
        yield
    except BaseException as error:
        with suppress(OSError):  # the block's error is the one to report
            if older and not _has_steps(run_dir):
                failed = _move_aside(run_dir) if run_dir.exists() else None
                older.rename(run_dir)
                left = f"; what this one left is in {failed}" if failed else ""
                error.add_note(f"the run that was in {run_dir} is there again{left}")
        raise


@contextmanager
def _as_before_on_failure(place: RunDir) -> Iterator[None]:
    """Give a run that resumes its settings and its summary back if the block fails before a further step: a finished
    run that could not be extended is finished still."""
    began = time.time()
    try:
        yield
    except BaseException:
        with suppress(OSError):
            steps = (line for _, line in lines(place.path / "metrics.jsonl") if line and line.get("kind") == "step")
            if all((finite(line.get("time")) or 0.0) < began for line in steps):
                for name, content in place.before.items():
                    (place.path / name).write_bytes(content)
        raise


def _write_settings(config: RunConfig, run_dir: Path) -> None:
    """Create the folder if it is absent, and write the settings into it. If that fails, no empty folder is left."""
    run_dir.mkdir(exist_ok=True)
    try:
        for part in run_dir.glob(_MARKER_PARTS):  # of a start that was killed
            part.unlink()
        settings = config.model_dump(mode="json")
        write_settings(run_dir / _MARKER, settings_text(settings), private=shown(settings) != settings)
        (run_dir / ".gitignore").write_text("*\n")  # git, and `ray job submit --working-dir`, leave the folder out
    except OSError:
        with suppress(OSError):
            run_dir.rmdir()  # fails if it holds something
        raise


def _has_steps(run_dir: Path) -> bool:
    """True if the folder holds anything of a step, which the next run would overwrite. A start that failed leaves
    messages and an evaluation before the first step, and no more. Lines that cannot be read may be of a step."""
    if any((run_dir / made).exists() for made in ("checkpoints", "policy")):
        return True
    if (read_summary(run_dir) or {"steps": 0}).get("steps") != 0:
        return True
    logged = (line for name in _LOGS for _, line in lines(run_dir / name))
    return any(line is None or (line["step"] > 0 and line.get("kind") not in ("info", "warning")) for line in logged)


def _finished(run_dir: Path, settings: dict[str, Any]) -> bool:
    """True if summary.json says so, and agrees with the settings beside it: the run took all its steps, or reached its
    target. The newest checkpoint, which a run that ends early always writes, has the last word on the latter. Else the
    run resumes, which for one that did finish repeats only its end."""
    summary = read_summary(run_dir)
    if summary is None or not has_finished(summary):
        return False
    if summary["steps"] == settings["steps"]:
        return True
    reached = summary.get("target_reached_at_step")
    if folders := step_folders(run_dir):
        try:
            reached = json.loads((folders[-1] / LOOP).read_bytes())["totals"]["reached_at"]
        except (FileNotFoundError, NotADirectoryError, ValueError, KeyError, TypeError, RecursionError):
            reached = None  # damaged
    return summary["steps"] == reached


def _check_same(config: RunConfig, run_dir: Path, old: dict[str, Any], checkpoint: Checkpoint) -> list[str]:
    """Raise ConfigError if the run in the folder learns something else. Return the differences in rounding alone."""
    try:  # settings that were added since then get their defaults
        known = validated_run(old, "config.yaml")
    except ConfigError as error:
        raise ConfigError(
            f"{run_dir} holds an unfinished run of another version, whose settings are not all known here: {error}. "
            "Set another name, or start again with --fresh (the old run is kept)"
        ) from None
    may_differ = ["evaluation.target_reward"]
    done, *totals = (
        steps * config.algorithm.updates_per_rollout for steps in (checkpoint.step, known.steps, config.steps)
    )
    if config.steps > checkpoint.step and config.learner.same_rates(done, *totals):
        may_differ.append("steps")
    before, now = (with_absolute_paths(settings).model_dump(mode="json") for settings in (known, config))
    differing = differences(before, now, [*may_differ, *_OTHER_SUMS])
    if differing:
        hint, schedule = "", config.learner.schedule
        if config.steps not in (known.steps, checkpoint.step) and schedule != "constant":
            hint = (
                f". With learner.schedule={schedule}, the learning rates so far depend on `steps`; with constant they "
                "do not, nor with wsd before it falls"
            )
        raise ConfigError(
            f"{run_dir} holds a run with other settings: {'; '.join(differing)}. Give those to resume it, set another "
            f"name, or start again with --fresh (the old run is kept){hint}"
        )
    return [text for text in differences(before, now, may_differ) if text.startswith(_OTHER_SUMS)]


def differences(old: dict[str, Any], new: dict[str, Any], may_differ: Sequence[str] = ()) -> list[str]:
    """Settings that change what is learned and that differ, as `key: old → new`. Those in `may_differ` do not count."""
    before, now = dict(_leaves(old)), dict(_leaves(new))
    keys = [key for key in {**before, **now} if before.get(key) != now.get(key) and key not in may_differ]
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
    return run_dir.rename(older)


def settings_text(settings: dict[str, Any]) -> str:
    """The settings, as plain nested values, as YAML."""
    return yaml.safe_dump(settings, sort_keys=False, allow_unicode=True)


def submitted() -> bool:
    """Return True if this driver runs as a Ray job."""
    return "RAY_JOB_CONFIG_JSON_ENV_VAR" in os.environ
