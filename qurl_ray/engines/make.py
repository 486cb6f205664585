"""Creation of engines, from options that are the same for all of them."""

from collections.abc import Sequence

import torch

from qurl_ray.config.rollout import RolloutConfig
from qurl_ray.engines.protocol import Engine, EngineOptions
from qurl_ray.errors import EngineError
from qurl_ray.tables import ENGINES
from qurl_ray.types import PolicySpec

_METHODS = ("load", "resident", "kernels", "generate", "cancel", "weight_max_code", "sleep", "wake", "close")


def make_engine(spec: PolicySpec, name: str, options: EngineOptions) -> Engine:
    """Return an engine of the table, or from outside the package, without weights.

    Raises:
        ConfigError: there is no such engine.
        EngineError: the entry of the table made an object that is no engine.
    """
    engine = ENGINES.load(name)(spec, options)
    missing = [method for method in _METHODS if not callable(getattr(engine, method, None))]
    if missing:
        raise EngineError(f"engine {name!r} made {type(engine).__name__}, which has no {', '.join(missing)}")
    return engine


def rollout_options(
    config: RolloutConfig,
    *,
    kernel: str,
    threads: int,
    keep: Sequence[str] = (),
    colocated: bool = False,
) -> EngineOptions:
    """Return the options of a rollout worker's engine.

    Args:
        kernel: `quantization.kernel`.
        threads: number of CPU threads that it may use.
        keep: patterns of the parameters that stay in full precision.
        colocated: the engine must be able to sleep while a learner uses its device.
    """
    cache = config.vllm.kv_cache_gb
    return EngineOptions(
        slots=config.slots,
        format_name=config.quantization,
        keep=tuple(keep),
        threads=threads,
        kernel=kernel,
        device=config.device,
        dtype=config.dtype,
        kv_cache=config.kv_cache,
        kept_bytes=int(config.kept_keys_gb * 2**30),
        kv_cache_bytes=None if cache is None else int(cache * 2**30),
        processes=config.processes,
        cuda_graphs=config.graphs,
        routes=config.router_replay != "off",
        route_weights=config.router_replay_weights,
        lossless=config.lossless,
        sleeps=colocated,
        start_timeout_s=config.start_limit_s,
    )


def torch_engine(spec: PolicySpec, options: EngineOptions) -> Engine:
    """Return the engine `torch`."""
    from qurl_ray.engines.torch.engine import TorchEngine
    from qurl_ray.engines.torch.graphs import CudaCapture

    return TorchEngine(
        spec,
        slots=options.slots,
        kernel=options.kernel,
        kv_cache=options.kv_cache,
        device=options.device,
        dtype=getattr(torch, options.dtype),
        kept_bytes=options.kept_bytes,
        capture=CudaCapture if options.cuda_graphs else None,
        routes=options.routes,
        route_weights=options.route_weights,
        drafts=options.lossless,
    )


def vllm_engine(spec: PolicySpec, options: EngineOptions) -> Engine:
    """Return the engine `vllm`."""
    from qurl_ray.engines.vllm.engine import VllmEngine

    return VllmEngine(
        spec,
        slots=options.slots,
        dtype=options.dtype,
        tensor_parallel=options.processes,
        kv_cache_bytes=options.kv_cache_bytes,
        kv_cache=options.kv_cache,
        format_name=options.format_name,
        keep=options.keep,
        graphs=options.cuda_graphs,
        kernel=options.kernel,
        routes=options.routes,
        route_weights=options.route_weights,
        threads=options.threads,
        sleep_mode=options.sleeps,
        timeout_s=options.start_timeout_s,
    )
