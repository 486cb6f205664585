"""Kernels for INT4 weights on a CPU against the INT8 kernel of engines: python benchmarks/int4_kernels.py (10 minutes).

Linears of a 1.1B model, 1 to 8 rows, one and two threads. Each product reads another copy of the weight, of so many
that no cache holds them, as in a decode step. In each round all kernels are timed one after the other; figures are
medians over rounds, and ratios are of the same round. A second table has the distance to the definition
(quant.linear.reference_linear), and whether a row's bits depend on the rows beside it.
"""

import math
import os
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated

import torch
import typer
from shared import RESULTS, Figures, machine

from qurl_ray.quant.elements import INT4
from qurl_ray.quant.formats import get_format
from qurl_ray.quant.linear import QuantizedLinear, reference_linear, weight_max_code
from qurl_ray.quant.quantize import QTensor, quantize, quantize_rows_int8

SHAPES = ((2048, 2048), (2048, 5632), (5632, 2048))
"""Inputs and outputs."""
ROWS = (1, 2, 4, 8)
CACHE = 200_000_000
"""Bytes that the INT8 codes of all copies exceed."""
ENOUGH = 0.05
"""Seconds after which the products of a round end, where they are slow."""
HALF_MAX = torch.finfo(torch.float16).max
INT8, GROUP = "INT8, of engines", 128
Product = Callable[[torch.Tensor], torch.Tensor]


@dataclass(frozen=True, slots=True, kw_only=True)
class Kernel:
    """A kernel of some origin."""

    activations: torch.dtype
    pack: Callable[[QTensor], Product]
    """Function from INT4 codes of groups, for INT8 from others, to the product with a copy of them."""


def engines_int8(q: QTensor) -> Product:
    """Return the product with codes in the layout that an engine holds in the long run."""
    linear = QuantizedLinear(q, None)
    linear.pack()
    return linear


def emulated(q: QTensor) -> Product:
    return QuantizedLinear(q, None, emulate=True)


def nibbles(q: QTensor) -> torch.Tensor:
    """Return codes as 0 … 15, uint8 [N, K]."""
    return (INT4.values(q.codes) + 8).to(torch.uint8)


def of_torch(dtype: torch.dtype) -> Callable[[QTensor], Product]:
    """Return the packing for aten._weight_int4pack_mm_for_cpu."""

    def pack(q: QTensor) -> Product:
        packed = torch.ops.aten._convert_weight_to_int4pack_for_cpu(nibbles(q).int(), 1)
        scale = q.scale.t().to(dtype)
        scales = torch.stack([scale, torch.zeros_like(scale)], dim=2).contiguous()
        return lambda x: torch.ops.aten._weight_int4pack_mm_for_cpu(x, packed, GROUP, scales)

    return pack


def of_torch_dynamic(q: QTensor) -> Product:
    """aten._dyn_quant_matmul_4bit, which quantizes activations to 8 bits."""
    N, K = q.shape
    codes, scale = nibbles(q), q.scale.bfloat16()
    packed = torch.ops.aten._dyn_quant_pack_4bit_weight(codes[:, 1::2] << 4 | codes[:, ::2], scale, None, GROUP, K, N)
    return lambda x: torch.ops.aten._dyn_quant_matmul_4bit(x, packed, GROUP, K, N)


def packed_rows(codes_KN: torch.Tensor) -> torch.Tensor:
    """Return eight codes of a row in an int32, the first in the lowest bits, [K, N / 8]."""
    eights = codes_KN.long().unflatten(1, (-1, 8)) << 4 * torch.arange(8)
    return eights.sum(dim=2).to(torch.uint32).view(torch.int32)


