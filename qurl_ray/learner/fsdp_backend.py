"""The FSDP2 backend: torch's fully_shard shards parameters, gradients and optimizer over ranks, from the first byte.

    model without weights ─► fully_shard: a rank owns some rows of every parameter ─► it reads only these from the files

A block's parameters are gathered while it computes, and those outside of blocks (embedding, last norm, head) for a
whole pass. Gradients are added over ranks, not averaged, as losses are already divided for the whole update.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor

from qurl_ray.config.learner import LearnerConfig
from qurl_ray.learner.backend import ReadRows, Resident, clipped_step, make_optimizers, world
from qurl_ray.learner.expert_parallel import divide_experts
from qurl_ray.learner.state import SavedState, own_rows, save_rows
from qurl_ray.policy.experts import mixtures


def shard(
    module: nn.Module, device: str, model: nn.Module, rows: ReadRows | None, *, expert_parallel: bool = False
) -> None:
    """Shard a module over all ranks, in place. Collective.

    Args:
        model: part of the module, whose weights `rows` reads by the names that they have in it.
        rows: None if the weights are there.
        expert_parallel: see learner.expert_parallel.
    """
    mesh, left = init_device_mesh(device, (world()[1],)), set[nn.Parameter]()
    if expert_parallel:
        left = {parameter for mixture in mixtures(module) for parameter in divide_experts(mixture, mesh)}
    # Experts are gathered with their block: ranks compute different ones, and must make the same collective calls.
    inner = [mixture.experts for mixture in mixtures(module)]
    lists = [part for part in module.modules() if isinstance(part, nn.ModuleList) and part not in inner]
    for block in [block for blocks in reversed(lists) for block in blocks]:  # inner ones first
        fully_shard(block, mesh=mesh, ignored_params=left)
    fully_shard(module, mesh=mesh, ignored_params=left)
    for part in _parts(module):
        part.set_gradient_divide_factor(1.0)
        part.set_force_sum_reduction_for_comms(True)  # gloo has no other
        if not any(parameter.requires_grad for parameter in module.parameters()):
            part.set_reshard_after_forward(True)  # else tensors outside of blocks would stay for a backward pass
    if rows is None:
        return
    # Not to_empty, which would also empty the buffers that a model computes from its settings.
    module._apply(lambda tensor: torch.empty_like(tensor, device=device) if tensor.is_meta else tensor)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if isinstance(parameter, DTensor):  # the head of a value model's body is no part of the module
                parameter.to_local().copy_(rows(name, *own_rows(len(parameter), *world())))


def rest(module: nn.Module) -> None:
    """Free the tensors that a pass gathered: afterwards, the module's parameters are the rows that this rank owns."""
    for part in _parts(module):
        part.reshard()


class FsdpBackend:
    """Backend with FSDP2; see learner.backend.Backend. It needs a process group, even for one rank.

    Args:
        model, rows: see `shard`.
    """

    lockstep = True  # parameters are gathered, and gradients reduced, in every pass

    def __init__(
        self, module: nn.Module, config: LearnerConfig, model: nn.Module, rows: ReadRows | None = None
    ) -> None:
        shard(module, config.device, model, rows, expert_parallel=config.expert_parallel)
        self.module, self._config = module, config
        (self._optimizer,) = make_optimizers(module, config)

    def __call__(self, batch: Any) -> Any:
        result = self.module(batch)
        if not torch.is_grad_enabled():
            rest(self.module)
        return result

    def backward(self, loss: torch.Tensor, *, last: bool) -> None:
        loss.backward()

    def step(self, lr: float, *, scale: float = 1.0) -> float | None:
        rest(self.module)
        return clipped_step(self.module, [self._optimizer], lr, scale=scale, clip=self._config.grad_clip)

    def named_parameters(self, *, trained: bool = False) -> Iterator[tuple[str, torch.Tensor]]:
        for name, parameter in self._own(trained=trained):
            yield name, parameter.detach().full_tensor()

    def _own(self, *, trained: bool = True) -> Iterator[tuple[str, Any]]:
        rest(self.module)
        for name, parameter in self.module.named_parameters():
            if parameter.requires_grad or not trained:
                yield name, parameter

    # --- state ---------------------------------------------------------------------------------------------------

    def save(self, folder: Path) -> None:
        rank, ranks = world()
        tensors: dict[str, torch.Tensor] = {}
        for name, parameter in self._own():
            tensors[name] = parameter.to_local()
            for kind, value in self._optimizer.state.get(parameter, {}).items():  # there is none before the first step
                tensors[f"{name}:{kind}"] = value.to_local() if isinstance(value, DTensor) else value
        save_rows(folder, tensors, rank=rank, ranks=ranks)

    @torch.no_grad()
    def load(self, folder: Path) -> None:
        saved = SavedState(folder)
        for name, parameter in self._own():
            own = own_rows(len(parameter), *world())
            parameter.to_local().copy_(saved.rows(name, *own))
            for kind in saved.states(name):
                value = saved.rows(f"{name}:{kind}", *own).to(parameter.device)
                if value.ndim:
                    whole: Any = torch.zeros_like(parameter)
                    whole.to_local().copy_(value)
                    value = whole
                self._optimizer.state[parameter][kind] = value

    def keep_on_device(self, resident: Resident) -> None:
        rest(self.module)
        own = self._config.device
        if own == "cpu":
            return
        self.module.to(own if resident >= Resident.PARAMETERS else "cpu")
        for state in self._optimizer.state.values():
            for kind, value in state.items():
                state[kind] = value.to(own if resident is Resident.ALL else "cpu")


def _parts(module: nn.Module) -> list[Any]:
    return [part for part in module.modules() if isinstance(part, FSDPModule)]
