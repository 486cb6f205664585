"""Shortest possible time of a decode step, by part, from a GPU's data sheet: what a measured step is compared with.

    linears, head = max(bytes / bandwidth, flops / peak)
    keys, activations, sampling = bytes / bandwidth

A product that reads its weights once takes at least the longer of the two (the roofline of
https://doi.org/10.1145/1498765.1498785). Activations are written by the operation that makes them, with quantization
fused into it, and read by each product. Sampling writes the logits in 16 bits and reads them once.
"""

import argparse
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from benchmarks.gpu.bench import Figures
from qurl_ray.planning.machines import BLOCK_BYTES, EIGHT_BIT, GPUS, PLANNED_AS, Gpu, Precision
from qurl_ray.planning.shapes import SHAPES, Shape

BATCHES = (1, 8, 32, 128, 256, 512)


def gpu_named(device: str) -> Gpu | None:
    """Return the data sheet of a device, such as "NVIDIA H100 80GB HBM3"; None if it is not known."""
    return next((gpu for name, gpu in GPUS.items() if name in device.lower()), None)


def limit_ms(
    shape: Shape,
    gpu: Gpu,
    format_name: str,
    batch: int,
    context: int,
    *,
    key_bytes: int = 2,
    head_in_codes: bool = False,
) -> dict[str, float]:
    """Return milliseconds of each part of a decode step of `batch` sequences of `context` tokens on one GPU.

    Args:
        key_bytes: bytes of each number in keys and values.
        head_in_codes: the head has the linears' format; otherwise it is in bfloat16.
    """
    precision = PLANNED_AS[format_name]
    # Of a layer: the inputs of q/k/v, gate/up, o and down, with the bytes of their codes; what products write, in 16
    # bits; and the residual, which two norms read and write.
    inputs = 2 * shape.hidden + shape.heads * shape.head_dim + shape.intermediate
    outputs = (shape.heads + 2 * shape.kv_heads) * shape.head_dim + 2 * shape.hidden + 2 * shape.intermediate
    read = 1 if precision in EIGHT_BIT else 2
    activations = shape.layers * batch * (2 * read * inputs + 2 * 2 * outputs + 4 * 2 * shape.hidden)

    def product(params: int, precision: Precision) -> float:
        peak = gpu.flops.get(precision, gpu.flops["bf16"])  # codes that it cannot multiply are multiplied in bfloat16
        return max(params * BLOCK_BYTES[precision] / gpu.bandwidth, 2 * params * batch / peak)

    seconds = {
        "linears": product(shape.block_params, precision),
        "head": product(shape.head_params, precision if head_in_codes else "bf16"),
        "keys": batch * shape.kv_bytes(context, key_bytes) / gpu.bandwidth,
        "activations": activations / gpu.bandwidth,
        "sampling": 2 * 2 * batch * shape.vocab / gpu.bandwidth,
    }
    return {part: 1000 * value for part, value in seconds.items()}


def saved_share(
    shape: Shape,
    gpu: Gpu,
    format_name: str,
    batch: int,
    context: int,
    *,
    ms: float,
    plain_ms: float,
    key_bytes: int = 2,
    head_in_codes: bool = False,
) -> float | None:
    """Return the milliseconds that a format saves, over those that the saved bytes of weights and keys take at the data
    sheet's bandwidth; None if it saves no bytes. 1 is all of it; more says that the baseline is slow."""
    params = shape.block_params + (shape.head_params if head_in_codes else 0)
    fewer = params * (BLOCK_BYTES["bf16"] - BLOCK_BYTES[PLANNED_AS[format_name]])
    fewer += batch * shape.kv_bytes(context, 2 - key_bytes)
    return (plain_ms - ms) / (1000 * fewer / gpu.bandwidth) if fewer else None


def add_limits(
    batches: Mapping[str, Figures],
    plain: Mapping[str, Figures],
    shape: Shape,
    device: str,
    format_name: str,
    *,
    context: int,
    **options: Any,
) -> None:
    """Add to the figures of each batch ("ms") the limits of its step, and the share of the saved bytes' time that it
    saves over those in full precision. Nothing is added for a GPU without a data sheet.

    Args:
        plain: the same in full precision; {} if they were not measured.
        options: those of `limit_ms`.
    """
    if not (gpu := gpu_named(device)):
        return
    for count, figures in batches.items():
        parts = limit_ms(shape, gpu, format_name, int(count), context, **options)
        figures["limit_ms"] = {"all": sum(parts.values()), **parts}
        if count in plain and "ms" in figures:
            figures["saved_share"] = saved_share(
                shape,
                gpu,
                format_name,
                int(count),
                context,
                ms=figures["ms"],
                plain_ms=plain[count]["ms"],
                **options,
            )


def main() -> None:
    """Print the limits of decode steps, and beside them the steps that a file of figures has."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu.roofline", description=main.__doc__)
    parser.add_argument("--gpu", choices=GPUS, default="h100")
    parser.add_argument("--shapes", nargs="+", default=["Qwen2.5-1.5B", "Qwen2.5-7B", "Qwen2.5-32B"])
    parser.add_argument("--context", type=int, default=512, help="tokens of each sequence (512)")
    parser.add_argument("--figures", type=Path, help="file of figures of this GPU, whose part vllm is compared")
    options = parser.parse_args()
    measured = json.loads(options.figures.read_text())["vllm"] if options.figures else {}
    gpu, titles = GPUS[options.gpu], ("all", "linears", "head", "keys", "activations", "sampling")
    print(
        "| shape | format | sequences | limit, ms | linears | head | keys | activations | sampling | measured | saved |"
    )
    print("|---|---|---|---|---|---|---|---|---|---|---|")
    for name in options.shapes:
        for format_name in ("none", "fp8", "int8"):
            steps = measured.get(f"{name}, graphs, {format_name}", {}).get("batches", {})
            batches = {count: dict(steps.get(count, {})) for count in map(str, BATCHES)}
            plain = measured.get(f"{name}, graphs, none", {}).get("batches", {}) if steps else {}
            add_limits(batches, plain, SHAPES[name], gpu.name, format_name, context=options.context)
            for count, figures in batches.items():
                limits = " | ".join(f"{figures['limit_ms'][title]:.2f}" for title in titles)
                ms, share = figures.get("ms"), figures.get("saved_share")
                told = f"{'' if ms is None else f'{ms:.2f}'} | {'' if share is None else f'{share:.2f}'}"
                print(f"| {name} | {format_name} | {count} | {limits} | {told} |")


if __name__ == "__main__":
    main()
