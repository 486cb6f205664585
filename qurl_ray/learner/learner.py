"""The learner: the order of passes, the objective and the schedule. A backend computes gradients and steps.

The objective divides losses by global denominators, so gradients of ranks are added, never averaged: ranks may have
different numbers of tokens, and micro-batches may have any size.
"""

import json
import math
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
from transformers import PreTrainedModel

from qurl_ray.config.learner import LearnerConfig
from qurl_ray.errors import CheckpointError
from qurl_ray.learner.backend import (
    Backend,
    ReadRows,
    Resident,
    load_random_state,
    save_random_state,
    sequence_group,
    world,
)
from qurl_ray.learner.batching import MiniBatch, to_tensors
from qurl_ray.learner.critic import Credit, Critic, ValueModel
from qurl_ray.learner.equalizer import Equalizer
from qurl_ray.learner.flow import Adaptation, FlowSwitch, UnifiedFlow
from qurl_ray.learner.loss_scale import LossScaled
from qurl_ray.learner.noise import NormNoise
from qurl_ray.learner.passes import Calibration, Pass, Penalty, compare_again, correction_strength
from qurl_ray.learner.probe import through_codes
from qurl_ray.learner.protocol import EnginePrecision, StepResult
from qurl_ray.learner.reference import StartingAdapters
from qurl_ray.learner.routers import Routers
from qurl_ray.learner.scorer import MODEL_PREFIX, Scorer, Scores
from qurl_ray.learner.torch_backend import TorchBackend
from qurl_ray.policy.experts import count_differing
from qurl_ray.policy.ranges import range_ids
from qurl_ray.quant.equalize import Factors
from qurl_ray.quant.quantize import QTensor
from qurl_ray.rl.objective import Denominators, ObjectiveSettings, objective
from qurl_ray.rl.reduce import as_floats, merge
from qurl_ray.types import Completion, Trajectory

_SENTINEL = Trajectory(
    uid="",
    prompt_ids=np.zeros(2, dtype=np.int32),
    token_ids=np.zeros(0, dtype=np.int32),
    logprobs=np.zeros(0, dtype=np.float32),
    reward=0.0,
    advantage=0.0,
    versions=np.zeros(0, dtype=np.int32),
)
"""Placeholder for a missing micro-batch of a rank: two tokens, none of which contributes to the loss."""


