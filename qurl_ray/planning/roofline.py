"""Seconds of a decode step and of a prefill on GPUs: the longer of reading and multiplying, plus overhead.

    device = layers · (layer_s + quantize) + linears + head + keys and values + sequences · sequence_s
    linears, head = max(bytes / (bandwidth · share), flops / (peak · share))
    step = device with CUDA graphs, max(device, operations · launch_s) without

The second line is the roofline of https://doi.org/10.1145/1498765.1498785, once for the block linears and once for the
head. What it takes to quantize activations depends on the engine:

| engine | operations of a quantized linear beside its product | of a layer beside its linears |
|---|---|---|
| vllm | 1 (tests/engines/test_vllm_kernels.py); compiled FP8 fuses it with what comes before | 9 |
| torch | 15, in float32 | 20 |

An operation that nothing fuses takes operation_s and the time of its reads and writes.

Where decode steps of the engine were measured (planning.measured), those are taken. The formula adds what longer
sequences read, divides reads and products among several GPUs, and adds what the host takes without graphs.
"""

from dataclasses import dataclass

from qurl_ray.planning.machines import CONSTANTS, NODE, Constants, Gpu, Precision
from qurl_ray.planning.measured import Card, measured_card
from qurl_ray.planning.shapes import Shape
from qurl_ray.planning.workload import EngineName

BLOCK_BYTES: dict[Precision, int] = {"bf16": 2, "int8": 1, "fp8": 1}
"""Bytes per weight of the block linears, by format."""
_LINEARS = 4  # of a layer: q/k/v and gate/up are one each
_QUANTIZING: dict[EngineName, tuple[int, int]] = {"vllm": (1, 3), "torch": (15, 15 * 8)}
"""Operations that quantize the activations of a linear, and bytes that they read and write for each input."""
_OTHERS: dict[EngineName, int] = {"vllm": 9, "torch": 20}
"""Operations of a layer beside its linears."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineRoofline:
    """Model of an engine that generates with weights in one format, on `tensor_parallel` GPUs of a node."""

    shape: Shape
    gpu: Gpu
    precision: Precision
    tensor_parallel: int = 1
    kv_bytes: float = 2
    """Bytes of each element of keys and values."""
    engine: EngineName = "vllm"
    graphs: bool = True
    """True if decode steps are CUDA graphs; with engine vllm, the model is then compiled, too."""
    constants: Constants = CONSTANTS

    @property
    def card(self) -> Card | None:
        """Measured figures of this engine on one GPU; None if it was not measured."""
        return measured_card(self.shape, self.gpu) if self.engine == "vllm" else None

    def decode_s(self, batch: float, context: float) -> float:
        """Seconds to draw one token for each of `batch` sequences of `context` tokens."""
        return sum(self.parts(batch, context).values())

    def parts(self, batch: float, context: float) -> dict[str, float]:
        """Seconds of each part of a decode step: weights and products, keys and values, overhead."""
        c, shape, gpu = self.constants, self.shape, self.gpu
        read = gpu.bandwidth * c.bandwidth
        heads = min(self.tensor_parallel, shape.kv_heads)  # beyond that, key heads are replicated
        found = {
            "weights and products": self._linears(batch) / self.tensor_parallel,
            "keys and values": batch * shape.kv_bytes(context, self.kv_bytes) / read / heads,
            "overhead": self._all_reduces(batch),
        }
        if card := self.card:  # overhead is what was measured beyond weights, keys and values
            reads = batch * shape.kv_bytes(card.context) / read
            found["overhead"] += card.decode_s(self.precision, batch) - self._linears(batch) - reads
        else:
            found["overhead"] += shape.layers * (c.layer_s + self._quantizing(batch)) + batch * c.sequence_s
        if not self.graphs:
            found["overhead"] += max(0.0, shape.layers * self.operations * c.launch_s - sum(found.values()))
        return found

    @property
    def operations(self) -> int:
        """Number of operations of a layer, each of which the host starts if there are no graphs."""
        quantizing = _QUANTIZING[self.engine][0] if self.precision != "bf16" else 0
        return _LINEARS * (1 + quantizing) + _OTHERS[self.engine]

    def _quantizing(self, batch: float) -> float:
        """Seconds per layer that quantization, and operations which only the torch engine has, take on the device."""
        c, shape = self.constants, self.shape
        more = (_OTHERS[self.engine] - _OTHERS["vllm"]) * c.operation_s
        if self.precision == "bf16":
            return more
        if self.engine == "vllm" and self.graphs and self.precision == "fp8":
            return c.quantize_s
        operations, moved = _QUANTIZING[self.engine]
        inputs = 2 * shape.hidden + shape.heads * shape.head_dim + shape.intermediate
        seconds = batch * inputs * moved / (self.gpu.bandwidth * c.bandwidth) / self.tensor_parallel
        return more + _LINEARS * operations * c.operation_s + seconds

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

    def _linears(self, batch: float) -> float:
        """Seconds to read and multiply all weights on one GPU."""
        head = self._product(self.shape.head_params, 2, batch, self.gpu.flops["bf16"] * self.constants.flops_16)
        return self._product(self.shape.block_params, BLOCK_BYTES[self.precision], batch, self._flops()) + head

    def _product(self, weights: int, bytes_each: int, batch: float, flops: float) -> float:
        read = weights * bytes_each / (self.gpu.bandwidth * self.constants.bandwidth)
        return max(read, 2 * weights * batch / flops)

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
