"""Service of one replica: the policy that answers now, and the swap to another one. Independent of Ray Serve."""

import asyncio
import contextlib
import logging
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from pathlib import Path

from qurl_ray.config.serving import ServingConfig
from qurl_ray.errors import ConfigError, EngineError
from qurl_ray.serving.load import LoadedPolicy, load_policy
from qurl_ray.serving.meters import Meters
from qurl_ray.serving.policies import Pinned, check_files, folder_of, tracking_uri
from qurl_ray.serving.protocol import ChatRequest, CompletionRequest, unavailable
from qurl_ray.serving.served import Answer, Served
from qurl_ray.tables import ENGINES

logger = logging.getLogger(__name__)

_CLOSE_S = 60.0  # deadline for an engine without work to end


class Service:
    """Service that answers with one policy at a time, on one event loop.

    Args:
        name: name of the model for clients.
        threads: CPU threads of an engine.
        kept: folder with the files of policies; see kept.keep.
    """

    def __init__(
        self, config: ServingConfig, *, name: str, threads: int, meters: Meters, kept: Path | None = None
    ) -> None:
        self.config, self.meters = config, meters
        self._name, self._threads, self._kept = name, threads, kept
        self._current: Served | None = None
        self._pinned: Pinned | None = None
        self._wanted: Pinned | None = None
        self._refused: str | None = None
        self._hung: str | None = None
        self._swapping = asyncio.Lock()
        self._ready = asyncio.Event()
        self._held = 0  # requests that wait for _ready
        self._leaving: set[asyncio.Task] = set()

    @property
    def ready(self) -> bool:
        """True if there is a policy, even while it is being replaced."""
        return self._current is not None

    # --- requests --------------------------------------------------------------------------------------------------

    @property
    def current(self) -> Served:
        """Policy that answers now.

        Raises:
            ApiError: 503 if there is none yet.
        """
        if self._current is None:
            raise unavailable()
        return self._current

    async def open(self, request: ChatRequest | CompletionRequest, *, size: int) -> Answer:
        """Start to answer, with one policy from the first token to the last.

        Args:
            size: size of the body, in bytes.

        Raises:
            ApiError: the request is refused.
        """
        while True:
            await self._hold()
            served = self.current
            encoded = await served.encode(request, size=size)
            if self._ready.is_set() and served is self._current:  # else the policy was swapped meanwhile
                return served.open(encoded)

    async def _hold(self) -> None:
        """Wait while policies are exchanged. Raise ApiError 503 if that takes too long, or too many requests wait."""
        if self._ready.is_set():
            return
        if self._held >= self.config.queue:
            raise unavailable()
        self._held += 1
        try:
            await asyncio.wait_for(self._ready.wait(), self.config.start_timeout_s)
        except TimeoutError:
            raise unavailable() from None
        finally:
            self._held -= 1

    # --- policies --------------------------------------------------------------------------------------------------

    async def swap(self, pinned: Pinned) -> None:
        """Answer new requests with this policy. Running requests end with the policy that they began with.

        If the policy cannot be loaded, the old one continues to answer.

        Raises:
            Exception: the policy cannot be loaded, and there is no old one.
        """
        self._wanted, self._refused = pinned, None
        async with self._swapping:
            if pinned == self._pinned or pinned != self._wanted:  # loaded already, or a later call wants another one
                return
            try:
                await self._replace(pinned)
            except Exception as error:  # of files, libraries, memory: none may end the policy that answers
                self._refused = f"{type(error).__name__}: {error}"
                self.meters.swaps.inc(tags={"outcome": "refused"})
                logger.error("cannot load the policy %s: %s", pinned.source, error)
                if self._current is None:
                    raise
            else:
                self._pinned, self._refused = pinned, None
                self.meters.swaps.inc(tags={"outcome": "done"})

    async def _replace(self, pinned: Pinned) -> None:
        old = self._current
        if old and ENGINES[self.config.engine].one_per_process:  # requests wait while it restarts
            await self._in_place(old, pinned)
            return
        self._current = await self._load(pinned)
        self._ready.set()
        if old:
            self._leave(old)

    async def _in_place(self, old: Served, pinned: Pinned) -> None:
        self._ready.clear()
        try:
            await self._close(old)
        except EngineError:
            self._ready.set()
            raise
        try:
            self._current = await self._load(pinned)
        except Exception as error:  # as in `swap`
            old.front.error = error  # final, unless the old policy can be loaded again
            assert self._pinned
            self._current = await self._load(self._pinned)
            raise
        finally:
            self._ready.set()

    async def _load(self, pinned: Pinned) -> Served:
        def load() -> LoadedPolicy:
            folder = folder_of(pinned, tracking_uri(self.config), self._kept)
            loaded = load_policy(folder, self.config, threads=self._threads)
            try:
                check_files(pinned, folder)  # they may have changed while they were read
            except ConfigError:
                loaded.engine.close()
                raise
            return loaded

        # In a thread that ends, and so releases its OpenMP threads. While another thread kept some, there would be more
        # threads than cores, and libgomp would put the engine's to sleep after every operation.
        thread = ThreadPoolExecutor(1, thread_name_prefix="load")
        try:
            loaded = await asyncio.get_running_loop().run_in_executor(thread, load)
        finally:
            thread.shutdown(wait=False)  # the event loop must not wait for a load that is no longer needed
        return Served(loaded, self.config, name=self._name, meters=self.meters)

    def _leave(self, old: Served) -> None:
        async def end() -> None:
            with contextlib.suppress(EngineError):  # check_health tells of it
                await self._close(old)

        task = asyncio.ensure_future(end())
        self._leaving.add(task)  # the event loop itself keeps no reference
        task.add_done_callback(self._leaving.discard)

    async def _close(self, old: Served) -> None:
        """Close the engine of a policy when its requests have ended.

        Raises:
            EngineError: the engine hangs. Its requests fail, and the replica, with its thread, is unhealthy.
        """
        try:
            await old.front.drained(self.config.silent_s)
            await asyncio.wait_for(asyncio.to_thread(old.close), _CLOSE_S)
        except (EngineError, TimeoutError) as error:
            reason = str(error) or f"it does not end within {_CLOSE_S:g} s"
            self._hung = f"the engine of {old.model}, whose policy was swapped, hangs: {reason}"
            logger.error("%s; the replica must be restarted", self._hung)
            hung = EngineError(self._hung)
            old.front.fail(hung)
            raise hung from None

    # --- health ----------------------------------------------------------------------------------------------------

    def status(self) -> dict[str, object]:
        """Return the policy that answers, its load, and the error of the last swap (None if it succeeded)."""
        served = self._current
        return {
            "model": served.model if served else None,
            "pinned": asdict(self._pinned) if self._pinned else None,
            "refused": self._refused,
            "running": served.front.running if served else 0,
            "waiting": served.front.waiting if served else 0,
            "kernels": served.kernels if served else [],
        }

    def check_health(self) -> None:
        """Raise EngineError if an engine has died, or sends no news for too long while it has work. Updates gauges."""
        if self._hung:
            raise EngineError(self._hung)
        served = self._current
        if served is None:
            return
        served.front.check(self.config.silent_s)
        tags = {"version": served.model}
        self.meters.running.set(served.front.running, tags)
        self.meters.waiting.set(served.front.waiting, tags)
