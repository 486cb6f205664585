"""Noise on the gains of norms, as exploration: QeRL's adaptive quantization noise (https://arxiv.org/abs/2510.11696).

A normal vector is added to each gain, another one in each step, and its size falls in stages. This is our reading:
engines and learner compute with the same gains, so the noise is part of the policy that generates and is trained, and
no correction is needed for it. Saved policies are without it.
"""

import zlib
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch
from torch.distributed.tensor import DTensor, distribute_tensor

from qurl_ray.learner.backend import Backend


@dataclass(frozen=True, slots=True, kw_only=True)
class NoiseSchedule:
    """Size of the noise over a run of `steps` steps in equal stages.

    The first stage has none. The n others have the standard deviation start · (end/start)^(k/(n - 1)), k = 0 … n - 1.
    After the last step there is none.
    """

    start: float
    end: float
    stages: int
    steps: int
    seed: int

    def sigma(self, step: int) -> float:
        """Return the standard deviation after `step` steps."""
        stage = step * self.stages // self.steps
        if not 0 < stage < self.stages:
            return 0.0
        return self.start * (self.end / self.start) ** ((stage - 1) / max(1, self.stages - 2))


class NormNoise:
    """Noise on the gains of a policy's norms, of which there is none at first.

    Args:
        policy: backend that holds whole parameters, or rows of them (all but DeepSpeed's stage 3).
    """

    def __init__(self, policy: Backend, schedule: NoiseSchedule) -> None:
        self._schedule, self._step = schedule, 0
        norms = {f"{name}.weight" for name, m in policy.module.named_modules() if type(m).__name__.endswith("Norm")}
        self._held = {name: gain for name, gain in policy.module.named_parameters() if name in norms}
        self._clean = {name: gain.detach().cpu().clone() for name, gain in policy.named_parameters() if name in norms}

    @property
    def sigma(self) -> float:
        """Present standard deviation of the noise."""
        return self._schedule.sigma(self._step)

    @torch.no_grad()
    def set(self, step: int) -> None:
        """Give the gains the noise of the weights after `step` steps."""
        self._step = step
        for name, value in self.named_gains():
            held: torch.Tensor = self._held[name]
            value = value.to(held.device)
            if isinstance(held, DTensor):  # each rank computes the whole, and keeps its rows
                value = distribute_tensor(value, held.device_mesh, held.placements, src_data_rank=None).to_local()
                held = held.to_local()
            held.copy_(value)

    def clear(self) -> None:
        """Take the noise away."""
        self.set(self._schedule.steps)

    def named_gains(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield the whole gains with their noise, by the names of their parameters."""
        for name, gain in self._clean.items():
            # NumPy's numbers are the same on every processor.
            random = np.random.default_rng((self._schedule.seed, self._step, zlib.crc32(name.encode())))
            noise = torch.from_numpy(random.standard_normal(gain.shape, dtype=np.float32))
            yield name, gain + self.sigma * noise
