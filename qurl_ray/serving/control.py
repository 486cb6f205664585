"""Control of a serving job by a second command, through a socket that only this user can open. Needs no Ray."""

import contextlib
import json
import os
import socket
import socketserver
import tempfile
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

from qurl_ray.errors import ConfigError, QurlError

_READ_S = 5.0  # deadline for a command to arrive on an open connection
_MOST_BYTES = 65536  # of a command

Swap = Callable[[str], str]
"""Function that swaps to a policy and returns a message with the result."""


class _Server(socketserver.ThreadingUnixStreamServer):
    daemon_threads = True  # else the end of the job would wait for a swap


@contextlib.contextmanager
def listening(port: int, swap: Swap) -> Iterator[None]:
    """Accept commands for the app on this port while the context is open. Each has a thread, which outlives the context
    if the command is still under way."""

    class Handler(socketserver.StreamRequestHandler):
        timeout = _READ_S

        def handle(self) -> None:
            try:
                policy = json.loads(self.rfile.readline(_MOST_BYTES))["policy"]
            except (OSError, ValueError, KeyError, TypeError):
                return  # no command, or not in time
            try:
                reply = {"ok": True, "message": swap(policy)}
            except QurlError as error:
                reply = {"ok": False, "message": str(error)}
            except Exception as error:  # of Ray, above all: the caller must know
                reply = {"ok": False, "message": f"the swap failed: {type(error).__name__}: {error}"}
            with contextlib.suppress(OSError):  # the caller has disconnected
                self.wfile.write(json.dumps(reply).encode() + b"\n")

    path = _path(port)
    path.parent.mkdir(mode=0o700, exist_ok=True)
    if path.parent.stat().st_uid != os.getuid() or path.parent.stat().st_mode & 0o077:
        raise ConfigError(f"{path.parent} can be read by other users: remove it")
    path.unlink(missing_ok=True)  # left by a job that was killed; the port is ours
    with _Server(str(path), Handler) as server:
        thread = threading.Thread(target=server.serve_forever, daemon=True)
        thread.start()
        try:
            yield
        finally:
            server.shutdown()
            path.unlink(missing_ok=True)


def ask_to_swap(port: int, policy: str, *, timeout_s: float) -> str:
    """Tell the app on this port to swap to a policy, and return its message.

    Raises:
        ConfigError: no app is served on the port, or it refused.
    """
    with socket.socket(socket.AF_UNIX) as connection:
        connection.settimeout(timeout_s)
        try:
            connection.connect(str(_path(port)))
            connection.sendall(json.dumps({"policy": policy}).encode() + b"\n")
            reply = json.loads(connection.makefile().readline())
        except (OSError, ValueError) as error:
            raise ConfigError(
                f"no serving job of this user listens on port {port} of this machine, or it ended: {error}"
            ) from None
    if not reply["ok"]:
        raise ConfigError(reply["message"])
    return reply["message"]


def _path(port: int) -> Path:
    return Path(tempfile.gettempdir()) / f"qurl-serving-{os.getuid()}" / f"{port}.sock"
