"""Equalization of channels: truer codes at no cost per token (SmoothQuant, https://arxiv.org/abs/2211.10438).

All channels of a token share one scale, so the channels with the largest activations leave few codes to the others.
Before codes are made, channel k of a linear's input is divided by s_k, and column k of its weight multiplied by it:

    y_n = Σ_k (x_k / s_k) · (s_k · w_nk)        s_k ≈ max|x_k|^α / max_n|w_nk|^(1 − α)     (equation 4)

The writer of the channel is divided by s_k: the gain of a norm, or a row of up_proj, in which act(gate) · up is linear.

s_k is a power of two here. Scaling is then exact in every float type, so that only codes differ: without codes, the
network computes the same bits, and a learner that divides x by s_k has the bits of an engine whose norm does. Masters
and optimizer never see a factor: they are applied where codes are made (`equalized`).
"""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import nn

from qurl_ray.errors import QuantizationError
from qurl_ray.numerics.products import ADAPTER_FACTORS
from qurl_ray.quant.units import Site, Unit, find_sites

NORM_ALPHA = 0.75
"""α for channels that a norm writes. Both were the best of five on SmolLM2's own rollouts (docs/LOG.md)."""
DOWN_ALPHA = 0.5
"""α for channels that up_proj writes."""
_LARGEST = 12  # bound on |log2 s|: a channel that is never active must not leave the range of a float
_STAY = 1.0  # a factor moves only if the wanted one is more than twice or less than half of it, or codes would flicker

Exponents = Mapping[str, torch.Tensor]
"""log2 s, int8 [K], by the name of the module that writes the channels."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Factors:
    """Factors of one module, powers of two: the weight that engines hold is reads · weight / writes.

    All methods return the type of their argument, in which these factors are exact.
    """

    reads: torch.Tensor | None = None
    """s of the channels that it reads, float32 [K]."""
    writes: torch.Tensor | None = None
    """s of the channels that it writes, float32 [N]."""

    def weight(self, weight: torch.Tensor) -> torch.Tensor:
        """Return a weight [N, K], or the gain of a norm [N], as engines hold it."""
        if self.reads is not None:
            weight = weight * self.reads.to(weight)
        if self.writes is not None:
            weight = weight / (self.writes[:, None] if weight.ndim == 2 else self.writes).to(weight)
        return weight

    def bias(self, bias: torch.Tensor) -> torch.Tensor:
        """Return a bias [N] as engines hold it."""
        return bias if self.writes is None else bias / self.writes.to(bias)

    def inputs(self, x: torch.Tensor) -> torch.Tensor:
        """Return x [..., K] as it arrives in an engine."""
        return x if self.reads is None else x / self.reads.to(x)

    def outputs(self, y: torch.Tensor) -> torch.Tensor:
        """Return an engine's result [..., N] without the factors that its next module takes out."""
        return y if self.writes is None else y * self.writes.to(y)


def equalized_sites(model: nn.Module, quantized: Mapping[str, Unit]) -> tuple[Site, ...]:
    """Return the channels of a model that can be equalized and that one of these units reads.

    Norms that multiply by 1 + w (Gemma) are left out: (1 + w) / s − 1 is not exact.

    Raises:
        QuantizationError: the architecture is not known.
    """
    chosen = tuple(
        site
        for site in find_sites(model)
        if site.offset != 1 and any(reader.weight in quantized for reader in site.readers)
    )
    if not chosen:
        raise QuantizationError(f"{type(model).__name__} has no channels that can be equalized")
    return chosen


