"""The plain torch learner: replicated parameters, one all-reduce of the summed gradient per update.

Losses leave the objective divided by global denominators, so gradients of ranks are added, never averaged. Data
parallelism without a wrapper has no hidden scaling and allows ranks to have different numbers of tokens.
"""

import time
from collections.abc import Iterator, Sequence

import torch
from torch import distributed
from torch.nn.utils import clip_grad_norm_
from transformers import PreTrainedModel

from qurl_ray.config.models import LearnerConfig
from qurl_ray.learner.batching import MiniBatch, Tensors, to_tensors
from qurl_ray.learner.protocol import StepResult
from qurl_ray.policy.logprobs import token_logprobs
from qurl_ray.rl.objective import ObjectiveSettings, objective
from qurl_ray.rl.reduce import merge
from qurl_ray.types import Trajectory


class TorchLearner:
    """See learner.protocol.Learner.

    Args:
        temperature: of the rollouts; the learner's log-probs are taken at the same.
        total_updates: at which the learning rate has fallen to its final share.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        config: LearnerConfig,
        settings: ObjectiveSettings,
        *,
        temperature: float,
        total_updates: int,
    ) -> None:
        self._model, self._config, self._settings, self._temperature = model, config, settings, temperature
        self._total_updates = total_updates
        matrices = [p for p in model.parameters() if p.ndim >= 2]
        vectors = [p for p in model.parameters() if p.ndim < 2]  # norms and biases do not decay
        self._optimizer = torch.optim.AdamW(
            [{"params": matrices, "weight_decay": config.weight_decay}, {"params": vectors, "weight_decay": 0.0}],
            lr=config.lr,
            betas=config.betas,
            fused=True,
        )
        self._updates = 0
        self._ranks = distributed.get_world_size() if distributed.is_initialized() else 1
        if self._ranks > 1:
            for parameter in model.parameters():
                distributed.broadcast(parameter.data, src=0)

    def named_parameters(self) -> Iterator[tuple[str, torch.Tensor]]:
        yield from self._model.named_parameters()

    def learn(self, mini_batches: Sequence[MiniBatch]) -> StepResult:
        started = time.perf_counter()
        # The first update's proximal log-probs are its own, detached; the others' are taken before anything moves.
        prox = [self._prox(mini_batch) if index else None for index, mini_batch in enumerate(mini_batches)]
        between = time.perf_counter()
        sums, norms, lr = [], [], 0.0
        for mini_batch, prox_of_batch in zip(mini_batches, prox, strict=True):
            batch_sums, norm, lr = self._update(mini_batch, prox_of_batch)
            sums.append(batch_sums)
            norms.append(norm)
        finite = [norm for norm in norms if norm is not None]
        return StepResult(
            sums=merge(sums),
            seconds={"logprob": between - started, "update": time.perf_counter() - between},
            grad_norm=finite[-1] if finite else float("nan"),
            lr=lr,
            skipped_updates=len(norms) - len(finite),
        )

    @torch.no_grad()
    def _prox(self, mini_batch: MiniBatch) -> list[torch.Tensor]:
        return [self._logprobs(to_tensors(samples)) for samples in mini_batch.micro_batches if samples]

    def _logprobs(self, batch: Tensors) -> torch.Tensor:
        return token_logprobs(self._model, batch.token_ids_BT, batch.mask_BT, self._temperature)

    def _update(
        self, mini_batch: MiniBatch, prox: list[torch.Tensor] | None
    ) -> tuple[dict[str, float], float | None, float]:
        """One optimizer step. Returns metric sums, the gradient's norm (None if not finite: no step), the rate."""
        sums = []
        filled = [samples for samples in mini_batch.micro_batches if samples]
        for index, samples in enumerate(filled):
            sums.append(self._backward(samples, mini_batch, prox[index] if prox else None))
        self._add_over_ranks()
        norm = float(clip_grad_norm_(self._model.parameters(), self._config.grad_clip))
        lr = learning_rate(self._config, self._updates, self._total_updates)
        finite = norm < float("inf")  # False for nan
        if finite:
            for group in self._optimizer.param_groups:
                group["lr"] = lr
            self._optimizer.step()
            self._updates += 1
        self._optimizer.zero_grad(set_to_none=True)
        return merge(sums), norm if finite else None, lr

    def _backward(
        self, samples: Sequence[Trajectory], mini_batch: MiniBatch, prox: torch.Tensor | None
    ) -> dict[str, float]:
        batch = to_tensors(samples)
        logprobs = self._logprobs(batch)
        loss, sums = objective(
            logprobs,
            logprobs.detach() if prox is None else prox,
            batch.behavior_BT,
            batch.advantages_B,
            batch.mask_BT,
            mini_batch.denominators,
            self._settings,
        )
        loss.backward()
        return {name: float(value) for name, value in sums.items()} | {"loss": float(loss.detach())}

    def _add_over_ranks(self) -> None:
        if self._ranks == 1:
            return
        parameters = list(self._model.parameters())
        # A rank whose share was empty has no gradients; it adds zeros.
        grads = [p.grad if p.grad is not None else torch.zeros_like(p) for p in parameters]
        flat = torch.cat([grad.reshape(-1) for grad in grads])
        distributed.all_reduce(flat)
        parts = flat.split([p.numel() for p in parameters])
        for parameter, part in zip(parameters, parts, strict=True):
            parameter.grad = part.view_as(parameter)


def learning_rate(config: LearnerConfig, updates: int, total_updates: int) -> float:
    """Rate of the next update after `updates` of them: linear warm-up times a linear fall to the final share."""
    warm = min(1.0, (updates + 1) / max(1, config.warmup_steps))
    progress = min(1.0, updates / max(1, total_updates - 1))
    return config.lr * warm * (1 - (1 - config.lr_final_share) * progress)
