"""Base class of all sections of settings, and the default type of a section."""

from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field

Share = Annotated[float, Field(ge=0, lt=1)]
"""Number that is at least 0 and below 1."""

DEFAULT_TYPES = {"model": "tiny", "task": "arithmetic", "algorithm": "dapo", "correction": "acr"}
"""Type of a section that does not give one, by the section's name."""

REMOVED = {("quantization", "rounding"): "nearest"}
"""Removed settings, by (section, name), with the value that every run has now: settings of earlier versions that give
it are valid."""


def without_removed(settings: Any) -> Any:
    """Leave out removed settings that have the value of REMOVED. Other values stay, and are refused as unknown keys."""
    if not isinstance(settings, dict):
        return settings
    kept = dict(settings)
    for (section, name), value in REMOVED.items():
        given = kept.get(section)
        if isinstance(given, dict) and given.get(name) == value:
            kept[section] = {key: given[key] for key in given if key != name}
    return kept


def with_default_types(settings: Any) -> Any:
    """Fill in the default `type` of sections that give none, so that `task: {max_operand: 9}` is valid. A section that
    is a name alone has that type."""
    if not isinstance(settings, dict):
        return settings
    filled = dict(settings)
    for key, default in DEFAULT_TYPES.items():
        given = filled.get(key)
        if isinstance(given, dict):
            filled[key] = {"type": default, **given}
        elif isinstance(given, str) and key != "correction":  # whose names are more than its types
            filled[key] = {"type": given}
    return filled


class Section(BaseModel):
    """Base class of a group of settings: frozen, and unknown keys are errors."""

    model_config = ConfigDict(
        extra="forbid", frozen=True, use_attribute_docstrings=True, protected_namespaces=(), allow_inf_nan=False
    )
