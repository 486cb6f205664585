"""What the loop expects of a learner."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from qurl_ray.learner.batching import MiniBatch


@dataclass(frozen=True, slots=True, kw_only=True)
class StepResult:
    """One rank's account of one step."""

    sums: dict[str, float]
    """Metric sums (rl.objective), to be merged over ranks."""
    seconds: dict[str, float]
    """Wall time of the phases "logprob" and "update"."""
    grad_norm: float
    """Of the last update, before clipping; the same on every rank."""
    lr: float
    skipped_updates: int
    """Updates left out because their gradient was not finite."""


class Learner(Protocol):
    """Holds the policy in full precision and updates it. Every rank calls the same methods in the same order."""

    def named_parameters(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Parameters under their checkpoint names, in a fixed order, tied ones once."""

    def learn(self, mini_batches: Sequence[MiniBatch]) -> StepResult:
        """One update per mini-batch. Proximal log-probs are those of the weights before the first."""
