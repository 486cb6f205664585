"""Engines that answer requests as they arrive: each joins the running batch, and its tokens are sent step by step.

    submit, cancel ──► inbox ──► thread: admit, step, news ──► deliver (once a step, on the event loop)

The loop of the torch engine is here. vLLM has its own loop, in engines/vllm/server.py.
"""

import asyncio
import queue
import threading
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol

from qurl_ray.engines.torch.batch import Draw, OpenBatch
from qurl_ray.engines.torch.engine import TorchEngine
from qurl_ray.errors import EngineError
from qurl_ray.types import Finish, Request

_PREFILL_TOKENS = 2048  # prompt tokens that join in one step: running requests wait for them


@dataclass(frozen=True, slots=True, kw_only=True)
class Ask:
    """A request whose tokens are sent one by one. Its uid is unique among all running requests."""

    request: Request
    top: int | None = None
    """Number of likeliest tokens to send with each token; None for no log-probs, not even that of the drawn token."""


@dataclass(frozen=True, slots=True, kw_only=True)
class News:
    """Progress of a request since its last news."""

    uid: str
    draws: Sequence[Draw]
    finish: Finish | None
    """Finish reason, if this is the last news; else None."""


Deliver = Callable[[Sequence[News]], None]
"""Function that receives news. It is called on the event loop."""
Fail = Callable[[Exception], None]
"""Function that receives the error after which the engine cannot be used. It is called on the event loop."""


class Stream(Protocol):
    """Interface of an engine for the front. The table of engines names a class for each engine that can be served; it
    takes what TorchStream takes."""

    def submit(self, asks: Sequence[Ask]) -> None:
        """Start to answer requests, which fit the context. May be called from any thread."""

    def cancel(self, uids: Iterable[str]) -> None:
        """Cancel requests; unknown uids are ignored. May be called from any thread."""

    def close(self) -> None:
        """Stop the engine. Blocks."""


class TorchStream:
    """Stream of the torch engine: a thread that runs it step by step.

    The tokens of a request depend only on its own prompt, seed and sampling, not on its time of arrival or on other
    requests: the engine is batch-invariant.

    Args:
        engine: engine with verified weights; from now on only this thread uses it.
        slots: sequences decoded at a time.
        length: most tokens of prompt and answer together.

    Raises:
        EngineError: there is not enough memory for the keys and values.
    """

    def __init__(
        self,
        engine: TorchEngine,
        *,
        slots: int,
        length: int,
        loop: asyncio.AbstractEventLoop,
        deliver: Deliver,
        fail: Fail,
    ) -> None:
        assert engine.version is not None, "weights come first"
        self._engine, self._loop, self._deliver, self._fail = engine, loop, deliver, fail
        self._inbox: queue.SimpleQueue[Sequence[Ask] | set[str] | None] = queue.SimpleQueue()
        self._batch = OpenBatch(places=slots, longest=length, version=engine.version)
        self._waiting: deque[Ask] = deque()
        self._running: dict[int, str] = {}
        """Uid of the running request in each place of the batch."""
        engine.reserve(slots, length)
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)
        self._thread.start()

    def submit(self, asks: Sequence[Ask]) -> None:
        self._inbox.put(asks)

    def cancel(self, uids: Iterable[str]) -> None:
        self._inbox.put(set(uids))

    def close(self) -> None:
        self._inbox.put(None)
        self._thread.join()
        self._engine.close()

    def _run(self) -> None:
        """Run step after step while there is work.

        consumes:  asks and cancels   from self._inbox    waits for one when nothing runs
        produces:  news of a step     for self._deliver   waits for nothing
        ends:      at close, or on the first error, which goes to self._fail
        """
        try:
            while (cancelled := self._read()) is not None:
                admitted = self._admit()
                self._engine.step(self._batch, admitted, cancelled=cancelled)
                if not self._batch.finite:
                    raise EngineError("log-probs are not finite: the engine's weights or its kernel are broken")
                self._tell()
        except Exception as error:  # after any error nothing can be answered any more, and it must be reported
            self._call(self._fail, error)

    def _read(self) -> list[int] | None:
        """Empty the inbox. Return the places of cancelled requests; None at the end of the stream."""
        cancelled: set[str] = set()
        while True:
            idle = not (self._batch.count or self._waiting or cancelled)
            try:
                item = self._inbox.get(block=idle)
            except queue.Empty:
                break
            if item is None:
                return None
            if isinstance(item, set):
                cancelled |= item
                dropped = [ask.request.uid for ask in self._waiting if ask.request.uid in item]
                self._waiting = deque(ask for ask in self._waiting if ask.request.uid not in item)
                if dropped:
                    ended = [News(uid=uid, draws=(), finish="cancelled") for uid in dropped]
                    self._call(self._deliver, ended)
            else:
                self._waiting.extend(item)
        return [place for place, uid in self._running.items() if uid in cancelled]

    def _admit(self) -> list[tuple[int, Request]]:
        admitted: list[tuple[int, Request]] = []
        tokens = 0
        while self._waiting and self._batch.free:
            tokens += len(self._waiting[0].request.prompt_ids)
            if admitted and tokens > _PREFILL_TOKENS:
                break
            ask = self._waiting.popleft()
            place = self._batch.enter(ask.request, top=ask.top)
            self._running[place] = ask.request.uid
            admitted.append((place, ask.request))
        return admitted

    def _tell(self) -> None:
        found = []
        for place, draws, finish in self._batch.news():
            uid = self._running[place] if finish is None else self._running.pop(place)
            found.append(News(uid=uid, draws=draws, finish=finish))
        if found:
            self._call(self._deliver, found)

    def _call(self, function: Callable, *args: object) -> None:
        try:
            self._loop.call_soon_threadsafe(function, *args)
        except RuntimeError:
            assert self._loop.is_closed(), "the only reason"  # the process ends, and nobody waits for tokens
