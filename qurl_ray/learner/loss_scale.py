"""Loss scaling for passes in float16, whose smallest numbers are larger than many gradients.

Losses are multiplied by a power of two, and gradients divided by it again before they are clipped, so that nothing else
sees it. An update whose gradient overflows is left out, and the factor halved; after many updates without one it is
doubled (https://arxiv.org/abs/1710.03740).
"""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from qurl_ray.learner.backend import Backend, Resident, world

_FIRST, _GROWS_AFTER = 2.0**16, 1000  # factor at the start; updates in a row after which it is doubled
_FILE = "loss_scale.json"


class LossScaled:
    """A backend with loss scaling; see learner.backend.Backend."""

    def __init__(self, backend: Backend) -> None:
        self._backend, self.factor, self._finite = backend, _FIRST, 0
        self.module, self.lockstep = backend.module, backend.lockstep

    def __call__(self, batch: Any) -> Any:
        return self._backend(batch)

    def backward(self, loss: torch.Tensor, *, last: bool) -> None:
        self._backend.backward(loss * self.factor, last=last)

    def step(self, lr: float, *, scale: float = 1.0) -> float | None:
        norm = self._backend.step(lr, scale=scale * self.factor)
        if norm is None:
            self.factor, self._finite = max(1.0, self.factor / 2), 0
            return None
        self._finite += 1
        if self._finite == _GROWS_AFTER:
            self.factor, self._finite = self.factor * 2, 0
        return norm

    def named_parameters(self, *, trained: bool = False) -> Iterator[tuple[str, torch.Tensor]]:
        return self._backend.named_parameters(trained=trained)

    def save(self, folder: Path) -> None:
        self._backend.save(folder)
        if world()[0] == 0:
            (folder / _FILE).write_text(json.dumps({"factor": self.factor, "finite": self._finite}))

    def load(self, folder: Path) -> None:
        self._backend.load(folder)
        state = json.loads((folder / _FILE).read_text())
        self.factor, self._finite = state["factor"], state["finite"]

    def keep_on_device(self, resident: Resident) -> None:
        self._backend.keep_on_device(resident)
