"""Checks of `placement`, and of weight transfers from GPU to GPU, against the other settings."""

from typing import Any, Literal

from qurl_ray.config.learner import LearnerConfig
from qurl_ray.config.rollout import RolloutConfig
from qurl_ray.config.sync import SyncConfig
from qurl_ray.tables import ENGINES, TRANSPORTS

Placement = Literal["disaggregated", "colocated"]
"""GPUs of engines and learner; the help is at RunConfig.placement."""


def with_offload(settings: Any) -> Any:
    """Set learner.offload_while_waiting: `auto` with placement=colocated, unless the settings give it; false in place
    of `auto` elsewhere, where nothing shares a GPU."""
    learner = (settings.get("learner") or {}) if isinstance(settings, dict) else None
    if not isinstance(learner, dict):
        return settings
    if settings.get("placement") == "colocated":
        return settings | {"learner": {"offload_while_waiting": "auto"} | learner}
    if learner.get("offload_while_waiting") == "auto":
        return settings | {"learner": learner | {"offload_while_waiting": False}}
    return settings


def check_placement(placement: Placement, rollout: RolloutConfig, learner: LearnerConfig, sync: SyncConfig) -> None:
    """Check that the other settings allow engines and learner to take turns on the same GPUs.

    Raises:
        ValueError: another setting contradicts `placement=colocated`.
    """
    colocated = "placement=colocated"
    if placement != "colocated":
        return
    if rollout.max_staleness:
        raise ValueError(
            f"{colocated} has engines and learner take turns, and rollout.max_staleness={rollout.max_staleness} has "
            "them work at the same time: set one of them to disaggregated, or 0"
        )
    if rollout.device != learner.device:
        raise ValueError(
            f"{colocated} puts engines where the learner is: rollout.device={rollout.device} and "
            f"learner.device={learner.device} must be the same"
        )
    each, engine = rollout.processes, f"rollout.engine={rollout.engine}"
    if rollout.workers * each != learner.workers:
        shared = f" of rollout.vllm.tensor_parallel={each} GPUs" if each > 1 else ""
        raise ValueError(
            f"{colocated} shares out the GPUs of the learner's ranks: rollout.workers={rollout.workers}{shared} need "
            f"learner.workers={rollout.workers * each}, not {learner.workers}"
        )
    if rollout.max_workers not in (None, rollout.workers):
        raise ValueError(f"{colocated} has no room for more engines than ranks: leave rollout.max_workers out")
    if rollout.device == "cpu" and not rollout.engine_entry.sleeps_on_cpu:
        raise ValueError(f"{colocated} needs engines that sleep, and {engine} cannot do that on a CPU: use another")
    if rollout.engine_entry.takes_free_memory and rollout.vllm.kv_cache_gb is None:
        raise ValueError(
            f"{colocated} needs rollout.vllm.kv_cache_gb: {engine} would otherwise take the learner's memory"
        )
    if sync.transport == "nccl":
        raise ValueError(
            f"{colocated} has two processes on one GPU, which NCCL refuses: use sync.transport=ipc, or object_store"
        )


def check_transport(
    placement: Placement,
    rollout: RolloutConfig,
    learner: LearnerConfig,
    sync: SyncConfig,
) -> None:
    """Check that the other settings allow a direct transport, from GPU to GPU.

    Raises:
        ValueError: another setting contradicts `sync.transport`.
    """
    transport = f"sync.transport={sync.transport}"
    if not TRANSPORTS[sync.transport].direct:
        return
    able = [name for name, entry in ENGINES.entries.items() if sync.transport in entry.transports]
    if rollout.engine not in able or (rollout.device, learner.device) != ("cuda", "cuda"):
        raise ValueError(
            f"{transport} sends from GPU to GPU: it needs rollout.engine={' or '.join(able)}, rollout.device=cuda and "
            "learner.device=cuda; elsewhere use object_store"
        )
    if sync.transport == "ipc" and placement != "colocated":
        raise ValueError(
            f"{transport} hands over the memory of GPUs that ranks and engines share: it needs placement=colocated; "
            "elsewhere use nccl"
        )
