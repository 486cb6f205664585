"""Routers of a mixture of experts in the learner: losses that spread tokens over experts, and metrics.

Over the n answer tokens of an update, with a layer's logits x_t and probabilities p_t, and the share f_i of all choices
that expert i got, a layer's loss is

    balance_coef · E · Σ_i f_i · (1/n) Σ_t p_ti      load balancing: Switch Transformer, eq. 4 (arXiv 2101.03961)
    z_coef · (1/n) Σ_t (log Σ_i exp x_ti)²           z-loss: ST-MoE, eq. 5 (arXiv 2202.08906)

and the loss is the mean over layers. f has no gradient. It is that of the step before, over all updates and ranks:
shares of a whole batch serve better than those of a micro-batch (arXiv 2501.11873), and with a known f the loss is a
sum over tokens, so that neither micro-batches nor ranks change a gradient. The first step of a run has no such term.
"""

from typing import Any

import torch
from torch import nn

from qurl_ray.config.learner import LearnerConfig
from qurl_ray.learner.backend import add_over_ranks
from qurl_ray.policy.experts import MixtureMlp, mixtures


class Routers:
    """The routers of a learner's policy. Every rank has one, and all call `end_step` together.

    Args:
        balance_coef: factor of the load balancing loss.
        z_coef: factor of the z-loss.
    """

    def __init__(self, model: nn.Module, *, balance_coef: float = 0.0, z_coef: float = 0.0) -> None:
        self._layers = [_Layer(mixture, self) for mixture in mixtures(model)]
        self.balance_coef, self.z_coef = balance_coef, z_coef
        self.tokens = 1
        """n, of the present update."""
        self.factor: torch.Tensor | None = None
        """Gradient of the present loss, which backends scale."""

    def __len__(self) -> int:
        return len(self._layers)

    def begin_update(self, tokens: int) -> None:
        """Say how many answer tokens the update has, of all ranks."""
        self.tokens = tokens

    def added_to(self, loss: torch.Tensor) -> torch.Tensor:
        """Return the loss of a pass. Its backward pass includes the losses of routers, whose values it lacks: they are
        added where weights of experts are computed, since checkpointing forgets all else of a layer."""
        return _Observed.apply(loss, self) if self._layers and loss.requires_grad else loss

    def end_step(self, config: LearnerConfig) -> dict[str, float]:
        """Return the metrics of a step; {} without tokens. Its shares are those of the next step. Collective."""
        if not self._layers:
            return {}
        total_LX = add_over_ranks(torch.stack([layer.sums_X.cpu() for layer in self._layers]), config)
        experts = len(self._layers[0].shares_E)
        load_LE, probs_LE, (tokens_L, entropy_L, z_L) = (
            total_LX[:, :experts],
            total_LX[:, experts : 2 * experts],
            total_LX[:, 2 * experts :].unbind(dim=1),
        )
        for layer in self._layers:
            layer.sums_X.zero_()
        if not tokens_L.all():
            return {}
        shares_LE = load_LE / load_LE.sum(dim=1, keepdim=True)
        for layer, shares_E in zip(self._layers, shares_LE, strict=True):
            layer.shares_E.copy_(shares_E)
        balance_L = experts * (shares_LE * probs_LE).sum(dim=1) / tokens_L
        return {  # the same on all ranks
            "max_router_balance": balance_L.mean().item(),
            "max_router_entropy": (entropy_L / tokens_L).mean().item(),
            "max_router_z": (z_L / tokens_L).mean().item(),
            "max_router_load": experts * shares_LE.max().item(),
            "max_router_idle": (load_LE == 0).double().mean().item(),
        }

    def state(self) -> list[list[float]]:
        """Return the shares of experts by layer, which the next step uses."""
        return [layer.shares_E.tolist() for layer in self._layers]

    def restore(self, state: list[list[float]]) -> None:
        """Undo `state`."""
        for layer, shares in zip(self._layers, state, strict=True):
            layer.shares_E.copy_(torch.tensor(shares, dtype=torch.float64))


class _Layer:
    """One router. It is called in each pass of its mixture (MixtureMlp.watch)."""

    def __init__(self, mixture: MixtureMlp, routers: Routers) -> None:
        experts = len(mixture.experts)
        self._routers = routers
        self.sums_X = torch.zeros(2 * experts + 3, dtype=torch.float64)
        """Choices and probabilities by expert, then tokens, entropies and squares of log-sums, of the step so far."""
        self.shares_E = torch.zeros(experts, dtype=torch.float64)
        """f of the step before; zeros if there is none."""
        mixture.watch = self

    def __call__(
        self, logits_NE: torch.Tensor, experts_Nk: torch.Tensor, weights_Nk: torch.Tensor, counted_N: torch.Tensor
    ) -> torch.Tensor:
        """Return the weights of a training pass, with the router's losses in their gradient."""
        logprobs_NE = logits_NE.log_softmax(dim=-1)
        probs_NE = logprobs_NE.exp()
        z_N = logits_NE.logsumexp(dim=-1).square()
        with torch.no_grad():
            each_N = counted_N.double()
            load_E = torch.zeros_like(self.shares_E).to(each_N.device)
            load_E.index_add_(0, experts_Nk.flatten(), each_N.repeat_interleave(experts_Nk.shape[1]))
            entropy_N = -(probs_NE * logprobs_NE).sum(dim=-1)
            by_token = torch.stack([torch.ones_like(z_N), entropy_N, z_N]).double() @ each_N
            self.sums_X = self.sums_X.to(each_N.device)
            self.sums_X += torch.cat([load_E, each_N @ probs_NE.double(), by_token])
        routers = self._routers
        if not (routers.balance_coef or routers.z_coef):
            return weights_Nk
        shares_E = self.shares_E.to(logits_NE)
        loss_N = routers.balance_coef * len(shares_E) * (probs_NE @ shares_E) + routers.z_coef * z_N
        return _PlusLoss.apply(weights_Nk, (counted_N * loss_N).sum() / (routers.tokens * len(routers)), routers)


class _Observed(torch.autograd.Function):
    """The loss of a pass; notes the factor that it is scaled with before any layer's gradient is computed."""

    @staticmethod
    def forward(ctx: Any, loss: torch.Tensor, routers: Routers) -> torch.Tensor:
        ctx.routers = routers
        return loss.clone()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        ctx.routers.factor = grad
        return grad, None


class _PlusLoss(torch.autograd.Function):
    """A tensor, in whose backward pass that of a loss is included, with the factor of the pass's own loss."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, loss: torch.Tensor, routers: Routers) -> torch.Tensor:
        ctx.routers, ctx.kind = routers, (loss.dtype, loss.device)
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, None]:
        assert ctx.routers.factor is not None
        dtype, device = ctx.kind
        return grad, ctx.routers.factor.to(device, dtype), None
