"""Deadlines of whole phases, computed from the deadlines of their parts; and a watchdog for stages that have none."""

import faulthandler
import os
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from qurl_ray.config import RunConfig
from qurl_ray.errors import DeadlineExceeded

CHECKS = "the check of folders, problems and functions"
PROBLEMS_S = 3600.0  # a data set may be downloaded
MODEL_S = 1800.0  # a model's files may be downloaded, and a cold disk reads packages slowly
_FRAMES = 3
"""Innermost calls that an error names."""
_GIVE_UP_S = 60.0
"""Time that a main thread has to end after it was told that it is late."""


def collection_deadline(config: RunConfig) -> float:
    """Seconds after which rollouts and rewards of a step (or an evaluation) cannot still be under way.

    Every round and every reward has its own deadline, which passes first and names what is late. A round may be
    generated twice if workers die during it, and may wait for one to start.
    """
    algorithm, rollout = config.algorithm, config.rollout
    rounds: float = algorithm.max_refill_rounds if algorithm.dynamic_sampling else 1
    certificate = config.evaluation.certificate
    prompts = max(rollout.prompts_per_step, 2 * certificate.prompts if certificate.every else 0)
    answers = max(prompts * rollout.samples_per_prompt, config.evaluation.problems)
    if config.environment.type is not None:
        turns = -(-answers // config.environment.concurrency) * config.environment.max_turns
        rounds *= turns * (1 + config.environment.timeout_s / rollout.timeout_s)
    return rounds * (2 * rollout.timeout_s + rollout.start_limit_s + judging_deadline(config, answers))


def sync_deadline(config: RunConfig) -> float:
    """Seconds after which engines cannot still be loading a version, a restart for another format included."""
    return config.sync.timeout_s + (config.rollout.start_limit_s if config.rollout.restarts_for_formats else 0.0)


def judging_deadline(config: RunConfig, answers: int) -> float:
    """Seconds that judging `answers` answers can take if every one hangs, plus a margin to start the processes."""
    share = -(-answers // config.task.verifiers)
    return share * (config.task.reward_timeout_s + 5) + 60


class Watchdog:
    """Thread that notices when the thread that made it does not get on.

    Example:
        watchdog = Watchdog(late=report, folder=run_dir / "logs")
        with watchdog.during("learning", 600):
            for batch in batches:
                watchdog.progress()
                ...

    Args:
        late: called once, in the watchdog's thread, with an error that says where the other thread is.
        folder: where a file with the calls of all threads is written.
    """

    def __init__(self, *, late: Callable[[DeadlineExceeded], None], folder: Path | None = None) -> None:
        self._late, self._folder, self._watched = late, folder, threading.get_ident()
        self._stage, self._limit_s, self._moved = "", float("inf"), 0.0
        self._changed = threading.Condition()
        self._closed = False
        threading.Thread(target=self._watch, name="watchdog", daemon=True).start()

    def begin(self, stage: str, limit_s: float) -> None:
        """Begin a stage, which must make progress every `limit_s` seconds. It ends the one before."""
        with self._changed:
            self._stage, self._limit_s, self._moved = stage, limit_s, time.monotonic()
            self._changed.notify()

    def progress(self) -> None:
        """The present stage gets on."""
        self._moved = time.monotonic()

    def rest(self) -> None:
        """End the stage. The next stages have deadlines of their own."""
        self.begin("", float("inf"))

    @contextmanager
    def during(self, stage: str, limit_s: float) -> Iterator[None]:
        """Make the block a stage."""
        self.begin(stage, limit_s)
        try:
            yield
        finally:
            self.rest()

    def close(self) -> None:
        with self._changed:
            self._closed = True
            self._changed.notify()

    def _watch(self) -> None:
        with self._changed:
            while not self._closed:
                left = self._moved + self._limit_s - time.monotonic()
                if left <= 0:
                    break
                self._changed.wait(min(left, threading.TIMEOUT_MAX))
            else:
                return
        self._late(DeadlineExceeded(f"{self._stage}: no progress for {self._limit_s:g} s, {self._place()}"))

    def _place(self) -> str:
        """Return where the other thread is: its innermost calls, and the file that has those of all threads."""
        stack = traceback.extract_stack(sys._current_frames().get(self._watched))
        calls = "; ".join(f"{frame.filename}, line {frame.lineno}, in {frame.name}" for frame in stack[-_FRAMES:])
        if not self._folder:
            return f"at {calls}"
        path = self._folder / f"stalled-{os.getpid()}.txt"
        try:
            path.parent.mkdir(exist_ok=True)
            with path.open("w") as file:
                faulthandler.dump_traceback(file)
        except OSError as error:
            return f"at {calls} (no file: {error})"
        return f"at {calls}; {path} has the calls of all threads"


@contextmanager
def stage_deadline(stage: str, limit_s: float) -> Iterator[None]:
    """Raise DeadlineExceeded in a block of the main thread that lasts longer, whatever it waits for. If that does not
    end the block either, end the process. Off the main thread, do nothing: only there a signal can raise an error."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    ended, errors, ending = threading.Event(), [], threading.Lock()

    def late(error: DeadlineExceeded) -> None:
        errors.append(error)
        with ending:  # after the end, nothing handles the signal
            if ended.is_set():
                return
            signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGUSR2)  # also ends calls of the system
        if not ended.wait(_GIVE_UP_S):
            sys.stderr.write(f"error: {error}\n")
            os._exit(1)

    def tell(*_: object) -> None:
        raise errors[0]

    before = signal.signal(signal.SIGUSR2, tell)
    watchdog = Watchdog(late=late)
    watchdog.begin(stage, limit_s)
    try:
        yield
    finally:
        with ending:
            ended.set()
        watchdog.close()
        signal.signal(signal.SIGUSR2, before)
