"""Absolute paths for settings, since the processes of a run work in other folders."""

import re
from pathlib import Path

from qurl_ray.errors import ConfigError

_FILE_ADDRESS = re.compile(r"(sqlite(?:\+\w+)?:///|file:)(?!/|:|file:)([^?]+)(.*)", re.DOTALL)


def absolute(path: str) -> str:
    """Return the absolute path of a file or folder that exists; other text, such as a hub id, is returned unchanged.

    The name of a file that is a link is kept: its target may lack the suffix.
    """
    try:
        here = expanded(path)
        if here.is_dir():
            return str(here.resolve())
        return str(here.parent.resolve() / here.name) if here.is_file() else path
    except (OSError, ConfigError):  # too long for a path, or of a user that does not exist
        return path


def expanded(path: str | Path) -> Path:
    """Return the path with a `~` or `~user` at its start replaced by the home folder.

    Raises:
        ConfigError: there is no such user, or no home folder.
    """
    try:
        return Path(path).expanduser()
    except RuntimeError:
        raise ConfigError(f"{path}: no home folder for {Path(path).parts[0]}") from None


def is_path(text: str) -> bool:
    """Return True if the text is a path and cannot be an id on the Hugging Face hub, which is `name` or `owner/name`:
    of a missing folder, the hub would say that its id is malformed."""
    return text.startswith(("/", ".", "~")) or text.count("/") > 1


def absolute_address(uri: str) -> str:
    """Return the address of a local database or folder with an absolute path; other addresses are unchanged.

    Example:
        absolute_address("sqlite:///mlflow.db") == "sqlite:////here/mlflow.db"
    """
    if match := _FILE_ADDRESS.fullmatch(uri):
        return f"{match[1]}{_resolved(match[2])}{match[3]}"
    return uri if ":" in uri or uri.startswith("databricks") else _resolved(uri)


def _resolved(path: str) -> str:
    return str(expanded(path).resolve())
