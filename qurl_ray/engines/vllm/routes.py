"""Routes of tokens in vLLM, in memory with a slot for each slot of the cache of keys and values.

The pass that writes a token's keys also writes its experts, into the same slot. So routes are valid as long as keys
are: requests that share blocks of a prompt share their routes, and a request that was preempted gets both again. The
scheduler reads the slots of a request before it gives its blocks back (engines/vllm/scheduler.py).

On a CPU without tensor parallelism, scheduler and worker are one process and take turns. Elsewhere the engine refuses
to note routes.
"""

from collections.abc import Sequence

import numpy as np
import torch
from vllm.forward_context import get_forward_context
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig

from qurl_ray.errors import EngineError
from qurl_ray.policy.experts import route_dtype


class RouteMemory:
    """Experts of each slot in each layer that has some.

    Args:
        weights: hold the experts' weights, too.
    """

    def __init__(self, *, weights: bool) -> None:
        self._weights = weights
        self._layers = self._experts = self._active = self._block = 0
        self._memory_SLx: np.ndarray | None = None

    def add_layer(self, experts: int, active: int) -> int:
        """Make room for a layer, before `allocate`; return its index."""
        self._experts, self._active = experts, active
        self._layers += 1
        return self._layers - 1

    def allocate(self, cache: KVCacheConfig) -> None:
        """Make a slot for each of the cache's.

        Raises:
            EngineError: the cache gives up blocks of requests that still run.
        """
        (kind, *others) = [group.kv_cache_spec for group in cache.kv_cache_groups]
        if others or type(kind) is not FullAttentionSpec:
            raise EngineError("routes are kept where keys are, and some layers do not keep those of all tokens")
        self._block = kind.block_size
        width = self._active * (2 if self._weights else 1)
        shape = (cache.num_blocks * self._block, self._layers, width)
        self._memory_SLx = np.zeros(shape, route_dtype(self._experts, weights=self._weights))

    def write(self, layer: int, experts_Nk: torch.Tensor, weights_Nk: torch.Tensor) -> None:
        """Note the experts of this pass's tokens in a layer, and their weights, in the slots of the forward context."""
        if self._memory_SLx is None:  # vLLM measures a pass before there is a cache
            return
        slots_N = next(iter(get_forward_context().slot_mapping.values())).numpy()
        real_N = slots_N >= 0  # others fill up the batch
        parts = [experts_Nk.numpy(), weights_Nk.numpy()] if self._weights else [experts_Nk.numpy()]
        self._memory_SLx[slots_N[real_N], layer] = np.concatenate(parts, axis=-1)[real_N]

    def read(self, blocks: Sequence[int], start: int, stop: int) -> np.ndarray:
        """Return the routes of a request's tokens from `start` to `stop`, as AnswerTokens.routes has them.

        Args:
            blocks: those of the request, in their order.
        """
        assert self._memory_SLx is not None
        places = np.arange(start, stop)
        return self._memory_SLx[np.asarray(blocks)[places // self._block] * self._block + places % self._block]
