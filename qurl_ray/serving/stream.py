"""The torch engine as a stream: requests join the running batch as they arrive, and tokens are sent step by step.

Stream.ask ──► inbox ──► engine's thread: admit, step ──► news (once a step, on the event loop) ──► mailboxes
"""

import asyncio
import threading
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from queue import Empty, SimpleQueue

from qurl_ray.engines.torch.batch import Draw, OpenBatch
from qurl_ray.engines.torch.engine import TorchEngine
from qurl_ray.errors import EngineError
from qurl_ray.policy.adapters import SavedAdapter
from qurl_ray.quant.equalize import Factors
from qurl_ray.serving.protocol import ApiError, unavailable
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


class Stream:
    """All requests in one engine. Used on one event loop, but for `close`.

    The tokens of a request depend only on its own prompt, seed and sampling, not on its time of arrival or on other
    requests: the engine is batch-invariant.

    Args:
        engine: engine with verified weights; from now on only the stream's thread uses it.
        slots: answers that the engine generates at a time.
        queue: additional answers that may wait.
        length: most tokens of prompt and answer together.

    Raises:
        EngineError: there is not enough memory for the keys and values.
    """

    def __init__(self, engine: TorchEngine, *, slots: int, queue: int, length: int) -> None:
        assert engine.version is not None, "weights come first"
        self._slots, self._queue = slots, queue
        self._loop = asyncio.get_running_loop()
        self._owners: dict[str, tuple[Mailbox, int]] = {}
        self._changes: set[asyncio.Future[None]] = set()
        """Adapters that the engine is to hold, and does not yet."""
        self._idle = asyncio.Event()
        self._idle.set()
        self.error: Exception | None = None
        """Error after which the engine cannot be used any more; None while it can."""
        self._last_news = self._loop.time()  # or of the last request while it was idle
        engine.reserve(slots, length)
        self._inbox: SimpleQueue[Sequence[Ask] | set[str] | Callable[[], None] | None] = SimpleQueue()
        """Requests, uids of requests to cancel, changes of adapters, and None at the end, for the engine's thread.
        `_engine`, `_batch`, `_unadmitted`, `_uids` and `_unwanted` belong to this thread alone."""
        self._unwanted: set[str] = set()
        """Adapters that are forgotten once no request has them."""
        self._engine = engine
        self._batch = OpenBatch(places=slots, longest=length, version=engine.version)
        self._unadmitted: deque[Ask] = deque()
        self._uids: dict[int, str] = {}
        """Uid of the running request in each place of the batch."""
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)
        self._thread.start()

    # --- on the event loop -----------------------------------------------------------------------------------------

    @property
    def running(self) -> int:
        return min(len(self._owners), self._slots)

    @property
    def waiting(self) -> int:
        return max(0, len(self._owners) - self._slots)

    def check(self, silent_s: float) -> None:
        """Raise EngineError if the engine has died, or has had work for `silent_s` seconds without sending news."""
        if self.error is not None:
            raise EngineError(f"the engine has died: {self.error}")
        if self._owners and (silent := self._loop.time() - self._last_news) >= silent_s:
            raise EngineError(f"the engine has work, but has sent no token for {silent:.1f} s")

    def ask(self, asks: Sequence[Ask]) -> "Mailbox":
        """Start to answer. News of asks[i] arrive in the returned mailbox as (i, news).

        Raises:
            ApiError: 429 if too many answers wait already; 503 if the engine is broken.
        """
        if self.error is not None:
            raise unavailable()
        if len(self._owners) + len(asks) > self._slots + self._queue:
            message = "all slots are taken and too many requests wait: try again"
            raise ApiError(429, message, kind="requests", code="rate_limit_exceeded")
        if not self._owners:
            self._last_news = self._loop.time()
        mailbox = Mailbox(self._inbox.put, [ask.request.uid for ask in asks])
        self._owners |= {ask.request.uid: (mailbox, index) for index, ask in enumerate(asks)}
        self._idle.clear()
        self._inbox.put(asks)
        return mailbox

    async def put_adapter(self, name: str, saved: SavedAdapter, factors: Mapping[str, Factors]) -> None:
        """Have the engine hold an adapter, between two steps. See TorchEngine.put_adapter; the name is a new one.

        Raises:
            Exception: the engine cannot hold it, or has died.
        """
        if self.error is not None:
            raise EngineError(f"the engine has died: {self.error}")
        done: asyncio.Future[None] = self._loop.create_future()

        def settle(error: Exception | None) -> None:
            self._changes.discard(done)
            if not done.done():
                done.set_exception(error) if error else done.set_result(None)

        def put() -> None:
            try:
                self._engine.put_adapter(name, saved, factors)
            except Exception as error:
                self._call(settle, error)
            else:
                self._call(settle, None)

        self._changes.add(done)
        self._inbox.put(put)
        await done

    def drop_adapter(self, name: str) -> None:
        """Have the engine forget an adapter, once the requests that have it have ended. No new one may come."""
        self._inbox.put(lambda: self._unwanted.add(name))

    async def drained(self) -> None:
        """Wait until nothing runs, or the engine has died."""
        await self._idle.wait()

    def _deliver(self, news: Sequence[News]) -> None:
        self._last_news = self._loop.time()
        for item in news:
            mailbox, index = self._owners[item.uid]
            if item.finish is not None:
                del self._owners[item.uid]
            mailbox.put(index, item)
        if not self._owners:
            self._idle.set()

    def _break(self, error: Exception) -> None:
        self.error = error
        for mailbox, _ in self._owners.values():
            mailbox.fail(error)
        for change in self._changes:
            if not change.done():
                change.set_exception(EngineError(f"the engine has died: {error}"))
        self._owners.clear()
        self._changes.clear()
        self._idle.set()

    # --- in a thread of the caller's -------------------------------------------------------------------------------

    def close(self) -> None:
        """End the engine and its thread. Blocks."""
        self._inbox.put(None)
        self._thread.join()
        self._engine.close()

    # --- in the engine's thread, which makes steps while there is work ---------------------------------------------

    def _run(self) -> None:
        try:
            while (cancelled := self._read()) is not None:
                admitted = self._admit()
                self._engine.step(self._batch, admitted, cancelled=cancelled)
                for name in self._unwanted - {*self._batch.adapters(), *(a.request.adapter for a in self._unadmitted)}:
                    self._engine.drop_adapter(name)
                    self._unwanted.discard(name)
                if not self._batch.finite:
                    raise EngineError("log-probs are not finite: the engine's weights or its kernel are broken")
                news = []
                for place, draws, finish in self._batch.news():
                    uid = self._uids[place] if finish is None else self._uids.pop(place)
                    news.append(News(uid=uid, draws=draws, finish=finish))
                if news:
                    self._call(self._deliver, news)
        except Exception as error:  # after any error nothing can be answered any more, and it must be reported
            self._call(self._break, error)

    def _read(self) -> list[int] | None:
        """Empty the inbox, waiting for it if nothing runs. Return the places of cancelled requests; None at the end."""
        cancelled: set[str] = set()
        while True:
            try:
                item = self._inbox.get(block=not (self._batch.count or self._unadmitted or cancelled))
            except Empty:
                break
            if item is None:
                return None
            if callable(item):
                item()
            elif isinstance(item, set):
                cancelled |= item
                if dropped := [ask.request.uid for ask in self._unadmitted if ask.request.uid in item]:
                    self._unadmitted = deque(ask for ask in self._unadmitted if ask.request.uid not in item)
                    self._call(self._deliver, [News(uid=uid, draws=(), finish="cancelled") for uid in dropped])
            else:
                self._unadmitted.extend(item)
        return [place for place, uid in self._uids.items() if uid in cancelled]

    def _admit(self) -> list[tuple[int, Request]]:
        admitted: list[tuple[int, Request]] = []
        tokens = 0
        while self._unadmitted and self._batch.free:
            tokens += len(self._unadmitted[0].request.prompt_ids)
            if admitted and tokens > _PREFILL_TOKENS:
                break
            ask = self._unadmitted.popleft()
            place = self._batch.enter(ask.request, top=ask.top)
            self._uids[place] = ask.request.uid
            admitted.append((place, ask.request))
        return admitted

    def _call(self, function: Callable, *args: object) -> None:
        try:
            self._loop.call_soon_threadsafe(function, *args)
        except RuntimeError:
            assert self._loop.is_closed(), "the only reason"  # the process ends, and nobody waits for tokens


