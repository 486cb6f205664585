"""Number formats that the engines take, and the learner's flow in the same numbers."""

from collections.abc import Mapping

import torch
from ray.actor import ActorHandle

from qurl_ray.config import RunConfig
from qurl_ray.learner.flow import UnifiedFlow
from qurl_ray.quant.formats import get_format
from qurl_ray.quant.training import announced
from qurl_ray.quant.units import Unit
from qurl_ray.training.rank.wait import wait
from qurl_ray.types import Event


def unified_flow(config: RunConfig, coordinator: ActorHandle, quantized: Mapping[str, Unit]) -> UnifiedFlow | None:
    """Return the flow that has the learner compute as the engines do; None if it trains in full precision."""
    if not config.trains_through_codes:
        return None
    name = config.rollout.quantization
    return UnifiedFlow(
        fmt=get_format(name, fleet_weight_max_code(config, coordinator, name)),
        quantized=quantized,
        backward=config.backward(),
        emulate=config.quantization.kernel == "emulation",
        equalized=config.quantization.equalizes(name),
    )


def tell_gradients(flow: UnifiedFlow, config: RunConfig, coordinator: ActorHandle) -> None:
    """Announce the kernels that compute the gradients, if they come from codes and are not emulated by choice."""
    if flow.backward == "quantized" and not flow.emulate:
        used = announced(flow.fmt, torch.device(config.learner.device))
        event = Event(kind="info", step=0, message=f"gradients of the learner's linears run on: {used}")
        wait(coordinator.tell.remote(event), config.sync.timeout_s, "the coordinator")


def fleet_weight_max_code(config: RunConfig, coordinator: ActorHandle, format_name: str) -> int:
    """Return the largest weight code that all engines can take and the settings allow. The first call waits until the
    engines are up."""
    call = coordinator.weight_max_code.remote(format_name)
    largest = wait(call, config.rollout.start_limit_s, "the rollout workers to start")
    return min(largest, config.quantization.weight_max_code or largest)
