"""Extension points: tables of functions by name, to which users add their own from outside the package.

A setting that names a function of a table takes

- a name of the table,
- `package.module:function`, which every process of the run can import, or
- a name that an installed package declares as an entry point of the table's group:

      [project.entry-points."qurl_ray.objectives"]
      mine = "my_package.my_module:mine"

The package's own functions stand in the tables in the same way, as references that are imported when they are used:
settings can be read without torch. docs/extending.md has an example of each table.
"""

import difflib
import importlib
import inspect
import os
import stat
import sys
import sysconfig
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from importlib import metadata
from pathlib import Path
from typing import Any, Generic, TypeVar

from qurl_ray.errors import ConfigError, ExtensionError, QurlError

_PACKAGE = str(Path(__file__).parent) + os.sep
_IMPORT = str(Path(importlib.__file__).parent) + os.sep
_INSTALLED = tuple(sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib", "platlib"))
TRACEBACKS = "QURL_TRACEBACKS"
"""Environment variable with the folder for tracebacks of processes that print to no file."""
_SLOW_S = 10.0
_MESSAGE_CHARS = 300
_TRACEBACKS_BYTES = 16 << 20  # limit of a file of tracebacks


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """A function of a table.

    Example:
        Entry(reference="qurl_ray.rl.advantages:rloo", help="subtracts the mean of the others in the group")
    """

    reference: str
    """`package.module:function`."""
    help: str
    """A clause for --help, whose subject is the entry."""
    needs: tuple[str, ...] = ()
    """Packages that the function imports when it is called; `load` imports them, so that a missing one shows early."""
    install: str = ""
    """Command that installs them, for the message where one is missing."""


E = TypeVar("E", bound=Entry)


@dataclass(frozen=True, kw_only=True)
class Table(Generic[E]):
    """The functions that a setting may name.

    Example:
        ADVANTAGES.load("rloo")(rewards_PG, lengths_PG)
    """

    kind: str
    """A word for messages: "objective"."""
    group: str
    """Entry points of other packages: "qurl_ray.objectives"."""
    entries: Mapping[str, E]
    arguments: tuple[str, ...] | None
    """Positional arguments that a function must take; None does not check them."""
    error: type[QurlError] = ConfigError
    outside: Callable[[str], E] | None = None
    """Makes the entry of a function from outside, where the table's entries say more than a reference."""

    def __getitem__(self, name: str) -> E:
        """Return the entry of a name, also of one from outside; nothing is imported.

        Raises:
            KeyError: the table does not describe functions from outside.
        """
        if name in self.entries or self.outside is None:
            return self.entries[name]
        return self.outside(name)

    def check(self, name: str) -> str:
        """Return `name` if it is in the table, an entry point, or has the form of a reference. Nothing is imported.

        Raises:
            QurlError: of the table's kind; it names the nearest entry.
        """
        self._reference(name)
        return name

    def load(self, name: str) -> Callable[..., Any]:
        """Import and return the function.

        Raises:
            QurlError: of the table's kind. There is no such function, its module cannot be imported, or it does not
                take the table's arguments.
        """
        if entry := self.entries.get(name):
            for package in entry.needs:
                self._import(package, name, entry.install)
        module_name, _, attribute = self._reference(name).partition(":")
        module = self._import(module_name, name)
        function = getattr(module, attribute, None)
        if not callable(function):
            functions = [key for key, value in vars(module).items() if callable(value) and not key.startswith("__")]
            problem = f"{module.__name__} has no {attribute}"
            if hasattr(module, attribute):
                problem = f"{attribute} is {type(function).__name__}, not a function"
            raise self.error(f"{self.kind} {name!r}: {problem}{did_you_mean(attribute, functions)}")
        self.check_arguments(function, name)
        return function

    def installed(self) -> dict[str, str]:
        """Entry points of the group: references by name."""
        return {point.name: f"{point.module}:{point.attr}" for point in metadata.entry_points(group=self.group)}

    def help(self) -> str:
        """Return the entries with their clauses, and the form of a reference, for --help."""
        known = "; ".join(f"`{name}` {entry.help}" for name, entry in self.entries.items())
        return f"{known}; or give `package.module:function`"

    def _reference(self, name: str) -> str:
        if name in self.entries:
            return self.entries[name].reference
        module, _, function = name.partition(":")
        if function.isidentifier() and all(part.isidentifier() for part in module.split(".")):
            return name
        installed = self.installed()
        if name in installed:
            return installed[name]
        known = [*self.entries, *installed]
        built_in = f"neither built in ({', '.join(known)}) nor" if known else "not"
        raise self.error(
            f"{self.kind} {name!r} is {built_in} of the form package.module:function{did_you_mean(name, known)}"
        )

    def _import(self, module: str, name: str, install: str = "") -> Any:
        try:
            return importlib.import_module(module)
        except (Exception, SystemExit) as error:  # a user's module may raise anything when it is imported
            remedy = f"; install it: {install}" if install and isinstance(error, ModuleNotFoundError) else ""
            message = f"{self.kind} {name!r}: cannot import {module}: {described(error)}{remedy}"
            raise self.error(message) from error

    def check_arguments(self, function: Callable[..., Any], name: str) -> None:
        """Raise a QurlError of the table's kind unless the function takes the table's arguments."""
        if self.arguments is None:
            return
        try:
            signature = inspect.signature(function)
        except (TypeError, ValueError):  # some callables written in C tell nothing
            return
        try:
            signature.bind(*self.arguments)
        except TypeError as error:
            wanted = ", ".join(self.arguments)
            raise self.error(f"{self.kind} {name!r} must take ({wanted}), it takes {signature}: {error}") from error


def import_reference(reference: str) -> Any:
    """Import and return the object to which `package.module:name`, of the package's own tables, refers."""
    module, _, name = reference.partition(":")
    return getattr(importlib.import_module(module), name)


def call_extension(kind: str, function: Callable[..., Any], *arguments: Any) -> Any:
    """Call a function that a setting names. An exception of a function from outside the package becomes an error that
    ends the run: a restart would not mend it.

    Raises:
        ExtensionError: the function raised; the message names it.
    """
    if function.__module__.startswith("qurl_ray."):
        return function(*arguments)
    try:
        return function(*arguments)
    except QurlError:
        raise
    except (Exception, SystemExit) as error:  # a user's function may raise anything
        raise ExtensionError(f"{kind} {reference_of(function)} failed: {described(error)}") from error


@contextmanager
def announced_if_slow(activity: str) -> Iterator[None]:
    """Tell on the terminal, every ten seconds, that the activity has not ended yet."""
    done, began = threading.Event(), time.monotonic()

    def tell() -> None:
        while not done.wait(_SLOW_S):
            sys.stderr.write(f"{activity} has been running for {time.monotonic() - began:.0f} s\n")
            sys.stderr.flush()

    threading.Thread(target=tell, name="announcer", daemon=True).start()
    try:
        yield
    finally:
        done.set()


def described(error: BaseException) -> str:
    """Return a description of an error that a user's code raised: its type and text, the place in that code, and the
    file that has the traceback, which is written here.

    Example:
        "KeyError: 'x' (/home/me/rewards.py, line 12, in score; traceback in /home/me/runs/a/logs/reward-0-0.log)"
    """
    message = message_of(error)
    if isinstance(error, SyntaxError):  # its own text has the file without its folder
        message = f"{error.msg} ({error.filename}, line {error.lineno})"
    text = f"{type(error).__name__}: {message}".encode(errors="backslashreplace").decode()
    text = printable(text, _MESSAGE_CHARS)
    ours = (_PACKAGE, _IMPORT, "<frozen")
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if not frame.filename.startswith(ours)]
    theirs = [frame for frame in frames if not frame.filename.startswith(_INSTALLED)]
    if not theirs and (isinstance(error, QurlError) or not frames):  # our own message says enough
        return text
    last = (theirs or frames)[-1]
    kept = keep_traceback(error)
    return f"{text} ({last.filename}, line {last.lineno}, in {last.name}{f'; traceback in {kept}' if kept else ''})"


