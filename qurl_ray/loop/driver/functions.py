"""User functions that the settings name: they are imported and tried before anything else is done."""

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch

from qurl_ray.config import RunConfig
from qurl_ray.config.algorithm import Custom
from qurl_ray.errors import ConfigError, QurlError
from qurl_ray.extensions import Table
from qurl_ray.rl.advantages import advantages
from qurl_ray.rl.corrections import CorrectionSettings, correct
from qurl_ray.rl.surrogate import Bounds, evaluate
from qurl_ray.tables import ADVANTAGES, CORRECTIONS, OBJECTIVES, SINKS

_MASK_BT = torch.tensor([[True, True, False], [True, False, False]])


def try_functions(config: RunConfig) -> None:
    """Import each function that is not built in, and call it with a few numbers.

    Raises:
        ConfigError: a function cannot be imported, raises, or returns something that the learner cannot use.
    """
    for sink in config.tracking.sinks:
        SINKS.load(sink)  # the tracker creates it, in the run's folder
    for table, name, attempt in _named(config):
        if name in table.entries:
            continue
        function = table.load(name)
        try:
            attempt(function)
        except QurlError:
            raise
        except Exception as error:  # a user's function may raise anything
            raise ConfigError(
                f"{table.kind} {name!r} failed when it was tried with two answers: {type(error).__name__}: {error}"
            ) from error


def _named(config: RunConfig) -> Iterator[tuple[Table, str, Callable[[Any], None]]]:
    algorithm = config.algorithm
    yield OBJECTIVES, algorithm.objective, _try_objective
    if isinstance(algorithm.correction, Custom):
        yield CORRECTIONS, algorithm.correction.function, _try_correction
    if algorithm.advantage != "gae":
        yield ADVANTAGES, algorithm.advantage, _try_advantage


def _try_objective(form: Any) -> None:
    """Raise ValueError unless value and gradient exist and are finite, at a ratio of 1 and beyond both bounds."""
    for shift in (0.0, 0.5, -0.5):
        leaf_BT = torch.full((2, 3), shift, requires_grad=True)
        log_ratio_BT = torch.where(_MASK_BT, leaf_BT, 0.0)
        adv_BT = torch.where(_MASK_BT, torch.tensor([[1.0], [-1.0]]), 0.0)
        bounds = Bounds(lower=0.8, upper_BT=torch.full((2, 3), 1.28), dual=None)
        value_BT = evaluate(form, log_ratio_BT, adv_BT, _MASK_BT, bounds).value_BT
        if not value_BT.requires_grad:
            raise ValueError("its value has no gradient")
        (gradient_BT,) = torch.autograd.grad(value_BT[_MASK_BT].sum(), leaf_BT)
        if not (value_BT[_MASK_BT].isfinite().all() and gradient_BT.isfinite().all()):
            raise ValueError(f"its value or gradient is not finite at a log ratio of {shift:g}")


def _try_correction(weigh: Any) -> None:
    log_rho_BT = torch.where(_MASK_BT, torch.tensor([[0.0, 0.7, 0.0], [-0.7, 0.0, 0.0]]), 0.0)
    correct(log_rho_BT, _MASK_BT, CorrectionSettings(weigh=weigh))


def _try_advantage(compare: Any) -> None:
    """Call it with two groups, one of which is uniform and lacks a sample."""
    advantages(np.array([[1.0, 0.0, 0.5], [1.0, 1.0, np.nan]]), compare, np.array([[3, 1, 2], [2, 2, 0]]))
