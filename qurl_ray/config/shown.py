"""Text of settings and errors as it is shown or written: without secrets, and not too long."""

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from qurl_ray.files import write_whole

_USERINFO = re.compile(r"(?<=://)(?:[^/\s]*|[^/\s:]*:[^\s@]*)@")
"""User and password of an address. The second form is a password with a slash, which databases accept."""
_QUERY_SECRET = re.compile(
    r"(?<=[?&])([^=&\s]*(?:pass|pwd|token|secret|key|auth|cred|sig|odbc_connect)[^=&\s]*)=[^&\s#'\"]+", re.IGNORECASE
)
_SECRET_NAME = re.compile(
    r"(?:(?:secret|passw(?:or)?d|passphrase|pwd|credential|authorization|(?:api|access|private|secret)[_-]?key)s?|token)$",
    re.IGNORECASE,
)
"""Ends of names of settings that hold a secret, such as api_key; max_new_tokens is none."""
_SERVER = re.compile(r"(?:\[[^\]/]*\]|[^/:@]*)(?::\d*)?(?:/|$)")
"""Beginning of an address of HTTP, after the scheme, without user and password."""
_CREDENTIALS = re.compile(r"\A[^:/]*(?::.*)?@", re.DOTALL)
"""User and password at the beginning of an address, after the scheme, as SQLAlchemy reads them."""
MARK = "…"
"""Mark in the place of a secret, or of the rest of a text."""


def redacted(text: str) -> str:
    """Remove from text the user and password of addresses, and passwords and tokens in their queries."""
    return _QUERY_SECRET.sub(rf"\1={MARK}", _USERINFO.sub(f"{MARK}@", text))


def shown_address(address: str) -> str:
    """Return the address of a server or database without user, password and query. Where it is not clear which part is
    the password, all after the scheme is left out."""
    scheme, slashes, rest = address.partition("://")
    if not slashes:
        return address if address.startswith(("/", ".", "~")) else redacted(_without_credentials(address))
    place, *query = re.split(r"([?#])", rest, maxsplit=1)
    if "@" in "".join(query):
        return f"{scheme}://{MARK}"
    if not (scheme in ("http", "https") and _SERVER.match(place)):
        place = _without_credentials(place)
    if query and not (scheme == "sqlite" and redacted(address) == address):  # a file's, such as ?timeout=5
        query[1] = MARK
    return f"{scheme}://{place}{''.join(query)}"


def _without_credentials(place: str) -> str:
    return _CREDENTIALS.sub(f"{MARK}@", place, count=1)


def names_secret(name: str) -> bool:
    """Return True if a setting of this name holds a secret, such as api_key."""
    return bool(_SECRET_NAME.search(name))


def shown(value: Any, name: str = "") -> Any:
    """Return settings without the secrets in them: values whose names say so, and parts of text that
    `redacted` removes.

    Args:
        value: settings as plain nested values, or the value of one.
        name: name of the setting.
    """
    if names_secret(name) and value not in (None, "") and not isinstance(value, bool):
        return MARK
    if isinstance(value, Mapping):
        return {key: shown(item, str(key)) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [shown(item) for item in value]
    if not isinstance(value, str):
        return value
    return shown_address(value) if name.endswith("mlflow_uri") else redacted(value)


def shortened(text: str, limit: int = 200) -> str:
    """Return the first `limit` characters of `text`, with the number of all if some are left out."""
    return text if len(text) <= limit else f"{text[:limit]}{MARK} ({len(text):,} characters)"


def write_settings(path: Path, text: str, *, private: bool) -> None:
    """Replace a file of settings, atomically. Only this user can read it if it is private."""
    write_whole(path, text, mode=0o600 if private else 0o666)


def reason(error: Exception, limit: int = 300, *, address: str = "") -> str:
    """Return type and message of an error of another package, in one line, without secrets, of `limit` characters.

    Args:
        address: an address that the message may repeat.
    """
    text = f"{type(error).__name__}: {error}"
    if address:
        text = text.replace(address, shown_address(address))
    return shortened(redacted(" ".join(text.split())), limit)
