"""The three products of a training linear, by entry of quant/training.py: seconds, and errors against float64.

M tokens by each weight [N, K] of a layer, as a learner with bfloat16 computes them: y = x · Wᵀ, dx = dy · W and
dW = dyᵀ · x, the quantization of x and dy included, that of the weight by itself. The error is relative, in the norm of
the whole, against the float64 product of operands that are not rounded: what FP8 costs, whichever way it is computed.
"""

import statistics
from functools import partial

import torch
from torch.nn import functional

from benchmarks.gpu.bench import Bench, Call, Figures
from benchmarks.gpu.kernels import error
from benchmarks.gpu.unified import PLAIN, linears
from qurl_ray.quant.formats import FORMATS
from qurl_ray.quant.linear import QuantizedLinear
from qurl_ray.quant.quantize import quantize, quantize_rows
from qurl_ray.quant.training import PRODUCTS

FMT = FORMATS["fp8_block"]
LIMIT = 0.05
"""Largest error. Of random operands it is 0.037 with two of them in FP8, and 0.044 where x is rounded twice, for dW."""
_WEIGHT = "quantize W"


def run(bench: Bench) -> None:
    for N, K in dict.fromkeys(size for shape in bench.scale.shapes[: bench.scale.whole] for size in linears(shape)):
        key = f"{N} × {K}"
        if figures := bench.attempt(key, partial(measured, bench, N, K)):
            sums = {way: 1000 * sum(parts.values()) for way, parts in figures["seconds"].items()}
            worst = max(max(parts.values()) for way, parts in figures["errors"].items() if way != PLAIN)
            verdict = f"{'right' if figures['right'] else 'WRONG'}, error {worst:.3f}"
            line = ", ".join(f"{way} {total:.2f} ms" for way, total in sums.items())
            bench.add(key, figures, "; ".join([verdict, line, *dict.fromkeys(figures["not_used"].values())]))


def measured(bench: Bench, N: int, K: int) -> Figures:
    bench.free()
    M, random = bench.scale.tokens, torch.Generator(bench.device).manual_seed(0)
    new = partial(torch.randn, generator=random, device=bench.device)
    weight_NK, x_MK, dy_MN = 0.02 * new(N, K), new(M, K).bfloat16(), (1e-3 * new(M, N)).bfloat16()
    half_NK, q = weight_NK.bfloat16(), quantize(weight_NK, FMT, finite=True)
    codes_MK, amax_MG = quantize_rows(x_MK.float(), FMT)
    saved = codes_MK.to(FMT.dtype), amax_MG
    calls: dict[tuple[str, str], Call] = {
        (PLAIN, "y"): lambda: functional.linear(x_MK, half_NK),
        (PLAIN, "dx"): lambda: dy_MN @ half_NK,
        (PLAIN, "dW"): lambda: dy_MN.t() @ x_MK,
    }
    reasons = {name: one.objection(FMT, bench.device, (M, N, K)) for name, one in PRODUCTS.items()}
    fitting = [name for name, why in reasons.items() if not why]
    for name in [name for name in fitting if name != "emulation"] or fitting:
        entry = PRODUCTS[name]
        calls[name, "y"] = lambda: QuantizedLinear(q, None)(x_MK)
        calls[name, "dx"] = lambda entry=entry: entry.gradients(dy_MN, q, None, FMT)[0]
        calls[name, "dW"] = lambda entry=entry: entry.gradients(dy_MN, None, saved, FMT)[1]
    x, w, dy = (values.double() for values in (x_MK, weight_NK, dy_MN))
    exact = {"y": x @ w.t(), "dx": dy @ w, "dW": dy.t() @ x}
    errors: Figures = {}
    for (way, product), call in calls.items():
        errors.setdefault(way, {})[product] = error(call(), exact[product])
    took = bench.take_turns(calls | {(_WEIGHT, "W"): lambda: quantize(weight_NK, FMT, finite=True)})
    seconds: Figures = {}
    for (way, product), rounds in took.items():
        seconds.setdefault(way, {})[product] = statistics.median(rounds)
    return {
        "tokens": M,
        "seconds": seconds,
        "errors": errors,
        "right": all(value < LIMIT for parts in errors.values() for value in parts.values()),
        "not_used": {name: why for name, why in reasons.items() if why},
    }
