"""Reinforcement learning of language models with quantized rollouts, on Ray.

`__all__` is the public API (docs/api.md). Its names are imported at their first use, so that `import qurl_ray` needs
neither torch nor ray. Names that are not listed may change in any version.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

import qurl_ray.environment as _environment  # noqa: F401  sets variables that libraries read when torch is imported

if TYPE_CHECKING:
    from qurl_ray.config import RunConfig, load_config
    from qurl_ray.environments.protocol import Step, Traits
    from qurl_ray.errors import (
        CheckpointError,
        ConfigError,
        CoordinatorDied,
        DataError,
        DeadlineExceeded,
        EngineError,
        EnvironmentFailed,
        ExtensionError,
        PlacementError,
        QuantizationError,
        QurlError,
        RewardError,
        StaleWeights,
        SyncError,
    )
    from qurl_ray.evaluation.evaluate import Report, evaluate
    from qurl_ray.tracking.callback import Callback
    from qurl_ray.training.driver.run import RunResult, run
    from qurl_ray.training.driver.train import train
    from qurl_ray.types import Problem

__version__ = "0.1.0"

__all__ = [
    "Callback",
    "CheckpointError",
    "ConfigError",
    "CoordinatorDied",
    "DataError",
    "DeadlineExceeded",
    "EngineError",
    "EnvironmentFailed",
    "ExtensionError",
    "PlacementError",
    "Problem",
    "QuantizationError",
    "QurlError",
    "Report",
    "RewardError",
    "RunConfig",
    "RunResult",
    "StaleWeights",
    "Step",
    "SyncError",
    "Traits",
    "__version__",
    "evaluate",
    "load_config",
    "run",
    "train",
]

_HOMES = {
    "Callback": "qurl_ray.tracking.callback",
    "Problem": "qurl_ray.types",
    "Report": "qurl_ray.evaluation.evaluate",
    "RunConfig": "qurl_ray.config",
    "RunResult": "qurl_ray.training.driver.run",
    "Step": "qurl_ray.environments.protocol",
    "Traits": "qurl_ray.environments.protocol",
    "evaluate": "qurl_ray.evaluation.evaluate",
    "load_config": "qurl_ray.config",
    "run": "qurl_ray.training.driver.run",
    "train": "qurl_ray.training.driver.train",
}
"""Module of each public name. Names that are not listed are errors, from qurl_ray.errors."""


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_HOMES.get(name, "qurl_ray.errors")), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
