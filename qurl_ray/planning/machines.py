"""Data-sheet figures of GPUs, and the few constants that say which share of them is reached.

Each constant is set once, from one source, or is marked as assumed. All models and GPUs share the constants:
docs/results.md. S and T (SOURCES) are measurements of other software; what a GPU measured with this package is in
planning.measured.
"""

from dataclasses import dataclass
from typing import Literal

from qurl_ray.errors import ConfigError
from qurl_ray.extensions import did_you_mean

Precision = Literal["bf16", "int8", "fp8", "int4", "nvfp4", "mxfp4", "mxfp8"]
PRECISIONS: tuple[Precision, ...] = ("bf16", "int8", "fp8")
"""Formats that every plan compares, which engines here have kernels for."""
EIGHT_BIT: tuple[Precision, ...] = ("int8", "fp8")
BLOCK_BYTES: dict[Precision, float] = {
    "bf16": 2,
    "int8": 1,
    "fp8": 1,
    "int4": (4 + 32 / 128) / 8,
    "nvfp4": (4 + 8 / 16) / 8,
    "mxfp4": (4 + 8 / 32) / 8,
    "mxfp8": (8 + 8 / 32) / 8,
}
"""Bytes per weight of the block linears, by format; with scales, but those of rows and of 128 × 128 weights."""
WITHOUT_KERNEL = tuple(name for name in BLOCK_BYTES if name not in PRECISIONS)
"""Formats that engines here emulate; plans count a kernel that reads codes and multiplies in bfloat16."""
PLANNED_AS: dict[str, Precision] = {
    **{name: name for name in BLOCK_BYTES},
    "none": "bf16",
    "fp8_block": "fp8",
    "nvfp4_w4a4": "nvfp4",
}
"""The planner's name of each of rollout.quantization's formats."""
SOURCES = {
    "S": "github.com/tgarg01/silybench-data at 93e4887, CC BY 4.0: vLLM 0.30.0, one H100 SXM, Qwen3-8B",
    "T": "torchtitan, benchmarks/llama3_h100_202412_torchtitan.md: Llama 3.1 8B, 8 H100 limited to 500 W",
}
"""Measurements of other software that constants are fitted to."""
NODE = 8
"""Number of GPUs in a node."""
NETWORK = 50e9
"""Network bandwidth of each GPU to other nodes, in B/s: 400 Gb/s."""
HOST_MEMORY = 2.2e12
"""Memory of a node's host, in bytes: 2 TiB, as AWS' p5.48xlarge (cluster/h100.yaml) has."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Gpu:
    """Data-sheet figures of one GPU. Peaks are those of dense products."""

    name: str
    memory: float
    """Memory visible to a process, in bytes."""
    bandwidth: float
    """Memory bandwidth, in B/s."""
    flops: dict[Precision, float]
    """Peak flops per second of the products in each format. Without an entry, codes are read and multiplied in bf16."""
    link: float
    """Bandwidth to a GPU of the same node, in one direction, in B/s."""
    host: float
    """Bandwidth to the host's memory, in one direction, in B/s."""


def _flops(bf16: float, eight_bit: float) -> dict[Precision, float]:
    return {"bf16": bf16, **dict.fromkeys(EIGHT_BIT, eight_bit)}


