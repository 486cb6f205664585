"""Base class of all sections of settings, and the default type of a section."""

from collections.abc import Iterator
from typing import Annotated, Any, get_args

from pydantic import BaseModel, ConfigDict, Field, model_validator

Share = Annotated[float, Field(ge=0, lt=1)]
"""Number that is at least 0 and below 1."""

DEFAULT_TYPES = {"model": "tiny", "task": "arithmetic", "algorithm": "dapo", "correction": "acr"}
"""Type of a section that does not give one, by the section's name."""


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
        elif isinstance(given, str) and key != "correction":  # which has more names than types
            filled[key] = {"type": given}
    return filled


class Section(BaseModel):
    """Base class of a group of settings: frozen, and unknown keys are errors."""

    model_config = ConfigDict(
        extra="forbid", frozen=True, use_attribute_docstrings=True, protected_namespaces=(), allow_inf_nan=False
    )

    @model_validator(mode="before")
    @classmethod
    def _numbers_are_no_truth_values(cls, settings: Any) -> Any:
        """Refuse true where a number is expected: pydantic would take it as 1."""
        for name in settings if isinstance(settings, dict) else ():
            if isinstance(settings[name], bool) and name in cls.model_fields:
                types = set(_types(cls.model_fields[name].annotation))
                if types & {int, float} and bool not in types:
                    word, value = ("yes", "true") if settings[name] else ("no", "false")
                    raise ValueError(f"{name} is a number, not {value}; YAML reads {word} as {value}")
        return settings


def _types(annotation: Any) -> Iterator[Any]:
    """Yield the types that a field's annotation is made of."""
    yield annotation
    for part in get_args(annotation):
        yield from _types(part)