class PolicyLearner:
    """Learner on a backend; see learner.protocol.Learner.

    Args:
        policy: backend that runs a learner.scorer.Scorer.
        critic: computes advantages per token; without one, all tokens of a sample have the sample's advantage, or that
            of their turn.
        reference: computes log-probs of the reference policy, for the KL penalty.
        penalty: subtracts that KL from rewards; without it, the KL is part of the loss.
        flow: unified flow that the policy computes in; None for full precision.
        equalizer: factors with which the policy's parameters become codes; None for none.
        adaptation: training of the policy's adapters alone; None if all parameters are trained.
        calibrate_every: steps between two calibrations of the clip bounds (rl.calibration); 0 means never.
        replay_reference: the reference takes the experts of rollouts, too, if samples have them.
        total_updates: number of updates at which the learning rate has fallen to its final share.
    """

    def __init__(
        self,
        policy: Backend,
        config: LearnerConfig,
        settings: ObjectiveSettings,
        *,
        total_updates: int,
        critic: Critic | None = None,
        reference: Scorer | StartingAdapters | None = None,
        penalty: Penalty | None = None,
        flow: FlowSwitch | None = None,
        equalizer: Equalizer | None = None,
        adaptation: Adaptation | None = None,
        calibrate_every: int = 0,
        replay_reference: bool = False,
    ) -> None:
        self._replay_reference = replay_reference
        self._flow, self._equalizer = flow, equalizer
        self.adapters = adaptation.adapters if adaptation else None
        self._base = adaptation.base if adaptation else ""
        self._frozen = adaptation.frozen if adaptation else None
        self.coded_base = self._frozen.record if self._frozen else None
        self._policy, self._config, self._settings = policy, config, settings
        self._routers = Routers(
            self._scorer.policy, balance_coef=settings.router_balance_coef, z_coef=settings.router_z_coef
        )
        self._critic, self._reference, self._penalty = critic, reference, penalty
        self._calibrate_every, self._bounds = calibrate_every, (settings.clip_low, settings.clip_high)
        self._adaptive = settings.correction.ess_floor is not None
        shared_critic = critic is not None and critic.backend is None
        self._measure_all = bool(penalty or self._adaptive or shared_critic)
        self._total_updates = total_updates
        self._updates = self._steps = 0
        self._noise = NormNoise(policy, adaptation.noise) if adaptation and adaptation.noise else None

    def named_parameters(self, *, trained: bool = False) -> Iterator[tuple[str, torch.Tensor | QTensor]]:
        yield from _of_the_model(self._policy.named_parameters(trained=trained))
        if self._frozen and not trained:
            yield from self._frozen.named_codes()

    def changing_parameters(self) -> Iterator[tuple[str, torch.Tensor]]:
        yield from _of_the_model(self._policy.named_parameters(trained=True))
        if self._noise:
            yield from _of_the_model(self._noise.named_gains())

    def end_noise(self) -> bool:
        noisy = self._noise is not None and self._noise.sigma > 0
        if self._noise:
            self._noise.clear()
        return noisy

    @torch.no_grad()
    def factors(self) -> Mapping[str, Factors]:
        if self._frozen:
            return self._frozen.factors
        if not self._equalizer:
            return {}
        if not self._equalizer.settled:
            pass_ = self._prompt_pass(range_ids(self._equalizer.model.config))
            with self._undivided(), self._out_of_flow(), self._equalizer.measuring(_real(pass_)):
                self._policy(pass_.batch)
            self._equalizer.settle(_of_the_model(self._policy.named_parameters()))
        return dict(self._equalizer.factors)

    def learn(self, mini_batches: Sequence[MiniBatch]) -> StepResult:
        started = time.perf_counter()
        passes = [[self._make_pass(samples) for samples in self._shares(m)] for m in mini_batches]
        strength = self._before_the_first_update(passes)
        due = self._calibrate_every > 0 and self._steps % self._calibrate_every == 0
        calibration = Calibration() if passes and due else None
        if calibration and self._flow:
            for chosen in passes:
                for pass_ in chosen:
                    pass_.shadow_BT = self._shadow(pass_)
        between = time.perf_counter()
        sums: list[dict[str, float]] = []
        # Metrics that have one value for the whole step and all ranks:
        if passes and self._adaptive:
            sums.append({"max_strength": strength})
        if passes and self._calibrate_every:
            sums.append({"max_clip_low": self._bounds[0], "max_clip_high": self._bounds[1]})
        norms, lr = [], 0.0
        measured = self._equalizer if passes and self._equalizer and self._equalizer.due(self._steps) else None
        for index, (mini_batch, chosen) in enumerate(zip(mini_batches, passes, strict=True)):
            equalizer = measured if not index else None
            sums.append(self._accumulate(chosen, mini_batch.denominators, strength, calibration, equalizer))
            share = self._config.rate(self._updates, self._total_updates)
            lr = self._config.lr * share
            norms.append(self._policy.step(lr))
            self._updates += norms[-1] is not None
            if self._critic and self._critic.backend:
                sums.append(self._critic.update(chosen, mini_batch.denominators, share))
        if calibration:
            nominal = self._settings.clip_low, self._settings.clip_high
            self._bounds = calibration.bounds(*nominal, self._config)
        if measured:
            measured.settle(_of_the_model(self._policy.named_parameters()))
            sums.append({"max_factors_moved": measured.moved})
        if passes and self._noise:
            sums.append({"max_noise": self._noise.sigma})
        differing, replayed = count_differing(self._scorer.policy)
        if replayed:
            sums.append({"routes_differing": differing, "routes_replayed": replayed})
        if len(self._routers):
            sums.append(self._routers.end_step(self._config))
        self._steps += 1
        if self._noise:
            self._noise.set(self._steps)
        finite = [norm for norm in norms if norm is not None]
        group = self._scorer.sequence
        return StepResult(
            sums={} if group and group.rank else merge(sums),  # the first rank of a sequence group reports for all
            seconds={"logprob": between - started, "update": time.perf_counter() - between},
            grad_norm=finite[-1] if finite else float("nan"),
            lr=lr,
            skipped_updates=len(norms) - len(finite),
            proximal=_watched(passes),
        )

    def compare_gradients(self, full: Sequence[MiniBatch], rolled: Sequence[MiniBatch]) -> dict[str, float]:
        alone = isinstance(self._policy, TorchBackend) and world()[1] == 1
        if not alone or self._flow or self._critic or len(self._routers) or not (full and rolled):
            return {}
        of_full, of_rolled = self._gradient(full), self._gradient(rolled)
        full_norm, rolled_norm = math.sqrt(_dot(of_full, of_full)), math.sqrt(_dot(of_rolled, of_rolled))
        if not (full_norm and rolled_norm):
            return {}
        return {
            "certificate/gradient_cosine": _dot(of_full, of_rolled) / full_norm / rolled_norm,
            "certificate/gradient_ratio": rolled_norm / full_norm,
        }

    def _gradient(self, mini_batches: Sequence[MiniBatch]) -> list[torch.Tensor]:
        """Return the objective's gradient on one mini-batch, by parameter."""
        passes = [self._make_pass(samples) for samples in self._shares(mini_batches[0])]
        strength = self._before_the_first_update([passes])
        self._accumulate(passes, mini_batches[0].denominators, strength, None)
        trained = [p for _, p in self._policy.named_parameters(trained=True)]
        gradient = [torch.zeros_like(p) if p.grad is None else p.grad for p in trained]
        self._policy.module.zero_grad(set_to_none=True)
        return gradient

    def adopt(self, settings: ObjectiveSettings) -> None:
        self._settings, self._bounds = settings, (settings.clip_low, settings.clip_high)

    def _shares(self, mini_batch: MiniBatch) -> list[list[Trajectory]]:
        if self._policy.lockstep:
            return [samples or [_SENTINEL] for samples in mini_batch.micro_batches]
        return [samples for samples in mini_batch.micro_batches if samples]

    def _make_pass(self, samples: Sequence[Trajectory]) -> Pass:
        batch = to_tensors(samples).to(self._config.device)
        return Pass(samples=samples, batch=batch, advantages=batch.advantages)

    @torch.no_grad()
    def _before_the_first_update(self, passes: Sequence[Sequence[Pass]]) -> float:
        """Compute the log-probs and values of the weights before the step, and advantages. Return the correction's
        strength."""
        everything = [pass_ for chosen in passes for pass_ in chosen]
        count_differing(self._scorer.policy)  # from here on
        for index, chosen in enumerate(passes):
            for pass_ in chosen:
                if index or self._measure_all:
                    pass_.prox_BT, _, pass_.values_BT = self._policy(pass_.batch)
                if self._reference:
                    batch = pass_.batch if self._replay_reference else replace(pass_.batch, routes_BTLk=None)
                    pass_.reference_BT = Scores(*self._reference(batch)).logprobs_BT
        if self._critic:
            self._critic.estimate(everything, self._penalty)
        elif self._penalty:
            compare_again(everything, self._penalty)
        if not self._adaptive:
            return 1.0
        return correction_strength(everything, self._settings.correction, self._config)

    def _accumulate(
        self,
        passes: Sequence[Pass],
        denominators: Denominators,
        strength: float,
        calibration: Calibration | None,
        equalizer: Equalizer | None = None,
    ) -> dict[str, float]:
        """Compute the gradients of a whole mini-batch, and the ranges of its activations. Return metric sums."""
        low, high = self._bounds
        settings, parts = replace(self._settings, clip_low=low, clip_high=high), []
        self._routers.begin_update(denominators.tokens)
        for index, pass_ in enumerate(passes):
            with equalizer.measuring(_real(pass_)) if equalizer else nullcontext():
                scores = Scores(*self._policy(pass_.batch))
            if pass_.prox_BT is None:
                pass_.prox_BT = scores.logprobs_BT.detach()
            loss, sums = objective(
                scores.logprobs_BT,
                pass_.prox_BT,
                pass_.batch.behavior_BT,
                pass_.advantages,
                pass_.batch.mask_BT,
                denominators,
                settings,
                reference_BT=pass_.reference_BT,
                entropy_BT=scores.entropy_BT,
                strength=strength,
                drawn_B=pass_.batch.drawn_B,
            )
            sums["loss"] = loss
            if scores.values_BT is not None:
                assert self._critic
                value_loss, value_sums = self._critic.loss(pass_, scores.values_BT, denominators)
                sums |= value_sums
                loss = loss + self._critic.coef * value_loss
            self._policy.backward(self._routers.added_to(loss), last=index + 1 == len(passes))
            if calibration:
                calibration.add(scores.logprobs_BT, pass_, self._shadow(pass_) if self._flow else None)
            parts.append(as_floats(sums))
        return merge(parts)

    @torch.no_grad()
    def _shadow(self, pass_: Pass) -> torch.Tensor:
        """Return log-probs [B, T] of the policy in full precision, for a learner with a unified flow."""
        assert self._flow
        with self._flow.full_precision():
            return Scores(*self._policy(pass_.batch)).logprobs_BT

    @torch.no_grad()
    def logprobs(
        self, completions: Sequence[Completion], prompt_ids: np.ndarray, precision: EnginePrecision
    ) -> list[np.ndarray]:
        samples = [
            Trajectory(
                uid=c.uid,
                prompt_ids=prompt_ids,
                token_ids=c.token_ids,
                logprobs=c.logprobs,
                reward=0.0,
                advantage=0.0,
                versions=c.versions,
            )
            for c in completions
        ]
        pass_ = self._make_pass(samples)
        with (
            self._undivided(),
            self._out_of_flow(),
            # Through the backend: only there is a sharded module gathered.
            through_codes(
                self._scorer.policy,
                precision,
                lambda ids: self._policy(self._prompt_pass(ids).batch),
                dict(self._frozen.named_codes()) if self._frozen else None,
            ),
        ):
            logprobs_BT = Scores(*self._policy(pass_.batch)).logprobs_BT
        return [row[mask].float().cpu().numpy() for row, mask in zip(logprobs_BT, pass_.batch.mask_BT, strict=True)]

    @property
    def _scorer(self) -> Scorer:
        return cast(Scorer, self._policy.module)

    def _out_of_flow(self) -> AbstractContextManager:
        return self._flow.full_precision() if self._flow else nullcontext()

    @contextmanager
    def _undivided(self) -> Iterator[None]:
        """Context in which every rank computes whole sequences, as an engine does."""
        scorer = self._scorer
        sequence, scorer.sequence = scorer.sequence, None
        try:
            yield
        finally:
            scorer.sequence = sequence

    def _prompt_pass(self, ids: Sequence[int]) -> Pass:
        return self._make_pass([replace(_SENTINEL, prompt_ids=np.array(ids, dtype=np.int32))])

    # --- state ---------------------------------------------------------------------------------------------------

    def save(self, folder: Path) -> None:
        save_random_state(folder)
        if world()[0] == 0:
            state: dict[str, Any] = {"updates": self._updates, "steps": self._steps, "bounds": self._bounds}
            if self._base:
                state["base"] = self._base
            if self._routers.balance_coef:
                state["routers"] = self._routers.state()
            (folder / "schedule.json").write_text(json.dumps(state))
        (folder / "policy").mkdir(exist_ok=True)
        self._policy.save(folder / "policy")
        if world()[0] == 0 and (factors := self._frozen or self._equalizer):
            factors.save(folder)
        if self._critic and self._critic.backend:
            (folder / "critic").mkdir(exist_ok=True)
            self._critic.backend.save(folder / "critic")

    def load(self, folder: Path) -> None:
        load_random_state(folder)
        state = json.loads((folder / "schedule.json").read_text())
        base, routers = state.pop("base", ""), state.pop("routers", None)
        if state.keys() != {"updates", "steps", "bounds"}:
            raise CheckpointError(f"{folder} is of another version of this package; start again with --fresh")
        if base != self._base:
            raise CheckpointError(
                f"{folder} holds adapters of another base model ({base or 'none'}) than that of this run "
                f"({self._base or 'none'}): give the model that the run began with, or start again with --fresh"
            )
        self._updates, self._steps, self._bounds = state["updates"], state["steps"], tuple(state["bounds"])
        self._policy.load(folder / "policy")
        if self._noise:
            self._noise.set(self._steps)
        if routers:
            self._routers.restore(routers)
        if self._equalizer:
            self._equalizer.load(folder)
        if self._critic and self._critic.backend:
            self._critic.backend.load(folder / "critic")

    def keep_on_device(self, resident: Resident) -> None:
        self._policy.keep_on_device(resident)
        others = resident if resident is Resident.ALL else Resident.NOTHING
        if self._reference:
            self._reference.to(self._config.device if others else "cpu")
        if self._critic and self._critic.backend:
            self._critic.backend.keep_on_device(others)
        if resident is not Resident.ALL and self._config.device == "cuda":
            torch.cuda.empty_cache()  # otherwise this process would keep the freed memory


