"""vLLM's worker for engines that compile: those of a node that start beside each other do not compile the same at once.

vLLM keeps compiled models below $VLLM_CACHE_ROOT, in a folder for each set of settings and code. Engines of a run are
alike, and share it. Started together, each would find it empty and compile for itself, on the cores of all. Here the
first one compiles; the others come as far as that beside it, wait, and find what it has written.
"""

import hashlib
from contextlib import nullcontext
from pathlib import Path
from typing import Any

from vllm import envs
from vllm.compilation.caching import aot_compile_hash_factors
from vllm.distributed import get_world_group
from vllm.platforms import current_platform
from vllm.utils.import_utils import resolve_obj_by_qualname

from qurl_ray.files import first_alone

Base: Any = resolve_obj_by_qualname(
    "vllm.v1.worker.cpu_worker.CPUWorker" if current_platform.is_cpu() else "vllm.v1.worker.gpu_worker.Worker"
)


class Worker(Base):
    """The platform's worker. It compiles in its first forward pass, which measures memory."""

    def determine_available_memory(self) -> int:
        # The ranks of an engine compute that pass together: one waits for all, or two engines could block each other.
        with first_alone(self._compiled()) if self.rank == 0 else nullcontext():
            get_world_group().barrier()
            return super().determine_available_memory()

    def _compiled(self) -> Path:
        """Return a folder for models like this one, in that of vLLM's compiled models."""
        key = hashlib.sha256(str(aot_compile_hash_factors(self.vllm_config)).encode()).hexdigest()
        return Path(envs.VLLM_CACHE_ROOT, "torch_compile_cache", f"qurl-{key[:16]}")
