"""The quantization "qurl" for vLLM: linears that hold floats or codes, and change from one to the other in place.

It is registered when this module is imported, and by vLLM itself through the entry point `vllm.general_plugins`. A
float checkpoint is quantized tensor by tensor with quant.quantize, before or after fusing and sharding, as equal bits
require. Codes arrive through engines/vllm/worker.py. Both end in the same memory, so the result has the same bits.

On CUDA a linear of codes is a FixedCodes (engines/vllm/kernels.py): vLLM's own kernels, in memory that never moves, for
one format as long as the engine lives. Elsewhere, and where emulation was asked for, it is a QuantizedLinear; emulated
ones are written in place, too, while those of a CPU's kernel are made again from each version.

vLLM's own float path packs weights on CPUs, after which they can be neither replaced nor read back. Therefore linears,
embedding and head multiply with the parameter itself. A head of its own is a linear whose rows are divided over the
ranks; one that is tied to the embedding has its floats.

Example, without the engine:
    LLM(folder, quantization="qurl", dtype="float32", enforce_eager=True,
        hf_overrides={"quantization_config": {"quant_method": "qurl", "format": "int8", "keep": ["lm_head\\\\."]}})

With tensor parallelism, the input of a row-parallel linear is divided over the ranks. Each quantizes its part by the
range of that part, as vLLM does: an agreed range would take a message between the GPUs before every such product.
Activations therefore get other codes, mostly finer ones, than without tensor parallelism, except in groups of columns.
"""

import re
from collections.abc import Sequence
from itertools import accumulate
from typing import Any

import torch
from torch import nn
from vllm.config import get_current_vllm_config
from vllm.distributed import get_tp_group
from vllm.model_executor.layers.fused_moe import GateLinear
from vllm.model_executor.layers.fused_moe.routed_experts import RoutedExperts
from vllm.model_executor.layers.linear import (
    ColumnParallelLinear,
    LinearBase,
    RowParallelLinear,
    UnquantizedLinearMethod,
    register_weight_loader_v2_supported_method,
)
from vllm.model_executor.layers.quantization import register_quantization_config
from vllm.model_executor.layers.quantization.base_config import QuantizationConfig, QuantizeMethodBase
from vllm.model_executor.layers.vocab_parallel_embedding import (
    ParallelLMHead,
    UnquantizedEmbeddingMethod,
    VocabParallelEmbedding,
)
from vllm.platforms import current_platform

from qurl_ray.engines.vllm.experts import MIXTRAL, NAME, PACKED, QurlExpertsMethod
from qurl_ray.engines.vllm.kernels import ExpertCodes, FixedCodes
from qurl_ray.engines.vllm.routes import RouteMemory
from qurl_ray.engines.vllm.shards import TensorShard, cut, fuse
from qurl_ray.errors import QuantizationError
from qurl_ray.numerics import products
from qurl_ray.policy.adapters import is_target
from qurl_ray.quant.formats import Format, get_format
from qurl_ray.quant.linear import QuantizedLinear
from qurl_ray.quant.linear import weight_max_code as largest_code
from qurl_ray.quant.quantize import QTensor, concatenate, filled, quantize
from qurl_ray.types import Adapters


def register() -> None:
    """Do nothing. This is the entry point; importing this module has registered the plugin."""


