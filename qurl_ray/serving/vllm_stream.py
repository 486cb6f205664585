"""vLLM as the engine behind a front: it streams by itself, and its outputs are passed on."""

import asyncio
from collections import deque
from collections.abc import Iterable, Sequence
from functools import partial
from typing import Any

from qurl_ray.engines.torch.batch import Draw
from qurl_ray.engines.vllm.engine import VllmEngine
from qurl_ray.serving.stream import Ask, Deliver, Fail, News
from qurl_ray.types import Finish


class VllmStream:
    """Stream of a vLLM engine; see serving.stream.Stream.

    Args:
        engine: engine with verified weights, created with logprobs_mode="raw_logprobs".
        slots, length: those that the engine was created with; vLLM keeps to them by itself.
    """

    def __init__(
        self,
        engine: VllmEngine,
        *,
        slots: int,
        length: int,
        loop: asyncio.AbstractEventLoop,
        deliver: Deliver,
        fail: Fail,
    ) -> None:
        self._engine, self._loop, self._deliver, self._fail = engine, loop, deliver, fail
        self._news: deque[News] = deque()

    def submit(self, asks: Sequence[Ask]) -> None:
        for ask in asks:
            self._engine.stream(
                ask.request, logprobs=ask.top, on_output=partial(self._receive, ask), on_error=self._broken
            )

    def cancel(self, uids: Iterable[str]) -> None:
        self._engine.cancel(set(uids))

    def close(self) -> None:
        self._engine.close()

    # --- on vLLM's thread ------------------------------------------------------------------------------------------

    def _receive(self, ask: Ask, output: Any) -> None:
        self._news.append(News(uid=ask.request.uid, draws=draws(output, ask.top), finish=_finish(output)))
        if len(self._news) == 1:  # else the event loop has not taken the earlier news yet
            self._loop.call_soon_threadsafe(self._pass_on)

    def _broken(self, error: Exception) -> None:
        self._loop.call_soon_threadsafe(self._fail, error)

    # --- on the event loop -----------------------------------------------------------------------------------------

    def _pass_on(self) -> None:
        found = []
        while self._news:
            found.append(self._news.popleft())
        self._deliver(found)


def draws(output: Any, top: int | None) -> list[Draw]:
    """Convert a vLLM CompletionOutput to draws."""
    tokens = list(output.token_ids)
    if top is None:
        return [Draw(token=token) for token in tokens]
    found = []
    for token, step in zip(tokens, output.logprobs, strict=True):
        ranked = sorted((one.rank, other, one.logprob) for other, one in step.items())
        likeliest = tuple((other, logprob) for rank, other, logprob in ranked if rank <= top)
        found.append(Draw(token=token, logprob=step[token].logprob, top=likeliest[:top]))
    return found


def _finish(output: Any) -> Finish | None:
    return "cancelled" if output.finish_reason == "abort" else output.finish_reason
