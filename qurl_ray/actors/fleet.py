"""The rollout workers: where they are placed, and how work and weights are spread over them."""

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass

import ray
from ray import ObjectRef
from ray.actor import ActorHandle
from ray.exceptions import RayActorError, RayTaskError
from ray.util.placement_group import PlacementGroup, placement_group, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from qurl_ray.actors.rollout_worker import RolloutWorker
from qurl_ray.config.models import RolloutConfig
from qurl_ray.errors import DeadlineExceeded, EngineError, QurlError
from qurl_ray.types import Completion, Manifest, PolicySpec, Request


@dataclass(frozen=True, slots=True, kw_only=True)
class Fleet:
    """Handles of the rollout workers; it may be sent to other processes."""

    workers: tuple[ActorHandle, ...]
    placement: PlacementGroup

    async def load(self, manifest: Manifest, parts: Sequence[ObjectRef], timeout_s: float) -> list[str]:
        """Every worker loads and verifies; the kernels in use afterwards.

        Raises:
            SyncError: a worker refused the weights.
            DeadlineExceeded: a worker was not done in time.
        """
        calls = [worker.load.remote(manifest, list(parts)) for worker in self.workers]
        kernels = await _all(calls, timeout_s, f"workers to load and verify weights {manifest.version}")
        return sorted({kernel for found in kernels for kernel in found})

    async def generate(self, requests: Sequence[Request], version: int, timeout_s: float) -> list[Completion]:
        """Completions in the order of the requests. Neighbours go to one worker, so groups share their prefill."""
        size = -(-len(requests) // len(self.workers))
        parts = [list(requests[i : i + size]) for i in range(0, len(requests), size)]
        calls = [worker.generate.remote(part, version) for worker, part in zip(self.workers, parts, strict=False)]
        answers = await _all(calls, timeout_s, f"rollouts of {len(requests)} requests with weights {version}")
        return [completion for part in answers for completion in part]

    async def weight_max_code(self, format_name: str, timeout_s: float) -> int:
        """Largest weight code that every worker can take. Also waits until all workers are up."""
        calls = [worker.weight_max_code.remote(format_name) for worker in self.workers]
        return min(await _all(calls, timeout_s, "rollout workers to start"))

    def stop(self) -> None:
        """End the workers and give their resources back."""
        for worker in self.workers:
            ray.kill(worker)
        remove_placement_group(self.placement)


def start_fleet(config: RolloutConfig, spec: PolicySpec, *, kernel: str, threads: int) -> Fleet:
    """Place and start the workers.

    Raises:
        DeadlineExceeded: the cluster cannot hold them; the message says what is missing.
    """
    bundle = {"CPU": 1.0}
    group = placement_group([bundle] * config.workers, strategy="PACK")
    if not group.wait(config.start_timeout_s):
        remove_placement_group(group)
        raise DeadlineExceeded(
            f"{config.workers} rollout worker(s) of {bundle} were not placed within {config.start_timeout_s:g} s; "
            f"the cluster has {counts(ray.cluster_resources())}, free now {counts(ray.available_resources())}"
        )
    actor = ray.remote(RolloutWorker)
    workers = tuple(
        actor.options(
            num_cpus=1,
            max_restarts=0,
            scheduling_strategy=PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=index),
        ).remote(spec, slots=config.slots, kernel=kernel, threads=threads)
        for index in range(config.workers)
    )
    return Fleet(workers=workers, placement=group)


async def _all(calls: Sequence[ObjectRef], timeout_s: float, what: str) -> list:
    try:
        return await asyncio.wait_for(asyncio.gather(*calls), timeout_s)
    except TimeoutError:
        raise DeadlineExceeded(f"waited {timeout_s:g} s for {what}") from None
    except RayTaskError as error:
        raise (error.cause if isinstance(error.cause, QurlError) else error) from None
    except RayActorError as error:
        raise EngineError(f"a rollout worker died during {what}: {error}") from None


def counts(resources: dict[str, float]) -> str:
    """Ray's resources in words: "2 CPU, 0 GPU"."""
    return ", ".join(f"{resources.get(kind, 0):g} {kind}" for kind in ("CPU", "GPU"))
