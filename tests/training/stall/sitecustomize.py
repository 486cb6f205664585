"""Faults in any process of a run. Python imports this file at its start where its folder is on PYTHONPATH.

STALL: function to replace, "module:name" or "module:Class.name", and how: "… sleep", "… die", "… socket", "… child".
LIMITS: values of a module's names, as JSON {"module:name": seconds}.
"""

import functools
import importlib.abc
import importlib.util
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable


def sleep(*_: object, **__: object) -> None:
    time.sleep(1e6)


def die(*_: object, **__: object) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def never_answered(*_: object, **__: object) -> None:
    """Wait for a peer that says nothing."""
    with socket.create_server(("127.0.0.1", 0)) as server, socket.create_connection(server.getsockname()) as peer:
        peer.recv(1)


def of_a_child(*_: object, **__: object) -> None:
    """Wait for a child whose output is never flushed."""
    code = "import time; print('working'); time.sleep(1e6)"
    subprocess.run([sys.executable, "-c", code], stdout=subprocess.PIPE, env={"PATH": os.environ["PATH"]})


def as_if(replaced: Callable, fault: Callable) -> Callable:
    """The fault with the signature of what it replaces, which Ray looks at."""

    @functools.wraps(replaced)
    def faulty(*_: object, **__: object) -> None:
        fault()

    return faulty


FAULTS = {"sleep": sleep, "die": die, "socket": never_answered, "child": of_a_child}


class Faults(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Loader that replaces names of some modules as soon as they are imported."""

    def __init__(self, replaced: dict[str, dict[str, object]]) -> None:
        self._replaced = replaced
        self._loaders: dict[str, importlib.abc.Loader] = {}

    def find_spec(self, name, path=None, target=None):
        if name not in self._replaced or name in self._loaders:
            return None
        self._loaders[name] = None
        spec = importlib.util.find_spec(name)
        self._loaders[name], spec.loader = spec.loader, self
        return spec

    def create_module(self, spec):
        return self._loaders[spec.name].create_module(spec)

    def exec_module(self, module):
        self._loaders[module.__name__].exec_module(module)
        for path, value in self._replaced[module.__name__].items():
            *owners, name = path.split(".")
            place = module
            for owner in owners:
                place = getattr(place, owner)
            setattr(place, name, as_if(getattr(place, name), value) if callable(value) else value)


def _replaced() -> dict[str, dict[str, object]]:
    found: dict[str, dict[str, object]] = {}
    for where, seconds in json.loads(os.environ.get("LIMITS", "{}")).items():
        module, _, name = where.partition(":")
        found.setdefault(module, {})[name] = seconds
    if where := os.environ.get("STALL"):
        where, how = where.split()
        module, _, name = where.partition(":")
        found.setdefault(module, {})[name] = FAULTS[how]
    return found


if replaced := _replaced():
    sys.meta_path.insert(0, Faults(replaced))
