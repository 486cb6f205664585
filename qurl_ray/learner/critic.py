"""The value model of PPO: it estimates an answer's reward at each of its tokens, and learns from what came."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import distributed, nn
from transformers import PreTrainedModel

from qurl_ray.config.models import LearnerConfig
from qurl_ray.learner.backend import Backend, world
from qurl_ray.learner.batching import Tensors
from qurl_ray.learner.scorer import on_device
from qurl_ray.policy.logprobs import answer_states
from qurl_ray.rl.reduce import merge
from qurl_ray.rl.value import gae, moments, value_loss, whiten


@dataclass(frozen=True, slots=True, kw_only=True)
class Credit:
    """How rewards become advantages per token."""

    lr: float
    gamma: float
    lam: float
    value_clip: float | None


class ValueModel(nn.Module):
    """A language model whose head gives one number; zeros at first, so that no advantage begins with noise."""

    def __init__(self, body: PreTrainedModel, config: LearnerConfig) -> None:
        super().__init__()
        self.body = on_device(body.base_model, config)
        self.head = nn.Linear(body.config.hidden_size, 1, bias=False, device=config.device)
        nn.init.zeros_(self.head.weight)
        self._packing, self._autocast, self._device = config.packing, config.compute == "bfloat16", config.device

    def forward(self, batch: Tensors) -> torch.Tensor:
        """float32 [B, T]: value of the state before each of the answer's tokens, 0 elsewhere."""
        with torch.autocast(self._device, torch.bfloat16, enabled=self._autocast):
            lengths_B = batch.lengths_B if self._packing else None
            states_Nd = answer_states(self.body, batch.token_ids_BT, batch.mask_BT, lengths_B)
        values_BT = torch.zeros(batch.mask_BT.shape, dtype=torch.float32, device=states_Nd.device)
        values_BT[batch.mask_BT] = self.head(states_Nd.float())[:, 0]
        return values_BT


@dataclass(frozen=True, slots=True)
class _Estimate:
    """Of one pass, before the step's first update; all [B, T]."""

    batch: Tensors
    values_BT: torch.Tensor
    advantages_BT: torch.Tensor
    returns_BT: torch.Tensor


class Critic:
    """Holds a step's estimates between the passes; passes are numbered as the policy's."""

    def __init__(self, backend: Backend, credit: Credit, *, device: str) -> None:
        self.backend, self._credit, self._device = backend, credit, device
        self._estimates: list[list[_Estimate]] = []

    @torch.no_grad()
    def estimate(self, mini_batches: Sequence[Sequence[Tensors]]) -> None:
        """Values, returns, and advantages whitened over all tokens of the step. Collective."""
        self._estimates = [[self._one(batch) for batch in passes] for passes in mini_batches]
        everything = [estimate for passes in self._estimates for estimate in passes]
        total = torch.zeros(3, dtype=torch.float64)  # what a rank without samples adds
        for e in everything:
            total += moments(e.advantages_BT, e.batch.mask_BT)
        if world()[1] > 1:
            total = total.to(self._device)  # nccl adds up nothing on the CPU
            distributed.all_reduce(total)
        for e in everything:
            e.advantages_BT.copy_(whiten(e.advantages_BT, e.batch.mask_BT, total))

    def advantages(self, mini_batch: int, index: int) -> torch.Tensor:
        """[B, T] of one pass."""
        return self._estimates[mini_batch][index].advantages_BT

    def update(self, mini_batch: int, tokens: int, schedule: float) -> dict[str, float]:
        """One step of the value model on a mini-batch. Returns metric sums.

        Args:
            tokens: of the whole update, all ranks.
            schedule: share of the learning rate.
        """
        found, passes = [], self._estimates[mini_batch]
        for index, e in enumerate(passes):
            values_BT = self.backend(e.batch)
            loss, sums = value_loss(
                values_BT, e.values_BT, e.returns_BT, e.batch.mask_BT, tokens=tokens, clip=self._credit.value_clip
            )
            self.backend.backward(loss, last=index + 1 == len(passes))
            found.append({name: float(value) for name, value in sums.items()} | {"value_loss": float(loss.detach())})
        skipped = self.backend.step(self._credit.lr * schedule) is None
        return merge([*found, {"value_skipped": float(skipped)}])

    def _one(self, batch: Tensors) -> _Estimate:
        values_BT = self.backend(batch)
        advantages_BT, returns_BT = gae(
            batch.rewards_B, values_BT, batch.mask_BT, gamma=self._credit.gamma, lam=self._credit.lam
        )
        return _Estimate(batch, values_BT, advantages_BT, returns_BT)
