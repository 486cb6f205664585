"""A module whose parameters an optimizer moves, on all ranks at once; and what the backends share."""

from collections.abc import Iterator
from enum import IntEnum
from pathlib import Path
from typing import Any, Protocol

import torch
from safetensors.torch import load_file, save_file
from torch import distributed, nn

from qurl_ray.config.models import LearnerConfig


class Resident(IntEnum):
    """What of a learner is on its device; the rest is on the host."""

    NOTHING = 0
    PARAMETERS = 1
    """Of the policy: what a sync reads and a forward pass needs."""
    ALL = 2
    """Also gradients, the optimizer's states, a value model and a reference."""


class Backend(Protocol):
    """Gradients are summed over ranks, and over all passes since the last step. All ranks make the same calls."""

    module: nn.Module
    """What it was given."""
    lockstep: bool
    """Whether each pass is a collective, so that a rank without samples must make it too."""

    def __call__(self, batch: Any) -> Any:
        """The module's output: a tensor, or a tuple of them."""
        ...

    def backward(self, loss: torch.Tensor, *, last: bool) -> None:
        """Add the loss's gradient; `last` of the passes before a step."""

    def step(self, lr: float) -> float | None:
        """Clip, step, forget the gradient. Returns its norm before clipping; None, and no step, if not finite."""

    def named_parameters(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Whole parameters, one at a time; see learner.protocol.Learner.named_parameters."""
        ...

    def save(self, folder: Path) -> None:
        """Parameters and optimizer."""

    def load(self, folder: Path) -> None:
        """Undo `save`, with as many ranks."""

    def reside(self, resident: Resident) -> None:
        """Have this on the device, and all else on the host. Only with ALL may it step."""


def adamw(module: nn.Module, config: LearnerConfig) -> torch.optim.AdamW:
    """Matrices decay, norms and biases do not."""
    matrices = [p for p in module.parameters() if p.ndim >= 2]
    vectors = [p for p in module.parameters() if p.ndim < 2]
    return torch.optim.AdamW(
        [{"params": matrices, "weight_decay": config.weight_decay}, {"params": vectors, "weight_decay": 0.0}],
        lr=config.lr,
        betas=config.betas,
        fused=True,
    )


def world() -> tuple[int, int]:
    """(rank, ranks) of the process group; (0, 1) without one."""
    return (distributed.get_rank(), distributed.get_world_size()) if distributed.is_initialized() else (0, 1)


def add_over_ranks(total: torch.Tensor, device: str) -> torch.Tensor:
    """The sum over all ranks, on the CPU. Collective."""
    if world()[1] > 1:
        total = total.to(device)  # nccl adds up nothing on the CPU
        distributed.all_reduce(total)
    return total.cpu()


def save_random_state(folder: Path) -> None:
    """Torch's generators of this rank, under random-<rank>.safetensors."""
    states = {"cpu": torch.get_rng_state()}
    if torch.cuda.is_available():
        states["cuda"] = torch.cuda.get_rng_state()
    save_file(states, folder / f"random-{world()[0]}.safetensors")


def load_random_state(folder: Path) -> None:
    """Undo `save_random_state`."""
    states = load_file(folder / f"random-{world()[0]}.safetensors")
    torch.set_rng_state(states["cpu"])
    if "cuda" in states and torch.cuda.is_available():
        torch.cuda.set_rng_state(states["cuda"])
