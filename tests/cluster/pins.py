"""Versions that pyproject.toml asks for."""

import tomllib
from pathlib import Path

from packaging.requirements import Requirement

ROOT = Path(__file__).parents[2]


def pins() -> dict[str, str]:
    """Package to specifier, extras included."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    asked = project["dependencies"] + [line for extra in project["optional-dependencies"].values() for line in extra]
    return {found.name: str(found.specifier) for found in map(Requirement, asked)}
