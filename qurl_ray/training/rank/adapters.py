"""Preparation of a rank's policy for adapters alone to be trained."""

import math
from collections.abc import Mapping
from pathlib import Path

from ray.actor import ActorHandle
from transformers import PreTrainedModel

from qurl_ray.config import RunConfig
from qurl_ray.errors import QuantizationError
from qurl_ray.learner.flow import EQUALIZATION, FrozenCodes, UnifiedFlow
from qurl_ray.policy.adapters import adapters_of, add_adapters, load_adapter, read_adapter
from qurl_ray.policy.ranges import measured_factors
from qurl_ray.quant.equalize import Factors, read_factors
from qurl_ray.quant.units import Unit
from qurl_ray.runs.checkpoint import Checkpoint
from qurl_ray.types import Event


def with_adapters(model: PreTrainedModel, config: RunConfig) -> None:
    """Give the model adapters as configured, in place: new ones, or those of `learner.lora.path`."""
    lora = config.learner.lora
    assert lora
    add_adapters(model, adapters_of(lora), seed=config.seed)
    if lora.path:
        load_adapter(model, read_adapter(Path(lora.path)), Path(lora.path))


def frozen_codes(
    model: PreTrainedModel,
    config: RunConfig,
    flow: UnifiedFlow,
    quantized: Mapping[str, Unit],
    resume: Checkpoint | None,
) -> FrozenCodes:
    """Replace the model's weights by codes, in place, made with the factors of the checkpoint from which the run
    resumes, or with those of its activations on random tokens."""
    device = config.learner.device
    factors: Mapping[str, Factors] = {}
    if resume:
        factors = read_factors(resume.learner / EQUALIZATION, device)
    elif flow.equalized:
        factors = _measured(model, config, quantized)
    return FrozenCodes(model, flow, factors, device)


def tell_adapters(model: PreTrainedModel, frozen: FrozenCodes | None, coordinator: ActorHandle) -> None:
    """Announce how many parameters are trained, and over what."""
    sizes = {True: 0, False: sum(math.prod(q.shape) for _, q in frozen.named_codes()) if frozen else 0}
    for parameter in model.parameters():
        sizes[parameter.requires_grad] += parameter.numel()
    share, trained = sizes[True] / sum(sizes.values()), sizes[True] / 1e6
    over = f"{frozen.record.format} codes {frozen.record.fingerprint}" if frozen else "full precision"
    message = f"adapters: {trained:,.1f} M parameters are trained, {share:.1%} of all, over {over}"
    coordinator.tell.remote(Event(kind="info", step=0, message=message))


def _measured(model: PreTrainedModel, config: RunConfig, quantized: Mapping[str, Unit]) -> Mapping[str, Factors]:
    try:
        return measured_factors(model, quantized)
    except QuantizationError:
        if config.quantization.equalize is True:
            raise
        return {}