@register_weight_loader_v2_supported_method
class QurlLinearMethod(UnquantizedLinearMethod):
    """Weight of one layer: `layer.weight` in full precision, or codes in `fixed` or `held`.

    The linears in `held` are not submodules, because vLLM's reload would treat their buffers as its own.
    """

    supports_pre_processed_weights = False
    outside_the_graph = False
    """True if vLLM computes the layer beside the model that it compiles."""

    def __init__(
        self,
        fmt: Format | None,
        *,
        tensors: int,
        emulate: bool,
        fixed: bool,
        adapter: "AdapterPlan | None" = None,
        memory: ExpertCodes | None = None,
    ) -> None:
        super().__init__()
        self._memory = memory
        self.adapter = adapter
        self.fmt = fmt
        """Format that the layer holds, and that a float checkpoint is quantized to; None for full precision."""
        self.fixed: FixedCodes | ExpertCodes | None = None
        self.held: tuple[QuantizedLinear, ...] = ()
        self._tensors = tensors  # number that the layer is fused from; 1 if the checkpoint has it fused
        self._emulate, self._fixed = emulate, fixed

    def create_weights(
        self,
        layer: Any,
        input_size_per_partition: int,
        output_partition_sizes: list[int],
        input_size: int,
        output_size: int,
        params_dtype: torch.dtype,
        **extra_weight_attrs: Any,
    ) -> None:
        if self._memory:  # of an expert, which the fused operation multiplies
            layer.output_partition_sizes = output_partition_sizes
            layer.weight = nn.Parameter(self._memory.values, requires_grad=False)
            self.fixed = self._memory if self.fmt else None
            return
        if self.adapter:
            sizes = output_partition_sizes if self._tensors > 1 else [sum(output_partition_sizes)]
            self.adapter.attach(layer, sizes, input_size_per_partition, params_dtype)
        if (
            self._fixed
            and self.fmt
            and not self._emulate
            and get_current_vllm_config().load_config.load_format == "dummy"
        ):
            # No floats first: what codes save is free for keys and values.
            layer.output_partition_sizes = output_partition_sizes
            self._fix(layer, self.fmt, input_size_per_partition, params_dtype, torch.empty(0).device)
            return
        shapes = (input_size_per_partition, output_partition_sizes, input_size, output_size)
        super().create_weights(layer, *shapes, params_dtype, **extra_weight_attrs)

    def process_weights_after_loading(self, layer: Any) -> None:
        layer.cpu_linear = products.linear  # what the base class calls on CPUs, here without packing
        if self.fmt is None:
            self.held = ()
            return
        if layer.weight.dtype == self.fmt.dtype:  # made for codes
            return
        sizes = layer.output_partition_sizes if self._tensors > 1 else [len(layer.weight)]
        self.hold(layer, [self._quantized(layer, part, self.fmt) for part in layer.weight.detach().split(sizes)])

    def hold(self, layer: Any, parts: Sequence[torch.Tensor | QTensor]) -> None:
        """Write these parts of the layer's rows, in their order.

        Raises:
            QuantizationError: the parts have different formats, or not the one that the layer was made for.
        """
        formats = {part.fmt if isinstance(part, QTensor) else None for part in parts}
        if len(formats) > 1:
            names = sorted(fmt.name if fmt else "none" for fmt in formats)
            raise QuantizationError(f"{layer.prefix} is one linear in vLLM and cannot be {' and '.join(names)} at once")
        fmt = formats.pop()
        held, came = (form.name if form else "none" for form in (self.fmt, fmt))
        if self._fixed and held != came:
            raise QuantizationError(
                f"{layer.prefix} was made for {held}, and {came} came: the engine must be restarted"
            )
        self.fmt = fmt
        device = layer.weight.device
        if fmt is None:
            floats = torch.cat([part for part in parts if isinstance(part, torch.Tensor)])
            if layer.weight.shape == floats.shape:
                layer.weight.data.copy_(floats)
            else:  # codes were held, eagerly
                layer.weight.data = floats.to(device, layer.params_dtype)
            self.held = ()
            return
        codes = [part for part in parts if isinstance(part, QTensor)]
        if self._fixed and not self._emulate:
            fixed = self.fixed or self._fix(layer, fmt, codes[0].shape[1], layer.params_dtype, device)
            fixed.write(concatenate(codes).to(device))
            return
        tensors = [q.to(device) for q in fuse(codes)]
        emulated = [
            (linear.fmt, (linear.out_features, linear.in_features)) for linear in self.held if linear.kernel is None
        ]
        if [(q.fmt, tuple(q.shape)) for q in tensors] == emulated:
            for linear, q in zip(self.held, tensors, strict=True):
                linear.write(q)
            return
        if layer.weight.numel():
            layer.weight.data = torch.empty(0, dtype=layer.params_dtype, device=device)
        self.held = tuple(QuantizedLinear(q, None, emulate=self._emulate) for q in tensors)
        for linear in self.held:
            linear.pack()

    def _fix(self, layer: Any, fmt: Format, inputs: int, dtype: torch.dtype, device: torch.device) -> FixedCodes:
        """Give the layer its parameters for codes, once."""
        self.fixed = fixed = FixedCodes(
            layer,
            fmt,
            layer.output_partition_sizes,
            inputs,
            dtype=dtype,
            device=device,
            name=layer.prefix,
            compiled=not self.outside_the_graph,
        )
        return fixed

    def resident(self) -> list[QTensor]:
        """Return codes and scales in the order of the layer's rows, from the kernels' own memory."""
        return [self.fixed.read()] if self.fixed else [linear.resident() for linear in self.held]

    def kernels(self) -> set[str]:
        """Return the names of the kernels, or emulations, that multiply codes."""
        if self.fixed:
            return {self.fixed.kernel}
        return {linear.kernel or f"emulation of {linear.fmt.name}" for linear in self.held}

    def apply(self, layer: Any, x: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        y = self._base(layer, x, bias)
        return self.adapter.plus(layer, x, y) if self.adapter else y

    def _base(self, layer: Any, x: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        if isinstance(self.fixed, FixedCodes):
            return self.fixed.multiply(x, bias)
        if not self.held:
            return super().apply(layer, x, bias)
        parts = [linear(x) for linear in self.held]
        y = parts[0] if len(parts) == 1 else torch.cat(parts, dim=-1)
        return y if bias is None else y + bias

    @staticmethod
    def _quantized(layer: Any, part: torch.Tensor, fmt: Format) -> QTensor:
        """Quantize a rank's part of a checkpoint tensor, to the codes that the whole tensor would get there."""
        if layer.tp_size == 1:
            return quantize(part, fmt)
        by_row = isinstance(layer, RowParallelLinear)  # a row's scale depends on the columns of all ranks
        if by_row or fmt.whole:
            # torch's collective: vLLM's own all-gather did not return on a CPU.
            shares = [torch.empty_like(part, memory_format=torch.contiguous_format) for _ in range(layer.tp_size)]
            torch.distributed.all_gather(shares, part.contiguous(), get_tp_group().device_group)
            whole, (rows, width) = quantize(torch.cat(shares, dim=1 if by_row else 0), fmt), part.shape
            if by_row:
                columns = (layer.tp_rank * width, (layer.tp_rank + 1) * width)
                return cut(whole, TensorShard(start=0, stop=rows, at=0, columns=columns))
            return cut(whole, TensorShard(start=layer.tp_rank * rows, stop=(layer.tp_rank + 1) * rows, at=0))
        if isinstance(layer, ColumnParallelLinear | ParallelLMHead) and len(part) % fmt.rows:
            raise QuantizationError(
                f"{layer.prefix}: {len(part)} rows on each of {layer.tp_size} ranks cut through {fmt.name}'s blocks of "
                f"{fmt.rows} rows: lower tensor_parallel, or take a format with smaller blocks"
            )
        return quantize(part, fmt)


class QurlRouterMethod(QurlLinearMethod):
    """The router of a mixture, in float32, as the learner computes it."""

    def create_weights(
        self,
        layer: Any,
        input_size_per_partition: int,
        output_partition_sizes: list[int],
        input_size: int,
        output_size: int,
        params_dtype: torch.dtype,
        **extra_weight_attrs: Any,
    ) -> None:
        shapes = (input_size_per_partition, output_partition_sizes, input_size, output_size)
        super().create_weights(layer, *shapes, torch.float32, **extra_weight_attrs)

    def apply(self, layer: Any, x: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        return super().apply(layer, x.float(), bias)


class QurlHeadMethod(QurlLinearMethod):
    """A head of its own, without the rows of zeros that vLLM adds to the vocabulary: its logits get columns of zeros,
    which vLLM cuts off."""

    outside_the_graph = True

    def create_weights(
        self,
        layer: Any,
        input_size_per_partition: int,
        output_partition_sizes: list[int],
        input_size: int,
        output_size: int,
        params_dtype: torch.dtype,
        **extra_weight_attrs: Any,
    ) -> None:
        layer.output_partition_sizes = [layer.num_org_embeddings_per_partition]
        shapes = (input_size_per_partition, layer.output_partition_sizes, input_size, output_size)
        super().create_weights(layer, *shapes, params_dtype, **extra_weight_attrs)

    def apply(self, layer: Any, x: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        logits = super().apply(layer, x, bias)
        return filled(logits, 0, layer.num_embeddings_per_partition - logits.shape[-1])


class QurlEmbeddingMethod(UnquantizedEmbeddingMethod):
    """Embedding in full precision, never packed, and a head that is tied to it."""

    supports_pre_processed_weights = False

    def process_weights_after_loading(self, layer: Any) -> None:
        layer.cpu_linear = products.linear


class AdapterMatrix(nn.Module):
    """One of the two matrices of the adapters of a layer's tensors, one below the other: A [tensors · rank, inputs], B
    [rows of the tensors, rank]."""

    def __init__(self, layer: Any, tensors: Sequence[int], shape: tuple[int, int], dtype: torch.dtype) -> None:
        super().__init__()
        self._layer = (layer,)  # no submodule: the layer has this one
        self.tensors = tuple(tensors)
        """Indices of those tensors of the layer that have an adapter."""
        self.weight = nn.Parameter(torch.zeros(shape, dtype=dtype), requires_grad=False)

    @property
    def layer(self) -> Any:
        """The linear that they are added to."""
        return self._layer[0]


class AdapterPlan:
    """Adapters of a layer: of some of the tensors that it is fused from. Their memory never moves.

    vLLM's own LoRA is not used: it would hold the versions of adapters as files, and turns compilation off on CPUs.
    """

    def __init__(self, adapters: Adapters, tensors: Sequence[int]) -> None:
        self._rank, self._scaling, self._tensors = adapters.rank, adapters.scaling, tuple(tensors)
        self._rows: list[tuple[int, int]] = []

    def attach(self, layer: Any, sizes: Sequence[int], inputs: int, dtype: torch.dtype) -> None:
        """Give the layer its matrices, zeros. `sizes` are the rows of its tensors on this rank."""
        borders = [0, *accumulate(sizes)]
        self._rows = [(borders[index], borders[index + 1]) for index in self._tensors]
        rows = sum(stop - start for start, stop in self._rows)
        layer.lora_A = AdapterMatrix(layer, self._tensors, (len(self._tensors) * self._rank, inputs), dtype)
        layer.lora_B = AdapterMatrix(layer, self._tensors, (rows, self._rank), dtype)

    def plus(self, layer: Any, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        """Return y with the adapters' results added to the rows of their tensors."""
        lows = products.linear(x, layer.lora_A.weight).split(self._rank, dim=-1)
        seconds = layer.lora_B.weight.split([stop - start for start, stop in self._rows])
        for (start, stop), low, second in zip(self._rows, lows, seconds, strict=True):
            y[..., start:stop] += products.linear(low, second) * self._scaling
        return y


@register_quantization_config(NAME)
class QurlConfig(QuantizationConfig):
    """Settings of the plugin, under `quantization_config` of a model's config.

    Args:
        format: format of the linears of a float checkpoint; "none" leaves them as floats until codes are loaded.
        keep: patterns of checkpoint names that stay in full precision, as in quant/units.py.
        weight_max_code: largest code of weights; None means the largest that the kernel here takes without saturating.
        kernel: "auto" or "emulation", as in the torch engine.
        adapters: rank, alpha and targets of adapters, as Adapters has them; None for none.
        fixed: codes stay in one format and in memory that never moves, multiplied by vLLM's kernels. None means: on
            CUDA, unless they are emulated.
        routes: note the "experts" of each token, or also their "weights". None means: neither.
    """

    def __init__(
        self,
        format: str = "none",
        keep: Sequence[str] = (),
        weight_max_code: int | None = None,
        kernel: str = "auto",
        fixed: bool | None = None,
        adapters: dict[str, Any] | None = None,
        routes: str | None = None,
    ) -> None:
        super().__init__()
        self.routes = RouteMemory(weights=routes == "weights") if routes else None
        self.adapters = Adapters(**adapters) if adapters else None
        self.keep = tuple(keep)
        self.emulate = kernel == "emulation"
        self.fixed = current_platform.is_cuda() and not self.emulate if fixed is None else fixed
        self.fmt = None if format == "none" else get_format(format, weight_max_code)
        self.slices: dict[str, ExpertCodes] = {}
        """Memory of experts' linears whose layers are being made, by prefix."""
        if self.fmt and weight_max_code is None and not self.emulate:
            self.fmt = get_format(format, largest_code(self.fmt, torch.device(current_platform.device_type)))

    def get_name(self) -> str:
        return NAME

    def get_supported_act_dtypes(self) -> list[torch.dtype]:
        return [torch.float32, torch.bfloat16, torch.float16]

    @classmethod
    def get_min_capability(cls) -> int:
        return 0

    @staticmethod
    def get_config_filenames() -> list[str]:
        return []

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> "QurlConfig":
        return cls(**{key: value for key, value in config.items() if key != "quant_method"})

    def get_quant_method(self, layer: Any, prefix: str) -> QuantizeMethodBase | None:
        if isinstance(layer, RoutedExperts):
            return QurlExpertsMethod(layer.moe_config, self)
        if isinstance(layer, GateLinear):
            return QurlRouterMethod(None, tensors=1, emulate=False, fixed=False)
        if isinstance(layer, LinearBase):
            names = self._names(prefix)
            plan = None
            if self.adapters:
                modules = [name.removesuffix(".weight") for name in names]
                targeted = [index for index, module in enumerate(modules) if is_target(module, self.adapters)]
                plan = AdapterPlan(self.adapters, targeted) if targeted else None
            memory = self.slices.pop(prefix, None)
            if memory and plan:
                raise QuantizationError(
                    f"{prefix} is an expert's, which has no adapter in vLLM on a GPU: leave it out of "
                    "learner.lora.targets"
                )
            return QurlLinearMethod(
                self.format_of(prefix),
                tensors=len(names),
                emulate=self.emulate,
                fixed=self.fixed,
                adapter=plan,
                memory=memory,
            )
        if isinstance(layer, VocabParallelEmbedding):
            tied = get_current_vllm_config().model_config.hf_text_config.tie_word_embeddings
            if isinstance(layer, ParallelLMHead) and not tied:
                return QurlHeadMethod(self.format_of(prefix), tensors=1, emulate=self.emulate, fixed=self.fixed)
            return QurlEmbeddingMethod()
        return None

    def format_of(self, prefix: str) -> Format | None:
        """Return the format of a float checkpoint's tensors in this vLLM layer; None for full precision.

        Raises:
            QuantizationError: only some of them stay in full precision.
        """
        names = self._names(prefix)
        kept = {name for name in names if any(re.search(pattern, name) for pattern in self.keep)}
        if kept and len(kept) < len(names):
            raise QuantizationError(
                f"quantization.keep leaves {sorted(kept)} in full precision but not {sorted({*names} - kept)}, which "
                f"are one linear in vLLM ({prefix}): keep all of them or none"
            )
        return None if kept else self.fmt

    def _names(self, prefix: str) -> list[str]:
        """Return the checkpoint's names of the tensors that are fused in a layer."""
        path, _, leaf = prefix.rpartition(".")
        packed = PACKED if ".experts." in prefix else self.packed_modules_mapping
        path = path.replace(MIXTRAL, ".mlp.")
        return [f"{path}.{name}.weight".lstrip(".") for name in packed.get(leaf, [leaf])]
