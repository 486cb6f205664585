"""Measurement of the memory held by the processes of a server, including files in memory.

The sum includes resident memory (pages that processes share count once), files without a name (memfds, deleted files),
new files in /dev/shm that a process was seen to write, and temporary files. Without /proc, it includes only the latter.
"""

import os
import re
import resource
import shutil
import stat
from collections.abc import Collection, Iterator, Sequence
from contextlib import suppress

SHM = "/dev/shm"
_PAGE = resource.getpagesize()

_File = tuple[int, int]  # device and inode


class Holdings:
    """Memory and files held by the processes below one keeper. Create it before the first of them starts."""

    def __init__(self, scratch: str) -> None:
        """Record which files are in /dev/shm now. `scratch` is the folder for temporary files."""
        self._scratch = scratch
        self._before = {_file(status) for _, status in _walk(SHM)}
        self._shm: dict[_File, str] = {}

    def exceed(self, processes: Sequence[int], limit: int) -> bool:
        """True if the processes and their files hold more than `limit` bytes."""
        files = self.look(processes)
        bytes_ = sum(files.values()) + sum(status.st_blocks * 512 for _, status in _walk(self._scratch))
        if bytes_ + sum(_resident_bytes(process) for process in processes) <= limit:
            return False
        # Shared pages and mapped files were counted more than once so far; the exact figure takes longer.
        return bytes_ + sum(_proportional_bytes(process, files) for process in processes) > limit

    def look(self, processes: Sequence[int]) -> dict[_File, int]:
        """Bytes of each file in memory that the processes hold now, or were seen to write in /dev/shm before."""
        nameless: dict[_File, int] = {}
        for process in processes:
            for path, status in _open_files(process):
                if status.st_nlink == 0:
                    nameless[_file(status)] = status.st_blocks * 512
                elif _file(status) not in self._before and _is_written(process, path):
                    self._remember(_target(path))
            for name in _mapped_files(process):
                self._remember(name)
        return nameless | self._in_shm()

    def give_back(self) -> None:
        """Delete temporary files, and files in /dev/shm that no other process holds. Call it when ours have ended."""
        shutil.rmtree(self._scratch, ignore_errors=True)
        found = self._in_shm()
        if not found:
            return
        processes = [int(name) for name in os.listdir("/proc") if name.isdigit()]
        held = {_file(status) for process in processes for _, status in _open_files(process)}
        names = {name for process in processes for name in _mapped_files(process)}
        for file in found.keys() - held:
            if self._shm[file] not in names:
                with suppress(OSError):  # also if a folder is not empty
                    os.unlink(self._shm[file])
                    folder = os.path.dirname(self._shm[file])
                    if _file(os.lstat(folder)) not in self._before and folder != SHM:
                        os.rmdir(folder)

    def _remember(self, name: str) -> None:
        with suppress(OSError):
            status = os.lstat(name)
            mine = name.startswith(f"{SHM}/") and not name.startswith(f"{self._scratch}/")
            if mine and _file(status) not in self._before:
                self._shm[_file(status)] = name

    def _in_shm(self) -> dict[_File, int]:
        """Bytes of each remembered file that still has its name."""
        found = {}
        for file, name in self._shm.items():
            with suppress(OSError):
                status = os.lstat(name)
                if _file(status) == file:
                    found[file] = status.st_blocks * 512
        return found


def descendants(process: int) -> list[int]:
    """Ids of all processes below `process`; empty without /proc."""
    found, parents = [], [process]
    while parents:
        children = _children(parents.pop())
        found += children
        parents += children
    return found


def _children(process: int) -> list[int]:
    found: list[int] = []
    with suppress(OSError):
        for thread in os.listdir(f"/proc/{process}/task"):
            found += [int(child) for child in _read(f"/proc/{process}/task/{thread}/children").split()]
    return found


def _open_files(process: int) -> Iterator[tuple[str, os.stat_result]]:
    """Yield the path below /proc and the status of each regular file that `process` has open."""
    folder = f"/proc/{process}/fd"
    with suppress(OSError):
        for fd in os.listdir(folder):
            with suppress(OSError):
                status = os.stat(f"{folder}/{fd}")
                if stat.S_ISREG(status.st_mode):
                    yield f"{folder}/{fd}", status


def _is_written(process: int, path: str) -> bool:
    """True if `process` has opened the file for writing."""
    found = re.search(r"^flags:\s*([0-7]+)", _read(f"/proc/{process}/fdinfo/{os.path.basename(path)}"), re.MULTILINE)
    return found is not None and int(found[1], 8) & os.O_ACCMODE != os.O_RDONLY


def _mapped_files(process: int) -> Iterator[str]:
    """Yield the names of files in /dev/shm that `process` maps for writing, whether or not it has them open."""
    if not re.search(r"^RssShmem:\s*[1-9]", _read(f"/proc/{process}/status"), re.MULTILINE):
        return  # the usual case; this check is faster than reading the maps
    for line in _read(f"/proc/{process}/maps").splitlines():
        match line.split(maxsplit=5):
            case [_, access, _, _, _, name] if access[1] == "w" and access[3] == "s" and name.startswith(f"{SHM}/"):
                yield name


def _resident_bytes(process: int) -> int:
    fields = _read(f"/proc/{process}/statm").split()
    return int(fields[1]) * _PAGE if fields else 0


def _proportional_bytes(process: int, without: Collection[_File]) -> int:
    """Resident bytes of `process`, with its part of shared pages, but without pages of the files in `without`."""
    text = _read(f"/proc/{process}/smaps")
    if "\nPss:" not in text:
        return _resident_bytes(process)
    total, counts = 0, True
    for line in text.splitlines():
        fields = line.split(maxsplit=5)
        if "-" in fields[0]:  # 7f00-7f10 rw-s 00000000 00:01 1024 /memfd:x (deleted)
            major, minor = (int(part, 16) for part in fields[3].split(":"))
            counts = (os.makedev(major, minor), int(fields[4])) not in without
        elif fields[0] == "Pss:" and counts:
            total += int(fields[1]) * 1024
    return total


def _walk(folder: str) -> Iterator[tuple[str, os.stat_result]]:
    """Yield the path and status of everything below `folder`. Sparse files have few blocks."""
    folders = [folder]
    while folders:
        with suppress(OSError), os.scandir(folders.pop()) as entries:
            for entry in entries:
                with suppress(OSError):
                    yield entry.path, entry.stat(follow_symlinks=False)
                    if entry.is_dir(follow_symlinks=False):
                        folders.append(entry.path)


def _file(status: os.stat_result) -> _File:
    return status.st_dev, status.st_ino


def _target(link: str) -> str:
    """Return the target of `link`, or "" if the link is gone."""
    try:
        return os.readlink(link)
    except OSError:
        return ""


def _read(path: str) -> str:
    """Return the text of a file below /proc, or "" if its process is gone."""
    try:
        with open(path, errors="replace") as file:
            return file.read()
    except OSError:
        return ""
