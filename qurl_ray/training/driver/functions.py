"""User functions that the settings name: they are imported and tried before anything else is done."""

from collections.abc import Callable
from importlib.util import find_spec
from typing import Any

import numpy as np
import torch

from qurl_ray.config import RunConfig
from qurl_ray.config.algorithm import Algorithm, Custom
from qurl_ray.errors import ConfigError, ExtensionError, QurlError
from qurl_ray.extensions import Table, described
from qurl_ray.rl.advantages import advantages
from qurl_ray.rl.corrections import CorrectionSettings, correct
from qurl_ray.rl.surrogate import Bounds, surrogate_of
from qurl_ray.tables import ADVANTAGES, CORRECTIONS, ENGINES, OBJECTIVES, SINKS, TRANSPORTS
from qurl_ray.weights.transports.protocol import transport_named


def try_functions(config: RunConfig) -> None:
    """Import each function that is not built in, and call it with a few numbers. Look for an optional package.

    Raises:
        ConfigError: a function cannot be imported, raises, or returns something that the learner cannot use.
    """
    if config.learner.optimizer == "adamw_8bit" and find_spec("bitsandbytes") is None:
        raise ConfigError("learner.optimizer=adamw_8bit needs bitsandbytes: pip install bitsandbytes")
    for sink in config.tracking.sinks:
        SINKS.load(sink)  # the tracker creates it, in the run's folder
    if config.rollout.engine not in ENGINES.entries:
        ENGINES.load(config.rollout.engine)  # the rollout workers create it
    if config.sync.transport not in TRANSPORTS.entries:
        transport_named(config.sync.transport)
    algorithm = config.algorithm
    trials: list[tuple[Table, str, Callable[[Any], None]]] = [
        (OBJECTIVES, algorithm.objective, lambda form: _try_objective(form, algorithm))
    ]
    if isinstance(algorithm.correction, Custom):
        trials.append((CORRECTIONS, algorithm.correction.function, _try_correction))
    if algorithm.advantage != "gae":
        samples = max(2, config.rollout.samples_per_prompt)
        trials.append((ADVANTAGES, algorithm.advantage, lambda compare: _try_advantage(compare, samples)))
    for table, name, attempt in trials:
        if name in table.entries:
            continue
        function = table.load(name)
        try:
            attempt(function)
        except QurlError:
            raise
        except Exception as error:  # a user's function may raise anything
            raise ExtensionError(f"{table.kind} {name!r} cannot be used: {described(error)}") from error


def _try_objective(form: Any, algorithm: Algorithm) -> None:
    """Check that its value and gradient are finite, and that it has one: at a ratio of 1, and beyond both bounds."""
    mask_BT = torch.tensor([[True, True, False], [True, False, False]])
    upper_BT = torch.full((2, 3), 1 + algorithm.clip_high)
    bounds = Bounds(lower=1 - algorithm.clip_low, upper_BT=upper_BT, dual=algorithm.dual_clip)
    adv_BT = torch.where(mask_BT, torch.tensor([[1.0], [-1.0]]), 0.0)
    for shift in (0.0, 0.5, -0.5):
        leaf_BT = torch.full((2, 3), shift, requires_grad=True)
        log_ratio_BT = torch.where(mask_BT, leaf_BT, 0.0)
        value_BT = surrogate_of(form, log_ratio_BT, adv_BT, mask_BT, bounds).value_BT
        if not value_BT.requires_grad:
            raise ValueError("its value has no gradient")
        (gradient_BT,) = torch.autograd.grad(value_BT[mask_BT].sum(), leaf_BT)
        if not (value_BT[mask_BT].isfinite().all() and gradient_BT.isfinite().all()):
            raise ValueError(f"its value or gradient is not finite at a log ratio of {shift:g}")


def _try_correction(weigh: Any) -> None:
    mask_BT = torch.tensor([[True, True, False], [True, False, False]])
    log_rho_BT = torch.where(mask_BT, torch.tensor([[0.0, 0.7, 0.0], [-0.7, 0.0, 0.0]]), 0.0)
    correct(log_rho_BT, mask_BT, CorrectionSettings(weigh=weigh))


def _try_advantage(compare: Any, samples: int) -> None:
    """Compare two groups, one of which is uniform and lacks a sample."""
    rewards_PG, lengths_PG = np.ones((2, samples)), np.full((2, samples), 2)
    rewards_PG[0, 0], rewards_PG[1, -1], lengths_PG[1, -1] = 0.0, np.nan, 0
    advantages(rewards_PG, compare, lengths_PG)
