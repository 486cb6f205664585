"""Where made policies are kept: $QURL_CACHE, else ~/.cache/qurl-ray."""

import os
from pathlib import Path


def cache_root() -> Path:
    """The folder; it may not exist yet."""
    return Path(os.environ.get("QURL_CACHE") or "~/.cache/qurl-ray").expanduser()
