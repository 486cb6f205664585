"""The plain torch backend: replicated parameters, one all-reduce of the summed gradient per update.

Data parallelism without a wrapper has no hidden scaling and allows ranks to have different numbers of tokens.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import distributed, nn
from torch.nn.utils import clip_grad_norm_

from qurl_ray.config.learner import LearnerConfig
from qurl_ray.learner.backend import Resident, adamw, world

_MOMENTS = ("exp_avg", "exp_avg_sq", "step")


class TorchBackend:
    """Backend in plain torch; see learner.backend.Backend. Its state is replicated, so rank 0 saves it for all."""

    lockstep = False

    def __init__(self, module: nn.Module, config: LearnerConfig) -> None:
        self.module, self._config = module, config
        self._optimizer = adamw(module, lr=config.lr, betas=config.betas, weight_decay=config.weight_decay)
        self._rank, self._ranks = world()
        if self._ranks > 1:
            for parameter in module.parameters():
                distributed.broadcast(parameter.data, src=0)

    def __call__(self, batch: Any) -> Any:
        return self.module(batch)

    def backward(self, loss: torch.Tensor, *, last: bool) -> None:
        loss.backward()

    def step(self, lr: float) -> float | None:
        self._add_over_ranks()
        norm = float(clip_grad_norm_(self.module.parameters(), self._config.grad_clip))
        finite = norm < float("inf")  # False for nan
        if finite:
            for group in self._optimizer.param_groups:
                group["lr"] = lr
            self._optimizer.step()
        self._optimizer.zero_grad(set_to_none=True)
        return norm if finite else None

    def named_parameters(self) -> Iterator[tuple[str, torch.Tensor]]:
        yield from self.module.named_parameters()

    def _add_over_ranks(self) -> None:
        if self._ranks == 1:
            return
        parameters = list(self.module.parameters())
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
        named = dict(self.named_parameters())
        moments = {
            f"{name}:{kind}": self._optimizer.state[parameter][kind]
            for name, parameter in named.items()
            for kind in _MOMENTS
            if parameter in self._optimizer.state  # there is no state before the first update
        }
        save_file({name: p.detach() for name, p in named.items()}, folder / "parameters.safetensors")
        save_file(moments, folder / "optimizer.safetensors")

    @torch.no_grad()
    def load(self, folder: Path) -> None:
        parameters = load_file(folder / "parameters.safetensors")
        moments = load_file(folder / "optimizer.safetensors")
        for name, parameter in self.named_parameters():
            parameter.copy_(parameters[name])  # in place: results may depend on the alignment of memory
            if f"{name}:step" in moments:
                self._optimizer.state[parameter] = {
                    # AdamW keeps its step count on the CPU unless it is fused on a GPU.
                    kind: moments[f"{name}:{kind}"].clone().to(parameter.device)
                    for kind in _MOMENTS
                }

    def reside(self, resident: Resident) -> None:
        own = self._config.device
        for parameter in self.module.parameters():  # gradients are freed after each step
            parameter.data = parameter.data.to(own if resident >= Resident.PARAMETERS else "cpu")
        for state in self._optimizer.state.values():
            for kind in _MOMENTS:
                state[kind] = state[kind].to(own if resident is Resident.ALL else "cpu")
