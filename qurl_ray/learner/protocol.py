"""What the loop expects of a learner."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import numpy as np
import torch

from qurl_ray.learner.backend import Resident
from qurl_ray.learner.batching import MiniBatch
from qurl_ray.learner.probe import Codes
from qurl_ray.rl.objective import ObjectiveSettings
from qurl_ray.types import Completion


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
    proximal: dict[str, np.ndarray]
    """By uid of the watched samples: log-probs of the answer before the first update, float32."""


class Learner(Protocol):
    """Holds the policy in full precision and updates it. Every rank calls the same methods in the same order."""

    def named_parameters(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Whole parameters under their checkpoint names, in a fixed order, tied ones once.

        A sharded parameter is gathered when its turn comes and may be gone at the next: use it at once, on all ranks.
        """

    def learn(self, mini_batches: Sequence[MiniBatch]) -> StepResult:
        """One update per mini-batch. Proximal log-probs are those of the weights before the first."""

    def adopt(self, settings: ObjectiveSettings) -> None:
        """Learn by these from now on."""

    def logprobs(self, completions: Sequence[Completion], prompt_ids: np.ndarray, codes: Codes) -> list[np.ndarray]:
        """Log-probs of each answer to one prompt through the codes that engines hold, float32 [answer length]."""

    def save(self, folder: Path) -> None:
        """Write what `load` needs to go on: parameters, optimizer, place in the schedule, random states."""

    def load(self, folder: Path) -> None:
        """Take up what `save` wrote, with as many ranks. The caller has verified the files."""

    def reside(self, resident: Resident) -> None:
        """Have this on the device, and all else on the host, until the next call. At first it is ALL, which `learn`,
        `save` and `load` need; `named_parameters` and `logprobs` need PARAMETERS."""
