"""The learner: the order of passes, the objective, the schedule. How gradients and steps are made is a backend's.

Losses leave the objective divided by global denominators, so gradients of ranks are added, never averaged: ranks may
have different numbers of tokens, and micro-batches any size.
"""

import json
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import torch
from transformers import PreTrainedModel

from qurl_ray.config.models import LearnerConfig
from qurl_ray.learner.backend import Backend, load_random_state, save_random_state, world
from qurl_ray.learner.batching import MiniBatch, Tensors, to_tensors
from qurl_ray.learner.critic import Credit, Critic, ValueModel
from qurl_ray.learner.protocol import StepResult
from qurl_ray.learner.scorer import MODEL_PREFIX, Scorer
from qurl_ray.rl.objective import ObjectiveSettings, objective
from qurl_ray.rl.reduce import merge
from qurl_ray.types import Trajectory

_SENTINEL = Trajectory(
    uid="",
    prompt_ids=np.zeros(2, dtype=np.int32),
    token_ids=np.zeros(0, dtype=np.int32),
    logprobs=np.zeros(0, dtype=np.float32),
    reward=0.0,
    advantage=0.0,
    version=0,
)
"""Stands for a rank's missing micro-batch: two tokens, none of which counts."""


class PolicyLearner:
    """See learner.protocol.Learner.

    Args:
        policy: runs a learner.scorer.Scorer.
        critic: gives credit per token; without one a sample's advantage is that of all its tokens.
        total_updates: at which the learning rate has fallen to its final share.
    """

    def __init__(
        self,
        policy: Backend,
        config: LearnerConfig,
        settings: ObjectiveSettings,
        *,
        total_updates: int,
        critic: Critic | None = None,
    ) -> None:
        self._policy, self._config, self._settings = policy, config, settings
        self._critic = critic
        self._total_updates = total_updates
        self._updates = 0

    def named_parameters(self) -> Iterator[tuple[str, torch.Tensor]]:
        for name, parameter in self._policy.named_parameters():
            yield name.removeprefix(MODEL_PREFIX), parameter

    def learn(self, mini_batches: Sequence[MiniBatch]) -> StepResult:
        started = time.perf_counter()
        proximal: dict[str, np.ndarray] = {}
        # The first update's proximal log-probs are its own, detached; the others' are taken before anything moves.
        prox = [self._prox(mini_batch) if index else None for index, mini_batch in enumerate(mini_batches)]
        if self._critic:
            self._critic.estimate([[self._tensors(samples) for samples in self._passes(m)] for m in mini_batches])
        between = time.perf_counter()
        sums, norms, lr = [], [], 0.0
        for index, mini_batch in enumerate(mini_batches):
            sums.append(self._accumulate(index, mini_batch, prox[index], proximal))
            share = schedule(self._config, self._updates, self._total_updates)
            lr = self._config.lr * share
            norms.append(self._policy.step(lr))
            self._updates += norms[-1] is not None
            if self._critic:
                sums.append(self._critic.update(index, mini_batch.denominators.tokens, share))
        finite = [norm for norm in norms if norm is not None]
        return StepResult(
            sums=merge(sums),
            seconds={"logprob": between - started, "update": time.perf_counter() - between},
            grad_norm=finite[-1] if finite else float("nan"),
            lr=lr,
            skipped_updates=len(norms) - len(finite),
            proximal=proximal,
        )

    def _passes(self, mini_batch: MiniBatch) -> list[list[Trajectory]]:
        if self._policy.lockstep:
            return [samples or [_SENTINEL] for samples in mini_batch.micro_batches]
        return [samples for samples in mini_batch.micro_batches if samples]

    @torch.no_grad()
    def _prox(self, mini_batch: MiniBatch) -> list[torch.Tensor]:
        return [self._policy(self._tensors(samples)) for samples in self._passes(mini_batch)]

    def _tensors(self, samples: Sequence[Trajectory]) -> Tensors:
        return to_tensors(samples).to(self._config.device)

    def _accumulate(
        self, number: int, mini_batch: MiniBatch, prox: list[torch.Tensor] | None, proximal: dict[str, np.ndarray]
    ) -> dict[str, float]:
        """Gradients of a whole mini-batch. Returns metric sums; adds the watched samples' log-probs to `proximal`."""
        passes, found = self._passes(mini_batch), []
        for index, samples in enumerate(passes):
            batch = self._tensors(samples)
            logprobs = self._policy(batch)
            before = logprobs.detach() if prox is None else prox[index]
            loss, sums = objective(
                logprobs,
                before,
                batch.behavior_BT,
                self._critic.advantages(number, index) if self._critic else batch.advantages_B,
                batch.mask_BT,
                mini_batch.denominators,
                self._settings,
            )
            self._policy.backward(loss, last=index + 1 == len(passes))
            found.append({name: float(value) for name, value in sums.items()} | {"loss": float(loss.detach())})
            for row, sample in enumerate(samples):
                if sample.watched:
                    proximal[sample.uid] = before[row, len(sample.prompt_ids) : sample.length].float().cpu().numpy()
        return merge(found)

    # --- state ---------------------------------------------------------------------------------------------------

    def save(self, folder: Path) -> None:
        save_random_state(folder)
        if world()[0] == 0:
            (folder / "schedule.json").write_text(json.dumps({"updates": self._updates}))
        (folder / "policy").mkdir(exist_ok=True)
        self._policy.save(folder / "policy")
        if self._critic:
            (folder / "critic").mkdir(exist_ok=True)
            self._critic.backend.save(folder / "critic")

    def load(self, folder: Path) -> None:
        load_random_state(folder)
        self._updates = json.loads((folder / "schedule.json").read_text())["updates"]
        self._policy.load(folder / "policy")
        if self._critic:
            self._critic.backend.load(folder / "critic")

    def offload(self) -> None:
        self._policy.offload()
        if self._critic:
            self._critic.backend.offload()

    def reload(self) -> None:
        self._policy.reload()
        if self._critic:
            self._critic.backend.reload()


def schedule(config: LearnerConfig, updates: int, total_updates: int) -> float:
    """Share of the rate that the next update has after `updates` of them: linear warm-up times a linear fall."""
    warm = min(1.0, (updates + 1) / max(1, config.warmup_steps))
    progress = min(1.0, updates / max(1, total_updates - 1))
    return warm * (1 - (1 - config.lr_final_share) * progress)


def make_learner(
    model: PreTrainedModel,
    config: LearnerConfig,
    settings: ObjectiveSettings,
    *,
    temperature: float,
    total_updates: int,
    credit: Credit | None = None,
    value_body: PreTrainedModel | None = None,
) -> PolicyLearner:
    """A learner of `model` on the configured backend; every rank of the process group calls this.

    Args:
        model: float32, the same on every rank.
        temperature: of the rollouts; the learner's log-probs are taken at the same.
        credit: with it, a value model gives credit per token.
        value_body: what the value model begins as; it is taken over.
    """
    critic = None
    if credit:
        critic = Critic(make_backend(ValueModel(value_body, config), config), credit, device=config.device)
    scorer = Scorer(model, config, temperature=temperature)
    policy = make_backend(scorer, config)
    return PolicyLearner(policy, config, settings, total_updates=total_updates, critic=critic)


def make_backend(module: torch.nn.Module, config: LearnerConfig) -> Backend:
    """The configured backend around a module."""
    if config.backend == "deepspeed":
        from qurl_ray.learner.deepspeed_backend import DeepSpeedBackend  # a second of imports

        return DeepSpeedBackend(module, config)
    from qurl_ray.learner.torch_backend import TorchBackend

    return TorchBackend(module, config)
