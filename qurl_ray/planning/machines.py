"""GPUs as their data sheets have them, and the few constants that say how much of that is reached.

The constants are fitted once, to a source each, and are the same for all models and GPUs: docs/planning.md.
"""

from dataclasses import dataclass
from difflib import get_close_matches
from typing import Literal

from qurl_ray.errors import ConfigError

Precision = Literal["bf16", "int8", "fp8"]
PRECISIONS: tuple[Precision, ...] = ("bf16", "int8", "fp8")
NODE = 8
"""GPUs of a node."""
NETWORK = 50e9
"""B/s of each GPU to other nodes: 400 Gb/s."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Gpu:
    """Peak figures, dense, of one GPU."""

    name: str
    memory: float
    """Bytes that a process sees."""
    bandwidth: float
    """B/s of its memory."""
    flops: dict[Precision, float]
    """Per second, by format of the products; a format that has none multiplies in bf16 after reading codes."""
    link: float
    """B/s, one way, to a GPU of the same node."""
    host: float
    """B/s, one way, to the host's memory."""

    def peak(self, precision: Precision) -> float:
        return self.flops.get(precision, self.flops["bf16"])


EIGHT_BIT: tuple[Precision, ...] = ("int8", "fp8")
GPUS = {
    gpu.name: gpu
    for gpu in (
        Gpu(
            name="h100",
            memory=85.5e9,
            bandwidth=3.35e12,
            flops={"bf16": 989e12, **dict.fromkeys(EIGHT_BIT, 1979e12)},
            link=450e9,
            host=64e9,
        ),
        Gpu(
            name="h200",
            memory=150e9,
            bandwidth=4.8e12,
            flops={"bf16": 989e12, **dict.fromkeys(EIGHT_BIT, 1979e12)},
            link=450e9,
            host=64e9,
        ),
        Gpu(
            name="a100",
            memory=85.5e9,
            bandwidth=2.039e12,
            flops={"bf16": 312e12, "int8": 624e12},
            link=300e9,
            host=32e9,
        ),
        Gpu(
            name="l40s",
            memory=47.7e9,
            bandwidth=864e9,
            flops={"bf16": 362e12, **dict.fromkeys(EIGHT_BIT, 733e12)},
            link=32e9,
            host=32e9,
        ),
        Gpu(
            name="b200",
            memory=192e9,
            bandwidth=8e12,
            flops={"bf16": 2250e12, **dict.fromkeys(EIGHT_BIT, 4500e12)},
            link=900e9,
            host=64e9,
        ),
    )
}
"""NVIDIA's data sheets: SXM forms of H100, H200, A100 (80 GB) and B200; the L40S has PCIe alone."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Constants:
    """How much of a peak is reached, and what every step costs besides."""

    bandwidth: float = 0.88
    """Share of a GPU's memory bandwidth that decoding reaches."""
    flops_16: float = 0.66
    """Share of its bf16 peak that an engine's products reach."""
    flops_8: float = 0.54
    """Share of its 8-bit peak."""
    layer_s: float = 48e-6
    """What a layer of a decode step takes besides reads and products: launches, norms, attention's latency."""
    quantize_s: float = 4.3e-6
    """What quantizing activations adds to a layer."""
    sequence_s: float = 8.7e-6
    """What each sequence of a decode step takes: sampling, scheduling."""
    learner_flops: float = 0.33
    """Share of the bf16 peak that a learner's passes reach."""
    learner_fp8: float = 1.28
    """How much faster they are with FP8 products."""
    link: float = 0.8
    """Share of a link's bandwidth that collectives and copies reach. Assumed."""
    all_reduce_s: float = 12e-6
    """Latency of one all-reduce of a decode step, two a layer, between GPUs of a node. Assumed."""
    memory: float = 0.9
    """Share of a GPU's memory that an engine takes: vLLM's default."""
    workspace: float = 4.6e9
    """Bytes of it for activations and captured graphs."""
    delta: float = 1 / 309
    """What a delta sends, of all weights in bfloat16."""


CONSTANTS = Constants()


def find_gpu(name: str) -> Gpu:
    """By name, in any case.

    Raises:
        ConfigError: it is unknown; the nearest is named.
    """
    if gpu := GPUS.get(name.lower()):
        return gpu
    if name.lower() == "cpu":
        raise ConfigError("of a CPU nothing is known but what --measure finds: use that, with --model or --config")
    nearest = get_close_matches(name.lower(), GPUS, n=1, cutoff=0.4)
    hint = f"did you mean {nearest[0]}? " if nearest else ""
    raise ConfigError(f"no GPU {name!r} is known; {hint}there are {', '.join(GPUS)}")
