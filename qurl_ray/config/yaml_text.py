"""Reader of all YAML: settings files, overrides, and the config.yaml of runs.

It refuses a key that is given twice, of which the first would be ignored, and text that cannot be printed or written.
"""

import re
from pathlib import Path
from typing import Any

import yaml

from qurl_ray.config.shown import redacted, shortened
from qurl_ray.errors import ConfigError

_MOST_BYTES = 2**18
_LONGEST_MESSAGE = 500
_UNWRITABLE = re.compile("[\0\ud800-\udfff]")


def read_yaml_file(path: Path) -> Any:
    """Parse a YAML file.

    Raises:
        ConfigError: as read_yaml.
        OSError: the file cannot be read.
    """
    with path.open("rb") as file:
        return read_yaml(file.read(_MOST_BYTES + 1), str(path))


def read_yaml(text: str | bytes, source: str) -> Any:
    """Parse YAML. Bytes are UTF-8.

    Args:
        source: name of the text in errors.

    Raises:
        ConfigError: the text is no YAML, or is refused for a reason above.
    """
    if len(text) > _MOST_BYTES:
        raise ConfigError(f"{source} is larger than {_MOST_BYTES:,} bytes: that is no settings file")
    try:
        return yaml.load(text if isinstance(text, str) else text.decode("utf-8"), _Loader)
    except UnicodeDecodeError as error:
        raise ConfigError(f"{source} is not UTF-8 text: {error}") from None
    except RecursionError:
        raise ConfigError(f"{source} is not valid YAML: it is nested too deeply") from None
    except yaml.YAMLError as error:
        # Without an excerpt of the text, which pyyaml would add: it may hold secrets.
        if isinstance(error, yaml.MarkedYAMLError) and error.problem_mark is not None:
            mark, began = error.problem_mark, error.context_mark
            context = f"{error.context} of line {began.line + 1}, " if error.context and began else ""
            fault = f"line {mark.line + 1}, column {mark.column + 1}: {context}{error.problem}"
        else:
            fault = " ".join(str(error).split())
        raise ConfigError(f"{source} is not valid YAML: {shortened(redacted(fault), _LONGEST_MESSAGE)}") from None


def read_text(text: str, source: str, *, nullable: bool) -> str | None:
    """Return the value of a setting that is text: the string that YAML reads, such as one without its quotes, or the
    text itself if YAML reads something else.

    Args:
        nullable: `null` is None.

    Raises:
        ConfigError: it has a NUL or half of a surrogate pair.
    """
    if _UNWRITABLE.search(text):
        raise ConfigError(f"{source} has a NUL or half of a surrogate pair")
    try:
        value = read_yaml(text, source)
    except ConfigError:
        return text
    if value is None and nullable:
        return None
    return value if isinstance(value, str) else text


class _Loader(yaml.SafeLoader):
    def compose_mapping_node(self, anchor: Any) -> yaml.MappingNode:
        node = super().compose_mapping_node(anchor)
        first: dict[tuple[str, str], int] = {}
        for key in (key for key, _ in node.value if isinstance(key, yaml.ScalarNode)):
            line = key.start_mark.line + 1
            if (key.tag, key.value) in first:
                lines = f"lines {first[key.tag, key.value]} and {line}"
                raise _refusal(f"key {key.value!r} is given twice, in {lines}", key)
            first[key.tag, key.value] = line
        return node

    def construct_object(self, node: yaml.Node, deep: bool = False) -> Any:
        try:
            value = super().construct_object(node, deep)
        except (ValueError, LookupError, AttributeError):  # as pyyaml raises for !!int x, or a 13th month
            kind = node.tag.rpartition(":")[2]
            raise _refusal(f"{shortened(str(node.value), 40)} is no {kind}", node) from None
        if isinstance(value, str) and _UNWRITABLE.search(value):
            raise _refusal("text with a NUL or half of a surrogate pair", node)
        return value


def _refusal(problem: str, place: Any) -> yaml.MarkedYAMLError:
    """Make an error at the start of an event or node."""
    return yaml.MarkedYAMLError(problem=problem, problem_mark=place.start_mark)
