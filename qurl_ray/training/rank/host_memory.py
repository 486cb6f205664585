"""Check that a rank has memory for what it is to learn from, before anything is loaded."""

from dataclasses import replace

import psutil
import torch
from ray.actor import ActorHandle

from qurl_ray.config import RunConfig
from qurl_ray.errors import ConfigError
from qurl_ray.planning.memory import activation_bytes, learner_stage, state_bytes
from qurl_ray.planning.on_gpu import GpuFit, beyond, fit_on_gpu
from qurl_ray.planning.shapes import configured_shape
from qurl_ray.planning.workload import configured_workload
from qurl_ray.types import Event


def check_memory(config: RunConfig, ranks_here: int) -> GpuFit | None:
    """Check that a rank can hold its states and the longest sample: by the planner's account, with all memory of its
    GPU, or of its machine shared by the ranks there, for itself. Return how the run fits on the rank's GPU; None
    without one. Other shapes than the planner's, and transports from outside, are not checked.

    Raises:
        ConfigError: it cannot, or the GPU cannot hold what shares it.
    """
    learner = config.learner
    try:
        shape, work = configured_shape(config.model), configured_workload(config)
    except ConfigError:
        return None
    work = replace(work, autocast=learner.compute != "float32")
    # The least that it needs: what collectives and gathered weights take comes on top.
    states = state_bytes(shape, work, ranks=learner.workers, stage=learner_stage(learner))
    held = states + activation_bytes(shape, work)
    whole = torch.cuda.mem_get_info()[1] if learner.device == "cuda" else psutil.virtual_memory().total / ranks_here
    if held > whole:
        raise ConfigError(
            f"a rank of the learner would hold at least {held / 1e9:,.1f} GB for answers of {work.response:,} tokens, "
            f"and has {whole / 1e9:,.1f}: take fewer (rollout.max_new_tokens), share them (learner.sequence_parallel), "
            "keep less of them (learner.gradient_checkpointing=true), or shard the weights (learner.backend=fsdp and "
            "more learner.workers)"
        )
    return fit_on_gpu(config, whole) if learner.device == "cuda" else None


def tell_memory(fit: GpuFit, config: RunConfig, coordinator: ActorHandle) -> None:
    """Announce how the run fits on its GPUs, and what is beyond the memory that can be planned with."""
    coordinator.tell.remote(Event(kind="info", step=0, message=str(fit)))
    if excess := beyond(config, fit):
        coordinator.tell.remote(Event(kind="warning", step=0, message=excess))
