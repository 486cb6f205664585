"""The DeepSpeed backend: ZeRO shards optimizer, gradients and parameters over the ranks.

DeepSpeed averages gradients over ranks and divides them by accumulation steps. Here, losses are already divided for the
whole update, so gradients must be added. Therefore the loss is multiplied by the number of ranks, accumulation steps
stay 1, and the last micro-batch of an update is marked explicitly.
"""

import logging
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import deepspeed
import torch
from deepspeed.ops.adam import FusedAdam
from deepspeed.runtime.zero import GatheredParameters
from deepspeed.runtime.zero.offload_config import OffloadStateTypeEnum
from deepspeed.utils import (
    lazy_init_hp_params_optimizer_state,
    safe_get_full_optimizer_state,
    safe_get_local_fp32_param,
    safe_get_local_optimizer_state,
    safe_set_local_fp32_param,
    safe_set_local_optimizer_state,
    set_z3_leaf_modules,
)
from torch import nn
from torch.nn.functional import pad

from qurl_ray.config.learner import LearnerConfig
from qurl_ray.learner.backend import Resident, make_optimizers, world
from qurl_ray.learner.state import SavedState, own_rows, save_rows
from qurl_ray.policy.experts import MixtureMlp

_OPTIMIZERS = {OffloadStateTypeEnum.hp_params, OffloadStateTypeEnum.optim_states}
_AWAY = {
    Resident.ALL: set(),
    Resident.PARAMETERS: set(OffloadStateTypeEnum) - {OffloadStateTypeEnum.lp_params},
    Resident.NOTHING: set(OffloadStateTypeEnum),
}

_BUCKET = 50_000_000
"""Numbers in the buffer in which gradients are collected until they are reduced. Every rank keeps it; DeepSpeed's own
setting is ten times as large."""

warnings.filterwarnings("ignore", message=".*is deprecated. Please use `torch.distributed", category=FutureWarning)
logging.getLogger("DeepSpeed").setLevel(logging.WARNING)
# On CPUs DeepSpeed would compile an all-reduce over shared memory at the start of a first run. gloo is used instead.
deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False


