"""The value model of PPO: it estimates the rewards to come at each token, and learns from the actual ones."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import nn
from transformers import PreTrainedModel

from qurl_ray.config.learner import LearnerConfig
from qurl_ray.learner.backend import Backend, add_over_ranks, world
from qurl_ray.learner.batching import Tensors
from qurl_ray.learner.passes import Pass, Penalty
from qurl_ray.learner.scorer import casting, on_device, placed, states_before_answers, value_head
from qurl_ray.policy.sequence import SequenceGroup
from qurl_ray.rl.objective import Denominators
from qurl_ray.rl.ratios import Sums
from qurl_ray.rl.reduce import as_floats, merge, moments
from qurl_ray.rl.value import gae, turn_gae, value_loss, whiten


@dataclass(frozen=True, slots=True, kw_only=True)
class Credit:
    """Settings that determine how rewards become advantages per token."""

    lr: float
    gamma: float
    lam: float
    value_clip: float | None
    coef: float = 0.1
    """Coefficient of the value loss, if that is part of the policy's loss."""
    by_turn: bool = False
    """True if a step of credit is a turn, and not a token: only the values at the starts of turns count then."""


class ValueModel(nn.Module):
    """Language model whose head returns one number per state. Arguments as of a Scorer."""

    def __init__(self, body: PreTrainedModel, config: LearnerConfig, sequence: SequenceGroup | None = None) -> None:
        super().__init__()
        self._sequence = sequence
        self.body = on_device(body.base_model, config.device, checkpointing=config.gradient_checkpointing)
        self.head = value_head(body, config.device)
        self._config = config

    def forward(self, batch: Tensors) -> torch.Tensor:
        """Return the value of the state before each token of the answer, 0 elsewhere, float32 [B, T]."""
        with casting(self._config):
            states_md, division = states_before_answers(self.body, batch, self._config, self._sequence)
        return placed(self.head(states_md.float())[:, 0], batch.mask_BT, division)


class Critic:
    """Computes advantages per token from estimated values, and trains the value model.

    Args:
        backend: runs a ValueModel; None if the policy has a value head, whose loss is then part of the policy's loss.
    """

    def __init__(self, backend: Backend | None, credit: Credit, config: LearnerConfig) -> None:
        self.backend, self.coef = backend, credit.coef
        self._credit, self._config = credit, config

    @torch.no_grad()
    def estimate(self, passes: Sequence[Pass], penalty: Penalty | None) -> None:
        """Write values, returns, and advantages (whitened over all tokens of the step) into `passes`. Collective."""
        total = torch.zeros(3, dtype=torch.float64)  # a rank without samples adds zeros
        for pass_ in passes:
            if self.backend:
                pass_.values_BT = self.backend(pass_.batch)
            assert pass_.values_BT is not None
            rewards_BT, mask_BT = pass_.batch.rewards_BT, pass_.batch.mask_BT
            if penalty:
                rewards_BT = rewards_BT - penalty.of(pass_)
            discounts = {"gamma": self._credit.gamma, "lam": self._credit.lam}
            if self._credit.by_turn:
                estimates = turn_gae(rewards_BT, pass_.values_BT, mask_BT, pass_.batch.starts_BT, **discounts)
            else:
                estimates = gae(rewards_BT, pass_.values_BT, mask_BT, **discounts)
            pass_.advantages, pass_.returns_BT = estimates
            total += moments(pass_.advantages, mask_BT)
        total = add_over_ranks(total, self._config)
        for pass_ in passes:
            pass_.advantages = whiten(pass_.advantages, pass_.batch.mask_BT, total)

    def loss(self, pass_: Pass, values_BT: torch.Tensor, denominators: Denominators) -> tuple[torch.Tensor, Sums]:
        """Return the value loss of a pass, and metric sums."""
        assert pass_.values_BT is not None
        assert pass_.returns_BT is not None
        mask_BT, tokens = pass_.batch.mask_BT, denominators.tokens
        if self._credit.by_turn:
            mask_BT, tokens = pass_.batch.starts_BT, denominators.turns
        return value_loss(
            values_BT, pass_.values_BT, pass_.returns_BT, mask_BT, tokens=tokens, clip=self._credit.value_clip
        )

    def update(self, passes: Sequence[Pass], denominators: Denominators, schedule: float) -> dict[str, float]:
        """Make one step of a separate value model on a mini-batch. Return metric sums.

        Args:
            schedule: factor on the learning rate.
        """
        assert self.backend
        parts = []
        for index, pass_ in enumerate(passes):
            loss, sums = self.loss(pass_, self.backend(pass_.batch), denominators)
            self.backend.backward(loss, last=index + 1 == len(passes))
            parts.append(as_floats(sums))
        skipped = self.backend.step(self._credit.lr * schedule) is None
        # All ranks skip together, and the shares of the ranks that report add up to 1.
        return merge([*parts, {"value_skipped": skipped * self._config.sequence_parallel / world()[1]}])
