"""An endless, resumable order of problems."""

import hashlib
from collections.abc import Sequence

import numpy as np

from qurl_ray.errors import DataError
from qurl_ray.types import Problem


class PromptCursor:
    """Cursor that visits all problems once per epoch, in an order that depends on (seed, epoch) alone.

    Example:
        cursor = PromptCursor(task.train, seed=0)
        problems = cursor.take(64)
        again = PromptCursor(task.train, seed=0)
        again.load_state(cursor.state())  # resumes at the position of the first cursor
    """

    def __init__(self, problems: Sequence[Problem], *, seed: int) -> None:
        if not problems:
            raise DataError("there are no problems to draw from")
        self._problems = problems
        self._seed = seed % 2**64
        self._turn_to(epoch=0, position=0)

    def take(self, n: int) -> list[Problem]:
        """Return the next n problems. They may extend into the next epoch, and so contain a problem twice."""
        taken: list[Problem] = []
        while len(taken) < n:
            if self._position == len(self._order):
                self._turn_to(epoch=self._epoch + 1, position=0)
            window = self._order[self._position : self._position + n - len(taken)]
            taken += self._consume(window)
        return taken

    def state(self) -> dict[str, int | str]:
        """Return the position as JSON values. All problems before it were taken, and none after it. `taken` is a digest
        of the problems taken in this epoch."""
        return {"epoch": self._epoch, "position": self._position, "taken": self._taken.hexdigest()}

    def load_state(self, state: dict[str, int | str]) -> None:
        """Resume from `state`. Raise DataError if the problems before its position are not those that were taken."""
        epoch, position = int(state["epoch"]), int(state["position"])
        if epoch >= 0 and 0 <= position <= len(self._problems):
            self._turn_to(epoch=epoch, position=position)
            if self._taken.hexdigest() == state["taken"]:
                return
        raise DataError(
            f"the saved position {position} of epoch {epoch} is not one among these {len(self._problems)} problems: "
            "has the task changed since the checkpoint?"
        )

    def _turn_to(self, *, epoch: int, position: int) -> None:
        self._epoch, self._position, self._taken = epoch, 0, hashlib.blake2b(digest_size=16)
        self._order = np.random.default_rng([self._seed, epoch]).permutation(len(self._problems))
        self._consume(self._order[:position])

    def _consume(self, window: np.ndarray) -> list[Problem]:
        """Move past the problems of `window`, the next ones in the order, and return them."""
        problems = [self._problems[int(index)] for index in window]
        for problem in problems:
            self._taken.update(f"{problem.uid}\n{problem.prompt}\n{problem.answer}\n".encode(errors="replace"))
        self._position += len(problems)
        return problems
