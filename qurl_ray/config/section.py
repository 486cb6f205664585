"""What all sections of a run's settings share."""

from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field

Share = Annotated[float, Field(ge=0, lt=1)]

DEFAULT_TYPES = {"model": "tiny", "task": "arithmetic", "algorithm": "dapo", "correction": "acr"}
"""What a section is when it does not say."""


def with_default_types(settings: Any) -> Any:
    """Let `task: {max_operand: 9}` mean the default type of task."""
    if not isinstance(settings, dict):
        return settings
    filled = dict(settings)
    for key, default in DEFAULT_TYPES.items():
        if isinstance(filled.get(key), dict):
            filled[key] = {"type": default, **filled[key]}
    return filled


class Section(BaseModel):
    """A group of settings."""

    model_config = ConfigDict(
        extra="forbid", frozen=True, use_attribute_docstrings=True, protected_namespaces=(), allow_inf_nan=False
    )
