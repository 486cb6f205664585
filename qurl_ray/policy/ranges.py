"""Ranges of activations, for quant.equalize: the largest value of each channel that a linear reads."""

from collections.abc import Iterable, Iterator, Mapping, Set
from contextlib import contextmanager

import torch
from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel

from qurl_ray.errors import QuantizationError
from qurl_ray.policy.kv import calibration_ids
from qurl_ray.quant.equalize import Fold, Site, column_maxima, equalized_sites, exponents, folds

_TOKENS = 512


@contextmanager
def measuring(model: nn.Module, sites: Iterable[Site], maxima: dict[str, torch.Tensor]) -> Iterator[None]:
    """Context in which forward passes raise `maxima`: max|x| of each channel, float32 [K], by the site's writer.

    Padding counts like any other token."""

    def look(writer: str, x: torch.Tensor) -> None:
        x = x.detach().flatten(0, -2)
        if len(x):
            top = torch.maximum(x.amax(dim=0), x.amin(dim=0).neg_()).float()
            maxima[writer] = torch.maximum(maxima[writer], top) if writer in maxima else top

    hooks = [
        model.get_submodule(site.readers[0]).register_forward_pre_hook(
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
    yet. Ranges on text serve better (docs/results.md)."""
    return calibration_ids(config, _TOKENS)


@torch.no_grad()
def measured_folds(model: PreTrainedModel, quantized: Set[str]) -> Mapping[str, Fold]:
    """Return factors for a model that generated nothing yet, from its activations on a fixed sequence of random tokens.
    There are none for an architecture that is not known."""
    try:
        sites = equalized_sites(model, quantized)
    except QuantizationError:
        return {}
    maxima: dict[str, torch.Tensor] = {}
    with measuring(model, sites, maxima):
        model(torch.tensor([range_ids(model.config)], device=model.device), use_cache=False)
    weights = column_maxima(sites, model.named_parameters())
    found = {site.writer: exponents(maxima[site.writer].cpu(), weights[site.writer], site.alpha) for site in sites}
    return folds(sites, found)
