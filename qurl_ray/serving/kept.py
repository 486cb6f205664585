"""The files of served policies, as hard links or as downloaded: a new run of the same name changes nothing of what is
served.

Links hold the files of folders that are moved or replaced, and need no space while these exist. Writing in place
changes them, too: a replica compares contents before it loads them, and refuses what has changed.
"""

import fcntl
import logging
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from qurl_ray.serving.policies import Pinned, files_of

logger = logging.getLogger(__name__)

_PREFIX = ".served-"
_LOCK = "lock"


@contextmanager
def keeping(runs: Path) -> Iterator[Path | None]:
    """Yield a new folder for files of policies in the folder of runs; None if none can be made. It is removed at the
    end, and with it those that jobs left which were killed."""
    try:
        kept = Path(tempfile.mkdtemp(dir=runs, prefix=_PREFIX))
        kept.chmod(0o755)  # replicas may be another user's
    except OSError:  # most often there are no runs here, but models elsewhere
        yield None
        return
    with (kept / _LOCK).open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        _remove_abandoned(runs)
        try:
            yield kept
        finally:
            shutil.rmtree(kept, ignore_errors=True)


def keep(pinned: Pinned, kept: Path) -> None:
    """Link the policy's files into a folder named after their content, where replicas look first. Files outside the
    folder of runs stay where they are: no run replaces them. Downloaded files are there already; see policies.pin."""
    folder, target = Path(pinned.folder), kept / pinned.sha256
    if not pinned.folder or not folder.is_relative_to(kept.parent) or target.is_dir():
        return
    aside = Path(tempfile.mkdtemp(dir=kept))
    try:
        for file in files_of(folder):
            link = aside / file.relative_to(folder)
            link.parent.mkdir(parents=True, exist_ok=True)
            os.link(file.resolve(), link)
        aside.chmod(0o755)
        aside.rename(target)
    except OSError as error:  # a file system without hard links
        shutil.rmtree(aside, ignore_errors=True)
        logger.warning("cannot link the files of %s (%s): it is served only until they change", folder, error.strerror)


def keep_only(pinned: Pinned, kept: Path) -> None:
    """Remove the files of all other policies."""
    for folder in kept.iterdir():
        if folder.name not in (_LOCK, pinned.sha256):
            shutil.rmtree(folder, ignore_errors=True)


def _remove_abandoned(runs: Path) -> None:
    for left in runs.glob(f"{_PREFIX}*/{_LOCK}"):
        try:
            with left.open("w") as lock:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(left.parent)
        except OSError:  # in use, or another user's
            continue
