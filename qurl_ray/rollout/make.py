"""Creation of the configured engine."""

import torch

from qurl_ray.config.rollout import RolloutConfig
from qurl_ray.rollout.engine import Engine
from qurl_ray.types import PolicySpec


def make_engine(
    spec: PolicySpec,
    config: RolloutConfig,
    *,
    kernel: str,
    threads: int,
    transport: str = "object_store",
    colocated: bool = False,
) -> Engine:
    """Return the configured engine, without weights.

    Args:
        kernel: `quantization.kernel`.
        threads: number of CPU threads that it may use.
        transport: `sync.transport`.
        colocated: the engine must be able to sleep while a learner uses its device.
    """
    if config.engine == "vllm":
        from qurl_ray.rollout.vllm_engine import VllmEngine

        cache = config.vllm.kv_cache_gb
        return VllmEngine(
            spec,
            slots=config.slots,
            dtype=config.dtype,
            tensor_parallel=config.vllm.tensor_parallel,
            kv_cache_bytes=None if cache is None else int(cache * 2**30),
            kernel=kernel,
            threads=threads,
            sleep_mode=colocated,
            transport=transport,
            timeout_s=config.start_timeout_s,
        )
    from qurl_ray.rollout.graphs import CudaCapture
    from qurl_ray.rollout.torch_engine import TorchEngine

    return TorchEngine(
        spec,
        slots=config.slots,
        kernel=kernel,
        kv_cache=config.kv_cache,
        device=config.device,
        dtype=getattr(torch, config.dtype),
        capture=CudaCapture if config.cuda_graphs else None,
        compile=torch.compile if config.compile else None,
    )
