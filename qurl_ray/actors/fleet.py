"""The rollout workers: where they are placed, and how work and weights are spread over them."""

import asyncio
from collections.abc import Awaitable, Sequence
from dataclasses import dataclass, field

import ray
from ray import ObjectRef
from ray.actor import ActorHandle
from ray.exceptions import RayActorError, RayTaskError
from ray.util.placement_group import PlacementGroup, placement_group, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from qurl_ray.actors.rollout_worker import Loaded, RolloutWorker
from qurl_ray.config.models import RolloutConfig
from qurl_ray.errors import DeadlineExceeded, EngineError, QurlError
from qurl_ray.types import Completion, Manifest, PolicySpec, Request

_MARGIN_S = 30.0  # engines notice their deadline between two tokens
_CLOSE_S = 20.0
IPC_SHARE = 0.5
"""Of a GPU, for the learner and for the engine each, when one hands its memory to the other."""


@dataclass(slots=True, kw_only=True)
class Fleet:
    """Handles of the rollout workers; it may be sent to other processes."""

    workers: tuple[ActorHandle, ...]
    placement: PlacementGroup
    out: set[int] = field(default_factory=set)
    """Places of workers that are left out."""

    @property
    def indices(self) -> list[int]:
        """Places of the workers that take part."""
        return [index for index in range(len(self.workers)) if index not in self.out]

    def leave_out(self, index: int) -> None:
        """That worker gets neither weights nor requests any more."""
        self.out.add(index)

    async def load(
        self,
        indices: Sequence[int],
        manifest: Manifest,
        buckets: Sequence[ObjectRef] | None,
        probe: Sequence[Request],
        timeout_s: float,
    ) -> dict[int, Loaded | QurlError]:
        """These workers load, verify and draw the probe; what each says, be it that it refuses the weights. Without
        buckets they have loaded, through vLLM's own transfer.

        Raises:
            DeadlineExceeded: a worker was not done in time.
            EngineError: a worker died.
        """
        calls = [self.workers[index].load.remote(manifest, buckets, list(probe)) for index in indices]
        what = f"workers to load and verify weights {manifest.version}"
        found = await _all([_or_refusal(call) for call in calls], timeout_s, what)
        return dict(zip(indices, found, strict=True))

    async def expect(self, manifest: Manifest, scales: Sequence[ObjectRef], timeout_s: float) -> None:
        """Make all workers ready for a version through vLLM's own transfer, also those that are left out: they are part
        of its collectives."""
        calls = [worker.expect.remote(manifest, scales) for worker in self.workers]
        await _all(calls, timeout_s, f"workers to expect weights {manifest.version}")

    async def transfer(self, method: str, arguments: dict, timeout_s: float) -> None:
        """A step of that, by all."""
        each = [arguments] * len(self.workers)
        if "rank_offset" in (info := arguments.get("init_info", {})):
            # vLLM numbers the workers of one engine: the engines get places one after the other, behind the sender.
            size = (info["world_size"] - 1) // len(self.workers)
            each = [{"init_info": info | {"rank_offset": 1 + i * size}} for i in range(len(self.workers))]
        calls = [worker.transfer.remote(method, own) for worker, own in zip(self.workers, each, strict=True)]
        await _all(calls, timeout_s, f"vLLM to {method}")

    async def generate(self, requests: Sequence[Request], version: int, timeout_s: float) -> list[Completion]:
        """Completions in the order of the requests. Neighbours go to one worker, so groups share their prefill.

        Raises:
            DeadlineExceeded: some answers were not finished in time; the engines have stopped working on them.
        """
        chosen = [self.workers[index] for index in self.indices]
        size = -(-len(requests) // len(chosen))
        parts = [list(requests[i : i + size]) for i in range(0, len(requests), size)]
        calls = [worker.generate.remote(part, version, timeout_s) for worker, part in zip(chosen, parts, strict=False)]
        what = f"rollouts of {len(requests)} requests with weights {version}"
        try:
            answers = [c for part in await _all(calls, timeout_s + _MARGIN_S, what) for c in part]
        except QurlError:  # nobody waits for the other workers' answers any more
            for worker, part in zip(chosen, parts, strict=False):
                worker.cancel.remote({request.uid for request in part})
            raise
        late = [c for c in answers if c.finish == "deadline"]
        if late:
            drawn = max(len(c.token_ids) for c in late)
            raise DeadlineExceeded(
                f"waited {timeout_s:g} s for {what}: {len(late)} are unfinished, after up to {drawn} tokens"
            )
        return answers

    async def weight_max_code(self, format_name: str, timeout_s: float) -> int:
        """Largest weight code that every worker can take. Also waits until all workers are up."""
        calls = [worker.weight_max_code.remote(format_name) for worker in self.workers]
        return min(await _all(calls, timeout_s, "rollout workers to start"))

    def stop(self) -> None:
        """End the workers and give their resources back."""
        closing = [worker.close.remote() for worker in self.workers]
        ray.wait(closing, num_returns=len(closing), timeout=_CLOSE_S)  # an engine may have processes of its own
        for worker in self.workers:
            ray.kill(worker)
        remove_placement_group(self.placement)


def start_fleet(
    config: RolloutConfig, spec: PolicySpec, *, kernel: str, threads: int, transport: str = "object_store"
) -> Fleet:
    """Place and start the workers.

    Raises:
        DeadlineExceeded: the cluster cannot hold them; the message says what is missing.
    """
    shared = config.vllm.tensor_parallel if config.engine == "vllm" else 1
    gpus = 0 if config.device == "cpu" else IPC_SHARE if transport == "ipc" else shared
    bundle = {"CPU": 1.0} | ({"GPU": float(gpus)} if gpus else {})
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
            num_gpus=gpus,
            max_restarts=0,
            max_concurrency=2,  # one to generate, one to cancel
            scheduling_strategy=PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=index),
        ).remote(spec, config, kernel=kernel, threads=threads, transport=transport)
        for index in range(config.workers)
    )
    return Fleet(workers=workers, placement=group)


async def _or_refusal(call: ObjectRef) -> Loaded | QurlError:
    """What the worker says; its error, if it is one of ours."""
    try:
        return await call
    except RayTaskError as error:
        if isinstance(error.cause, QurlError):
            return error.cause
        raise


async def _all(calls: Sequence[Awaitable], timeout_s: float, what: str) -> list:
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
