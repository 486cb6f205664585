"""Small files that are replaced as a whole."""

import os
from pathlib import Path

PART = ".part"
"""End of the names of files that are not complete yet."""


def write_whole(path: Path, text: str, mode: int = 0o666) -> None:
    """Write a file atomically: a reader sees the old file or the new one, never a partial one. If that fails, nothing
    is left of the new one.

    Args:
        mode: permissions of the new file, which the umask restricts.

    Raises:
        OSError: the folder is missing or not writable, or the disk is full.
    """
    part = path.with_name(f".{path.name}.{os.getpid()}{PART}")
    try:
        part.unlink(missing_ok=True)
        part.touch(mode=mode)
        part.write_text(text, encoding="utf-8")
        part.replace(path)
    finally:
        part.unlink(missing_ok=True)
