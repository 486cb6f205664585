"""Verifiers: Ray actors that judge answers. Reward functions run in child processes, which cannot take an actor
down."""

import asyncio
import queue
import threading
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, cast

from ray.exceptions import RayActorError, RayTaskError

from qurl_ray.errors import DeadlineExceeded, QurlError
from qurl_ray.rewards.given import carried
from qurl_ray.rewards.judge import failure
from qurl_ray.rewards.process import VerifierProcess
from qurl_ray.sandbox.process import MEMORY_GB
from qurl_ray.types import Problem, Verdict

if TYPE_CHECKING:
    from ray.actor import ActorHandle

_PROCESSES = 4  # of a verifier: one works, the others replace it when it hangs
_PIECE = 128  # most answers in one call: few enough to lose with an actor
_RETRY_S = 0.5


class Verifier:
    """Judge that uses one process at a time and has a few spare ones.

    An answer that takes longer than a quarter of its deadline keeps its process, and a spare one takes the next answer:
    a hang costs only that quarter. A killed process restarts in the background: a crash costs only its answer.
    """

    def __init__(self, spec: str, timeout_s: float, memory_gb: float = MEMORY_GB, logs: Path | None = None) -> None:
        """Create the processes, idle at first. Both bounds apply to each of them; see VerifierProcess.

        Args:
            logs: beginning of the paths of their logs.
        """
        self._processes = [
            VerifierProcess(spec, timeout_s, memory_gb=memory_gb, log=logs and logs.with_name(f"{logs.name}-{n}.log"))
            for n in range(_PROCESSES)
        ]
        self._free: queue.LifoQueue[VerifierProcess] = queue.LifoQueue()  # warm processes come before new ones
        for process in self._processes:
            self._free.put(process)
        self._threads = ThreadPoolExecutor(_PROCESSES)
        self._turn = threading.Lock()
        self._patience_s = timeout_s / _PROCESSES

    def check(self) -> None:
        """Raise RewardError if the reward cannot be used."""
        process = self._free.get()
        try:
            process.check()
        finally:
            self._free.put(process)

    def judge_many(self, items: Sequence[tuple[str, Problem]]) -> list[Verdict]:
        """Return one verdict per (answer, problem), in order. Several threads may call this at once; they take
        turns."""
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
        finally:  # if the reward can no longer be resolved, the next answer reports it
            self._free.put(process)


class _Run:
    """Answers that one process judges, from index `start` on."""

    def __init__(self, items: Sequence[tuple[str, Problem]], verdicts: list[Verdict | None], start: int) -> None:
        self.items, self.start = items, start
        self._verdicts, self._at, self._over, self._since = verdicts, start, False, time.monotonic()
        self.left = False
        """True if another process has taken over all answers after the next one."""
        self._changed = threading.Condition()

    def put(self, verdict: Verdict) -> None:
        """Store the next verdict, unless another process was faster."""
        with self._changed:
            if self._verdicts[self._at] is None:
                self._verdicts[self._at] = verdict
            self._at, self._since = self._at + 1, time.monotonic()  # wakes up nobody: this is called often

    def finish(self) -> None:
        """Mark that no more verdicts will come."""
        with self._changed:
            self._over = True
            self._changed.notify_all()

    def until_stuck(self, patience_s: float) -> int:
        """Wait until the process is done or stuck. Returns the index of the first answer for another process: after the
        last verdict if it is done, or after the answer that it has not judged for `patience_s` seconds."""
        with self._changed:
            while not self._over:
                remaining = self._since + patience_s - time.monotonic()
                if remaining <= 0:
                    self.left = True
                    return self._at + 1
                self._changed.wait(remaining)
            # Without a single verdict, it could not start at all: the caller gets its error with the result.
            return self._at if self._at > self.start else len(self.items)


@dataclass(frozen=True, slots=True, kw_only=True)
class VerifierPool:
    """Handles of the verifiers; may be sent to other processes."""

    verifiers: "tuple[ActorHandle, ...]"

    async def judge(self, items: Sequence[tuple[str, Problem]], deadline_s: float) -> list[Verdict]:
        """Return one verdict per (answer, problem), in order. Chunks go to whichever verifier is free.

        If a verifier dies, the answers of its chunk get status "error"; the verifier is restarted.

        Raises:
            DeadlineExceeded: some verdicts were missing after `deadline_s` seconds.
            RewardError: the reward cannot be resolved.
        """
        verdicts: list[Verdict] = [failure("error", "not judged")] * len(items)
        # As many chunks at a verifier as it has processes, so that a hanging one does not delay the next.
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
        """End the verifiers and everything that their rewards started."""
        import ray

        ray.wait([verifier.close.remote() for verifier in self.verifiers], num_returns=len(self.verifiers), timeout=5)
        for verifier in self.verifiers:
            ray.kill(verifier)


def start_verifiers(
    count: int, spec: str, timeout_s: float, memory_gb: float = MEMORY_GB, folder: Path | None = None
) -> VerifierPool:
    """Start a pool of `count` verifiers; see Verifier. Ray does not retry calls: the pool handles failures itself.

    Args:
        folder: for logs of what rewards print.
    """
    import ray

    # One thread for each chunk that the pool sends at once, and one for `close`.
    actor = ray.remote(num_cpus=0, max_restarts=-1, max_task_retries=0, max_concurrency=_PROCESSES + 1)(Verifier)
    logs = [folder and folder / f"reward-{number}" for number in range(count)]
    return VerifierPool(verifiers=tuple(actor.remote(carried(spec), timeout_s, memory_gb, log) for log in logs))


async def _ask(verifier: "ActorHandle", items: Sequence[tuple[str, Problem]]) -> list[Verdict]:
    try:
        return await verifier.judge_many.remote(list(items))
    except RayActorError:
        while True:  # until it is back, or all remaining chunks would fail, one after the other
            try:
                await verifier.check.remote()
                return [failure("error", "the verifier died")] * len(items)
            except RayActorError:
                await asyncio.sleep(_RETRY_S)