def of_vllm(dtype: torch.dtype) -> Callable[[QTensor], Product]:
    """Return the packing for vLLM's cpu_gemm_wna16: blocks of 16 outputs, one after the other."""
    from vllm import _custom_ops as ops

    def pack(q: QTensor) -> Product:
        N, K = q.shape
        blocks = packed_rows(nibbles(q).t()).view(K, -1, 2).permute(1, 0, 2).reshape(N // 16, 2 * K).contiguous()
        scales = q.scale.t().to(dtype).contiguous()
        return lambda x: ops.cpu_gemm_wna16(x, blocks, scales, None, None, 8, "vec")

    return pack


def of_vllm_w4a8(q: QTensor) -> Product:
    """vLLM's int4_scaled_mm_cpu, which quantizes activations to 8 bits; codes in AWQ's order, zero points 8."""
    from vllm import _custom_ops as ops

    order = [0, 2, 4, 6, 1, 3, 5, 7]
    codes = nibbles(q).t().unflatten(1, (-1, 8))[:, :, order].flatten(1)
    zeros = torch.full((q.scale.shape[1], q.shape[0]), 8)
    parts = ops.convert_weight_packed_scale_zp(
        packed_rows(codes), packed_rows(zeros), q.scale.t().contiguous(), ops.CPUQuantAlgo.AWQ
    )
    weight, zero_points, scales = parts
    return lambda x: ops.int4_scaled_mm_cpu(x, weight, zero_points, scales, None)


def of_vllm_codes(q: QTensor) -> Product:
    """The same for float32, as an engine would compute it: it gets the codes of quantize_rows, which float16 holds and
    its own quantization leaves as they are. A power of two keeps sums within float16."""
    bound = 127 * 7 * GROUP * float(q.scale.sum(dim=1).max())
    factor = 2.0 ** max(0, math.ceil(math.log2(bound / HALF_MAX)))
    product, int8 = of_vllm_w4a8(replace(q, scale=q.scale / factor)), get_format("int8")

    def multiply(x: torch.Tensor) -> torch.Tensor:
        codes_MK, amax_M1 = quantize_rows_int8(x, int8)
        return product(codes_MK.half()).float().mul_(factor * int8.activation_step).mul_(amax_M1)

    return multiply


def kernels() -> Iterator[tuple[str, Kernel]]:
    """Yield the kernels by name, the base of ratios first."""
    single, half = torch.float32, torch.bfloat16
    yield INT8, Kernel(activations=single, pack=engines_int8)
    yield "emulation, of engines", Kernel(activations=single, pack=emulated)
    yield "torch int4pack, float32", Kernel(activations=single, pack=of_torch(single))
    yield "torch int4pack, bfloat16", Kernel(activations=half, pack=of_torch(half))
    yield "torch dyn_quant, 8-bit activations", Kernel(activations=single, pack=of_torch_dynamic)
    try:
        yield "vLLM wna16, bfloat16", Kernel(activations=half, pack=of_vllm(half))
    except ImportError:
        return
    yield "vLLM wna16, float16", Kernel(activations=torch.float16, pack=of_vllm(torch.float16))
    yield "vLLM int4_scaled_mm, 8-bit activations", Kernel(activations=half, pack=of_vllm_w4a8)
    yield "the same with codes of float32", Kernel(activations=single, pack=of_vllm_codes)


def seconds(products: list[Product], x: torch.Tensor) -> tuple[float, float]:
    """Return seconds of a product, by the clock and of processors, with each of these copies in turn for ENOUGH."""
    start, processor, count = time.perf_counter(), time.process_time(), 0
    for product in products:
        product(x)
        count += 1
        if time.perf_counter() - start > ENOUGH:
            break
    return (time.perf_counter() - start) / count, (time.process_time() - processor) / count


def codes_of(name: str, w_NK: torch.Tensor) -> QTensor:
    """Return the codes that a kernel of this name multiplies."""
    fmt = get_format("int8" if name == INT8 else "int4")
    return quantize(w_NK, get_format(fmt.name, weight_max_code(fmt, torch.device("cpu"))))


def main(
    rounds: Annotated[int, typer.Option(help="Rounds of a shape.")] = 15,
    out: Annotated[Path, typer.Option(help="File of figures; its table is beside it.")] = RESULTS / "int4_kernels.json",
) -> None:
    """Time kernels for INT4 against that for INT8."""
    figures = Figures(out)
    figures.keep("load", os.getloadavg()[0])
    for inputs, outputs in SHAPES:
        w_NK = torch.randn(outputs, inputs, generator=torch.Generator().manual_seed(0)) * inputs**-0.5
        x = torch.randn(max(ROWS), inputs, generator=torch.Generator().manual_seed(1))
        copies = -(-CACHE // (inputs * outputs))
        made: dict[str, tuple[list[Product], torch.Tensor]] = {}
        for name, kernel in kernels():
            q, own = codes_of(name, w_NK), x.to(kernel.activations)
            try:
                product = kernel.pack(q)
                y = product(own)
            except (RuntimeError, NotImplementedError) as error:
                figures.keep(f"{name}, {inputs} × {outputs}", str(error).strip().splitlines()[0])
                continue
            expected = reference_linear(own.float(), q, None)
            alone = all(
                torch.equal(product(own[first : first + count]), y[first : first + count])
                for count in ROWS
                for first in range(max(ROWS) - count + 1)
            )
            distance = float((y.float() - expected).norm() / expected.norm())
            figures.keep(f"{name}, {inputs} × {outputs}", {"distance": distance, "same_bits_in_any_batch": alone})
            made[name] = [product, *(kernel.pack(q) for _ in range(copies - 1))], own
        for threads in (1, 2):
            torch.set_num_threads(threads)
            for rows in ROWS:
                times: dict[str, list[tuple[float, float]]] = {name: [] for name in made}
                for _ in range(rounds + 1):
                    for name, (products, own) in made.items():
                        times[name].append(seconds(products, own[:rows]))
                for name, values in times.items():
                    pairs = list(zip(times[INT8], values, strict=True))[1:]
                    clock, processor = (statistics.median(b[i] / v[i] for b, v in pairs) for i in (0, 1))
                    us = 1e6 * statistics.median(clock for clock, _ in values[1:])
                    key = f"{name}, {inputs} × {outputs}, {threads} threads, {rows} rows"
                    figures.keep(key, {"us": us, "over_int8": clock, "over_int8_of_processors": processor})
    out.with_suffix(".md").write_text("\n".join(page(figures)) + "\n")


def page(figures: Figures) -> Iterator[str]:
    """Yield the lines of the tables."""
    yield from ("# INT4 on a CPU against INT8", "", "`python benchmarks/int4_kernels.py`", "", machine(), "")
    yield "Microseconds of a product of INT8 codes by the clock, and how many times as fast INT4 is, with 1, 2, 4 and 8"
    yield "rows: with one thread by the time of processors, with two by the clock. The machine had other work, a load"
    yield f"of {figures.values['load']:.1f} before the first product."
    names = [name for name, _ in kernels()]
    for threads in (1, 2):
        yield from ("", f"## Threads: {threads}", "")
        yield "| kernel | " + " | ".join(f"{inputs} × {outputs}" for inputs, outputs in SHAPES) + " |"
        yield "|---" * (1 + len(SHAPES)) + "|"
        for name in names:
            cells = []
            for inputs, outputs in SHAPES:
                shape = f"{name}, {inputs} × {outputs}, {threads} threads"
                found = filter(None, (figures.values.get(f"{shape}, {rows} rows") for rows in ROWS))
                if name == INT8:
                    cells.append(", ".join(f"{v['us']:.0f}" for v in found))
                else:
                    ratio = "over_int8_of_processors" if threads == 1 else "over_int8"
                    cells.append(", ".join(f"{v[ratio]:.2f}" for v in found))
            yield f"| {name} | " + " | ".join(cell or "refused" for cell in cells) + " |"
    yield from ("", "## Values", "", "| kernel | distance to the definition | a row's bits are the same in any batch |")
    yield "|---|---|---|"
    for name in names:
        seen = [figures.values.get(f"{name}, {inputs} × {outputs}") for inputs, outputs in SHAPES]
        if isinstance(seen[0], dict):
            worst, same = max(v["distance"] for v in seen), all(v["same_bits_in_any_batch"] for v in seen)
            yield f"| {name} | {worst:.1e} | {'yes' if same else 'no'} |"
        else:
            yield f"| {name} | refused: {seen[0]} | |"


if __name__ == "__main__":
    typer.run(main)
