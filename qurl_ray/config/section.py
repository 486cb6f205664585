"""Base class of all sections of settings, and the default type of a section."""

from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field

Share = Annotated[float, Field(ge=0, lt=1)]
"""Number that is at least 0 and below 1."""

DEFAULT_TYPES = {"model": "tiny", "task": "arithmetic", "algorithm": "dapo", "correction": "acr"}
"""Type of a section that does not give one, by the section's name."""


def with_default_types(settings: Any) -> Any:
    """Fill in the default `type` of sections that give none, so that `task: {max_operand: 9}` is valid."""
    if not isinstance(settings, dict):
        return settings
    filled = dict(settings)
    for key, default in DEFAULT_TYPES.items():
        if isinstance(filled.get(key), dict):
            filled[key] = {"type": default, **filled[key]}
    return filled


class Section(BaseModel):
    """Base class of a group of settings: frozen, and unknown keys are errors."""

    model_config = ConfigDict(
        extra="forbid", frozen=True, use_attribute_docstrings=True, protected_namespaces=(), allow_inf_nan=False
    )
