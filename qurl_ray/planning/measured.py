"""Figures that a GPU measured with this package. They replace the formulas for the same GPU and shape of model.

One NVIDIA H200, 2026-11-27: docs/gpu.md and benchmarks/results/gpu_h200_speed.json.
"""

from dataclasses import dataclass, replace

import numpy as np

from qurl_ray.planning.machines import Gpu, Precision
from qurl_ray.planning.shapes import SHAPES, Shape


@dataclass(frozen=True, slots=True, kw_only=True)
class Card:
    """Figures of one model on one GPU."""

    name: str
    """Name of the GPU, as `--gpu` and the plan's marks have it."""
    date: str
    model: Shape
    batches: tuple[int, ...]
    """Sequences of the decode steps that were measured."""
    decode_ms: dict[Precision, tuple[float, ...]]
    """Milliseconds of a decode step of vLLM with CUDA graphs, for each of `batches`."""
    context: int
    """Tokens of each sequence in these decode steps."""
    learn_s: dict[Precision, float]
    """Seconds of the learner's step, packed, without checkpointing; `fp8` is FP8 blocks. Measured with one and three
    layers and the head, and extrapolated to all layers."""
    learn_tokens: int
    sample: int
    """Tokens of the learner's step, and of each of its samples."""

    def decode_s(self, precision: Precision, batch: float) -> float:
        """Seconds of a decode step, linear between two measured batches and beyond the last two."""
        counts, ms = self.batches, self.decode_ms[precision]
        beyond = max(0.0, batch - counts[-1]) * (ms[-1] - ms[-2]) / (counts[-1] - counts[-2])
        return (float(np.interp(batch, counts, ms)) + beyond) / 1e3


H200 = Card(
    name="h200",
    date="2026-11-27",
    model=SHAPES["Qwen2.5-7B"],
    batches=(1, 32, 128, 256),
    decode_ms={
        "bf16": (4.715, 5.078, 7.985, 15.799),
        "int8": (3.637, 4.161, 7.750, 13.005),
        "fp8": (3.566, 4.394, 8.583, 13.799),
    },
    context=512,
    learn_s={"bf16": 0.9409, "fp8": 0.8448},
    learn_tokens=8192,
    sample=1024,
)


def measured_card(shape: Shape, gpu: Gpu) -> Card | None:
    """Return the figures of this shape on this GPU, whatever the model's name; None if there are none."""
    return H200 if gpu.name == H200.name and replace(shape, name=H200.model.name) == H200.model else None
