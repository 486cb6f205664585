"""Cache folder for generated policies and self-check results: $QURL_CACHE, else ~/.cache/qurl-ray."""

import os
from pathlib import Path


def cache_root() -> Path:
    """Return the path of the cache folder, which may not exist yet."""
    return Path(os.environ.get("QURL_CACHE") or "~/.cache/qurl-ray").expanduser()
