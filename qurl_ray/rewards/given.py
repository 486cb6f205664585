"""Rewards that are given as Python functions instead of by name.

A function that other processes can import gets its name, `module:function`. Any other one, such as a lambda or one of
the script that is run, is pickled by value and travels to the processes that judge; settings then hold `given:<name>`,
which only a process has in which the function was given. A digest of its code is part of the name, so that a run does
not resume with another function.
"""

import base64
import hashlib
import importlib
import zlib
from collections.abc import Callable
from contextlib import suppress
from types import CodeType
from typing import Any

import cloudpickle

from qurl_ray.errors import RewardError
from qurl_ray.extensions import described
from qurl_ray.tables import REWARDS

_PREFIX = "given:"
_given: dict[str, str] = {}
"""Text that travels to processes that judge, by reference."""


def give(function: Callable[..., Any]) -> str:
    """Return the reference of a reward function, for `task.reward`.

    Raises:
        RewardError: it does not take (answer, problem), or cannot be pickled.
    """
    name = getattr(function, "__name__", type(function).__name__)
    REWARDS.check_arguments(function, name)
    module, qualified = getattr(function, "__module__", None), getattr(function, "__qualname__", None)
    if module and module != "__main__" and qualified and qualified.isidentifier():
        with suppress(Exception):  # a module that only this process has
            if getattr(importlib.import_module(module), qualified, None) is function:
                return f"{module}:{qualified}"
    try:
        pickled = cloudpickle.dumps(function)
    except Exception as error:  # as objects raise that it refers to
        raise RewardError(
            f"reward {name} cannot be sent to other processes: {type(error).__name__}: {error}"
        ) from error
    code = getattr(function, "__code__", None) or getattr(type(function).__call__, "__code__", None)
    digest = hashlib.sha256(repr(_parts(code)).encode()).hexdigest()[:8]  # not of values that the function closes over
    reference = f"{_PREFIX}{name}-{digest}"
    _given[reference] = f"{reference}\n{base64.b85encode(zlib.compress(pickled)).decode()}"
    return reference


def carried(reference: str) -> str:
    """Return what a process that judges needs to `load` the reward: the reference, with the function if it was given.

    Raises:
        RewardError: the function was given in another process.
    """
    if not reference.startswith(_PREFIX) or "\n" in reference:
        return reference
    if reference not in _given:
        raise RewardError(
            f"reward {reference} was given to qurl_ray.train as a function, and is not known here: give it again, or "
            "put it into a module and set task.reward=module:function"
        )
    return _given[reference]


def told(reference: str) -> str:
    """Return a reference as messages name it, without the function that it may carry."""
    return reference.partition("\n")[0]


def load(reference: str) -> Callable[..., Any]:
    """Return the function of a reference that `carried` returned.

    Raises:
        RewardError: it cannot be imported, or does not fit.
    """
    name, carries, pickled = reference.partition("\n")
    if not carries:
        return REWARDS.load(reference)
    try:
        return cloudpickle.loads(zlib.decompress(base64.b85decode(pickled)))
    except Exception as error:  # what the function refers to may be missing here
        raise RewardError(f"reward {name} cannot be loaded: {described(error)}") from error


def _parts(code: CodeType | None) -> list[Any]:
    """Return instructions, names and constants, those of functions within it, too."""
    if code is None:
        return []
    constants: list[Any] = []
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            constants.append(_parts(constant))
        elif isinstance(constant, frozenset):
            constants.append(sorted(map(repr, constant)))
        else:
            constants.append(constant)
    return [code.co_code, code.co_names, constants]