def column_maxima(sites: Iterable[Site], parameters: Iterable[tuple[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
    """Return max|w_nk| over all linears that read a channel, float32 [K] on the CPU, by writer."""
    writers = {reader.weight: site.writer for site in sites for reader in site.readers}
    maxima: dict[str, torch.Tensor] = {}
    for name, weight in parameters:
        if name in writers:
            rows = weight.detach().flatten(0, -2)
            largest = torch.maximum(rows.amax(dim=0), rows.amin(dim=0).neg()).float().cpu()
            before = maxima.get(writers[name])
            maxima[writers[name]] = largest if before is None else torch.maximum(before, largest)
    return maxima


def exponents(
    activations_K: torch.Tensor, weights_K: torch.Tensor, alpha: float, before_K: torch.Tensor | None = None
) -> torch.Tensor:
    """Return log2 of the factors of one site, int8 [K], centered: half of them are at most 1.

    Args:
        activations_K: max|x_k|. If one of them is not finite, the factors stay.
        weights_K: max_n|w_nk|.
        before_K: present exponents, which stay unless they are off by more than a factor of two; None for zeros.
    """
    if not (activations_K.isfinite().all() and weights_K.isfinite().all()):
        return torch.zeros(len(weights_K), dtype=torch.int8) if before_K is None else before_K
    wanted = alpha * _log2(activations_K) - (1 - alpha) * _log2(weights_K)
    wanted = (wanted - wanted.median()).clamp_(-_LARGEST, _LARGEST)
    nearest = wanted.round().to(torch.int8)
    return nearest if before_K is None else torch.where((wanted - before_K).abs() > _STAY, nearest, before_K)


def _log2(maxima: torch.Tensor) -> torch.Tensor:
    """Return log2 of the maxima. A channel that was silent, or that nothing reads, counts like the faintest other."""
    heard = maxima[maxima > 0]
    return maxima.float().clamp(min=float(heard.min()) if len(heard) else 1.0).log2()


def new_exponents(
    sites: Iterable[Site],
    activations: Mapping[str, torch.Tensor],
    weights: Mapping[str, torch.Tensor],
    before: Exponents,
) -> dict[str, torch.Tensor]:
    """Return the exponents of all sites, from max|x_k| and `column_maxima`, both by writer."""
    by_writer: dict[str, torch.Tensor] = {}
    for site in sites:
        writer = site.writer
        alpha = DOWN_ALPHA if site.kind == "down" else NORM_ALPHA
        by_writer[writer] = exponents(activations[writer], weights[writer], alpha, before.get(writer))
    return by_writer


def factors_of(sites: Iterable[Site], by_writer: Exponents, device: torch.device | str = "cpu") -> dict[str, Factors]:
    """Return the factors of each module that has any, by name."""
    reads: dict[str, torch.Tensor] = {}
    writes: dict[str, torch.Tensor] = {}
    for site in sites:
        scales = torch.exp2(by_writer[site.writer].float()).to(device)
        writes[site.writer] = scales
        reads |= dict.fromkeys((*(reader.module for reader in site.readers), *site.exact), scales)
    return {name: Factors(reads=reads.get(name), writes=writes.get(name)) for name in reads | writes}


def equalized(
    parameters: Iterable[tuple[str, torch.Tensor]], factors: Mapping[str, Factors]
) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield parameters as engines hold them, before they are quantized. Parameters without factors are not copied, and
    codes are as they are. Of an adapter's matrices, A reads what its linear reads, and B writes what it writes."""
    for name, parameter in parameters:
        path, _, leaf = name.rpartition(".")
        own = factors.get(path) or _of_adapter(path, factors)
        if own and isinstance(parameter, torch.Tensor):  # no codes, which were made with them
            parameter = own.weight(parameter.detach()) if leaf == "weight" else own.bias(parameter.detach())
        yield name, parameter


def _of_adapter(path: str, factors: Mapping[str, Factors]) -> Factors | None:
    linear, _, matrix = path.rpartition(".")
    if matrix not in ADAPTER_FACTORS or (own := factors.get(linear)) is None:
        return None
    return Factors(reads=own.reads) if matrix == ADAPTER_FACTORS[0] else Factors(writes=own.writes)


def write_factors(path: Path, factors: Mapping[str, Factors]) -> None:
    """Write factors by module as safetensors."""
    tensors: dict[str, torch.Tensor] = {}
    for module, own in factors.items():
        parts = {"reads": own.reads, "writes": own.writes}
        tensors |= {
            f"{part}:{module}": scales.to("cpu", copy=True) for part, scales in parts.items() if scales is not None
        }
    save_file(tensors, path)


def read_factors(path: Path, device: str = "cpu") -> dict[str, Factors]:
    """Return the factors that `write_factors` has written."""
    by_module: dict[str, dict[str, torch.Tensor]] = {}
    for name, scales in load_file(path, device=device).items():
        part, _, module = name.partition(":")
        by_module.setdefault(module, {})[part] = scales
    return {module: Factors(**parts) for module, parts in by_module.items()}
