"""The forward pass of the learner's policy, as one module that a backend can wrap."""

from typing import NamedTuple

import torch
from torch import nn
from transformers import PreTrainedModel

from qurl_ray.config.learner import LearnerConfig
from qurl_ray.learner.batching import Tensors
from qurl_ray.numerics.products import Linear
from qurl_ray.policy.attention import VARLEN
from qurl_ray.policy.logprobs import (
    Entropy,
    answer_states,
    enable_checkpointing,
    own_answer_states,
    scatter,
    score_states,
)
from qurl_ray.policy.sequence import Division, SequenceGroup

MODEL_PREFIX = "policy."
"""Prefix of the model's parameter names inside a Scorer."""


class Scores(NamedTuple):
    """Results of a Scorer, all float32 [B, T], and 0 where the batch's mask is False."""

    logprobs_BT: torch.Tensor
    entropy_BT: torch.Tensor | None
    """Entropy of the distribution that each token is drawn from, in nats; None if gradients are disabled."""
    values_BT: torch.Tensor | None
    """Value of the state before each token; None without a value head."""


class Scorer(nn.Module):
    """Module that takes a batch of samples and returns the fields of Scores as a tuple.

    Args:
        model: float32; moved to `config.device`.
        temperature: sampling temperature of the rollouts; log-probs are computed at the same temperature.
        entropy_gradient: compute entropies with a gradient, because they are part of a loss.
        with_values: add a value head that reads the model's final states.
        sequence: ranks that share the tokens of each sample; they must be given the same ones.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        config: LearnerConfig,
        *,
        temperature: float,
        entropy_gradient: bool = False,
        with_values: bool = False,
        sequence: SequenceGroup | None = None,
    ) -> None:
        super().__init__()
        self.sequence = sequence
        self.policy = on_device(model, config.device, checkpointing=config.gradient_checkpointing)
        self.value_head = value_head(model, config.device) if with_values else None
        self._temperature, self._config = temperature, config
        self._entropy: Entropy = "gradient" if entropy_gradient else "value"

    def forward(self, batch: Tensors) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor | None]:
        mask_BT = batch.mask_BT
        entropy: Entropy = self._entropy if torch.is_grad_enabled() else "none"
        with casting(self._config):
            states_md, division = states_before_answers(self.policy, batch, self._config, self.sequence)
            ids_m = batch.token_ids_BT[mask_BT]
            if division:
                ids_m = ids_m[division.own_m]
            logprobs_m, entropy_m = score_states(self.policy, states_md, ids_m, self._temperature, entropy=entropy)
        return (
            placed(logprobs_m, mask_BT, division),
            None if entropy_m is None else placed(entropy_m, mask_BT, division),
            None if self.value_head is None else placed(self.value_head(states_md.float())[:, 0], mask_BT, division),
        )


def casting(config: LearnerConfig) -> torch.autocast:
    """Return the context of products in 16 bits. Without its cache, which would hold a copy of every weight until the
    end of a pass, though each is used once."""
    dtype = torch.float16 if config.compute == "float16" else torch.bfloat16
    return torch.autocast(config.device, dtype, enabled=config.compute != "float32", cache_enabled=False)


def value_head(model: PreTrainedModel, device: str) -> nn.Linear:
    """Return a linear with one output per state. Its weights are zeros, so that advantages do not start with noise."""
    head = Linear(model.config.hidden_size, 1, bias=False, device=device)
    nn.init.zeros_(head.weight)
    return head


def states_before_answers(
    model: PreTrainedModel, batch: Tensors, config: LearnerConfig, sequence: SequenceGroup | None = None
) -> tuple[torch.Tensor, Division | None]:
    """Return answer_states [m, d] of a model from `on_device`, packed or with shared prompts as configured: with a
    sequence group, the states that this rank computes, and how they are divided."""
    lengths_B = batch.lengths_B if config.packing else None
    share_prompts = config.share_prompts and config.device == "cpu"  # depends on the attention that on_device chooses
    tokens = batch.token_ids_BT, batch.mask_BT
    if sequence:
        shares = share_prompts and not config.packing
        return own_answer_states(
            model, *tokens, batch.lengths_B, sequence, share_prompts=shares, routes_BTLk=batch.routes_BTLk
        )
    states = answer_states(model, *tokens, lengths_B, share_prompts=share_prompts, routes_BTLk=batch.routes_BTLk)
    return states, None


def placed(values_m: torch.Tensor, mask_BT: torch.Tensor, division: Division | None) -> torch.Tensor:
    """Return [B, T] with the values of the masked tokens, from the share that each rank of a sequence group has, and 0
    elsewhere."""
    return scatter(division.gather(values_m) if division else values_m, mask_BT)


def on_device(model: PreTrainedModel, device: str, *, checkpointing: bool) -> PreTrainedModel:
    """Move `model` to the device, in place, with the attention for it, and with gradient checkpointing if that is
    asked for; return it. A model without weights stays where it is."""
    if checkpointing:
        enable_checkpointing(model)
    if device == "cuda":
        model.set_attn_implementation(VARLEN)  # the invariant attention is made for the engine on a CPU
    return model if next(model.parameters()).is_meta else model.to(device)
