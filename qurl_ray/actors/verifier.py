"""Judging as Ray actors. Reward functions run in processes below the actors, which they cannot take down."""

import asyncio
import queue
import threading
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import TYPE_CHECKING, cast

from ray.exceptions import RayActorError, RayTaskError

from qurl_ray.errors import DeadlineExceeded, QurlError
from qurl_ray.rewards.judge import failure
from qurl_ray.rewards.process import MEMORY_GB, VerifierProcess
from qurl_ray.types import Problem, Verdict

if TYPE_CHECKING:
    from ray.actor import ActorHandle

_PROCESSES = 4  # of a verifier: one works, the others are there for when it hangs
_PIECE = 128  # answers in one call, at most: few enough to lose with an actor
_RETRY_S = 0.5


class Verifier:
    """Judges with one process at a time, and has a few to spare.

    An answer that takes longer than a quarter of its deadline keeps its process, and a spare one takes the next answer:
    a hang costs that quarter. A process that was killed starts anew beside the work: a crash costs its answer.
    """

    def __init__(self, spec: str, timeout_s: float, memory_gb: float = MEMORY_GB) -> None:
        """See VerifierProcess, to each of which the bounds apply."""
        self._processes = [VerifierProcess(spec, timeout_s, memory_gb=memory_gb) for _ in range(_PROCESSES)]
        self._free: queue.LifoQueue[VerifierProcess] = queue.LifoQueue()  # a warm one before one that has not started
        for process in self._processes:
            self._free.put(process)
        self._threads = ThreadPoolExecutor(_PROCESSES)
        self._turn = threading.Lock()
        self._patience_s = timeout_s / _PROCESSES

    def check(self) -> None:
        """RewardError if the reward cannot be used."""
        process = self._free.get()
        try:
            process.check()
        finally:
            self._free.put(process)

    def judge_many(self, items: Sequence[tuple[str, Problem]]) -> list[Verdict]:
        """One verdict per (answer, problem), in order. Works from several threads at once, which take turns."""
        verdicts: list[Verdict | None] = [None] * len(items)
        calls, start = [], 0
        while start < len(items):
            with self._turn:
                run = _Run(items, verdicts, start)
                calls.append(self._threads.submit(self._judge, self._free.get(), run))
                start = run.until_stuck(self._patience_s)
        for call in calls:
            call.result()
        return cast(list[Verdict], verdicts)

    def close(self) -> None:
        for process in self._processes:
            process.close()

    def _judge(self, process: VerifierProcess, run: "_Run") -> None:
        try:
            for verdict in process.judging(run.items[run.start :]):
                run.put(verdict)
                if run.left:
                    process.settle()
                    break
        finally:
            if process.running:
                self._free.put(process)
            else:
                self._threads.submit(self._renew, process)
            run.finish()

    def _renew(self, process: VerifierProcess) -> None:
        try:
            process.check()
        finally:  # a reward that cannot be resolved any more says so to the next answer
            self._free.put(process)


class _Run:
    """Answers that one process judges, from `start` on."""

    def __init__(self, items: Sequence[tuple[str, Problem]], verdicts: list[Verdict | None], start: int) -> None:
        self.items, self.start = items, start
        self._verdicts, self._at, self._over, self._since = verdicts, start, False, time.monotonic()
        self.left = False
        """Another process judges all but the next one."""
        self._changed = threading.Condition()

    def put(self, verdict: Verdict) -> None:
        """The next verdict. One that another process was quicker with stays."""
        with self._changed:
            if self._verdicts[self._at] is None:
                self._verdicts[self._at] = verdict
            self._at, self._since = self._at + 1, time.monotonic()  # without waking anybody: this is often

    def finish(self) -> None:
        """No more verdicts."""
        with self._changed:
            self._over = True
            self._changed.notify_all()

    def until_stuck(self, patience_s: float) -> int:
        """Waits. Returns the first answer that is another process's to judge: behind the last verdict, if the process
        is done, or behind the answer that it has not judged for so long."""
        with self._changed:
            while not self._over:
                remaining = self._since + patience_s - time.monotonic()
                if remaining <= 0:
                    self.left = True
                    return self._at + 1
                self._changed.wait(remaining)
            # Without a single verdict it could not begin at all: its error is raised by whoever asks for the result.
            return self._at if self._at > self.start else len(self.items)


@dataclass(frozen=True, slots=True, kw_only=True)
class VerifierPool:
    """Handles of the verifiers; it may be sent to other processes."""

    verifiers: "tuple[ActorHandle, ...]"

    async def judge(self, items: Sequence[tuple[str, Problem]], deadline_s: float) -> list[Verdict]:
        """One verdict per (answer, problem), in order. Pieces go to whichever verifier is free.

        The answers that a verifier dies with get status "error"; it is restarted.

        Raises:
            DeadlineExceeded: some verdicts were not there after `deadline_s` seconds.
            RewardError: the reward cannot be resolved.
        """
        verdicts: list[Verdict] = [failure("error", "not judged")] * len(items)
        # As many pieces at a verifier as it has processes, so that one that hangs does not hold up the next.
        lanes = [verifier for _ in range(_PROCESSES) for verifier in self.verifiers]
        size = max(1, min(_PIECE, len(items) // (2 * len(lanes))))
        starts = iter(range(0, len(items), size))

        async def serve(verifier: "ActorHandle") -> None:
            for start in starts:
                piece = slice(start, start + size)
                verdicts[piece] = await _ask(verifier, items[piece])

        try:
            await asyncio.wait_for(asyncio.gather(*map(serve, lanes)), deadline_s)
        except TimeoutError:
            raise DeadlineExceeded(f"waited {deadline_s:g} s for {len(items)} rewards") from None
        except RayTaskError as error:
            raise (error.cause if isinstance(error.cause, QurlError) else error) from None
        return verdicts

    def close(self) -> None:
        """End the verifiers with all that their rewards started."""
        import ray

        ray.wait([verifier.close.remote() for verifier in self.verifiers], num_returns=len(self.verifiers), timeout=5)
        for verifier in self.verifiers:
            ray.kill(verifier)


def start_verifiers(count: int, spec: str, timeout_s: float, memory_gb: float = MEMORY_GB) -> VerifierPool:
    """A pool of `count` verifiers; see Verifier. Calls are not retried: the pool knows best what an answer is worth."""
    import ray

    # One thread for each piece that the pool gives it, and one to close it.
    actor = ray.remote(num_cpus=0, max_restarts=-1, max_task_retries=0, max_concurrency=_PROCESSES + 1)(Verifier)
    return VerifierPool(verifiers=tuple(actor.remote(spec, timeout_s, memory_gb) for _ in range(count)))


async def _ask(verifier: "ActorHandle", items: Sequence[tuple[str, Problem]]) -> list[Verdict]:
    try:
        return await verifier.judge_many.remote(list(items))
    except RayActorError:
        await _back(verifier)  # or it would fail all that are left, one after the other
        return [failure("error", "the verifier died")] * len(items)


async def _back(verifier: "ActorHandle") -> None:
    while True:
        try:
            return await verifier.check.remote()
        except RayActorError:
            await asyncio.sleep(_RETRY_S)
