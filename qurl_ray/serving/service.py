"""The service of one replica: the policy that answers now, and how another one takes its place. Knows no Ray Serve."""

import asyncio
import logging
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict

from qurl_ray.config.serving import ServingConfig
from qurl_ray.errors import EngineError
from qurl_ray.serving.load import Loaded, load_policy
from qurl_ray.serving.meters import Meters
from qurl_ray.serving.policies import Pinned, folder_of, tracking_uri
from qurl_ray.serving.protocol import ChatRequest, CompletionRequest, unavailable
from qurl_ray.serving.served import Answer, Served

logger = logging.getLogger(__name__)


class Service:
    """Answers with one policy at a time. Lives on one event loop.

    Args:
        name: what clients call the model.
        threads: CPU threads of an engine.
    """

    def __init__(self, config: ServingConfig, *, name: str, threads: int, meters: Meters) -> None:
        self.config, self.meters = config, meters
        self._name, self._threads = name, threads
        self._current: Served | None = None
        self._pinned: Pinned | None = None
        self._wanted: Pinned | None = None
        self._refused: str | None = None
        self._swapping = asyncio.Lock()
        self._ready = asyncio.Event()
        self._held = 0  # requests that wait for it
        self._leaving: set[asyncio.Task] = set()

    @property
    def ready(self) -> bool:
        """Whether there is a policy, though it may just be exchanged."""
        return self._current is not None

    # --- requests --------------------------------------------------------------------------------------------------

    @property
    def current(self) -> Served:
        """The policy that answers.

        Raises:
            ApiError: 503, there is none yet.
        """
        if self._current is None:
            raise unavailable()
        return self._current

    async def open(self, request: ChatRequest | CompletionRequest, *, size: int) -> Answer:
        """Begin to answer, with one policy from the first token to the last.

        Args:
            size: bytes of the body.

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
        """Wait while one policy has gone and the next one has not come; few may."""
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
        """Answer new requests with this policy; those that run end with the one that they began with.

        A policy that cannot be loaded leaves the old one where it is. Without an old one that is an error.

        Raises:
            Exception: what was wrong with it, and there is no other.
        """
        self._wanted, self._refused = pinned, None
        async with self._swapping:
            if pinned == self._pinned or pinned != self._wanted:  # it is there already, or another one is asked for
                return
            try:
                await self._replace(pinned)
            except Exception as error:  # of the policy's files, its libraries, memory: nothing may end what answers
                self._refused = f"{type(error).__name__}: {error}"
                self.meters.swaps.inc(tags={"outcome": "refused"})
                logger.error("the policy %s was refused: %s", pinned.source, error)
                if self._current is None:
                    raise
            else:
                self._pinned, self._refused = pinned, None
                self.meters.swaps.inc(tags={"outcome": "done"})

    async def _replace(self, pinned: Pinned) -> None:
        old = self._current
        if old and self.config.engine == "vllm":  # a process holds one vLLM: requests wait while it is made anew
            await self._in_place(old, pinned)
            return
        self._current = await self._load(pinned)
        self._ready.set()
        if old:
            self._leave(old)

    async def _in_place(self, old: Served, pinned: Pinned) -> None:
        self._ready.clear()
        await old.front.drained()
        await asyncio.to_thread(old.close)
        try:
            self._current = await self._load(pinned)
        except Exception as error:  # as in `swap`
            old.front.error = error  # unless it can be made anew
            assert self._pinned
            self._current = await self._load(self._pinned)
            raise
        finally:
            self._ready.set()

    async def _load(self, pinned: Pinned) -> Served:
        def load() -> Loaded:
            folder = folder_of(pinned, tracking_uri(self.config))
            return load_policy(folder, self.config, threads=self._threads)

        # In a thread that ends, and gives its OpenMP threads back. As long as another thread had some, there would be
        # more than cores, and libgomp would put the engine's to sleep after every operation.
        thread = ThreadPoolExecutor(1, thread_name_prefix="load")
        try:
            loaded = await asyncio.get_running_loop().run_in_executor(thread, load)
        finally:
            thread.shutdown(wait=False)  # the event loop must not wait for a load that nobody wants any more
        return Served(loaded, self.config, name=self._name, meters=self.meters)

    def _leave(self, old: Served) -> None:
        async def end() -> None:
            await old.front.drained()
            await asyncio.to_thread(old.close)

        task = asyncio.ensure_future(end())
        self._leaving.add(task)  # the loop itself keeps no reference
        task.add_done_callback(self._leaving.discard)

    # --- health ----------------------------------------------------------------------------------------------------

    def status(self) -> dict[str, object]:
        """Which policy answers, and what became of the last swap."""
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
        """Raise EngineError if the engine has died, or is silent for too long while it has work."""
        served = self._current
        if served is None:
            return
        if served.front.error is not None:
            raise EngineError(f"the engine has died: {served.front.error}")
        if (silent := served.front.silent_s()) > self.config.silent_s:
            raise EngineError(f"the engine has told of no token for {silent:.0f} s")
        tags = {"version": served.model}
        self.meters.running.set(served.front.running, tags)
        self.meters.waiting.set(served.front.waiting, tags)
