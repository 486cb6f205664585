"""The plain torch backend: replicated parameters, one all-reduce of the summed gradient per update.

Data parallelism without a wrapper has no hidden scaling and allows ranks to have different numbers of tokens.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import distributed, nn

from qurl_ray.config.learner import LearnerConfig
from qurl_ray.learner.backend import Resident, clipped_step, make_optimizers, world
from qurl_ray.learner.state import SavedState, save_rows


class TorchBackend:
    """Backend in plain torch; see learner.backend.Backend. Its state is replicated, so rank 0 saves it for all."""

    lockstep = False

    def __init__(self, module: nn.Module, config: LearnerConfig) -> None:
        self.module, self._config = module, config
        self._optimizers = make_optimizers(module, config)
        self._optimizer_of: dict[torch.Tensor, torch.optim.Optimizer] = {
            p: o for o in self._optimizers for group in o.param_groups for p in group["params"]
        }
        self._rank, self._ranks = world()
        if self._ranks > 1:
            for parameter in module.parameters():
                distributed.broadcast(parameter.data, src=0)

    def __call__(self, batch: Any) -> Any:
        return self.module(batch)

    def backward(self, loss: torch.Tensor, *, last: bool) -> None:
        loss.backward()

    def step(self, lr: float, *, scale: float = 1.0) -> float | None:
        self._add_over_ranks()
        return clipped_step(self.module, self._optimizers, lr, scale=scale, clip=self._config.grad_clip)

    def named_parameters(self, *, trained: bool = False) -> Iterator[tuple[str, torch.Tensor]]:
        for name, parameter in self.module.named_parameters():
            if parameter.requires_grad or not trained:
                yield name, parameter

    def _add_over_ranks(self) -> None:
        if self._ranks == 1:
            return
        parameters = [parameter for _, parameter in self.named_parameters(trained=True)]
        # A rank with an empty share has no gradients; it adds zeros.
        grads = [p.grad if p.grad is not None else torch.zeros_like(p) for p in parameters]
        flat = torch.cat([grad.reshape(-1) for grad in grads])
        distributed.all_reduce(flat)
        parts = flat.split([p.numel() for p in parameters])
        for parameter, part in zip(parameters, parts, strict=True):
            parameter.grad = part.view_as(parameter)

    # --- state ---------------------------------------------------------------------------------------------------

    def save(self, folder: Path) -> None:
        if self._rank:
            return
        named = dict(self.named_parameters(trained=True))
        states: dict[str, torch.Tensor] = {}
        for name, parameter in named.items():
            optimizer = self._optimizer_of[parameter]
            for kind, value in optimizer.state.get(parameter, {}).items():  # there is none before the first update
                if not type(optimizer).__module__.startswith("torch."):
                    # In bitsandbytes' states, steps are no tensor, and parameters share some of the tensors.
                    value = torch.as_tensor(value).clone()
                states[f"{name}:{kind}"] = value
        save_rows(folder, named | states)

    @torch.no_grad()
    def load(self, folder: Path) -> None:
        saved = SavedState(folder)
        for name, parameter in self.named_parameters(trained=True):
            parameter.copy_(saved.rows(name))  # in place: results may depend on the alignment of memory
            optimizer = self._optimizer_of[parameter]
            # Torch's AdamW, fused, counts steps where it computes.
            as_number = not type(optimizer).__module__.startswith("torch.")
            for kind in saved.states(name):
                value = saved.rows(f"{name}:{kind}")
                known = int(value) if as_number and kind == "step" else value.clone().to(parameter.device)
                optimizer.state[parameter][kind] = known

    def keep_on_device(self, resident: Resident) -> None:
        own = self._config.device
        for parameter in self.module.parameters():  # gradients are freed after each step
            parameter.data = parameter.data.to(own if resident >= Resident.PARAMETERS else "cpu")
        for optimizer in self._optimizers:
            for state in optimizer.state.values():
                for kind, value in state.items():
                    if isinstance(value, torch.Tensor):
                        state[kind] = value.to(own if resident is Resident.ALL else "cpu")
