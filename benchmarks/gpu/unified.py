"""Gain of training through codes: forward and backward of one layer's linears, each weight quantized in each.

The baseline is bfloat16 as the learner computes it without a flow, by autocast of float32 masters. FP8 blocks compute
all three products in FP8; INT8 computes its forward in INT8, and a backward in float32 (quant/unified.py).
"""

import statistics
from collections.abc import Callable
from functools import partial

import torch
from torch.nn import functional

from benchmarks.gpu.bench import Bench, Figures, ratio
from qurl_ray.planning.shapes import Shape
from qurl_ray.quant.formats import FORMATS
from qurl_ray.quant.kernels import why_emulated
from qurl_ray.quant.unified import Backward, unified_linear

FLOWS: dict[str, Backward] = {"fp8_block": "quantized", "int8": "straight_through"}
PLAIN = "bfloat16"
Linear = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


def run(bench: Bench) -> None:
    for shape in bench.scale.shapes:
        if figures := bench.attempt(shape.name, partial(measured, bench, shape)):
            ways = figures["ways"].items()
            line = ", ".join(f"{name} {way['ms_of_a_layer']:.1f} ms, ×{way['times_as_fast']:.2f}" for name, way in ways)
            bench.add(shape.name, figures, f"{line}; × {shape.layers} layers, extrapolated")


def measured(bench: Bench, shape: Shape) -> Figures:
    bench.free()
    sizes = linears(shape)
    weights = [torch.nn.Parameter(0.02 * torch.randn(*size, device=bench.device)) for size in sizes]
    new = partial(torch.randn, bench.scale.tokens, device=bench.device, dtype=torch.bfloat16)
    pairs = [(new(w.shape[1], requires_grad=True), 1e-3 * new(w.shape[0])) for w in weights]
    ways: dict[str, Linear] = {PLAIN: partial(autocast, bench.device.type)}
    for name, backward in FLOWS.items():
        ways[name] = partial(unified_linear, bias=None, fmt=FORMATS[name], backward=backward)

    def both(linear: Linear) -> None:
        for weight, (x_MK, dy_MN) in zip(weights, pairs, strict=True):
            torch.autograd.grad(linear(x_MK, weight), (x_MK, weight), dy_MN)

    took = bench.take_turns({name: partial(both, linear) for name, linear in ways.items()})
    products = 6 * bench.scale.tokens * sum(weight.numel() for weight in weights)
    found: Figures = {}
    for name, seconds in took.items():
        layer = statistics.median(seconds)
        found[name] = {
            "ms_of_a_layer": 1000 * layer,
            "tflops": products / layer / 1e12,
            "times_as_fast": ratio(took[PLAIN], seconds),
            "ms_extrapolated_to_all_layers": 1000 * layer * shape.layers,
        }
        if name in FLOWS:
            reasons = {why_emulated(FORMATS[name], bench.device, size) for size in sizes}
            found[name]["emulated"] = sorted(reasons - {None})
    return {"tokens": bench.scale.tokens, "linears": sizes, "layers": shape.layers, "ways": found}


def linears(shape: Shape) -> list[tuple[int, int]]:
    """Return N, K of a layer's linears: q, k, v, o, gate, up, down."""
    D, FF, KV = shape.hidden, shape.intermediate, shape.kv_heads * shape.head_dim
    return [(D, D), (KV, D), (KV, D), (D, D), (FF, D), (FF, D), (D, FF)]


def autocast(device: str, x_MK: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    with torch.autocast(device, torch.bfloat16):
        return functional.linear(x_MK, weight)
