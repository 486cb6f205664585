"""Files that processes share: small ones that are replaced as a whole, and folders that one process fills for all."""

import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from tempfile import TemporaryFile

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


@contextmanager
def first_alone(folder: Path) -> Iterator[None]:
    """Context whose block runs in one process at a time, until it has ended without an error in one of them. From then
    on, it runs beside others. A process that dies makes way for the next. No error if the folder cannot be locked."""
    folder.mkdir(parents=True, exist_ok=True)
    done = folder / "done"
    with (folder / "lock").open("w") as lock:
        with suppress(OSError):  # a file system without locks
            fcntl.flock(lock, fcntl.LOCK_EX)
            if done.exists():
                fcntl.flock(lock, fcntl.LOCK_UN)
        yield
        done.touch()


def why_unwritable(folder: Path) -> str:
    """Return why nothing can be written in a folder, or in the one in which it would be made; "" if it can. A file
    without a name is tried: permissions say nothing of /proc or of a file system that is full or mounted read-only."""
    there = folder
    try:
        there = next(path for path in (folder, *folder.parents) if path.exists())
        if not there.is_dir():
            return f"{there} is no folder to write in"
        with TemporaryFile(dir=there) as file:
            file.write(b"0")
    except OSError as error:
        return f"{error.strerror} in {there}"
    return ""
