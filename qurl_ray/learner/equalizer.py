"""The learner's factors of equalization (quant.equalize): measured on rollouts, in forward passes that it makes anyway.

Factors are looked at again every so many steps, from the largest activations of that step's samples. They move only
where they are off by more than a factor of two, so that deltas stay small. All ranks compute the same ones.
"""

from collections.abc import Iterable, Iterator, Mapping, Set
from contextlib import contextmanager
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import distributed
from transformers import PreTrainedModel

from qurl_ray.config.quantization import QuantizationConfig
from qurl_ray.errors import CheckpointError, QuantizationError
from qurl_ray.learner.backend import world
from qurl_ray.policy.ranges import measuring
from qurl_ray.quant.equalize import Fold, column_maxima, equalized_sites, exponents, folds

_FILE = "equalization.safetensors"


def equalizer_for(
    model: PreTrainedModel, config: QuantizationConfig, quantized: Set[str], format_name: str
) -> "Equalizer | None":
    """Return the equalizer of a model that becomes codes of this format; None where the settings ask for none.

    Raises:
        QuantizationError: equalization was asked for, and the architecture is not known.
    """
    if format_name == "none" or not config.equalizes(format_name):
        return None
    try:
        return Equalizer(model, quantized, every=config.equalize_every)
    except QuantizationError:
        if config.equalize is True:
            raise
        return None


class Equalizer:
    """Factors of a model, and the maxima that the next ones are computed from.

    Args:
        model: the policy, before a backend wraps it.
        quantized: names of the parameters that are sent as codes.
        every: steps from one look at the factors to the next.

    Raises:
        QuantizationError: the architecture is not known.
    """

    def __init__(self, model: PreTrainedModel, quantized: Set[str], *, every: int) -> None:
        self.model, self._sites, self._every = model, equalized_sites(model, quantized), every
        self._maxima: dict[str, torch.Tensor] = {}
        self._exponents: dict[str, torch.Tensor] = {}
        self.folds: dict[str, Fold] = {}
        """Present factors by module; empty before the first `settle`. The same dictionary for good."""
        self.moved = 0.0
        """Share of factors that the last `settle` changed."""

    @property
    def settled(self) -> bool:
        """True if there are factors."""
        return bool(self._exponents)

    def due(self, steps: int) -> bool:
        """Return True if factors are looked at in the step after so many."""
        return steps % self._every == 0

    @contextmanager
    def measuring(self) -> Iterator[None]:
        """Context in which the model's forward passes are measured."""
        with measuring(self.model, self._sites, self._maxima):
            yield

    @torch.no_grad()
    def settle(self, parameters: Iterable[tuple[str, torch.Tensor]], device: str) -> None:
        """Compute factors from what was measured since the last call, on all ranks, and from the weights.

        Args:
            parameters: the learner's, whole and unfolded.
            device: device of collectives.
        """
        weights = column_maxima(self._sites, parameters)
        # A rank may have had no samples: zeros are no maxima, and the sites are the same on all ranks.
        heard = torch.cat([self._heard(site.writer, weights) for site in self._sites]).to(device)
        if world()[1] > 1:
            distributed.all_reduce(heard, op=distributed.ReduceOp.MAX)
        self._maxima.clear()
        if not bool(heard.any()):
            return
        parts = heard.cpu().split([len(weights[site.writer]) for site in self._sites])
        found, changed, count = {}, 0, 0
        for site, activations in zip(self._sites, parts, strict=True):
            before = self._exponents.get(site.writer)
            found[site.writer] = now = exponents(activations, weights[site.writer], site.alpha, before)
            count += len(now)
            changed += len(now) if before is None else int((now != before).sum())
        self._adopt(found)
        self.moved = changed / count

    def _heard(self, writer: str, weights: Mapping[str, torch.Tensor]) -> torch.Tensor:
        return self._maxima[writer].cpu() if writer in self._maxima else torch.zeros_like(weights[writer])

    def _adopt(self, found: dict[str, torch.Tensor]) -> None:
        self._exponents = found
        self.folds.clear()
        self.folds |= folds(self._sites, found)

    def save(self, folder: Path) -> None:
        """Write the factors."""
        save_file(self._exponents, folder / _FILE)

    def load(self, folder: Path) -> None:
        """Read the factors that `save` wrote.

        Raises:
            CheckpointError: they are not there.
        """
        if not (folder / _FILE).is_file():
            raise CheckpointError(f"{folder} has no {_FILE}: the run was not equalized; start again with --fresh")
        self._adopt(load_file(folder / _FILE))