def message_of(error: BaseException) -> str:
    """Return the message of an error that user code raised."""
    try:
        return str(error)
    except Exception as broken:  # a user's exception class may fail to print itself
        return f"(no message: {type(broken).__name__})"


def printable(text: str, limit: int) -> str:
    """Return the first characters of a text, safe to print."""
    return "".join(char if char.isprintable() else "·" for char in text[:limit])


def keep_traceback(error: BaseException) -> str | None:
    """Write a traceback to the file to which this process prints errors, such as a log, or else to a temporary one.
    Return its path; None if it cannot be written, or is large."""
    printed = _printed_to()
    path = printed or _tracebacks()
    try:
        if path is None or os.path.getsize(path) > _TRACEBACKS_BYTES:
            return None
        # Through the same descriptor: text that is printed later would overwrite text that another one appends.
        with open(
            2 if printed else path, "a", encoding="utf-8", errors="backslashreplace", closefd=not printed
        ) as file:
            traceback.print_exception(error, file=file)
    except Exception:  # a full disk; or an exception class that fails to print itself
        return None
    return path


def _printed_to() -> str | None:
    """Return the file to which this process prints errors; None if it is a terminal or a pipe."""
    try:
        if stat.S_ISREG(os.fstat(2).st_mode) and os.path.isfile(path := os.path.realpath("/proc/self/fd/2")):
            return path
    except OSError:  # it is closed
        pass
    return None


@cache
def _tracebacks() -> str | None:
    """Make this process's own file of tracebacks."""
    try:
        # A sandboxed process has a folder of its own for temporary files, which ends with it.
        handle, path = tempfile.mkstemp(prefix="qurl-ray-traceback-", suffix=".txt", dir=os.environ.get(TRACEBACKS))
    except OSError:
        return None
    os.close(handle)
    return path


def reference_of(function: Callable[..., Any]) -> str:
    """Return `package.module:function`, for messages."""
    return f"{function.__module__}:{getattr(function, '__qualname__', type(function).__qualname__)}"


def find_modules_here() -> None:
    """Let modules in the working directory be imported, after all others. Ray does the same in its workers, if they see
    the same folder."""
    if (here := os.getcwd()) not in sys.path:
        sys.path.append(here)


def did_you_mean(name: str, candidates: Iterable[str], *, cutoff: float = 0.6) -> str:
    """Return the end of an error message that names the candidate most similar to `name`; "" if none is similar.

    Args:
        cutoff: least similarity, 0 to 1, as in difflib.
    """
    nearest = difflib.get_close_matches(name, list(candidates), n=1, cutoff=cutoff)
    return f"; did you mean {nearest[0]!r}?" if nearest else ""
