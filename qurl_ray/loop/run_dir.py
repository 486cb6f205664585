"""The folder that a run leaves. Light: a dry run needs neither torch nor Ray."""

import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import yaml

from qurl_ray.config import RunConfig, resolve
from qurl_ray.errors import ConfigError


@contextmanager
def new_run_dir(config: RunConfig) -> Iterator[Path]:
    """<output_dir>/<name>, this run's alone while the context lasts.

    An older run of the name is moved to <name>.<n>, never overwritten.

    Raises:
        ConfigError: a run of that name is still going on there, or the folder cannot be made.
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
        _move_older_aside(run_dir)
        yield run_dir


def _move_older_aside(run_dir: Path) -> None:
    try:
        if run_dir.exists():
            number = 1
            while (older := run_dir.with_name(f"{run_dir.name}.{number}")).exists():
                number += 1
            run_dir.rename(older)
        run_dir.mkdir()
    except OSError as error:
        raise ConfigError(f"cannot make the run folder {run_dir}: {error.strerror}; set output_dir") from None


def write_config(config: RunConfig, run_dir: Path) -> str:
    """Save the resolved settings as config.yaml; returns their text."""
    text = yaml.safe_dump(config.model_dump(mode="json"), sort_keys=False)
    (run_dir / "config.yaml").write_text(text)
    return text


def dry_run(config: RunConfig) -> str:
    """Save and return the resolved settings; they were validated when they were read."""
    config = resolve(config, submitted=submitted())
    assert config.output_dir is not None
    run_dir = config.output_dir / f"{config.name}.dry-run"
    run_dir.mkdir(parents=True, exist_ok=True)
    return write_config(config, run_dir)


def submitted() -> bool:
    """Whether this driver runs as a Ray job."""
    return "RAY_JOB_CONFIG_JSON_ENV_VAR" in os.environ
