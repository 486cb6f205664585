"""The kernels that multiply codes, by device and format, in one table. `linear.reference_linear` defines their result.

A kernel packs codes and scales, multiplies with them, and returns them from the memory that it multiplies with.
`kernel_for` finds a kernel. If there is none, the linear is emulated, and `why_emulated` returns the reason: every
linear is computed as its format requires.

| kernel | device | formats | widths |
|---|---|---|---|
| onednn | x86 CPU with AMX | int8 | rows of more than 16 |
| fbgemm | x86 CPU | int8 | any |
| in_place | CPU where torch's 8-bit product is exact and fast | int8, until codes are packed | 2 and more |
| numerics.products: oneDNN or MKL, by the self-check | CPU | none (float32) | any |
| int_mm | CUDA | int8 | multiples of 8 |
| scaled_mm | CUDA, compute capability 8.9 and up | fp8 | multiples of 16 |
| scaled_mm_block | CUDA, compute capability 9.0, CUDA 12.9 | fp8_block | multiples of 128 |

Packing codes for fbgemm takes as long as it saves in 75 to 300 calls (docs/LOG.md). Where IN_PLACE is exact and
fast, linears therefore begin with it: it multiplies codes as they are, and has the same bits. They are packed if they
are called that often.

The three CUDA kernels were compared with float64 on an H200 (docs/gpu.md). The products for gradients through FP8
blocks are in a table of their own, in quant/training.py.

There is no kernel for formats with blocks of columns. torch's `_weight_int4pack_mm` takes only bfloat16 on CUDA, and on
CPUs it is slower than emulation in float32, and than INT8 in bfloat16. vLLM's `int4_scaled_mm_cpu` is faster than INT8
up to four rows (benchmarks/int4_kernels.py), but it quantizes activations, and takes and returns 16 bits. Nor is there
a kernel for FP8 on CPUs, where `scaled_mm` exists but is slower than the product in float32 (docs/LOG.md).
"""

import functools
import os
import timeit
import warnings
from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import torch
from torch.nn import functional
from torch.nn.functional import ScalingType, pad

from qurl_ray.errors import QuantizationError
from qurl_ray.quant.formats import Format
from qurl_ray.quant.quantize import Codes, QTensor, fused_kernels, quantize_rows_int8, row_codes, row_maximum

warnings.filterwarnings("ignore", message="torch.quantize_per_tensor")  # on the future of fbgemm's type of tensor


class Kernel(ABC):
    """A kernel, which multiplies activations with packed codes. It has no state: `pack` returns the packed codes."""

    name: ClassVar[str]
    device_type: ClassVar[str]
    multiple: ClassVar[int] = 1
    """Both widths of a weight must be a multiple of this."""

    @abstractmethod
    def takes(self, fmt: Format) -> bool:
        """Return True if the kernel multiplies codes and scales of this format."""

    @abstractmethod
    def lacks(self, device: torch.device) -> str | None:
        """Return the requirement that a device of its type does not meet, in words; None if it meets all."""

    def pack(self, q: QTensor) -> Any:
        """Return codes and scales in the kernel's own layout, on the device where they are; by default, unchanged."""
        return QTensor(codes=q.codes.contiguous(), scale=q.scale.contiguous(), fmt=q.fmt)

    def codes(self, x: torch.Tensor, fmt: Format) -> Codes | None:
        """Return `row_codes` of x [..., K] as a matrix, to which rows of zeros may be added; None if the kernel takes
        none, but makes them itself."""
        return None

    @abstractmethod
    def forward(
        self, x: torch.Tensor, packed: Any, bias: torch.Tensor | None, codes: Codes | None = None
    ) -> torch.Tensor:
        """Return y of `reference_linear`, x [..., K] to [..., N] of x's dtype. Scaling is done in float32 at least.

        Args:
            codes: those of x, from `codes`, if they were made before.
        """

    def unpack(self, packed: Any) -> QTensor:
        """Return codes and scales, read back from the memory that `forward` multiplies with."""
        return packed

    def weight_max(self, fmt: Format) -> int:
        """Return the largest weight code that the kernel multiplies without saturating."""
        return fmt.weight_max

    def objection(self, fmt: Format, device: torch.device, shape: tuple[int, ...] | None = None) -> str | None:
        """Return why it cannot multiply weights [N, K] of this format here, or None. With shape None: why it multiplies
        none of them, whatever their shape and largest code."""
        if not self.takes(fmt):
            return f"{self.name} does not multiply {fmt.name}"
        if device.type != self.device_type:
            return f"{self.name} needs a device of type {self.device_type}, not {device.type}"
        if missing := self.lacks(device):
            return f"{self.name} needs {missing}"
        if shape and any(width % self.multiple for width in shape):
            return f"{self.name} needs widths that are multiples of {self.multiple}, not {shape[0]} × {shape[1]}"
        if shape and fmt.weight_max > (largest := self.weight_max(fmt)):
            return f"{self.name} would saturate with weight codes to {fmt.weight_max}: here it takes them to {largest}"
        return None

    def supports(self, fmt: Format, device: torch.device, shape: tuple[int, ...] | None = None) -> bool:
        return self.objection(fmt, device, shape) is None


