"""Record of the app that `qurl serve` runs on a port, by which `qurl serve --swap` finds it. Needs no Ray, which reads
variables of the record when it is imported."""

import json
import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from qurl_ray.errors import ConfigError


@dataclass(frozen=True, slots=True, kw_only=True)
class AppRecord:
    """An app on a port, as a second process needs it to deploy the app again with another policy."""

    name: str
    """Name of the model for clients."""
    settings: dict[str, Any]
    """Resolved settings. They may hold MLflow's password, so only this user can read the file."""
    environment: dict[str, str]
    """Variables with which a process reaches the app's Ray."""


@contextmanager
def recorded(port: int, record: AppRecord) -> Iterator[None]:
    """Keep a record while the context lasts.

    Raises:
        ConfigError: others could read it.
    """
    file = _file(port)
    file.parent.mkdir(mode=0o700, exist_ok=True)
    if file.parent.stat().st_uid != os.getuid() or file.parent.stat().st_mode & 0o077:
        raise ConfigError(f"{file.parent} can be read by other users: remove it")
    file.write_text(json.dumps(asdict(record)))
    try:
        yield
    finally:
        file.unlink(missing_ok=True)


def read_record(port: int) -> AppRecord:
    """Return the record of the app on a port of this machine.

    Raises:
        ConfigError: there is none.
    """
    try:
        return AppRecord(**json.loads(_file(port).read_text()))
    except (OSError, ValueError, TypeError):
        raise ConfigError(f"`qurl serve` of this user serves nothing on port {port} of this machine") from None


def _file(port: int) -> Path:
    return Path(tempfile.gettempdir()) / f"qurl-serving-{os.getuid()}" / f"{port}.json"
