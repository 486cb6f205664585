"""Preparation of a rank's policy for adapters alone to be trained."""

from collections.abc import Mapping
from pathlib import Path

from ray.actor import ActorHandle
from transformers import PreTrainedModel

from qurl_ray.config import RunConfig
from qurl_ray.learner.flow import EQUALIZATION, Adaptation, FrozenCodes, UnifiedFlow
from qurl_ray.learner.noise import NoiseSchedule
from qurl_ray.policy.adapters import adapters_of, add_adapters, load_adapter, read_adapter
from qurl_ray.policy.load import files_digest
from qurl_ray.policy.ranges import configured_factors
from qurl_ray.quant.equalize import read_factors
from qurl_ray.quant.units import Unit
from qurl_ray.runs.checkpoint import Checkpoint
from qurl_ray.training.totals import TRAINED_SHARE
from qurl_ray.types import Event, PolicySpec


def with_adapters(model: PreTrainedModel, config: RunConfig) -> None:
    """Give the model adapters as configured, in place: new ones, or those of `learner.lora.path`."""
    lora = config.learner.lora
    assert lora
    add_adapters(model, adapters_of(lora), seed=config.seed)
    if lora.path:
        load_adapter(model, read_adapter(Path(lora.path)), Path(lora.path))


def adaptation(
    model: PreTrainedModel,
    spec: PolicySpec,
    config: RunConfig,
    flow: UnifiedFlow | None,
    quantized: Mapping[str, Unit],
    resume: Checkpoint | None,
) -> Adaptation:
    """Prepare the model for training of its adapters alone, in place.

    Args:
        flow: format of the codes that take the place of its weights; None if these stay. They are made with the factors
            of the checkpoint from which the run resumes, or with those of activations on random tokens.
    """
    lora = config.learner.lora
    assert lora
    noise = None
    if lora.noise:
        noise = NoiseSchedule(**lora.noise.model_dump(), steps=config.steps, seed=config.seed)
    device, factors = config.learner.device, {}
    if flow and not resume:  # without the adapters, which may not be new ones
        factors = dict(configured_factors(model, quantized, config.quantization, flow.fmt.name))
    with_adapters(model, config)
    if not flow:
        return Adaptation(adapters=adapters_of(lora), base=files_digest(spec), noise=noise)
    if resume:
        factors = read_factors(resume.learner / EQUALIZATION, device)
    frozen = FrozenCodes(model, flow, factors, device)
    return Adaptation(adapters=adapters_of(lora), base=frozen.record.fingerprint, frozen=frozen, noise=noise)


def tell_adapters(model: PreTrainedModel, prepared: Adaptation, coordinator: ActorHandle) -> None:
    """Announce how many parameters are trained, and over what."""
    frozen = prepared.frozen
    sizes = {True: 0, False: frozen.parameters if frozen else 0}
    for parameter in model.parameters():
        sizes[parameter.requires_grad] += parameter.numel()
    share, trained = sizes[True] / sum(sizes.values()), sizes[True] / 1e6
    over = f"{frozen.record.format} codes {frozen.record.fingerprint}" if frozen else "full precision"
    message = f"adapters: {trained:,.1f} M parameters are trained, {share:.1%} of all, over {over}"
    coordinator.tell.remote(Event(kind="info", step=0, message=message, values={TRAINED_SHARE: share}))