def _of_the_model(parameters: Iterable[tuple[str, torch.Tensor]]) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the parameters of the policy by its own names: a value head stays in the learner."""
    for name, parameter in parameters:
        if name.startswith(MODEL_PREFIX):
            yield name.removeprefix(MODEL_PREFIX), parameter


def _dot(first: Sequence[torch.Tensor], second: Sequence[torch.Tensor]) -> float:
    """Return the inner product of two gradients, given by parameter."""
    return math.fsum(float(a.double().flatten() @ b.double().flatten()) for a, b in zip(first, second, strict=True))


def _real(pass_: Pass) -> torch.Tensor:
    """Return bool [B, T - 1]: the tokens of a padded pass that are no padding, without the last of each sample, which a
    pass without padding need not compute. Placeholders have none."""
    device = pass_.batch.lengths_B.device
    real = [sample is not _SENTINEL for sample in pass_.samples]
    lengths_B = pass_.batch.lengths_B * torch.tensor(real, device=device)
    return torch.arange(pass_.batch.token_ids_BT.shape[1] - 1, device=device) < (lengths_B[:, None] - 1)


def _watched(passes: Sequence[Sequence[Pass]]) -> dict[str, np.ndarray]:
    """Return proximal log-probs of the tokens that the policy drew in watched rows, by row_uid."""
    return {
        sample.row_uid: pass_.prox_BT[row, sample.places].float().cpu().numpy()
        for chosen in passes
        for pass_ in chosen
        if pass_.prox_BT is not None
        for row, sample in enumerate(pass_.samples)
        if sample.watched
    }


def make_learner(
    model: PreTrainedModel,
    config: LearnerConfig,
    settings: ObjectiveSettings,
    *,
    temperature: float,
    total_updates: int,
    credit: Credit | None = None,
    value_body: PreTrainedModel | None = None,
    reference: PreTrainedModel | None = None,
    penalty: Penalty | None = None,
    flow: UnifiedFlow | None = None,
    equalizer: Equalizer | None = None,
    adaptation: Adaptation | None = None,
    calibrate_every: int = 0,
    replay_reference: bool = False,
    rows: ReadRows | None = None,
) -> PolicyLearner:
    """Return a learner of `model` on the configured backend. Every rank of the process group must call this.

    Args:
        model: float32, the same on every rank.
        temperature: sampling temperature of the rollouts; log-probs are computed at the same temperature.
        credit: settings of a value model, which computes advantages per token; None for no value model.
        value_body: initial model of a separate value model, which takes it over. Without it, the policy gets a value
            head.
        reference: reference policy of the KL penalty, which the learner takes over. It is sharded with FSDP2; else,
            every rank holds all of it. Where adapters alone are trained, the reference is the model with those that it
            has now.
        flow: unified flow of the policy, and of a value head on it; reference and separate value model stay in full
            precision.
        equalizer: factors of the model's codes, made from this model.
        adaptation: training of the model's adapters alone.
        rows: with FSDP2, reads the weights of these models, which then have none.
    """
    switch = FlowSwitch(model, flow, equalizer.factors if equalizer and flow.equalized else {}) if flow else None
    sequence = sequence_group(config)
    critic = None
    if credit:
        separate = None
        if value_body:
            separate = make_backend(ValueModel(value_body, config, sequence), config, value_body, rows)
        critic = Critic(separate, credit, config)
    comparison: Scorer | StartingAdapters | None = None
    if reference:
        comparison = Scorer(reference.requires_grad_(False), config, temperature=temperature, sequence=sequence)
        if config.backend == "fsdp":
            from qurl_ray.learner.fsdp_backend import shard

            shard(comparison, config.device, reference, rows, expert_parallel=config.expert_parallel)
    scorer = Scorer(
        model,
        config,
        temperature=temperature,
        entropy_gradient=settings.entropy_coef > 0,
        with_values=credit is not None and value_body is None,
        sequence=sequence,
    )
    backend = make_backend(scorer, config, model, rows)
    if adaptation and (settings.kl_coef or penalty):
        comparison = StartingAdapters(backend)
    return PolicyLearner(
        backend,
        config,
        settings,
        total_updates=total_updates,
        critic=critic,
        reference=comparison,
        penalty=penalty,
        flow=switch,
        equalizer=equalizer,
        adaptation=adaptation,
        calibrate_every=calibrate_every,
        replay_reference=replay_reference,
    )


def make_backend(
    module: torch.nn.Module, config: LearnerConfig, model: PreTrainedModel, rows: ReadRows | None = None
) -> Backend:
    """Return the configured backend around a module, of which `model` is a part; see make_learner."""
    backend: Backend
    if config.backend == "fsdp":
        from qurl_ray.learner.fsdp_backend import FsdpBackend  # such imports take a second

        backend = FsdpBackend(module, config, model, rows)
    elif config.backend == "deepspeed":
        from qurl_ray.learner.deepspeed_backend import DeepSpeedBackend

        backend = DeepSpeedBackend(module, config)
    else:
        backend = TorchBackend(module, config)
    return LossScaled(backend) if config.compute == "float16" else backend
