"""A bound on memory that the kernel holds: a cgroup (version 2) for the judge and all that it starts.

Possible where the groups beside this process's own may be made and have the memory controller: below a systemd user
manager, or in a service with `Delegate=yes`. Not in most containers. A group below the own one is no help: the kernel
gives controllers only to the children of groups without processes.
"""

import os
from contextlib import suppress
from pathlib import Path

_ROOT = Path("/sys/fs/cgroup")
_OWN = Path("/proc/self/cgroup")


def make_group(limit: int) -> Path | None:
    """Make a group that may hold `limit` bytes of memory, and no swap. None where that cannot be done."""
    try:
        own = next(line for line in _OWN.read_text().splitlines() if line.startswith("0::/"))
        parent = (_ROOT / own.removeprefix("0::/")).parent
        if not parent.is_relative_to(_ROOT) or not _is_delegated(parent):
            return None
        if "memory" not in (parent / "cgroup.subtree_control").read_text().split():
            return None
        group = parent / f"qurl-reward-{os.getpid()}"
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
    """Move this process into `group`, and with it all that it will start. Do nothing where that is denied."""
    with suppress(OSError):
        (group / "cgroup.procs").write_text("0")


def was_full(group: Path) -> bool:
    """True if the kernel killed processes of `group` because it held too much."""
    with suppress(OSError, ValueError):
        events = dict(line.split() for line in (group / "memory.events").read_text().splitlines())
        return int(events.get("oom_kill", 0)) > 0
    return False


def remove_group(group: Path) -> None:
    """Remove `group`, in which no process is left."""
    with suppress(OSError):
        group.rmdir()


def _is_delegated(group: Path) -> bool:
    """True if this user may arrange what is below `group`. Root may write anywhere, but most groups are systemd's."""
    if os.geteuid():
        return os.access(group / "cgroup.procs", os.W_OK)
    with suppress(OSError):
        return os.getxattr(group, "user.delegate") == b"1"
    return False
