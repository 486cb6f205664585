"""Memory of a run's own layout on the GPUs that it gets: does it fit, and do ranks and engines stay there together?"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

from pydantic import ValidationError

from qurl_ray.config import RunConfig
from qurl_ray.errors import ConfigError
from qurl_ray.planning.machines import GPUS
from qurl_ray.planning.memory import Footprint, check_layout
from qurl_ray.planning.shapes import configured_shape
from qurl_ray.planning.workload import configured_workload

_FEWEST_TOKENS = 128  # of an answer or a pass: fewer are not proposed


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuFit:
    """A run's own layout on GPUs of one size, by the planner's account."""

    footprint: Footprint
    colocated: bool
    together: bool
    """Ranks and engines that share a GPU stay there at the same time: nothing is moved, and no engine sleeps."""

    def __str__(self) -> str:
        turns = ", ".join(f"{turn} {size / 1e9:.1f}" for turn, size in self.footprint.gpu.items())
        shared = ""
        if self.colocated:
            shared = "; learner and engine " + ("stay there together" if self.together else "take turns")
        return f"memory of a GPU in GB, of {self.footprint.engine.gpu.memory / 1e9:.0f}, as planned: {turns}{shared}"


def fit_on_gpu(config: RunConfig, memory: float) -> GpuFit | None:
    """Return how a run fits on GPUs of `memory` bytes; None if it uses none, or if the planner does not know its shape,
    engine or transport.

    Raises:
        ConfigError: it needs more than the whole memory; the message has the arithmetic, and the nearest settings.
    """
    if (fit := _fit(config, memory)) and fit.footprint.excess * fit.footprint.limit > memory:
        raise ConfigError(f"the run is too large for its GPUs: {beyond(config, fit)}")
    return fit


def beyond(config: RunConfig, fit: GpuFit) -> str | None:
    """Return what is beyond the memory that can be planned with, and the nearest settings that fit; None if all of it
    fits."""
    if not fit.footprint.problems:
        return None
    memory = fit.footprint.engine.gpu.memory
    changes: dict[str, Any] = {}
    for path, value in _smaller(config, fit):
        if not _fits(config, changes := changes | {path: value}, memory):
            continue
        for path in list(changes):  # some may not have been needed
            if _fits(config, fewer := {key: kept for key, kept in changes.items() if key != path}, memory):
                changes = fewer
        settings = " ".join(f"{path}={_text(value)}" for path, value in changes.items())
        return f"{fit.footprint.problems[0]}: set {settings}"
    return f"{fit.footprint.problems[0]}: take more or larger GPUs, or a smaller model"


def _fit(config: RunConfig, memory: float) -> GpuFit | None:
    if (config.rollout.device, config.rollout.engine) != ("cuda", "vllm"):
        return None
    try:
        shape, work = configured_shape(config.model), configured_workload(config)
    except ConfigError:
        return None
    # Whole GB, so that all ranks decide alike, whose cards may differ by some pages.
    gpu = replace(GPUS["h100"], name="this GPU", memory=memory // 1e9 * 1e9)
    colocated = config.placement == "colocated"
    if colocated and config.learner.offload_while_waiting is not True:
        both = check_layout(shape, gpu, work, config, together=True)
        if not both.problems:
            return GpuFit(footprint=both, colocated=True, together=True)
    return GpuFit(footprint=check_layout(shape, gpu, work, config), colocated=colocated, together=False)


def _smaller(config: RunConfig, fit: GpuFit) -> Iterator[tuple[str, Any]]:
    """Yield settings that need less memory, those that cost least first."""
    if fit.colocated:
        if config.learner.offload_while_waiting is False:
            yield "learner.offload_while_waiting", True
        gigabytes, answer = config.rollout.vllm.kv_cache_gb or 0.0, fit.footprint.answer / 2**30
        while (gigabytes := gigabytes // 2) > answer:
            yield "rollout.vllm.kv_cache_gb", gigabytes
    yield "learner.gradient_checkpointing", True
    tokens = config.learner.tokens_per_micro_batch
    while (tokens := tokens // 2) >= max(_FEWEST_TOKENS, config.rollout.max_new_tokens):
        yield "learner.tokens_per_micro_batch", tokens
    if config.learner.workers > 1:
        yield "learner.backend", "fsdp"
    tokens = config.rollout.max_new_tokens
    while (tokens := tokens // 2) >= _FEWEST_TOKENS:
        yield "rollout.max_new_tokens", tokens


def _text(value: Any) -> str:
    return f"{value:g}" if isinstance(value, float) else str(value).lower()


def _fits(config: RunConfig, changes: dict[str, Any], memory: float) -> bool:
    """Return True if the run fits with other settings; false also if they contradict its own."""
    settings = config.model_dump()
    for path, value in changes.items():
        *sections, name = path.split(".")
        section = settings
        for key in sections:
            section = section[key]
        section[name] = value
    try:
        fit = _fit(RunConfig.model_validate(settings), memory)
    except ValidationError:
        return False
    return fit is not None and not fit.footprint.problems
