"""How the learner's ranks wait for the coordinator."""

from typing import Any

import ray
from ray.exceptions import GetTimeoutError, RayActorError, RayTaskError

from qurl_ray.errors import CoordinatorDied, DeadlineExceeded, QurlError

_MARGIN_S = 90.0  # the coordinator's own deadlines pass first, and name what is late


def wait(call: ray.ObjectRef, timeout_s: float, what: str) -> Any:
    """The call's result.

    Raises:
        DeadlineExceeded: `timeout_s` and a margin have passed.
        CoordinatorDied: it did. Errors of ours come through as they are.
    """
    try:
        return ray.get(call, timeout=timeout_s + _MARGIN_S)
    except GetTimeoutError:
        raise DeadlineExceeded(f"waited {timeout_s + _MARGIN_S:g} s for {what}") from None
    except RayTaskError as error:
        raise (error.cause if isinstance(error.cause, QurlError) else error) from None
    except RayActorError as error:
        raise CoordinatorDied(f"the coordinator died while the learner waited for {what}: {error}") from None
