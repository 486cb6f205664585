"""Equalization of channels: truer codes at no cost per token (SmoothQuant, https://arxiv.org/abs/2211.10438).

All channels of a token share one scale, so the channels with the largest activations leave few codes to the others.
Before codes are made, channel k of what a linear reads is divided by s_k, and column k of its weight multiplied by it:

    y_n = Σ_k (x_k / s_k) · (s_k · w_nk)        s_k ≈ max|x_k|^α / max_n|w_nk|^(1 − α)     (equation 4)

What writes the channel is divided by s_k: the gain of a norm, or a row of up_proj, in which act(gate) · up is linear.

s_k is a power of two here. Scaling is then exact in every float type, so that only codes differ: without codes, the
network computes the same bits, and a learner that divides x by s_k has the bits of an engine whose norm does. Masters
and optimizer never see a factor: they are applied where codes are made (`folded`).
"""

from collections.abc import Iterable, Iterator, Mapping, Set
from dataclasses import dataclass

import torch
from torch import nn

from qurl_ray.errors import QuantizationError
from qurl_ray.quant.structure import gain_offset, gated_mlps, norm_fed

NORM_ALPHA = 0.75
"""α for channels that a norm writes. Both were the best of five on SmolLM2's own rollouts (docs/LOG.md)."""
DOWN_ALPHA = 0.5
"""α for channels that up_proj writes."""
_LARGEST = 12  # bound on |log2 s|: a channel that is never active must not leave the range of a float
_STAY = 1.0  # a factor moves only if the wanted one is more than twice or less than half of it, or codes would flicker

Exponents = Mapping[str, torch.Tensor]
"""log2 s, int8 [K], by the name of the module that writes the channels."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Site:
    """Channels that one module writes and some linears read, by the modules' names."""

    writer: str
    readers: tuple[str, ...]
    alpha: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Fold:
    """Factors of one module, float32 powers of two: what engines hold is reads · weight / writes."""

    reads: torch.Tensor | None = None
    """s of the channels that it reads, [K]."""
    writes: torch.Tensor | None = None
    """s of the channels that it writes, [N]."""

    def weight(self, weight: torch.Tensor) -> torch.Tensor:
        """Return a weight [N, K], or the gain of a norm [N], as engines hold it."""
        if self.reads is not None:
            weight = weight * self.reads
        return weight if self.writes is None else weight / (self.writes[:, None] if weight.ndim == 2 else self.writes)

    def bias(self, bias: torch.Tensor) -> torch.Tensor:
        """Return a bias [N] as engines hold it."""
        return bias if self.writes is None else bias / self.writes

    def inputs(self, x: torch.Tensor) -> torch.Tensor:
        """Return x [..., K] as it arrives in an engine."""
        return x if self.reads is None else x / self.reads

    def outputs(self, y: torch.Tensor) -> torch.Tensor:
        """Return an engine's result [..., N] without the factors that its next module takes out."""
        return y if self.writes is None else y * self.writes

    def to(self, device: torch.device) -> "Fold":
        """Return these factors on a device."""
        reads, writes = (None if s is None else s.to(device) for s in (self.reads, self.writes))
        return Fold(reads=reads, writes=writes)


def equalized_sites(model: nn.Module, quantized: Set[str]) -> tuple[Site, ...]:
    """Return the channels of a model that can be equalized and that a parameter of `quantized` reads.

    Norms that multiply by 1 + w (Gemma) are left out: (1 + w) / s − 1 is not exact.

    Raises:
        QuantizationError: the architecture is not known.
    """
    sites = [
        Site(writer=one.name, readers=tuple(one.linears), alpha=NORM_ALPHA)
        for one in norm_fed(model)
        if gain_offset(one.norm) == 0
    ]
    sites += [
        Site(writer=f"{mlp}.up_proj", readers=(f"{mlp}.down_proj",), alpha=DOWN_ALPHA) for mlp in gated_mlps(model)
    ]
    found = tuple(site for site in sites if any(f"{reader}.weight" in quantized for reader in site.readers))
    if not found:
        raise QuantizationError(f"{type(model).__name__} has no channels that can be equalized")
    return found


def column_maxima(sites: Iterable[Site], parameters: Iterable[tuple[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
    """Return max|w_nk| over all linears that read a channel, float32 [K] on the CPU, by writer."""
    writers = {f"{reader}.weight": site.writer for site in sites for reader in site.readers}
    found: dict[str, torch.Tensor] = {}
    for name, weight in parameters:
        if name in writers:
            largest = torch.maximum(weight.detach().amax(dim=0), weight.detach().amin(dim=0).neg()).float().cpu()
            before = found.get(writers[name])
            found[writers[name]] = largest if before is None else torch.maximum(before, largest)
    return found


def exponents(
    activations_K: torch.Tensor, weights_K: torch.Tensor, alpha: float, before_K: torch.Tensor | None = None
) -> torch.Tensor:
    """Return log2 of the factors of one site, int8 [K], centered: half of them are at most 1.

    Args:
        activations_K: max|x_k|.
        weights_K: max_n|w_nk|.
        before_K: present exponents, which stay unless they are off by more than a factor of two.
    """
    # Channels that were silent, or that nothing reads, get the factor of the faintest that was heard.
    x, w = (v.float().clamp(min=max(1e-6 * float(v.max()), 1e-30)).log2() for v in (activations_K, weights_K))
    wanted = alpha * x - (1 - alpha) * w
    wanted = (wanted - wanted.median()).clamp_(-_LARGEST, _LARGEST).nan_to_num_(0.0)  # nan: of a broken policy
    nearest = wanted.round().to(torch.int8)
    return nearest if before_K is None else torch.where((wanted - before_K).abs() > _STAY, nearest, before_K)


def folds(sites: Iterable[Site], found: Exponents) -> dict[str, Fold]:
    """Return the factors of each module that has any, by name."""
    reads: dict[str, torch.Tensor] = {}
    writes: dict[str, torch.Tensor] = {}
    for site in sites:
        factors = torch.exp2(found[site.writer].float())
        writes[site.writer] = factors
        reads |= dict.fromkeys(site.readers, factors)
    return {name: Fold(reads=reads.get(name), writes=writes.get(name)) for name in reads | writes}


def folded(
    parameters: Iterable[tuple[str, torch.Tensor]], factors: Mapping[str, Fold]
) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield parameters as engines hold them, before they are quantized. Those without factors are not copied."""
    for name, parameter in parameters:
        path, _, leaf = name.rpartition(".")
        if fold := factors.get(path):
            fold, parameter = fold.to(parameter.device), parameter.detach()
            parameter = fold.weight(parameter) if leaf == "weight" else fold.bias(parameter)
        yield name, parameter
