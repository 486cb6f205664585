"""Link between requests, on the event loop, and the engine's thread: delivers news, and limits how much may wait."""

import asyncio
import contextlib
from collections.abc import Sequence
from types import TracebackType

from qurl_ray.errors import EngineError
from qurl_ray.serving.protocol import overloaded, unavailable
from qurl_ray.serving.stream import Ask, News, Stream


class Front:
    """All requests in one engine. Used on one event loop only.

    Args:
        slots: answers that the engine generates at a time.
        queue: additional answers that may wait.
        retry_after_s: seconds after which rejected clients are told to retry.
    """

    def __init__(self, *, slots: int, queue: int, retry_after_s: int) -> None:
        self._slots, self._queue, self._retry_after_s = slots, queue, retry_after_s
        self._owners: dict[str, tuple[Mailbox, int]] = {}
        self._idle = asyncio.Event()
        self._idle.set()
        self.stream: Stream
        """Stream of the engine. Set once, before the first request."""
        self.error: Exception | None = None
        """Error after which the engine cannot be used any more; None while it can."""
        self.last_news = asyncio.get_running_loop().time()
        """Time of the engine's last news, or of the last request while it was idle, on the clock of the event loop."""

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
        if self._owners and (silent := asyncio.get_running_loop().time() - self.last_news) >= silent_s:
            raise EngineError(f"the engine has work, but has sent no token for {silent:.1f} s")

    def check_room(self, count: int) -> None:
        """Raise ApiError 429 if there is no room for `count` more answers, or 503 if the engine is broken."""
        if self.error is not None:
            raise unavailable()
        if len(self._owners) + count > self._slots + self._queue:
            raise overloaded(self._retry_after_s)

    def ask(self, asks: Sequence[Ask]) -> "Mailbox":
        """Start to answer. News of asks[i] arrive in the returned mailbox as (i, news).

        Raises:
            ApiError: 429 if too many answers wait already; 503 if the engine is broken.
        """
        self.check_room(len(asks))
        if not self._owners:
            self.last_news = asyncio.get_running_loop().time()
        mailbox = Mailbox(self, [ask.request.uid for ask in asks])
        self._owners |= {ask.request.uid: (mailbox, index) for index, ask in enumerate(asks)}
        self._idle.clear()
        try:
            self.stream.submit(asks)
        except EngineError as error:
            self.fail(error)
            raise
        return mailbox

    def cancel(self, uids: Sequence[str]) -> None:
        """Cancel answers. They keep their slots until the engine has released them."""
        if known := [uid for uid in uids if uid in self._owners]:
            self.stream.cancel(known)

    def deliver(self, news: Sequence[News]) -> None:
        """Pass the engine's news of one step to the mailboxes of the requests."""
        self.last_news = asyncio.get_running_loop().time()
        for item in news:
            if item.uid not in self._owners:  # the engine was given up, and moves again
                continue
            mailbox, index = self._owners[item.uid]
            if item.finish is not None:
                del self._owners[item.uid]
            mailbox.put(index, item)
        if not self._owners:
            self._idle.set()

    def fail(self, error: Exception) -> None:
        """Fail all requests, because the engine has died."""
        self.error = error
        for mailbox, _ in self._owners.values():
            mailbox.fail(error)
        self._owners.clear()
        self._idle.set()

    async def drained(self, silent_s: float) -> None:
        """Wait until nothing runs. Raise EngineError as `check`."""
        while self._owners:
            self.check(silent_s)
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._idle.wait(), silent_s / 4)


class Mailbox:
    """Mailbox for the news of one request's answers. Leaving the context before the end cancels the remaining answers.

    Example:
        with front.ask(asks) as mailbox:
            while mailbox.open:
                for index, news in await mailbox.take(): ...
    """

    def __init__(self, front: Front, uids: Sequence[str]) -> None:
        self._front, self._uids = front, list(uids)
        self._news: list[tuple[int, News]] = []
        self._arrived = asyncio.Event()
        self._error: Exception | None = None
        self._left = set(uids)

    @property
    def open(self) -> bool:
        """True if more news will arrive, or some have not been taken."""
        return bool(self._left or self._news)

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
        found, self._news = self._news, []
        return found

    def stop(self, index: int) -> None:
        """Cancel the answer with this index."""
        self._front.cancel([self._uids[index]])

    def __enter__(self) -> "Mailbox":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._left:
            self._front.cancel(list(self._left))
