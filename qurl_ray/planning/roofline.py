"""Seconds of a decode step and of a prefill on GPUs: the longer of reading and multiplying, plus overhead.

    step = layers · (layer_s + quantize_s) + linears + head + keys and values + sequences · sequence_s
    linears, head = max(bytes / (bandwidth · share), flops / (peak · share))

This is the roofline of https://doi.org/10.1145/1498765.1498785, once for the block linears and once for the head.
"""

from dataclasses import dataclass

from qurl_ray.planning.machines import CONSTANTS, NODE, Constants, Gpu, Precision
from qurl_ray.planning.shapes import Shape

BLOCK_BYTES: dict[Precision, int] = {"bf16": 2, "int8": 1, "fp8": 1}
"""Bytes per weight of the block linears, by format."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineRoofline:
    """Model of an engine that generates with weights in one format, on `tensor_parallel` GPUs of a node."""

    shape: Shape
    gpu: Gpu
    precision: Precision
    tensor_parallel: int = 1
    kv_bytes: float = 2
    """Bytes of each element of keys and values."""
    constants: Constants = CONSTANTS

    def decode_s(self, batch: float, context: float) -> float:
        """Seconds to draw one token for each of `batch` sequences of `context` tokens."""
        return sum(self.parts(batch, context).values())

    def parts(self, batch: float, context: float) -> dict[str, float]:
        """Seconds of each part of a decode step: weights and products, keys and values, overhead."""
        c, shape, gpu = self.constants, self.shape, self.gpu
        read = gpu.bandwidth * c.bandwidth
        heads = min(self.tensor_parallel, shape.kv_heads)  # beyond that, key heads are replicated
        overhead = shape.layers * c.layer_s + batch * c.sequence_s
        if self.precision != "bf16":
            overhead += shape.layers * c.quantize_s
        return {
            "weights and products": self._product(shape.block_params, BLOCK_BYTES[self.precision], batch, self._flops())
            + self._product(shape.head_params, 2, batch, gpu.flops["bf16"] * c.flops_16),
            "keys and values": batch * shape.kv_bytes(context, self.kv_bytes) / read / heads,
            "overhead": overhead + self._all_reduces(batch),
        }

    def kv_of(self, context: float) -> float:
        """Bytes of keys and values of a sequence with `context` tokens, in all GPUs of the engine."""
        return self.shape.kv_bytes(context, self.kv_bytes)

    def prefill_s(self, prompts: float, length: float) -> float:
        """Seconds to prefill `prompts` whole prompts of `length` tokens. Half of a causal product is not computed."""
        c, shape, tokens = self.constants, self.shape, prompts * length
        linears = 2 * shape.block_params * tokens / self._flops()
        attention = 2 * shape.layers * shape.heads * shape.head_dim * length * tokens
        return (linears + attention / (self.gpu.flops["bf16"] * c.flops_16)) / self.tensor_parallel

    def _flops(self) -> float:
        """Flops per second that the products of the block linears reach on one GPU."""
        c = self.constants
        is_8bit = self.precision in self.gpu.flops and self.precision != "bf16"
        return self.gpu.peak(self.precision) * (c.flops_8 if is_8bit else c.flops_16)

    def _product(self, weights: int, bytes_each: int, batch: float, flops: float) -> float:
        read = weights * bytes_each / (self.gpu.bandwidth * self.constants.bandwidth)
        return max(read, 2 * weights * batch / flops) / self.tensor_parallel

    def _all_reduces(self, batch: float) -> float:
        """Seconds of the all-reduces of a decode step: two per layer, of one hidden state per sequence."""
        if self.tensor_parallel == 1:
            return 0.0
        c, others = self.constants, (self.tensor_parallel - 1) / self.tensor_parallel
        sent = 2 * others * batch * self.shape.hidden * 2
        return 2 * self.shape.layers * (c.all_reduce_s + sent / (self.gpu.link * c.link))


def widths(shape: Shape, gpus: int) -> list[int]:
    """Possible tensor parallel widths with `gpus` GPUs: within a node, with equally many heads on each GPU."""
    return [width for width in (1, 2, 4, NODE) if width <= gpus and shape.heads % width == 0]
