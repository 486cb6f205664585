"""Ranges of activations, for quant.equalize: the largest value of each channel that a linear reads."""

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager

import torch
from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel

from qurl_ray.config.quantization import QuantizationConfig
from qurl_ray.errors import QuantizationError
from qurl_ray.policy.kv import calibration_ids
from qurl_ray.quant.equalize import Factors, column_maxima, equalized_sites, factors_of, new_exponents
from qurl_ray.quant.units import Site, Unit

_TOKENS = 512


@contextmanager
def measuring(
    model: nn.Module, sites: Iterable[Site], maxima: dict[str, torch.Tensor], real_BT: torch.Tensor | None = None
) -> Iterator[None]:
    """Context in which forward passes raise `maxima`: max|x| of each channel, float32 [K], by the site's writer.

    Args:
        real_BT: bool, False for padding of a pass over [B, T] tokens, which does not count. A pass over tokens in
            another layout has no padding.
    """

    def look(writer: str, x: torch.Tensor) -> None:
        x = x.detach()
        x = x[real_BT] if real_BT is not None and x.shape[:-1] == real_BT.shape else x.flatten(0, -2)
        if len(x):
            top = torch.maximum(x.amax(dim=0), x.amin(dim=0).neg_()).float()
            maxima[writer] = torch.maximum(maxima[writer], top) if writer in maxima else top

    hooks = [
        model.get_submodule(site.input_of).register_forward_pre_hook(
            lambda _, args, writer=site.writer: look(writer, args[0])
        )
        for site in sites
    ]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


def range_ids(config: PreTrainedConfig) -> list[int]:
    """Return a fixed sequence of random tokens, on which the ranges of a model are measured that has generated nothing
    yet; the last one is not measured. Ranges on text serve better (docs/results.md)."""
    return calibration_ids(config, _TOKENS)


@torch.no_grad()
def measured_factors(model: PreTrainedModel, quantized: Mapping[str, Unit]) -> Mapping[str, Factors]:
    """Return factors for a model that generated nothing yet, from its activations on a fixed sequence of random tokens.

    Raises:
        QuantizationError: the architecture is not known.
    """
    sites = equalized_sites(model, quantized)
    maxima: dict[str, torch.Tensor] = {}
    with measuring(model, sites, maxima):
        model.base_model(torch.tensor([range_ids(model.config)[:-1]], device=model.device), use_cache=False)
    return factors_from(sites, maxima, model.named_parameters())


def configured_factors(
    model: PreTrainedModel, quantized: Mapping[str, Unit], config: QuantizationConfig, format_name: str
) -> Mapping[str, Factors]:
    """Return `measured_factors` if codes of this format are to be equalized, and the architecture is known; else {}.

    Raises:
        QuantizationError: equalization was asked for, and the architecture is not known.
    """
    if not config.equalizes(format_name):
        return {}
    try:
        return measured_factors(model, quantized)
    except QuantizationError:
        if config.equalize is True:
            raise
        return {}


def factors_from(
    sites: Iterable[Site], maxima: Mapping[str, torch.Tensor], parameters: Iterable[tuple[str, torch.Tensor]]
) -> Mapping[str, Factors]:
    """Return factors from the maxima of `measuring`, and from the weights; there are none before."""
    heard = {writer: largest.cpu() for writer, largest in maxima.items()}
    sites = tuple(sites)
    return factors_of(sites, new_exponents(sites, heard, column_maxima(sites, parameters), {}))
