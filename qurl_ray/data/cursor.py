"""An endless, resumable order of problems."""

from collections.abc import Sequence

import numpy as np

from qurl_ray.errors import DataError
from qurl_ray.types import Problem


class PromptCursor:
    """Goes through all problems once per epoch, in an order that depends on (seed, epoch) alone.

    Example:
        cursor = PromptCursor(task.train, seed=0)
        problems = cursor.take(64)
        again = PromptCursor(task.train, seed=0)
        again.load_state(cursor.state())  # goes on where the first one stands
    """

    def __init__(self, problems: Sequence[Problem], *, seed: int) -> None:
        if not problems:
            raise DataError("there are no problems to draw from")
        self._problems = problems
        self._seed = seed % 2**64
        self._turn_to(epoch=0, position=0)

    def take(self, n: int) -> list[Problem]:
        """The next n problems; may run into the next epoch, and so hold a problem twice."""
        taken: list[Problem] = []
        while len(taken) < n:
            if self._position == len(self._order):
                self._turn_to(epoch=self._epoch + 1, position=0)
            window = self._order[self._position : self._position + n - len(taken)]
            taken += [self._problems[int(index)] for index in window]
            self._position += len(window)
        return taken

    def state(self) -> dict[str, int]:
        """Where it stands, for JSON; the problems and the seed are the caller's to keep the same."""
        return {"epoch": self._epoch, "position": self._position}

    def load_state(self, state: dict[str, int]) -> None:
        """Go on from `state`; DataError if it belongs to another set of problems."""
        epoch, position = int(state["epoch"]), int(state["position"])
        if epoch < 0 or not 0 <= position <= len(self._problems):
            raise DataError(
                f"the saved position {position} of epoch {epoch} does not exist among {len(self._problems)} problems: "
                "has the task changed since the checkpoint?"
            )
        self._turn_to(epoch=epoch, position=position)

    def _turn_to(self, *, epoch: int, position: int) -> None:
        self._epoch, self._position = epoch, position
        self._order = np.random.default_rng([self._seed, epoch]).permutation(len(self._problems))
