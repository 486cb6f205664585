"""The reference of a KL penalty for a policy whose adapters alone are trained: itself, with the adapters that it began
with. It costs a copy of the adapters, not of the policy."""

from typing import Any

import torch
from torch.distributed.tensor import DTensor

from qurl_ray.learner.backend import Backend


class StartingAdapters:
    """The policy with its present adapters, whatever they become later. Called like a Scorer, without gradients.

    Args:
        policy: backend that holds whole parameters, or rows of them (all but DeepSpeed's stage 3).
    """

    def __init__(self, policy: Backend) -> None:
        self._policy = policy
        self._trained: list[torch.Tensor] = [
            parameter.to_local() if isinstance(parameter, DTensor) else parameter
            for parameter in policy.module.parameters()
            if parameter.requires_grad
        ]
        self._start = [parameter.detach().clone() for parameter in self._trained]

    @torch.no_grad()
    def __call__(self, batch: Any) -> Any:
        now = [parameter.detach().clone() for parameter in self._trained]
        self._write(self._start)
        try:
            return self._policy(batch)
        finally:
            self._write(now)

    def to(self, _device: str) -> None:
        """Do nothing: adapters are small, and stay where the policy is."""

    def _write(self, values: list[torch.Tensor]) -> None:
        for parameter, value in zip(self._trained, values, strict=True):
            parameter.copy_(value)
