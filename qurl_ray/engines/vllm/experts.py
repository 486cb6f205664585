"""Mixtures of experts in vLLM: each expert is two linears of vLLM's own, which the plugin fills like any other.

So places, shards, codes and fingerprints of experts are those of linears (engines/vllm/worker.py). Routes are chosen as
the learner chooses them (policy/experts.py), since vLLM breaks ties in another way.

On a CPU each expert multiplies by itself, and the sums are the learner's, too, bit for bit. On CUDA the linears of a
layer's experts are slices of one tensor, which vLLM's fused operation reads (kernels.StackedCodes). That was tested on
a CPU, with a definition of the operation, and not on a GPU.
"""

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import nn
from vllm.config import get_current_vllm_config
from vllm.model_executor.layers.fused_moe import GateLinear
from vllm.model_executor.layers.fused_moe.fused_moe import fused_experts
from vllm.model_executor.layers.fused_moe.fused_moe_method_base import FusedMoEMethodBase
from vllm.model_executor.layers.fused_moe.routed_experts import RoutedExperts
from vllm.model_executor.layers.linear import MergedColumnParallelLinear, RowParallelLinear
from vllm.model_executor.models import mixtral, olmoe
from vllm.platforms import current_platform

from qurl_ray.engines.vllm.kernels import StackedCodes, fused_quantization
from qurl_ray.errors import QuantizationError
from qurl_ray.numerics.activations import silu
from qurl_ray.policy.experts import choose, each_by_itself, mixed

_PARTS = {"gate_proj": ("gate_up_proj", 0), "up_proj": ("gate_up_proj", 1), "down_proj": ("down_proj", None)}
"""Linear of vLLM that holds each linear of an expert, and its place there."""
PACKED = {linear: [part for part, (held, _) in _PARTS.items() if held == linear] for linear, _ in _PARTS.values()}
NAME = "qurl"
"""Name of this package's quantization in vLLM."""
MIXTRAL = ".block_sparse_moe."
"""Path of mixtures in vLLM's Mixtral, where the learner has .mlp."""


class QuantizedGate(GateLinear):
    """A router that asks this package's quantization for its method. vLLM's OLMoE and Mixtral ask for none, and pack it
    on a CPU, after which it can be neither replaced nor read back. With another quantization it is vLLM's own."""

    def __init__(self, *args: Any, **settings: Any) -> None:
        quantization = get_current_vllm_config().quant_config
        if quantization and quantization.get_name() == NAME:
            settings["quant_config"] = quantization
        super().__init__(*args, **settings)


olmoe.GateLinear = mixtral.GateLinear = QuantizedGate


class ExpertLinears(nn.Module):
    """down(silu(gate(x)) · up(x)), on a rank's part of the hidden layer."""

    def __init__(self, hidden: int, width: int, dtype: torch.dtype, config: Any, prefix: str) -> None:
        super().__init__()
        settings: dict[str, Any] = {"bias": False, "params_dtype": dtype, "quant_config": config}
        self.gate_up_proj = MergedColumnParallelLinear(
            hidden, [width, width], prefix=f"{prefix}.gate_up_proj", **settings
        )
        self.down_proj = RowParallelLinear(
            width, hidden, prefix=f"{prefix}.down_proj", reduce_results=False, **settings
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        both, _ = self.gate_up_proj(x)
        gate, up = (part.contiguous() for part in both.chunk(2, dim=-1))
        y, _ = self.down_proj(silu(gate) * up)
        return y


class QurlExpertsMethod(FusedMoEMethodBase):
    """Computes vLLM's layer of experts from its modules `experts`.

    Args:
        config: the plugin's settings.
    """

    is_monolithic = True  # it gets the router's logits

    def __init__(self, moe: Any, config: Any) -> None:
        super().__init__(moe)
        self._config = config
        self._place = config.routes.add_layer(moe.num_experts, moe.experts_per_token) if config.routes else 0
        self._stacks: tuple[StackedCodes, StackedCodes] | None = None
        """Memory of all gate_up_proj and of all down_proj, where the fused operation multiplies."""

    def create_weights(
        self,
        layer: RoutedExperts,
        num_experts: int,
        hidden_size: int,
        intermediate_size_per_partition: int,
        params_dtype: torch.dtype,
        **extra_weight_attrs: Any,
    ) -> None:
        names = [f"{layer.layer_name}.{index}" for index in range(num_experts)]
        if self._config.fixed and not self._config.emulate:
            width = intermediate_size_per_partition
            self._stacks = (
                self._stacked([f"{name}.gate_up_proj" for name in names], [width, width], hidden_size, params_dtype),
                self._stacked([f"{name}.down_proj" for name in names], [hidden_size], width, params_dtype),
            )
        elif current_platform.is_cuda() and not get_current_vllm_config().model_config.enforce_eager:
            raise QuantizationError(
                "experts are emulated one by one, which CUDA graphs cannot hold: set rollout.cuda_graphs=false"
            )
        sizes = (hidden_size, self.moe.intermediate_size, params_dtype)
        layer.experts = nn.ModuleList(ExpertLinears(*sizes, self._config, name) for name in names)

    def _stacked(self, names: Sequence[str], widths: Sequence[int], inputs: int, dtype: torch.dtype) -> StackedCodes:
        """Make the memory of these linears, and have the plugin give each its slice."""
        formats = {self._config.format_of(name) for name in names}
        if len(formats) > 1:
            raise QuantizationError(
                f"quantization.keep leaves some of the experts {names[0]} … in full precision, which are one tensor in "
                "vLLM: keep all of them or none"
            )
        stack = StackedCodes(formats.pop(), len(names), widths, inputs, dtype=dtype, name=names[0])
        self._config.slices |= {name: stack.slice(index) for index, name in enumerate(names)}
        return stack

    def get_fused_moe_quant_config(self, layer: RoutedExperts) -> None:
        """Return None: the linears are quantized, each by itself."""

    def apply_monolithic(
        self,
        layer: RoutedExperts,
        x: torch.Tensor,
        router_logits: torch.Tensor,
        input_ids: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Return the rank's part of the mixture's result, [N, d], from the router's logits [N, E]."""
        weights_Nk, experts_Nk, _ = choose(router_logits.float(), layer.top_k, normalizes=layer.renormalize)
        if self._config.routes:
            self._config.routes.write(self._place, experts_Nk, weights_Nk)
        if self._stacks is None:
            return mixed(
                x, weights_Nk, experts_Nk, len(layer.experts), partial(each_by_itself, experts=list(layer.experts))
            )
        first, second = self._stacks
        return fused_experts(
            x.contiguous(),
            first.values,
            second.values,
            weights_Nk,
            experts_Nk.int(),
            quant_config=fused_quantization(first, second),
        )


def place_of_expert(name: str) -> tuple[str, int | None] | None:
    """Return vLLM's name of a parameter of an expert, and its place in the linear there; None for other parameters."""
    before, within, after = name.partition(".experts.")
    if not within:
        return None
    index, linear, leaf = after.split(".", 2)
    held, place = _PARTS[linear]
    return f"{before}.experts.routed_experts.experts.{index}.{held}.{leaf}", place
