"""Actor handles whose calls run in this process: the real fleet and the real workers, without Ray."""

import asyncio
from typing import Any

from ray.exceptions import RayTaskError

from qurl_ray.errors import QurlError


class LocalActor:
    """Stands for a handle of `target`.

    Args:
        threaded: calls run beside the event loop.
    """

    def __init__(self, target: Any, *, threaded: bool = False) -> None:
        self.target, self._threaded = target, threaded

    def __getattr__(self, name: str) -> "LocalMethod":
        return LocalMethod(getattr(self.target, name), self._threaded)


class LocalMethod:
    """Of a LocalActor. Coroutine functions run in the caller's event loop."""

    def __init__(self, function: Any, threaded: bool) -> None:
        self._function, self._threaded = function, threaded

    def options(self, **_: Any) -> "LocalMethod":
        return self

    def remote(self, *args: Any) -> asyncio.Future:
        return asyncio.ensure_future(self._run(args))

    async def _run(self, args: tuple) -> Any:
        try:
            if self._threaded:
                return await asyncio.to_thread(self._function, *args)
            found = self._function(*args)
            return await found if asyncio.iscoroutine(found) else found
        except QurlError as error:
            raise RayTaskError("a local actor", "", error) from None
