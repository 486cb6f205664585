"""Encoding as plain JSON of values that JSON alone would change: tuples, and dicts with keys that are not text.

Some reasoning-gym scorers compare tuples (arc_agi, rearc): after a plain JSON round trip a perfect
answer would score 0.05.
"""

from typing import Any

_TUPLE = "__tuple__"
_ITEMS = "__items__"


def pack(value: Any) -> Any:
    """Return the value as plain JSON types; `unpack` restores it. Other types are unchanged, so json refuses them."""
    if isinstance(value, tuple):
        return {_TUPLE: [pack(item) for item in value]}
    if isinstance(value, list):
        return [pack(item) for item in value]
    if isinstance(value, dict):
        if all(type(key) is str and key not in (_TUPLE, _ITEMS) for key in value):
            return {key: pack(item) for key, item in value.items()}
        return {_ITEMS: [[pack(key), pack(item)] for key, item in value.items()]}
    return value


def unpack(value: Any) -> Any:
    """Return the value that `pack` encoded."""
    if isinstance(value, list):
        return [unpack(item) for item in value]
    if not isinstance(value, dict):
        return value
    if _TUPLE in value:
        return tuple(unpack(item) for item in value[_TUPLE])
    if _ITEMS in value:
        return {unpack(key): unpack(item) for key, item in value[_ITEMS]}
    return {key: unpack(item) for key, item in value.items()}
