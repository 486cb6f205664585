"""A replica of the app, as Ray Serve has it: one process with one engine, and the whole HTTP API in front of it.

One deployment, not a gateway before engines: each token would pass one more process, and what a gateway could do for a
replica that dies, asking another one, a client's retry does as well.
"""

import asyncio
from typing import Any

import torch
from ray import serve
from starlette.types import ASGIApp

from qurl_ray.config.serving import ServingConfig
from qurl_ray.serving.http import http_app
from qurl_ray.serving.meters import Meters, exposition
from qurl_ray.serving.policies import Pinned
from qurl_ray.serving.service import Service


class Replica:
    """What Ray Serve starts, asks for its health, and tells of another policy.

    Args:
        settings: of the app, resolved.
        key_digest: see http_app.
        threads: CPU threads of the engine.
    """

    async def __init__(  # type: ignore[misc]  # Ray Serve awaits it
        self, settings: dict[str, Any], *, name: str, key_digest: str | None, threads: int
    ) -> None:
        torch.set_num_threads(threads)
        config = ServingConfig.model_validate(settings)
        self._key_digest = key_digest
        self._service = Service(config, name=name, threads=threads, meters=Meters())
        self._swaps: set[asyncio.Task] = set()

    def __serve_build_asgi_app__(self) -> ASGIApp:
        return http_app(self._service, key_digest=self._key_digest, exposition=exposition)

    async def reconfigure(self, policy: dict[str, Any]) -> None:
        """Serve calls it at the start, and whenever `user_config` is another one. Later policies load beside the one
        that answers: Serve sends no requests to a replica that is still in here."""
        swap = asyncio.ensure_future(self._service.swap(Pinned(**policy)))
        if not self._service.ready:
            await swap
            return
        self._swaps.add(swap)  # the loop itself keeps no reference
        swap.add_done_callback(self._swaps.discard)

    async def check_health(self) -> None:
        """Serve starts the replica anew if this raises."""
        self._service.check_health()

    async def status(self) -> dict[str, object]:
        """See Service.status."""
        return self._service.status()


ReplicaDeployment = serve.deployment(serve.ingress()(Replica))