_A100_FLOPS: dict[Precision, float] = {"bf16": 312e12, "int8": 624e12}
GPUS = {
    gpu.name: gpu
    for gpu in (
        Gpu(name="h100", memory=85.5e9, bandwidth=3.35e12, flops=_flops(989e12, 1979e12), link=450e9, host=64e9),
        Gpu(name="h200", memory=150e9, bandwidth=4.8e12, flops=_flops(989e12, 1979e12), link=450e9, host=64e9),
        Gpu(name="a100", memory=85.5e9, bandwidth=2.039e12, flops=_A100_FLOPS, link=300e9, host=32e9),
        Gpu(name="l40s", memory=47.7e9, bandwidth=864e9, flops=_flops(362e12, 733e12), link=32e9, host=32e9),
        Gpu(name="b200", memory=192e9, bandwidth=8e12, flops=_flops(2250e12, 4500e12), link=900e9, host=64e9),
    )
}
"""GPUs by name, from NVIDIA's data sheets: SXM versions of H100, H200, A100 (80 GB), B200; the L40S has only PCIe."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Constants:
    """Shares of peak figures that are reached, and the additional costs of every step."""

    bandwidth: float = 0.88
    """Share of a GPU's memory bandwidth that decoding reaches."""
    flops_16: float = 0.66
    """Share of the bf16 peak that an engine's products reach."""
    flops_8: float = 0.54
    """Share of the 8-bit peak that an engine's products reach."""
    layer_s: float = 48e-6
    """Seconds per layer of a decode step besides reads and products: norms, latency of attention. S."""
    quantize_s: float = 4.3e-6
    """Seconds per layer of a decode step to quantize activations to FP8, fused with the operations before. S."""
    operation_s: float = 2.5e-6
    """Seconds of a small operation on the device that nothing fuses. Assumed."""
    launch_s: float = 10e-6
    """Seconds of the host to start one operation on the device. Assumed."""
    sequence_s: float = 8.7e-6
    """Seconds per sequence of a decode step: sampling, scheduling. S."""
    learner_flops: float = 0.33
    """Share of the bf16 peak that the learner's passes reach. T."""
    learner_fp8: float = 1.28
    """Speedup of the learner's passes with FP8 products. T."""
    link: float = 0.8
    """Share of a link's bandwidth that collectives and copies of pinned memory reach. Assumed."""
    all_reduce_s: float = 12e-6
    """Seconds of latency of one all-reduce between GPUs of a node; a decode step has two per layer. Assumed."""
    memory: float = 0.9
    """Share of a GPU's or host's memory that is planned for; the rest is for fragments and other programs."""
    workspace: float = 3.1e9
    """Bytes of an engine's memory on each GPU for activations and `context`. S, less `graphs`."""
    graphs: float = 1.5e9
    """Bytes of the CUDA graphs of an engine on each GPU, which stay while it sleeps. Assumed, of 1 to 2 GiB; S has the
    sum of both."""
    context: float = 0.5e9
    """Bytes of CUDA's own for each process on a GPU. Assumed."""
    pageable: float = 6e9
    """Bandwidth in B/s between a GPU and host memory that is not pinned. Assumed."""
    gather_s: float = 1e-3
    """Seconds of ZeRO-3 to gather one tensor for a sync, besides its bytes. Assumed."""
    call_s: float = 1e-3
    """Seconds of one call from an engine's process to its workers. Assumed."""
    objects: float = 0.56e9
    """Bandwidth in B/s at which Ray's object store fetches to one node: 45 Gb/s to ten nodes (ray-project/ray#42632,
    Ray 2.9)."""
    delta: float = 1 / 309
    """Size of a delta, as a share of all weights in bfloat16. Measured on a CPU."""

    # Rates of one process on a host, in B/s of the result: an AMD EPYC (Zen 3) with 2 cores, alone, rounded from two
    # measurements (benchmarks/planner.py --part host) on 2026-11-26. A GPU's host is taken to have the same.
    fingerprint: float = 7e9
    """Bytes that are fingerprinted, with one thread."""
    compare: float = 4e9
    """Codes that are compared with those sent before."""
    copy: float = 1.1e10
    """Bytes that are copied: to memory shared with workers, to where an engine holds them."""
    put: float = 0.8e9
    """Bytes that are put into the object store, whose pages are fresh each time."""
    changes: float = 6.5e6
    """Bytes of deltas that are packed, with one thread."""
    convert: float = 1.6e10
    """Float32 values that are rounded to bfloat16, or made from it."""


CONSTANTS = Constants()


def find_format(name: str) -> Precision:
    """Return the planner's name of a format without a kernel.

    Raises:
        ConfigError: there is no such format, or every plan has it.
    """
    if found := next((known for known in WITHOUT_KERNEL if known == name.lower()), None):
        return found
    raise ConfigError(
        f"format {name!r}: a plan compares {', '.join(PRECISIONS)}, and can add {', '.join(WITHOUT_KERNEL)}"
    )


def find_gpu(name: str) -> Gpu:
    """Return the GPU with this name, in upper or lower case.

    Raises:
        ConfigError: the name is unknown; the message names the nearest one.
    """
    if gpu := GPUS.get(name.lower()):
        return gpu
    if name.lower() == "cpu":
        raise ConfigError("the planner knows no CPU: start the run with a few steps, and read its time by phase")
    nearest = did_you_mean(name.lower(), GPUS, cutoff=0.4)
    raise ConfigError(f"no GPU {name!r} is known; there are {', '.join(GPUS)}{nearest}")
