"""A Ray Serve replica of the app: one process with one engine, and the whole HTTP API in front of it.

There is one deployment, and no gateway in front of engines: with one, each token would pass through one more process.
"""

import asyncio
from typing import Any

import torch
from ray import serve
from starlette.types import ASGIApp

from qurl_ray.config.serving import ServingConfig
from qurl_ray.serving.http import http_app
from qurl_ray.serving.meters import Meters
from qurl_ray.serving.policies import Pinned
from qurl_ray.serving.service import Service


class Replica:
    """Replica that Ray Serve starts, checks for health, and reconfigures for another policy.

    Args:
        settings: resolved settings of the app.
        key_digest: see http_app.
        threads: CPU threads of the engine.
    """

    async def __init__(  # type: ignore[misc]  # Ray Serve awaits it
        self, settings: dict[str, Any], *, name: str, key_digest: str | None, threads: int
    ) -> None:
        torch.set_num_threads(threads)
        config = ServingConfig.model_validate(settings)
        self._key_digest = key_digest
        self._service = Service(config, name=name, meters=Meters())
        self._swaps: set[asyncio.Task] = set()

    def __serve_build_asgi_app__(self) -> ASGIApp:
        return http_app(self._service, key_digest=self._key_digest)

    async def reconfigure(self, policy: dict[str, Any]) -> None:
        """Swap to a policy. Serve calls this at the start, and whenever `user_config` changes.

        Waits for the first policy only. Later policies load in the background while the old one answers: Serve sends no
        requests to a replica until this returns.
        """
        swap = asyncio.ensure_future(self._service.swap(Pinned(**policy)))
        if not self._service.ready:
            await swap
            return
        self._swaps.add(swap)  # the event loop itself keeps no reference
        swap.add_done_callback(self._swaps.discard)

    async def check_health(self) -> None:
        """Raise EngineError if the replica is unhealthy. Serve then restarts it."""
        self._service.check_health()

    async def status(self) -> dict[str, object]:
        """Return the status of the service; see Service.status."""
        return self._service.status()


ReplicaDeployment = serve.deployment(serve.ingress()(Replica))
