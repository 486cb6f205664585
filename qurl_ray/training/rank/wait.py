"""How the learner's ranks wait for the coordinator."""

import os
from typing import Any

import ray
from ray.exceptions import GetTimeoutError, RayActorError, RayTaskError

from qurl_ray.actors.cluster import own_log
from qurl_ray.errors import CoordinatorDied, DeadlineExceeded, QurlError

_MARGIN_S = 90.0  # the coordinator's own deadlines pass first, and name what is late


def wait(call: ray.ObjectRef, timeout_s: float, goal: str) -> Any:
    """Return the call's result.

    Args:
        goal: object of “waits for” in the errors.

    Raises:
        DeadlineExceeded: `timeout_s` and a margin have passed.
        CoordinatorDied: the coordinator died. Our own errors (QurlError) are raised as they are.
    """
    try:
        return ray.get(call, timeout=timeout_s + _MARGIN_S)
    except GetTimeoutError:
        seconds, logs = timeout_s + _MARGIN_S, os.path.dirname(own_log())
        raise DeadlineExceeded(f"waited {seconds:g} s for the coordinator and {goal}; its log is in {logs}") from None
    except RayTaskError as error:
        raise (error.cause if isinstance(error.cause, QurlError) else error) from None
    except RayActorError as error:
        raise CoordinatorDied(f"the coordinator died while the learner waited for {goal}: {error}") from None
