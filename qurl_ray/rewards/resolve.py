"""From the name of a reward to the function."""

import difflib
import importlib
import inspect
from collections.abc import Sequence
from types import ModuleType
from typing import cast

from qurl_ray.errors import RewardError
from qurl_ray.rewards.judge import Score

BUILT_IN = ("exact", "math_verify", "reasoning_gym", "reasoning_gym_boxed")

# Imported when the name is resolved: a missing package shows at once, and the first answer is not charged for it.
_PACKAGES = {"math_verify": "math_verify", "reasoning_gym": "reasoning_gym", "reasoning_gym_boxed": "reasoning_gym"}


def resolve(spec: str) -> Score:
    """The reward function that `spec` names: one of BUILT_IN, or `package.module:function`.

    Raises:
        RewardError: there is no such function, it cannot be imported, or it does not take (answer, problem).
    """
    if spec in BUILT_IN:
        if spec in _PACKAGES:
            _import(_PACKAGES[spec], spec)
        module, name = _import("qurl_ray.rewards.scorers", spec), spec
    else:
        module_name, name = _split(spec)
        module = _import(module_name, spec)
    return _function(module, name, spec)


def _split(spec: str) -> tuple[str, str]:
    module, _, name = spec.partition(":")
    if not name.isidentifier() or not all(part.isidentifier() for part in module.split(".")):
        raise RewardError(
            f"reward {spec!r} is neither built in ({', '.join(BUILT_IN)}) nor of the form package.module:function"
            f"{_nearest(spec, BUILT_IN)}"
        )
    return module, name


def _import(module: str, spec: str) -> ModuleType:
    try:
        return importlib.import_module(module)
    except (Exception, SystemExit) as error:  # user code at import time may raise anything
        raise RewardError(f"reward {spec!r}: cannot import {module}: {type(error).__name__}: {error}") from error


def _function(module: ModuleType, name: str, spec: str) -> Score:
    functions = [key for key, value in vars(module).items() if callable(value) and not key.startswith("__")]
    if name not in vars(module) and not hasattr(module, name):
        raise RewardError(f"reward {spec!r}: {module.__name__} has no {name}{_nearest(name, functions)}")
    function = getattr(module, name)
    if not callable(function):
        raise RewardError(
            f"reward {spec!r}: {name} is {type(function).__name__}, not a function{_nearest(name, functions)}"
        )
    score = cast(Score, function)
    _check_arguments(score, spec)
    return score


def _check_arguments(function: Score, spec: str) -> None:
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):  # some callables written in C tell nothing
        return
    try:
        signature.bind("answer", "problem")
    except TypeError as error:
        raise RewardError(f"reward {spec!r} must take (answer, problem), it takes {signature}: {error}") from error


def _nearest(name: str, candidates: Sequence[str]) -> str:
    found = difflib.get_close_matches(name, candidates, n=1)
    return f"; did you mean {found[0]!r}?" if found else ""
