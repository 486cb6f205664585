"""Cache folder for generated policies and self-check results: $QURL_CACHE, else ~/.cache/qurl-ray."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from pathlib import Path

writable: ContextVar[bool] = ContextVar("writable", default=True)
"""False in a dry run, which leaves no file behind."""


def cache_root() -> Path:
    """Return the absolute path of the cache folder, which may not exist yet."""
    return Path(os.environ.get("QURL_CACHE") or "~/.cache/qurl-ray").expanduser().resolve()


@contextmanager
def read_only() -> Iterator[None]:
    """Let nothing be written to the cache folder while the context lasts."""
    token = writable.set(False)
    try:
        yield
    finally:
        writable.reset(token)