# --- x86 ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class _Prepacked:
    weight: torch.ScriptObject
    fmt: Format


@dataclass(frozen=True, slots=True, kw_only=True)
class _Ordered:
    codes: torch.Tensor
    """Codes [K, N], in oneDNN's own order."""
    scale: torch.Tensor
    """Scale of each output channel, float32 [N]."""
    zeros: torch.Tensor
    """Zero points, int64 [N]: all 0, because codes are symmetric."""
    least_rows: int
    """Least rows of activations, so that oneDNN does not treat the product as small."""
    fmt: Format


class OneDnn(Kernel):
    """INT8 on x86 CPUs with AMX: sums in int32, so that a row's result cannot depend on the batch.

    Without AMX, oneDNN computes this product by a plain loop, which takes a thousand times as long and gives different
    last bits. Where AMX has no float16 (Sapphire Rapids), it does the same with products that it treats as small
    ("small shapes fall back" in brgemm_matmul_utils.cpp of oneDNN 3.12). It never gets such products here: rows are
    added, and weights with short rows are left to the next kernel.
    """

    name = "onednn"
    device_type = "cpu"

    def takes(self, fmt: Format) -> bool:
        return _int8_by_row(fmt)

    def lacks(self, device: torch.device) -> str | None:
        allowed = os.environ.get("ONEDNN_MAX_CPU_ISA", "ALL").upper()
        if allowed not in ("ALL", "DEFAULT") and "AMX" not in allowed:
            return f"AMX, which ONEDNN_MAX_CPU_ISA={allowed} leaves out"
        built = torch.backends.mkldnn.is_available() and hasattr(torch.ops.onednn, "qlinear_prepack")
        return None if built and torch.cpu._is_amx_tile_supported() else "an x86 CPU with AMX and a torch with oneDNN"

    def objection(self, fmt: Format, device: torch.device, shape: tuple[int, ...] | None = None) -> str | None:
        short = f"onednn needs rows of more than 16, not {shape[1]}" if shape and shape[1] <= 16 else None
        return super().objection(fmt, device, shape) or short

    def pack(self, q: QTensor) -> _Ordered:
        codes = torch.ops.onednn.qlinear_prepack(q.codes.contiguous(), None)
        outputs, columns = q.codes.shape
        return _Ordered(
            codes=codes,
            scale=q.scale[:, 0].contiguous(),
            zeros=torch.zeros(outputs, dtype=torch.int64),
            least_rows=max(2 if columns == 256 else 1, min(33, 256 // outputs + 1)),
            fmt=q.fmt,
        )

    def codes(self, x: torch.Tensor, fmt: Format) -> Codes:
        return quantize_rows_int8(x.reshape(-1, x.shape[-1]).float(), fmt)

    def forward(
        self, x: torch.Tensor, packed: _Ordered, bias: torch.Tensor | None, codes: Codes | None = None
    ) -> torch.Tensor:
        codes_MK, amax_M1 = codes or self.codes(x, packed.fmt)
        rows, missing = len(codes_MK), packed.least_rows - len(codes_MK)
        y = torch.ops.onednn.qlinear_pointwise(
            pad(codes_MK, (0, 0, 0, missing)) if missing > 0 else codes_MK,
            packed.fmt.activation_step,
            0,
            packed.codes,
            packed.scale,
            packed.zeros,
            None,
            1.0,
            0,
            torch.float32,
            "none",
            [],
            "",
        )[:rows].mul_(amax_M1)
        return (y if bias is None else y.add_(bias)).to(x.dtype).view(*x.shape[:-1], -1)

    def unpack(self, packed: _Ordered) -> QTensor:
        codes_KN = packed.codes.to_dense().numpy()  # numpy transposes faster than torch
        codes = torch.from_numpy(np.ascontiguousarray(codes_KN.T))
        return QTensor(codes=codes, scale=packed.scale[:, None], fmt=packed.fmt)


class Fbgemm(Kernel):
    """INT8 on x86 CPUs.

    It gets rows divided by their maximum, and the static scale 1/127. It is therefore symmetric per token and
    independent of the batch. `quantized::linear_dynamic` is not, because its range spans the batch.
    """

    name = "fbgemm"
    device_type = "cpu"

    def takes(self, fmt: Format) -> bool:
        return _int8_by_row(fmt)

    def lacks(self, device: torch.device) -> str | None:
        return (
            None if "fbgemm" in torch.backends.quantized.supported_engines else "an x86 CPU and a torch built with it"
        )

    def weight_max(self, fmt: Format) -> int:
        """Return the largest weight code that does not saturate: 63 at most without VNNI.

        Without VNNI, fbgemm adds pairs of 8-bit products in 16 bits; codes within ±63 cannot overflow them. One bit
        less for the weights costs less than one bit less for the activations would.
        """
        return fmt.weight_max if torch.cpu._is_vnni_supported() else min(63, fmt.weight_max)

    def pack(self, q: QTensor) -> _Prepacked:
        zero_points = torch.zeros(len(q.scale), dtype=torch.int64)
        weight = torch._make_per_channel_quantized_tensor(q.codes, q.scale[:, 0].double(), zero_points, 0)
        return _Prepacked(weight=torch.ops.quantized.linear_prepack(weight, None), fmt=q.fmt)

    def forward(
        self, x: torch.Tensor, packed: _Prepacked, bias: torch.Tensor | None, codes: Codes | None = None
    ) -> torch.Tensor:
        dtype, x = x.dtype, x.float()
        amax = row_maximum(x)
        y = torch.ops.quantized.linear_with_input_q_dq_qweight_dq_output_fp32(
            x / amax, packed.fmt.activation_step, 128, packed.weight
        ).mul_(amax)
        return (y if bias is None else y.add_(bias)).to(dtype)

    def unpack(self, packed: _Prepacked) -> QTensor:
        weight, _ = torch.ops.quantized.linear_unpack(packed.weight)
        return QTensor(codes=weight.int_repr(), scale=weight.q_per_channel_scales().float()[:, None], fmt=packed.fmt)


class InPlace(Kernel):
    """INT8 on CPUs by `torch._int_mm`, which reads codes as they are: nothing is packed, and the product reads the
    memory that was received. For 2 to 64 rows, oneDNN orders the codes in every call, which costs more the larger the
    weight is; results have the bits of the other kernels."""

    name = "in_place"
    device_type = "cpu"

    def takes(self, fmt: Format) -> bool:
        return _int8_by_row(fmt)

    def lacks(self, device: torch.device) -> str | None:
        return None if _int_mm_is_exact(1) and _int_mm_is_fast() else "a CPU on which torch._int_mm is fast"

    def objection(self, fmt: Format, device: torch.device, shape: tuple[int, ...] | None = None) -> str | None:
        if reason := super().objection(fmt, device, shape):
            return reason
        if not _int_mm_is_exact(fmt.weight_max):
            return f"torch._int_mm does not add products of codes to {fmt.weight_max} exactly on this CPU"
        # torch takes a matrix with an axis of 1 for its own transpose, and reads beyond it.
        narrow = shape and min(shape) < 2
        return f"in_place needs widths of 2 and more, not {shape[0]} × {shape[1]}" if shape and narrow else None

    def codes(self, x: torch.Tensor, fmt: Format) -> Codes:
        return quantize_rows_int8(x.reshape(-1, x.shape[-1]).float(), fmt)

    def forward(
        self, x: torch.Tensor, packed: QTensor, bias: torch.Tensor | None, codes: Codes | None = None
    ) -> torch.Tensor:
        codes_MK, amax_M1 = codes or self.codes(x, packed.fmt)
        y = torch.mul(torch._int_mm(codes_MK, packed.codes.t()), _channel_scale(packed)).mul_(amax_M1)
        return (y if bias is None else y.add_(bias)).to(x.dtype).view(*x.shape[:-1], len(packed.codes))


@functools.cache
def _int_mm_is_exact(weight_max: int) -> bool:
    """Return True if torch._int_mm adds products of extreme codes without saturating. Without VNNI, pairs of products
    are added in 16 bits, and weight codes up to 63 are exact."""
    for rows in (1, 2, 9, 33, 130):
        for sign in (1, -1):
            a = torch.full((rows, 96), 127, dtype=torch.int8)
            b = torch.full((40, 96), sign * weight_max, dtype=torch.int8)
            b[::3] = -b[::3]
            try:
                sums = torch._int_mm(a, b.t())
            except (RuntimeError, NotImplementedError):
                return False
            if not torch.equal(sums.double(), a.double() @ b.double().t()):
                return False
    return True


@functools.cache
def _int_mm_is_fast() -> bool:
    """Return True if torch._int_mm takes at most four times as long as the same product in float32.

    Without VNNI, oneDNN computes it by a plain loop, which takes 20 times as long; a busy machine does not change that.
    """
    a, b = torch.ones(32, 512, dtype=torch.int8), torch.ones(512, 512, dtype=torch.int8)
    x, y = a.float(), b.float()
    integers = min(timeit.repeat(lambda: torch._int_mm(a, b.t()), number=1, repeat=5))
    return integers <= 4 * min(timeit.repeat(lambda: x @ y.t(), number=1, repeat=5))


# --- CUDA ------------------------------------------------------------------------------------------------------------


class _Cuda(Kernel):
    """Base of the CUDA kernels, which multiply codes as they are, [N, K] transposed without a copy."""

    device_type = "cuda"
    capabilities: ClassVar[tuple[tuple[int, int], tuple[int, int]]]
    """Lowest and highest compute capability, both included."""

    def lacks(self, device: torch.device) -> str | None:
        if not torch.cuda.is_available() or torch.version.hip:
            return "CUDA, which this torch does not have or finds no device for"
        lowest, highest = self.capabilities
        version = torch.cuda.get_device_capability(device)
        if not lowest <= version <= highest:
            return f"compute capability {_dotted(lowest)} or later, not {_dotted(version)}" + (
                f", and at most {_dotted(highest)}" if highest < _ANY else ""
            )
        return None

    def codes(self, x: torch.Tensor, fmt: Format) -> Codes:
        """At least 32 rows and a multiple of 16: `_int_mm` needs more than 16, and the others are then fastest."""
        x_MK = x.reshape(-1, x.shape[-1])
        return row_codes(x_MK, fmt, rows=max(32, -(-len(x_MK) // 16) * 16))


_ANY = (99, 0)


class IntMm(_Cuda):
    """INT8 by `torch._int_mm`: sums in int32, so that a row's result cannot depend on the batch."""

    name = "int_mm"
    multiple = 8
    capabilities = ((7, 5), _ANY)

    def takes(self, fmt: Format) -> bool:
        return _int8_by_row(fmt)

    def forward(
        self, x: torch.Tensor, packed: QTensor, bias: torch.Tensor | None, codes: Codes | None = None
    ) -> torch.Tensor:
        codes_MK, amax_M1 = codes or self.codes(x, packed.fmt)
        return _scaled(torch._int_mm(codes_MK, packed.codes.t()), amax_M1, packed, bias, x)


class ScaledMm(_Cuda):
    """FP8 with a scale per token and per output channel.

    For x in bfloat16, the scales are part of the product. A float32 result with such scales exists on compute
    capability 9.0 only, so for any other x the product returns sums of codes in float32, which are scaled afterwards.
    Sums are accumulated in float32 (no `use_fast_accum`). Independence of the batch is not promised.
    """

    name = "scaled_mm"
    multiple = 16
    capabilities = ((8, 9), _ANY)

    def takes(self, fmt: Format) -> bool:
        by_row = fmt.group is None and fmt.activation_group is None
        return fmt.dtype == torch.float8_e4m3fn and by_row and fmt.activation_max is not None

    def forward(
        self, x: torch.Tensor, packed: QTensor, bias: torch.Tensor | None, codes: Codes | None = None
    ) -> torch.Tensor:
        codes_MK, amax_M1 = codes or self.codes(x, packed.fmt)
        if x.dtype == torch.bfloat16:
            y_MN = functional.scaled_mm(
                codes_MK,
                packed.codes.t(),
                amax_M1,
                ScalingType.RowWise,
                _channel_scale(packed)[None],
                ScalingType.RowWise,
                bias=None if bias is None else bias.to(x.dtype),
                output_dtype=x.dtype,
            )
            return _like(x, y_MN)
        unit, whole, exact = torch.ones(1, device=x.device), ScalingType.TensorWise, torch.float32
        sums_MN = functional.scaled_mm(codes_MK, packed.codes.t(), unit, whole, unit, whole, output_dtype=exact)
        return _scaled(sums_MN, amax_M1, packed, bias, x)


class ScaledMmBlock(_Cuda):
    """FP8 with a scale per 1 × 128 activations and per 128 × 128 weights; torch uses cuBLAS for this, on Hopper only.

    The scales of weights are kept as cuBLAS needs them: blocks along K are padded to a multiple of 4.
    """

    name = "scaled_mm_block"
    multiple = 128
    capabilities = ((9, 0), (9, 0))

    def takes(self, fmt: Format) -> bool:
        blocks = (fmt.rows, fmt.group, fmt.activation_group)
        return fmt.dtype == torch.float8_e4m3fn and blocks == (128, 128, 128) and fmt.activation_max is not None

    def lacks(self, device: torch.device) -> str | None:
        if missing := super().lacks(device):
            return missing
        version = tuple(map(int, (torch.version.cuda or "0.0").split(".")[:2]))
        return None if version >= (12, 9) else f"a torch for CUDA 12.9 or later, not {torch.version.cuda}"

    def pack(self, q: QTensor) -> QTensor:
        return QTensor(codes=q.codes.contiguous(), scale=pad(q.scale, (0, -q.scale.shape[1] % 4), value=1.0), fmt=q.fmt)

    def unpack(self, packed: QTensor) -> QTensor:
        blocks = packed.codes.shape[1] // 128
        return QTensor(codes=packed.codes, scale=packed.scale[:, :blocks].contiguous(), fmt=packed.fmt)

    def forward(
        self, x: torch.Tensor, packed: QTensor, bias: torch.Tensor | None, codes: Codes | None = None
    ) -> torch.Tensor:
        codes_MK, amax_MG = codes or self.codes(x, packed.fmt)
        y_MN = functional.scaled_mm(
            codes_MK,
            packed.codes.t(),
            column_major(amax_MG * packed.fmt.activation_step),
            ScalingType.BlockWise1x128,
            packed.scale.t(),
            ScalingType.BlockWise128x128,
            output_dtype=torch.bfloat16 if x.dtype == torch.bfloat16 else torch.float32,
        )
        return _like(x, y_MN if bias is None else y_MN + bias)


def column_major(scale: torch.Tensor) -> torch.Tensor:
    """Return scales of groups in the order in which cuBLAS reads them."""
    return scale.t().contiguous().t()


def _int8_by_row(fmt: Format) -> bool:
    return fmt.dtype == torch.int8 and fmt.activation_max is not None and fmt.group is None


def _dotted(version: tuple[int, int]) -> str:
    return f"{version[0]}.{version[1]}"


def _like(x: torch.Tensor, y_MN: torch.Tensor) -> torch.Tensor:
    """Return y, without the rows that were added, in the shape and type that x [..., K] asks for."""
    return y_MN[: x.shape[:-1].numel()].to(x.dtype).view(*x.shape[:-1], y_MN.shape[1])


def _channel_scale(q: QTensor) -> torch.Tensor:
    """Return the factor of a sum of products of codes, without the activations' maxima, float32 [N]."""
    return q.scale[:, 0] * q.fmt.activation_step


def _scaled(
    sums_MN: torch.Tensor, amax_M1: torch.Tensor, q: QTensor, bias: torch.Tensor | None, x: torch.Tensor
) -> torch.Tensor:
    """Return scaled sums plus bias, `_like` x. Factors are applied one by one, in the order of `reference_linear`."""
    if fused := fused_kernels(x.device, torch.int8):
        return _like(x, fused.scaled_sums(sums_MN, _channel_scale(q), amax_M1, bias, x.dtype))
    y = sums_MN.float() * _channel_scale(q) * amax_M1
    return _like(x, y if bias is None else y + bias)


# --- the table ------------------------------------------------------------------------------------------------------

_ALL = (OneDnn(), Fbgemm(), IntMm(), ScaledMm(), ScaledMmBlock())
KERNELS: dict[str, Kernel] = {kernel.name: kernel for kernel in _ALL}
"""Kernels by name. The first that supports a weight multiplies it."""
IN_PLACE = InPlace()
"""Stands in for a CPU's kernel in KERNELS until codes are packed for that."""


def kernel_for(fmt: Format, device: torch.device, shape: tuple[int, ...] | None = None) -> Kernel | None:
    """Return the kernel for weights [N, K] of this format here (shape None: of some shape), or None for emulation."""
    return next((kernel for kernel in KERNELS.values() if kernel.supports(fmt, device, shape)), None)


def why_emulated(fmt: Format, device: torch.device, shape: tuple[int, ...] | None = None) -> str | None:
    """Return why `kernel_for` finds no kernel, for an announcement; None if it finds one.

    Example:
        "scaled_mm_block needs widths that are multiples of 128, not 1536 × 576"
    """
    if kernel_for(fmt, device, shape):
        return None
    candidates = [kernel for kernel in KERNELS.values() if kernel.takes(fmt) and kernel.device_type == device.type]
    reasons = [str(kernel.objection(fmt, device, shape)) for kernel in candidates]
    return "; ".join(reasons) or f"there is no kernel for {fmt.name} on {device.type}"


def named_kernel(name: str, fmt: Format, device: torch.device, shape: tuple[int, ...] | None = None) -> Kernel:
    """Return the kernel of this name.

    Raises:
        QuantizationError: there is no such kernel, or it cannot multiply such weights here.
    """
    if name not in KERNELS:
        raise QuantizationError(f"unknown kernel {name!r}; known: {', '.join(KERNELS)}")
    if objection := KERNELS[name].objection(fmt, device, shape):
        raise QuantizationError(f"the kernel asked for cannot be used: {objection}")
    return KERNELS[name]
