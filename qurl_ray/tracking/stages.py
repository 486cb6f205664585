"""The stages of a start, each with its seconds: a run that hangs before its first step says where."""

import threading
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from qurl_ray.errors import ConfigError
from qurl_ray.tracking.sink import Sink
from qurl_ray.types import Event, Outcome

_EVERY_S = 15.0


class Stages(Sink):
    """Sink with a line when a stage begins, and another every 15 s while it lasts. A stage ends with the next one, a
    step, an evaluation or the run.

    Args:
        path: file of the lines, which are added to it at once.
        show: called with each line, too, and the number of steps so far; None shows none.

    Raises:
        ConfigError: the file cannot be written.
    """

    name = "stages"

    def __init__(self, path: Path, show: Callable[[str, int], None] | None) -> None:
        self._show = show
        try:
            path.parent.mkdir(exist_ok=True)
            self._file = path.open("a", encoding="utf-8", errors="backslashreplace")
        except OSError as error:
            raise ConfigError(f"cannot write {path}: {error.strerror}") from None
        self._lock = threading.Lock()
        self._stage: Event | None = None
        """The event that began the present stage."""
        self._began = 0.0
        """Monotonic time at which it began."""
        self._closed = threading.Event()
        self._changed = threading.Event()
        threading.Thread(target=self._tick, name="stages", daemon=True).start()

    def handle(self, event: Event, at: float) -> None:
        if event.kind == "phase":
            with self._lock:
                self._stage, self._began = event, time.monotonic()
                self._tell(event.message, event.step)
            self._changed.set()
        elif event.kind in ("step", "evaluation", "summary"):
            with self._lock:
                self._stage = None
            self._changed.set()

    def close(self, outcome: Outcome) -> None:
        with self._lock:
            if self._stage:
                line = f"{outcome} in this stage, after {self._seconds()}: {self._stage.message}"
                self._tell(line, self._stage.step)
            self._stage = None
            self._closed.set()
            self._file.close()
        self._changed.set()

    def _tick(self) -> None:
        while not self._closed.is_set():
            if self._changed.wait(_EVERY_S):
                self._changed.clear()
                continue
            with self._lock, suppress(OSError):  # a full disk, or a closed pipe: other sinks report it
                if self._stage and not self._closed.is_set():
                    self._tell(f"{self._stage.message}: {self._seconds()} so far", self._stage.step)

    def _seconds(self) -> str:
        return f"{time.monotonic() - self._began:.0f} s"

    def _tell(self, line: str, step: int) -> None:
        self._file.write(f"{time.strftime('%Y-%m-%d %H:%M:%S')} {line}\n")
        self._file.flush()
        if self._show is not None:
            self._show(line, step)
