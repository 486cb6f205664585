"""The folder that a run leaves. Light: a dry run needs neither torch nor Ray."""

import os
from pathlib import Path

import yaml

from qurl_ray.config import RunConfig, resolve
from qurl_ray.errors import ConfigError


def new_run_dir(config: RunConfig) -> Path:
    """<output_dir>/<name>; an older run of the name is moved to <name>.<n>, never overwritten."""
    assert config.output_dir is not None, "resolve() comes first"
    run_dir = config.output_dir / config.name
    try:
        if run_dir.exists():
            number = 1
            while (older := run_dir.with_name(f"{config.name}.{number}")).exists():
                number += 1
            run_dir.rename(older)
        run_dir.mkdir(parents=True)
    except OSError as error:
        raise ConfigError(f"cannot make the run folder {run_dir}: {error.strerror}; set output_dir") from None
    return run_dir


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
