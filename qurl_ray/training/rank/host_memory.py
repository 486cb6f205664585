"""Check that a rank has memory for what it is to learn from, before anything is loaded."""

from dataclasses import replace

import psutil
import torch

from qurl_ray.config import RunConfig
from qurl_ray.errors import ConfigError
from qurl_ray.planning.memory import activation_bytes, learner_stage, state_bytes
from qurl_ray.planning.shapes import configured_shape
from qurl_ray.planning.workload import configured_workload


def check_memory(config: RunConfig, ranks_here: int) -> None:
    """Raise ConfigError if a rank cannot hold its states and the longest sample: by the planner's account, with all
    memory of its GPU, or of its machine shared by the ranks there, for itself.

    Nothing is said of what the planner does not know: other shapes, and transports from outside.
    """
    learner = config.learner
    try:
        shape, work = configured_shape(config.model), configured_workload(config)
    except ConfigError:
        return
    work = replace(work, autocast=learner.compute != "float32")
    # The least that it needs: what collectives and gathered weights take comes on top.
    states = state_bytes(shape, ranks=learner.workers, stage=learner_stage(learner))
    held = states + activation_bytes(shape, work)
    whole = torch.cuda.mem_get_info()[1] if learner.device == "cuda" else psutil.virtual_memory().total / ranks_here
    if held > whole:
        raise ConfigError(
            f"a rank of the learner would hold at least {held / 1e9:,.1f} GB for answers of {work.response:,} tokens, "
            f"and has {whole / 1e9:,.1f}: take fewer (rollout.max_new_tokens), share them (learner.sequence_parallel), "
            "keep less of them (learner.gradient_checkpointing=true), or shard the weights (learner.backend=fsdp and "
            "more learner.workers)"
        )
