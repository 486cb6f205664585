"""Memory limit enforced by the kernel: a cgroup (version 2) for a server of user code and all processes that it starts.

It requires that this process may create siblings of its own group, and that these have the memory controller. This is
the case below a systemd user manager, or in a service with `Delegate=yes`, but not in most containers. A child of
its own group would not help: the kernel gives controllers only to the children of groups without processes.
"""

import os
from contextlib import suppress
from pathlib import Path

_ROOT = Path("/sys/fs/cgroup")
_OWN = Path("/proc/self/cgroup")


def make_group(limit: int) -> Path | None:
    """Create a group that may hold `limit` bytes of memory, and no swap. Return None if that is not possible."""
    try:
        own = next(line for line in _OWN.read_text().splitlines() if line.startswith("0::/"))
        parent = (_ROOT / own.removeprefix("0::/")).parent
        if not parent.is_relative_to(_ROOT) or not _is_delegated(parent):
            return None
        if "memory" not in (parent / "cgroup.subtree_control").read_text().split():
            return None
        group = parent / f"qurl-sandbox-{os.getpid()}"
        group.mkdir()
    except (OSError, StopIteration):
        return None
    try:
        (group / "memory.max").write_text(str(limit))
        (group / "memory.oom.group").write_text("1")
        with suppress(FileNotFoundError):  # a kernel without swap
            (group / "memory.swap.max").write_text("0")
    except OSError:
        remove_group(group)
        return None
    return group


def join_group(group: Path) -> None:
    """Move this process, and all processes that it will start, into `group`. Do nothing if that is denied."""
    with suppress(OSError):
        (group / "cgroup.procs").write_text("0")


def was_full(group: Path) -> bool:
    """True if the kernel killed processes of `group` because the group exceeded its memory limit."""
    with suppress(OSError, ValueError):
        events = dict(line.split() for line in (group / "memory.events").read_text().splitlines())
        return int(events.get("oom_kill", 0)) > 0
    return False


def remove_group(group: Path) -> None:
    """Remove `group`. It must not contain any process."""
    with suppress(OSError):
        group.rmdir()


def _is_delegated(group: Path) -> bool:
    """True if this user may manage groups below `group`. Root may write anywhere, but most groups are systemd's."""
    if os.geteuid():
        return os.access(group / "cgroup.procs", os.W_OK)
    with suppress(OSError):
        return os.getxattr(group, "user.delegate") == b"1"
    return False
