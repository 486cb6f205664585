"""The learner's factors of equalization (quant.equalize): measured on rollouts, in forward passes that it makes anyway.

Factors are looked at again every so many steps, from the largest activations of the samples of that step's first
update. They move only where they are off by more than a factor of two, so that deltas stay small. All ranks compute the
same factors.
"""

from collections.abc import Iterable, Iterator, Mapping
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
from qurl_ray.quant.equalize import Factors, column_maxima, equalized_sites, factors_of, new_exponents
from qurl_ray.quant.units import Unit

_FILE = "equalization.safetensors"


def equalizer_for(
    model: PreTrainedModel,
    config: QuantizationConfig,
    quantized: Mapping[str, Unit],
    formats: Iterable[str],
    *,
    device: str = "cpu",
) -> "Equalizer | None":
    """Return the equalizer of a model that becomes codes of these formats; None where the settings ask for none.

    Args:
        device: the learner's.

    Raises:
        QuantizationError: equalization was asked for, and the architecture is not known.
    """
    if not any(config.equalizes(format_name) for format_name in formats):
        return None
    try:
        return Equalizer(model, quantized, every=config.equalize_every, device=device)
    except QuantizationError:
        if config.equalize is True:
            raise
        return None


class Equalizer:
    """Factors of a model, and the maxima that the next ones are computed from.

    Args:
        model: the policy, before a backend wraps it.
        quantized: units that are sent as codes, by the names of their parameters.
        every: steps from one look at the factors to the next.
        device: where the factors are, and device of collectives.

    Raises:
        QuantizationError: the architecture is not known.
    """

    def __init__(
        self, model: PreTrainedModel, quantized: Mapping[str, Unit], *, every: int, device: str = "cpu"
    ) -> None:
        self.model, self._sites = model, equalized_sites(model, quantized)
        self._every, self._device = every, device
        self._maxima: dict[str, torch.Tensor] = {}
        self._exponents: dict[str, torch.Tensor] = {}
        self.factors: dict[str, Factors] = {}
        """Present factors by module; empty before the first `settle`. The same dictionary for good, and the same
        entries until some of them move."""
        self.moved = 0.0
        """Share of factors that the last `settle` changed."""

    @property
    def settled(self) -> bool:
        """True if there are factors."""
        return bool(self._exponents)

    def due(self, steps: int) -> bool:
        """Return True if the factors are due for an update after `steps` steps."""
        return not self.settled or steps % self._every == 0

    @contextmanager
    def measuring(self, real_BT: torch.Tensor) -> Iterator[None]:
        """Context in which the model's forward passes are measured, without padding as in policy.ranges.measuring."""
        with measuring(self.model, self._sites, self._maxima, real_BT):
            yield

    @torch.no_grad()
    def settle(self, parameters: Iterable[tuple[str, torch.Tensor]]) -> None:
        """Compute factors from the maxima measured since the last call, on all ranks, and from the weights.

        Args:
            parameters: the learner's, whole, and without factors.
        """
        weights = column_maxima(self._sites, parameters)
        # A rank may have had no samples: zeros are no maxima, and the sites are the same on all ranks.
        own = [self._maxima.get(site.writer, torch.zeros_like(weights[site.writer])) for site in self._sites]
        heard = torch.cat([maxima.to(self._device) for maxima in own])
        if world()[1] > 1:
            distributed.all_reduce(heard, op=distributed.ReduceOp.MAX)
        self._maxima.clear()
        self.moved = 0.0
        if not bool(heard.any()):
            return
        parts = heard.cpu().split([len(weights[site.writer]) for site in self._sites])
        activations = {site.writer: part for site, part in zip(self._sites, parts, strict=True)}
        exponents = new_exponents(self._sites, activations, weights, self._exponents)
        changed = sum(
            int((now != self._exponents[writer]).sum()) if self.settled else len(now)
            for writer, now in exponents.items()
        )
        if changed:
            self._adopt(exponents)
        self.moved = changed / len(heard)

    def _adopt(self, exponents: dict[str, torch.Tensor]) -> None:
        self._exponents = exponents
        self.factors.clear()
        self.factors |= factors_of(self._sites, exponents, self._device)

    def save(self, folder: Path) -> None:
        """Write the factors, if there are any."""
        save_file(self._exponents, folder / _FILE)

    def load(self, folder: Path) -> None:
        """Read the factors that `save` wrote.

        Raises:
            CheckpointError: the file is not there.
        """
        if not (folder / _FILE).is_file():
            raise CheckpointError(f"{folder} has no {_FILE}: the run was not equalized; start again with --fresh")
        if exponents := load_file(folder / _FILE):
            self._adopt(exponents)
