"""Do kernels give activations the codes that the learner gives them?

A kernel returns products alone, so it multiplies with an identity matrix of codes 1 and scales 1: its result divided by
the activations' scales is their codes. Even bfloat16 has enough bits to tell which. The reference is
quant.quantize.quantize_rows. This package's kernels compute it themselves; vLLM's have code of their own, and are asked
in the layers of a model that vLLM has made.

Some hundreds of a million activations in bfloat16 lie in the middle of two codes. Which of them a kernel takes depends
on how it divides, and neither is wrong. So codes that differ are counted, and judged are those of them that are further
from the activation than the reference's.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from benchmarks.gpu.bench import Bench, Figures, lacks
from benchmarks.gpu.child import call
from benchmarks.gpu.engines import Setup, setup_of
from benchmarks.gpu.kernels import fused
from benchmarks.gpu.vllm import ask, measuring
from qurl_ray.quant.formats import FORMATS, Format, get_format
from qurl_ray.quant.linear import QuantizedLinear, weight_max_code
from qurl_ray.quant.quantize import QTensor, nearest, quantize_rows

LIMIT = 1e-4
"""Largest share of codes that may be further from the activation than the reference's."""
_ROUNDING = 2e-5
"""Error of an activation divided by its scale, in float32, relative or in codes."""


def run(bench: Bench) -> None:
    without = lacks("vllm")
    for name in bench.scale.formats:
        if name == "none" or FORMATS[name].activation_max is None or FORMATS[name].activations:
            continue
        if figures := bench.attempt(f"torch, {name}", partial(ours, bench, name)):
            bench.add(f"torch, {name}", figures, summary(figures))
        if without:
            bench.skip(f"vllm, {name}", without)
        elif figures := bench.attempt(f"vllm, {name}", partial(of_vllm, bench, name)):
            bench.add(f"vllm, {name}", figures, summary(figures))


def ours(bench: Bench, name: str) -> Figures:
    """Compare the kernels of the torch engine, for the linears of the first shape."""
    fmt, found = get_format(name, weight_max_code(FORMATS[name], bench.device)), {}
    for N, K in fused(bench.scale.shapes[0]):
        linear = QuantizedLinear(eye(N, K, fmt, bench.device), None)
        key = f"{N} × {K}"
        found[key] = differing(linear, (N, K), fmt, bench.scale.activations, bench.device, bench.dtype)
        kernel = linear.kernel or f"emulation of {name}"
    return judged(found, [kernel])


def of_vllm(bench: Bench, name: str) -> Figures:
    """Compare the kernels that vLLM chooses for one layer of the first shape."""
    with setup_of(
        bench, bench.scale.shapes[0], 1, engine="vllm", format_name=name, graphs=False, context=64, slots=2
    ) as setup:
        found = call(bench, asked_of_vllm, setup=setup.plain(), rows=bench.scale.activations)
    return judged(found["linears"], found["kernels"])


def asked_of_vllm(*, setup: dict[str, Any], rows: int) -> Figures:
    """Return the comparison of each linear of a model. Runs in a process of its own."""
    measuring()
    made = Setup(**setup)
    engine = made.make()
    found = ask(engine, "codes", made.format_name, engine.weight_max_code(made.format_name), rows)
    result = {"linears": found, "kernels": engine.kernels()}
    engine.close()
    return result


def eye(N: int, K: int, fmt: Format, device: torch.device) -> QTensor:
    """Return a weight [N, K] whose codes are an identity matrix, with scales 1."""
    scales = (-(-N // fmt.rows), -(-K // (fmt.group or K)))
    codes = torch.eye(N, K, device=device).to(fmt.dtype)
    return QTensor(codes=codes, scale=torch.ones(scales, device=device), fmt=fmt)


def differing(
    multiply: Callable[[torch.Tensor], torch.Tensor],
    size: tuple[int, int],
    fmt: Format,
    rows: int,
    device: torch.device,
    dtype: torch.dtype,
) -> list[int]:
    """Return numbers of activations: of all, of those whose code is not the reference's, and of those whose code is
    further from the activation than the reference's.

    Args:
        multiply: product with `eye`.
    """
    assert fmt.activation_max
    random = torch.Generator(device).manual_seed(0)
    x_MK = torch.randn(rows, size[1], generator=random, device=device)
    x_MK[::2, ::97] *= 30  # outliers, as activations have them
    x_MK = x_MK.to(dtype)
    shown = min(size)
    codes_MK, amax_MG = quantize_rows(x_MK.float(), fmt)
    expected = codes_MK[:, :shown]
    scale_MK = amax_MG.repeat_interleave(fmt.activation_group or size[1], dim=1)[:, :shown] / fmt.activation_max
    found = nearest(multiply(x_MK)[:, :shown].float() / scale_MK, fmt)
    exact = x_MK[:, :shown].double() / scale_MK.double()
    near = (found - exact).abs() <= (expected - exact).abs() + _ROUNDING * exact.abs().clamp(min=1)
    return [found.numel(), int((found != expected).sum()), int((~near).sum())]  # nan is not near


def judged(found: dict[str, list[int]], kernels: list[str]) -> Figures:
    codes, differ, further = (sum(part[i] for part in found.values()) for i in range(3))
    shares = {"share": further / codes, "share_with_ties": differ / codes}
    return {"linears": found, "kernels": kernels, "codes": codes, **shares, "right": further <= LIMIT * codes}


def summary(figures: Figures) -> str:
    verdict = "right" if figures["right"] else "WRONG"
    return (
        f"{verdict}, {figures['share']:.1e} of {figures['codes']} codes are further off than the reference's, "
        f"{figures['share_with_ties']:.1e} differ; {', '.join(figures['kernels'])}"
    )