class Mailbox:
    """Mailbox for the news of one request's answers.

    Example:
        with closing(stream.ask(asks)) as mailbox:
            for index, news in await mailbox.take(): ...
    """

    def __init__(self, cancel: Callable[[set[str]], None], uids: Sequence[str]) -> None:
        self._cancel, self._uids = cancel, list(uids)
        self._news: list[tuple[int, News]] = []
        self._arrived = asyncio.Event()
        self._error: Exception | None = None
        self._left = set(uids)

    def put(self, index: int, news: News) -> None:
        if news.finish is not None:
            self._left.discard(news.uid)
        self._news.append((index, news))
        self._arrived.set()

    def fail(self, error: Exception) -> None:
        self._error = error
        self._arrived.set()

    async def take(self) -> list[tuple[int, News]]:
        """Wait for news, and return all that have arrived.

        Raises:
            EngineError: the engine has died.
        """
        await self._arrived.wait()
        if self._error:
            raise EngineError("the engine has died") from self._error
        self._arrived.clear()
        news, self._news = self._news, []
        return news

    def stop(self, index: int) -> None:
        """Cancel the answer with this index."""
        self._cancel({self._uids[index]})

    def close(self) -> None:
        """Cancel the answers that have not ended. They keep their slots until the engine has released them."""
        if self._left:
            self._cancel(set(self._left))
