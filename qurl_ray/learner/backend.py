"""The interface of a backend, which computes gradients and optimizer steps on all ranks; code that backends share."""

from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from enum import IntEnum
from pathlib import Path
from typing import Any, Protocol

import torch
from safetensors.torch import load_file, save_file
from torch import distributed, nn
from torch.distributed.tensor import DTensor
from torch.nn.utils import clip_grad_norm_

from qurl_ray.config.learner import LearnerConfig
from qurl_ray.errors import ConfigError
from qurl_ray.policy.sequence import SequenceGroup

ReadRows = Callable[[str, int, int], torch.Tensor]
"""Callback that reads rows of a parameter, (name, first, one after the last), float32."""


class Resident(IntEnum):
    """Part of a learner that is on its device; the rest is on the host."""

    NOTHING = 0
    PARAMETERS = 1
    """Parameters of the policy, which a sync reads and a forward pass needs."""
    ALL = 2
    """Also gradients, the optimizer's states, a value model and a reference."""


class Backend(Protocol):
    """A module with its optimizer, on all ranks, which must make the same calls.

    Gradients are summed over ranks, and over all passes since the last step.
    """

    module: nn.Module
    """The module that the backend was given."""
    lockstep: bool
    """True if each pass is a collective, so that a rank without samples must make it too."""

    def __call__(self, batch: Any) -> Any:
        """Return the module's output: a tensor, or a tuple of tensors."""
        ...

    def backward(self, loss: torch.Tensor, *, last: bool) -> None:
        """Add the gradient of the loss. `last` is True for the last pass before a step."""

    def step(self, lr: float, *, scale: float = 1.0) -> float | None:
        """Divide the gradient by `scale`, clip it, make a step, clear the gradient. Return its norm before clipping.

        If the norm is not finite, make no step and return None.
        """

    def named_parameters(self, *, trained: bool = False) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield whole parameters, one at a time; see learner.protocol.Learner.named_parameters."""
        ...

    def save(self, folder: Path) -> None:
        """Write the parameters that are trained, and the state of the optimizer."""

    def load(self, folder: Path) -> None:
        """Restore the state that `save` wrote, with any number of ranks, and with any backend (learner.state)."""

    def keep_on_device(self, resident: Resident) -> None:
        """Keep this part on the device, and the rest on the host. `step` needs ALL."""


def make_optimizers(module: nn.Module, config: LearnerConfig) -> list[torch.optim.Optimizer]:
    """Return the optimizers that together update all parameters with gradients, with weight decay for matrices only.

    Raises:
        ConfigError: bitsandbytes is missing.
    """
    trained = {name: p for name, p in module.named_parameters() if p.requires_grad}
    matrices = {name: p for name, p in trained.items() if p.ndim >= 2}
    vectors = [p for p in trained.values() if p.ndim < 2]
    made: list[torch.optim.Optimizer] = []
    if config.optimizer == "muon":
        of_blocks = {}
        for name, matrix in matrices.items():
            owner = name.rpartition(".")[0]
            # Muon is for the matrices between the embedding, whose rows belong to tokens, and the heads.
            if not (isinstance(module.get_submodule(owner), nn.Embedding) or owner.endswith("head")):
                of_blocks[name] = matrix
        made.append(
            torch.optim.Muon(
                list(of_blocks.values()),
                lr=config.lr,
                weight_decay=config.weight_decay,
                adjust_lr_fn="match_rms_adamw",
            )
        )
        matrices = {name: p for name, p in matrices.items() if name not in of_blocks}
    groups = [
        {"params": list(matrices.values()), "weight_decay": config.weight_decay},
        {"params": vectors, "weight_decay": 0.0},
    ]
    groups = [group for group in groups if group["params"]]
    if config.optimizer == "adamw_8bit":
        try:
            from bitsandbytes.optim import AdamW8bit
        except ImportError as error:
            raise ConfigError(f"learner.optimizer=adamw_8bit needs bitsandbytes: pip install it ({error})") from None
        return [AdamW8bit(groups, lr=config.lr, betas=config.betas)]
    if not groups:  # all that is trained are matrices of blocks
        return made
    return [*made, torch.optim.AdamW(groups, lr=config.lr, betas=config.betas, fused=True)]


def clipped_step(
    module: nn.Module, optimizers: Sequence[torch.optim.Optimizer], lr: float, *, scale: float, clip: float
) -> float | None:
    """Make a step of Backend with gradients that are added over ranks already, in torch's own tensors."""
    if scale != 1:
        for parameter in module.parameters():
            if parameter.grad is not None:
                parameter.grad.div_(scale)
    total = clip_grad_norm_(module.parameters(), clip)
    norm = float(total.full_tensor() if isinstance(total, DTensor) else total)
    finite = norm < float("inf")  # False for nan
    if finite:
        for optimizer in optimizers:
            for group in optimizer.param_groups:
                group["lr"] = lr
            optimizer.step()
    module.zero_grad(set_to_none=True)
    return norm if finite else None


def world() -> tuple[int, int]:
    """Return (rank, number of ranks) of the process group; (0, 1) without one."""
    return (distributed.get_rank(), distributed.get_world_size()) if distributed.is_initialized() else (0, 1)


def add_over_ranks(total: torch.Tensor, config: LearnerConfig) -> torch.Tensor:
    """Return the sum over all samples, on the CPU, from each rank's sum over its own. Collective."""
    if world()[1] > 1:
        total = total.to(config.device)  # nccl cannot reduce tensors on the CPU
        distributed.all_reduce(total)
    return total.cpu() / config.sequence_parallel  # the ranks of a sequence group have the same samples


def sequence_group(config: LearnerConfig) -> SequenceGroup | None:
    """Return the ranks that share the tokens of this rank's samples; None if it has them alone. Collective."""
    rank, ranks = world()
    each = config.sequence_parallel
    if each == 1:
        return None
    members = [list(range(first, first + each)) for first in range(0, ranks, each)]
    limit = timedelta(seconds=config.timeout_s)
    process_group, _ = distributed.new_subgroups_by_enumeration(members, timeout=limit)
    return SequenceGroup(process_group=process_group, rank=rank % each, ranks=each)


def save_random_state(folder: Path) -> None:
    """Write the states of this rank's torch generators to random-<rank>.safetensors."""
    states = {"cpu": torch.get_rng_state()}
    if torch.cuda.is_available():
        states["cuda"] = torch.cuda.get_rng_state()
    save_file(states, folder / f"random-{world()[0]}.safetensors")


def load_random_state(folder: Path) -> None:
    """Restore the states that `save_random_state` wrote. A rank that has none, because there were fewer, keeps its
    own: nothing that the learner computes is random."""
    path = folder / f"random-{world()[0]}.safetensors"
    if not path.is_file():
        return
    states = load_file(path)
    torch.set_rng_state(states["cpu"])
    if "cuda" in states and torch.cuda.is_available():
        torch.cuda.set_rng_state(states["cuda"])
