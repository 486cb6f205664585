"""Other quantizers than rounding to nearest, which is the only one of the package: they lost the comparison. Below
them, the parts of an error of the package's own.

rounding.py and frozen.py compare them; docs/LOG.md has the figures. With float32 masters, rounding to nearest loses
nothing from sync to sync. The first two quantizers here change many codes at every sync although the weights hardly
move. They cannot be used with a sync that sends only what changed.
"""

import zlib
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from qurl_ray.errors import QuantizationError
from qurl_ray.quant.formats import Blocks, Format
from qurl_ray.quant.quantize import QTensor, dequantize, nearest, quantize, quantize_by


def quantize_stochastic(w_NK: torch.Tensor, fmt: Format, generator: torch.Generator | int) -> QTensor:
    """Quantize by stochastic rounding: up with a probability equal to the distance from the code below,
    as a share of the distance between codes. Then

        E[dequantize(quantize_stochastic(w))] = w

    for float codes and for integer codes, which are 1 apart. Scales are those of rounding to nearest, so the largest
    weight of a block is always exact. (Croci et al. 2022, https://doi.org/10.1098/rsos.211631, section 2.)

    Args:
        generator: a generator on the weight's device, or a seed. The same seed gives the same codes on the same kind
            of device. Use another seed for each tensor and version to keep them independent. CPUs use the low 32 bits
            of a seed.
    """
    if isinstance(generator, int):
        generator = torch.Generator(device=w_NK.device).manual_seed(generator)

    def rounding(x: torch.Tensor) -> torch.Tensor:
        step = _spacing(x, fmt)
        low = (x / step).floor()
        draws = torch.rand(x.shape, generator=generator, device=x.device)
        return (low + (draws < x / step - low)) * step

    return quantize_by(w_NK, fmt, rounding)


def quantize_with_feedback(
    w_NK: torch.Tensor, fmt: Format, residual: torch.Tensor | None
) -> tuple[QTensor, torch.Tensor]:
    """Quantize w + residual. Return the codes and the new residual, which is their rounding error:

        q = quantize(w + residual),  residual' = w + residual - dequantize(q)

    The codes of T versions thus add up to their weights, except for the last residual (error feedback; Seide et al.
    2014, https://www.microsoft.com/en-us/research/publication/1-bit-stochastic-gradient-descent-and-its-application-to-data-parallel-distributed-training-of-speech-dnns/,
    section 3, there for gradients).

    Args:
        residual: float32 [N, K], as returned for the last version; None for the first version.
    """
    target = w_NK.detach().float() if residual is None else w_NK.detach().float() + residual
    q = quantize_by(target, fmt, lambda x: nearest(x, fmt))
    return q, target - dequantize(q)


def quantize_clipped(w_NK: torch.Tensor, fmt: Format, ratios: Sequence[float]) -> QTensor:
    """Quantize each row with the range, out of `ratios` · max|w|, that has the least squared error in w.

    Products of codes cost the same as without clipping; quantization costs len(ratios) times as much.

    Raises:
        QuantizationError: the format does not have one scale per row.
    """
    if fmt.group or fmt.rows > 1:
        raise QuantizationError(f"{fmt.name}: ranges are clipped by row, and its scales are not")
    tried = [quantize_by(w_NK, fmt, lambda x: nearest(x, fmt), clip=ratio) for ratio in ratios]
    errors = torch.stack([(dequantize(q) - w_NK).square().sum(dim=1) for q in tried])
    best = errors.argmin(dim=0)
    row = torch.arange(len(best), device=best.device)
    codes = torch.stack([q.codes.view(torch.uint8) for q in tried])[best, row].view(fmt.dtype)
    return QTensor(codes=codes, scale=torch.stack([q.scale for q in tried])[best, row], fmt=fmt)


def _spacing(x: torch.Tensor, fmt: Format) -> torch.Tensor | float:
    """Distance between the codes on either side of each x: 1 for integers, eps · 2^⌊log2|x|⌋ for floats."""
    if not fmt.dtype.is_floating_point:
        return 1.0
    info = torch.finfo(fmt.dtype)
    _, exponent = torch.frexp(x.abs().clamp(min=info.tiny))  # |x| = mantissa · 2^exponent, mantissa in [0.5, 1)
    return torch.ldexp(torch.full_like(x, info.eps), exponent - 1)


class Rounding:
    """Quantizer of named weights, with the state that an experiment keeps between syncs.

    Args:
        kind: "stochastic" or "error_feedback".
        seed: seed of the run.
    """

    def __init__(self, kind: str, seed: int) -> None:
        self._kind, self._seed = kind, seed
        self._syncs: Counter[str] = Counter()
        self._residuals: dict[str, torch.Tensor] = {}

    def __call__(self, name: str, w_NK: torch.Tensor, fmt: Format) -> QTensor:
        if self._kind == "error_feedback":
            q, self._residuals[name] = quantize_with_feedback(w_NK, fmt, self._residuals.get(name))
            return q
        self._syncs[name] += 1
        # All 32 bits that torch's CPU generators use differ by name and sync.
        return quantize_stochastic(w_NK, fmt, zlib.crc32(f"{self._seed} {name} {self._syncs[name]}".encode()))


@dataclass(frozen=True, slots=True, kw_only=True)
class SquaredError:
    """Sum of (Q(w; s) − w)² over a weight, as the sum of three parts.

    s is the step of w's block, s* = max|w| / weight_max the same before it is rounded, and Q(w; s) the value of w's
    code. The parts are those that https://arxiv.org/abs/2605.20402 names for MXFP4.
    """

    scale_bias: float
    """Sum of (Q(w; s) − w)² − (Q(w; s*) − w)²: what rounding the step adds."""
    dead_zone: float
    """Sum of w² where Q(w; s*) = 0."""
    grid_noise: float
    """Sum of (Q(w; s*) − w)² where Q(w; s*) ≠ 0."""


def squared_error(w_NK: torch.Tensor, fmt: Format) -> SquaredError:
    """Return the error of a weight in a format whose codec is `Blocks`."""
    assert isinstance(fmt.codec, Blocks), "steps that are rounded"
    exact = replace(fmt, codec=replace(fmt.codec, scale="float32"), whole=False)
    w_NK = w_NK.detach().double()
    found, unrounded = (dequantize(quantize(w_NK, form)).double() for form in (fmt, exact))
    squares, zero = (unrounded - w_NK).square(), unrounded == 0
    return SquaredError(
        scale_bias=float((found - w_NK).square().sum() - squares.sum()),
        dead_zone=float(squares[zero].sum()),
        grid_noise=float(squares[~zero].sum()),
    )
