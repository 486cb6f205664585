"""The policy as the learner runs it: one module, so that a backend can wrap it."""

import torch
from torch import nn
from transformers import PreTrainedModel

from qurl_ray.config.models import LearnerConfig
from qurl_ray.learner.batching import Tensors
from qurl_ray.policy.attention import VARLEN
from qurl_ray.policy.logprobs import enable_checkpointing, token_logprobs

MODEL_PREFIX = "policy."
"""Of the model's parameter names inside a Scorer."""


class Scorer(nn.Module):
    """Samples in, log-probs of their answers out.

    Args:
        model: float32; moved to `config.device`.
        temperature: of the rollouts; log-probs are taken at the same.
    """

    def __init__(self, model: PreTrainedModel, config: LearnerConfig, *, temperature: float) -> None:
        super().__init__()
        self.policy = on_device(model, config)
        self._temperature, self._packing = temperature, config.packing
        self._autocast, self._device = config.compute == "bfloat16", config.device

    def forward(self, batch: Tensors) -> torch.Tensor:
        """float32 [B, T], 0 where the batch's mask is."""
        with torch.autocast(self._device, torch.bfloat16, enabled=self._autocast):
            return token_logprobs(
                self.policy,
                batch.token_ids_BT,
                batch.mask_BT,
                self._temperature,
                lengths_B=batch.lengths_B if self._packing else None,
            )


def on_device(model: PreTrainedModel, config: LearnerConfig) -> PreTrainedModel:
    """`model` where and how the learner computes it, in place."""
    if config.gradient_checkpointing:
        enable_checkpointing(model)
    if config.device == "cuda":
        model.set_attn_implementation(VARLEN)  # the invariant attention is made for the CPU's engine
    return model.to(config.device)
