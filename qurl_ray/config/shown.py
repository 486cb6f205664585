"""Text of settings and errors as it is shown or written: without secrets, and not too long."""

import re
from pathlib import Path
from typing import Any

from qurl_ray.files import write_whole

_USERINFO = re.compile(r"(?<=://)(?:[^/\s]*|[^/\s:]*:[^\s@]*)@")
"""User and password of an address. The second form is a password with a slash, which databases accept."""
_QUERY_SECRET = re.compile(
    r"(?<=[?&])([^=&\s]*(?:pass|pwd|token|secret|key|auth|cred|sig)[^=&\s]*)=[^&\s#'\"]+", re.IGNORECASE
)
MARK = "…"
"""Mark in the place of a secret, or of the rest of a text."""


def redacted(value: Any) -> Any:
    """Remove from text the user and password of addresses, and passwords and tokens in their queries. Lists become
    text; other values are unchanged."""
    if isinstance(value, list):
        return ", ".join(str(redacted(item)) for item in value)
    if not isinstance(value, str):
        return value
    return _QUERY_SECRET.sub(rf"\1={MARK}", _USERINFO.sub(f"{MARK}@", value))


def shortened(text: str, limit: int = 200) -> str:
    """Return the first `limit` characters of `text`, with the number of all if some are left out."""
    return text if len(text) <= limit else f"{text[:limit]}{MARK} ({len(text):,} characters)"


def write_settings(path: Path, text: str) -> None:
    """Replace a file of settings, atomically. Only this user can read it if one of them holds a password."""
    write_whole(path, text, mode=0o600 if redacted(text) != text else 0o666)


def reason(error: Exception, limit: int = 300) -> str:
    """Return type and message of an error of another package, in one line, without secrets, of `limit` characters."""
    return shortened(redacted(" ".join(f"{type(error).__name__}: {error}".split())), limit)
