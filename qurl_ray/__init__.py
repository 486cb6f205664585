"""Reinforcement learning of language models with quantized rollouts, on Ray.

`__all__` is the public API (docs/api.md). Its names are imported at their first use, so that `import qurl_ray` needs
neither torch nor ray. Names that are not listed may change in any version.
"""

import os
import sys
from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from qurl_ray.config import RunConfig, load_config
    from qurl_ray.errors import (
        CheckpointError,
        ConfigError,
        CoordinatorDied,
        DataError,
        DeadlineExceeded,
        EngineError,
        PlacementError,
        QuantizationError,
        QurlError,
        RewardError,
        StaleWeights,
        SyncError,
    )
    from qurl_ray.evaluation.evaluate import Report, evaluate
    from qurl_ray.loop.driver.run import RunResult, run
    from qurl_ray.types import Problem

__version__ = "0.1.0"

__all__ = [
    "CheckpointError",
    "ConfigError",
    "CoordinatorDied",
    "DataError",
    "DeadlineExceeded",
    "EngineError",
    "PlacementError",
    "Problem",
    "QuantizationError",
    "QurlError",
    "Report",
    "RewardError",
    "RunConfig",
    "RunResult",
    "StaleWeights",
    "SyncError",
    "__version__",
    "evaluate",
    "load_config",
    "run",
]

_HOMES = {
    "Problem": "qurl_ray.types",
    "Report": "qurl_ray.evaluation.evaluate",
    "RunConfig": "qurl_ray.config",
    "RunResult": "qurl_ray.loop.driver.run",
    "evaluate": "qurl_ray.evaluation.evaluate",
    "load_config": "qurl_ray.config",
    "run": "qurl_ray.loop.driver.run",
}
"""Module of each public name. Names that are not listed are errors, from qurl_ray.errors."""

# MKL's strict reproducibility mode. On Intel, a row of a matrix product then depends on that row alone; on AMD, only
# with four rows or more. numerics.selfcheck measures what else is needed (docs/concepts.md). MKL reads the variable
# once, at its first product, so it is set before torch is imported.
TORCH_WAS_FIRST = "torch" in sys.modules and "MKL_CBWR" not in os.environ
os.environ.setdefault("MKL_CBWR", "AUTO,STRICT")
# OpenMP's threads wait in a loop before they sleep, by default for milliseconds. Where other processes want the cores,
# one waits for another that does not run (benchmarks/spinning.py). libgomp reads this when torch is imported.
if "OMP_WAIT_POLICY" not in os.environ:
    os.environ.setdefault("GOMP_SPINCOUNT", "1000")


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_HOMES.get(name, "qurl_ray.errors")), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
