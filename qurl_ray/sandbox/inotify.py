"""Kernel notification of new files (Linux), so that their writer can be identified while it has them open."""

import ctypes
import os
import struct
from contextlib import suppress

_CREATE, _IS_FOLDER = 0x100, 0x4000_0000
_EVENT = struct.Struct("iIII")  # watch, mask, cookie, bytes of the name
_READ_BYTES = 1 << 16


class NewFiles:
    """Watch whose `fd` becomes readable when a file is created in a folder, or in a folder created there since."""

    def __init__(self, folder: str) -> None:
        """Watch `folder`. `fd` is None if there is no inotify, or no inotify instance left for this user."""
        self.fd: int | None = None
        self._folders: dict[int, str] = {}
        with suppress(AttributeError, OSError):
            self._libc = ctypes.CDLL(None)
            fd = self._libc.inotify_init1(os.O_NONBLOCK | os.O_CLOEXEC)
            if fd >= 0:
                self.fd = fd
                self._add(folder)

    def read(self) -> None:
        """Read the pending events, and watch the new folders among them."""
        if self.fd is None:
            return
        with suppress(BlockingIOError):
            data = os.read(self.fd, _READ_BYTES)
            at = 0
            while at < len(data):
                watch, mask, _, size = _EVENT.unpack_from(data, at)
                at += _EVENT.size + size
                if mask & _IS_FOLDER and watch in self._folders:
                    name = os.fsdecode(data[at - size : at].rstrip(b"\0"))
                    self._add(f"{self._folders[watch]}/{name}")

    def _add(self, folder: str) -> None:
        watch = self._libc.inotify_add_watch(self.fd, os.fsencode(folder), _CREATE)
        if watch >= 0:
            self._folders[watch] = folder
