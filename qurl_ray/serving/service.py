"""Service of one replica: the policy that answers now, and the swap to another one. Independent of Ray Serve."""

import asyncio
import logging
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import TypeVar

from qurl_ray.config.serving import ServingConfig
from qurl_ray.serving.load import LoadedAdapter, LoadedPolicy, load_policy
from qurl_ray.serving.meters import Meters
from qurl_ray.serving.policies import Pinned, check_files, files_of
from qurl_ray.serving.protocol import ChatRequest, CompletionRequest, unavailable
from qurl_ray.serving.served import Answer, Served

logger = logging.getLogger(__name__)

T = TypeVar("T")


class Service:
    """Service that answers with one policy at a time, on one event loop.

    Args:
        name: name of the model for clients.
    """

    def __init__(self, config: ServingConfig, *, name: str, meters: Meters) -> None:
        self.config = config
        self._meters, self._name = meters, name
        self._current: Served | None = None
        self._pinned: Pinned | None = None
        self._wanted: Pinned | None = None
        self._refused: str | None = None
        self._swapping = asyncio.Lock()
        self._leaving: dict[Served, asyncio.Task] = {}

    @property
    def ready(self) -> bool:
        return self._current is not None

    @property
    def current(self) -> Served:
        """Policy that answers now.

        Raises:
            ApiError: 503 if there is none yet.
        """
        if self._current is None:
            raise unavailable()
        return self._current

    async def open(self, request: ChatRequest | CompletionRequest) -> Answer:
        """Start to answer, with one policy from the first token to the last.

        Raises:
            ApiError: the request is refused.
        """
        while True:
            served = self.current
            prompts = await served.encode(request)
            if served is self._current:  # else the policy was swapped meanwhile
                return served.open(request, prompts)

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
            same = self._pinned and replace(pinned, adapters=()) == replace(self._pinned, adapters=())
            try:
                if same and (current := self._current):
                    await current.adopt(await self._in_a_thread(partial(self._read, pinned, current.loaded)))
                    self._pinned = pinned
                    return
                loaded = await self._load(pinned)
                served = await self._served(pinned, loaded)
            except Exception as error:  # of files, libraries, memory: none may end the policy that answers
                self._refused = f"{type(error).__name__}: {error}"
                logger.error("cannot load the policy %s: %s", pinned.source, error)
                if self._current is None:
                    raise
                return
            old, self._pinned = self._current, pinned
            self._current = served
            if old:
                self._leaving[old] = asyncio.ensure_future(self._leave(old))

    async def _served(self, pinned: Pinned, loaded: LoadedPolicy) -> Served:
        """Return the loaded policy with its adapters, ready to answer."""
        served = Served(loaded, self.config, name=self._name, meters=self._meters)
        try:
            await served.adopt(await self._in_a_thread(partial(self._read, pinned, loaded)))
        except BaseException:
            await asyncio.to_thread(served.close)
            raise
        return served

    def _read(self, pinned: Pinned, loaded: LoadedPolicy) -> dict[str, LoadedAdapter]:
        """Read the pinned adapters, which must be as they were pinned, before and after."""
        adapters = {}
        for name, folder, sha256 in pinned.adapters:
            check_files(folder, Path(folder), sha256)
            adapters[name] = loaded.adapter(Path(folder))
            check_files(folder, Path(folder), sha256)
        return adapters

    async def _load(self, pinned: Pinned) -> LoadedPolicy:
        def load() -> LoadedPolicy:
            with files_of(pinned, self.config) as folder:
                return load_policy(folder, self.config, [Path(folder) for _, folder, _ in pinned.adapters])

        return await self._in_a_thread(load)

    async def _in_a_thread(self, load: Callable[[], T]) -> T:
        # In a thread that ends, and so releases its OpenMP threads. While another thread kept some, there would be more
        # threads than cores, and libgomp would put the engine's to sleep after every operation.
        thread = ThreadPoolExecutor(1, thread_name_prefix="load")
        try:
            return await asyncio.get_running_loop().run_in_executor(thread, load)
        finally:
            thread.shutdown(wait=False)  # the event loop must not wait for a load that is no longer needed

    async def _leave(self, old: Served) -> None:
        """Close the engine of a policy when its requests have ended."""
        await old.stream.drained()
        await asyncio.to_thread(old.close)
        del self._leaving[old]

    def status(self) -> dict[str, object]:
        """Return the policy that answers, and the error of the last swap (None if it succeeded)."""
        return {"pinned": asdict(self._pinned) if self._pinned else None, "refused": self._refused}

    def check_health(self) -> None:
        """Raise EngineError if an engine, also one that is leaving, has died, or sends no news for too long while it
        has work. Updates gauges."""
        if current := self._current:
            tags = {"version": current.model}
            self._meters.running.set(current.stream.running, tags)
            self._meters.waiting.set(current.stream.waiting, tags)
            for served in (current, *self._leaving):
                served.stream.check(self.config.silent_s)