class DeepSpeedBackend:
    """Backend with DeepSpeed ZeRO; see learner.backend.Backend. It needs a process group, even for one rank.

    Every rank loads the whole model before it is sharded, so a node's memory limits the model's size; FSDP2 does not.
    """

    lockstep = True  # ZeRO reduces gradients, and with stage 3 gathers parameters, in every pass

    def __init__(self, module: nn.Module, config: LearnerConfig) -> None:
        self._config, self._ranks, self.module = config, world()[1], module
        (optimizer,) = make_optimizers(module, config)
        # Stage 3 offloads masters and moments only of DeepSpeed's own Adam, which is compiled and for CUDA.
        self._stay = _OPTIMIZERS if config.zero_stage == 3 and config.device == "cpu" else set()
        if config.zero_stage == 3:
            # Ranks compute other experts: the parameters of all are gathered at once.
            set_z3_leaf_modules(module, [MixtureMlp], raise_if_not_found=False)
        own_adam = config.offload_while_waiting and config.zero_stage == 3 and not config.offload_optimizer
        if own_adam and config.device == "cuda" and config.optimizer == "adamw":
            optimizer = FusedAdam(optimizer.param_groups, lr=config.lr, betas=config.betas)
        self._engine, *_ = deepspeed.initialize(
            model=module, optimizer=optimizer, config=zero_settings(config), dist_init_required=False
        )

    def __call__(self, batch: Any) -> Any:
        return self._engine(batch)

    def backward(self, loss: torch.Tensor, *, last: bool) -> None:
        self._engine.set_gradient_accumulation_boundary(last)
        self._engine.backward(loss * self._ranks, scale_wrt_gas=False)

    def step(self, lr: float, *, scale: float = 1.0) -> float | None:
        assert scale == 1, "its gradients cannot be divided (config.learner)"
        for group in self._engine.optimizer.param_groups:
            group["lr"] = lr
        if self._config.zero_stage:
            self._engine.step()
            # ZeRO checks the gradient itself, and does not change the parameters if it is not finite.
            return None if self._engine.optimizer.overflow else float(self._engine.get_global_grad_norm())
        # At stage 0, DeepSpeed neither checks that gradients are finite nor returns their norm.
        grads = [p.grad for p in self._engine.module.parameters() if p.grad is not None]
        norm = float(torch.nn.utils.get_total_norm(grads))
        if not norm < float("inf"):  # includes nan
            self._engine.optimizer.zero_grad()
            return None
        self._engine.step()
        return norm

    def named_parameters(self, *, trained: bool = False) -> Iterator[tuple[str, torch.Tensor]]:
        for name, parameter in self._engine.module.named_parameters():
            if trained and not parameter.requires_grad:
                continue
            with GatheredParameters([parameter], enabled=self._config.zero_stage == 3):
                yield name, parameter

    # --- state ---------------------------------------------------------------------------------------------------

    def save(self, folder: Path) -> None:
        """Write this rank's rows. Not DeepSpeed's own form, which is pickles for one number of ranks."""
        rank, ranks = world()
        tensors: dict[str, torch.Tensor] = {}
        self._link_states()
        for name, parameter in self.named_parameters(trained=True):
            own = slice(*own_rows(len(parameter), rank, ranks))
            tensors[name] = parameter.detach()[own].to("cpu", copy=True)
            for kind, value in self._states_of(parameter).items():
                tensors[f"{name}:{kind}"] = (value[own] if value.ndim else value).to("cpu", copy=True)
        save_rows(folder, tensors, rank=rank, ranks=ranks)

    @torch.no_grad()
    def load(self, folder: Path) -> None:
        saved = SavedState(folder)
        for name, parameter in self._engine.module.named_parameters():
            if not parameter.requires_grad:
                continue
            value = saved.rows(name)
            with GatheredParameters([parameter], modifier_rank=0, enabled=self._config.zero_stage == 3):
                parameter.copy_(value)
            states = {kind: saved.rows(f"{name}:{kind}") for kind in saved.states(name)}
            if not self._config.zero_stage:
                self._engine.optimizer.state[parameter] |= {kind: own.clone() for kind, own in states.items()}
                continue
            self._make_states(states)
            self._set_flat(parameter, value)
            for kind, own in states.items():
                if own.ndim:
                    self._set_flat(parameter, own, kind)

    def _states_of(self, parameter: torch.Tensor) -> dict[str, torch.Tensor]:
        """Return the optimizer's whole states of a parameter; none before the first step. Collective."""
        optimizer = self._engine.optimizer
        if not self._config.zero_stage:
            return dict(optimizer.state.get(parameter, {}))
        flat = optimizer.optimizer.state.get(self._flats()[0], {})
        return {
            kind: safe_get_full_optimizer_state(parameter, kind) if value.ndim else value
            for kind, value in flat.items()
        }

    def _flats(self) -> list[torch.Tensor]:
        """Return this rank's parts of the parameters, which DeepSpeed joins and gives to the optimizer."""
        optimizer = self._engine.optimizer
        return (
            optimizer.fp32_partitioned_groups_flat
            if self._config.zero_stage == 3
            else optimizer.single_partition_of_fp32_groups
        )

    def _make_states(self, like: dict[str, torch.Tensor]) -> None:
        """Give the optimizer such states where it has none, as it does in its first step."""
        optimizer = self._engine.optimizer
        for flat in self._flats():
            state = optimizer.optimizer.state[flat]
            for kind, value in like.items():
                if kind not in state:
                    state[kind] = torch.zeros_like(flat) if value.ndim else value.clone()
                elif not value.ndim:
                    state[kind].copy_(value)
        self._link_states()

    def _link_states(self) -> None:
        """Let DeepSpeed's functions find the states of parameters at stages 1 and 2. It does so in its first step, when
        not all of them are there."""
        if self._config.zero_stage in (1, 2):
            optimizer = self._engine.optimizer
            for parameters, flat in zip(optimizer.bit16_groups, self._flats(), strict=True):
                lazy_init_hp_params_optimizer_state(parameters, flat, optimizer.optimizer.state)

    def _set_flat(self, parameter: Any, value: torch.Tensor, kind: str | None = None) -> None:
        """Set this rank's part of a parameter's master, or of a state, from the whole."""
        if self._config.zero_stage < 3:
            parameter.set_full_hp_param(value, kind)
            return
        part = safe_get_local_optimizer_state(parameter, kind) if kind else safe_get_local_fp32_param(parameter)
        rank, ranks = world()
        # The last parts of a parameter are padded; DeepSpeed's own function for whole values does not pad.
        flat = pad(value.flatten(), (0, len(part) * ranks - value.numel()))[len(part) * rank :][: len(part)]
        if kind:
            safe_set_local_optimizer_state(parameter, flat, kind)
        else:
            safe_set_local_fp32_param(parameter, flat)

    def keep_on_device(self, resident: Resident) -> None:
        if not self._config.zero_stage:
            return
        away, noted = _AWAY[resident] - self._stay, self._engine.optimizer.offloaded_states
        if noted - away:
            # DeepSpeed reloads all states in this set: those that are to stay away are removed from it meanwhile.
            kept = noted & away
            noted -= kept
            self._engine.reload_states()
            noted |= kept
        if away - noted:
            self._engine.offload_states(include=away, pin_memory=self._config.device == "cuda")


def zero_settings(config: LearnerConfig) -> dict[str, Any]:
    """Return the settings that DeepSpeed is initialized with."""
    zero: dict[str, Any] = {
        "stage": config.zero_stage,
        "overlap_comm": config.device == "cuda",
        "reduce_bucket_size": _BUCKET,
    }
    if config.offload_optimizer:
        zero["offload_optimizer"] = {"device": "cpu", "pin_memory": config.device == "cuda"}
    return {
        "train_micro_batch_size_per_gpu": 1,  # not used: batches are made by this package
        "gradient_accumulation_steps": 1,
        "gradient_clipping": config.grad_clip,
        "zero_optimization": zero,
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,  # torch's fused AdamW needs no compiler
        "steps_per_print": 10**9,
    }
