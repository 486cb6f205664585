"""The micro-batches of a step, with the quantities that are computed before the step's first update."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import distributed

from qurl_ray.config.learner import LearnerConfig
from qurl_ray.learner.backend import add_over_ranks, world
from qurl_ray.learner.batching import Tensors, advantages_of
from qurl_ray.rl.advantages import AdvantageEstimator, grpo
from qurl_ray.rl.calibration import calibrated, clip_histogram
from qurl_ray.rl.corrections import CorrectionSettings, correct, strength
from qurl_ray.rl.credit import (
    CreditMode,
    RowRewards,
    advantages_of_rows,
    compare_turns,
    credited,
    returns_of_rows,
    rewards_of_row,
)
from qurl_ray.rl.objective import per_token
from qurl_ray.rl.ratios import Estimator, kl_estimate, log_ratio
from qurl_ray.rl.reduce import moments
from qurl_ray.types import Trajectory


@dataclass(slots=True, kw_only=True)
class Pass:
    """Data of one forward and backward pass. Tensors are [B, T] unless stated otherwise."""

    samples: Sequence[Trajectory]
    batch: Tensors
    advantages: torch.Tensor
    """Advantages: [B], or [B, T] if turns have their own, or from a value model."""
    prox_BT: torch.Tensor | None = None
    """Log-probs of the proximal policy. In the first update, unless they are needed earlier, they are None until its
    forward pass: they are then that pass's own log-probs, detached."""
    reference_BT: torch.Tensor | None = None
    shadow_BT: torch.Tensor | None = None
    """Log-probs of the proximal policy in full precision, if a unified flow is calibrated."""
    values_BT: torch.Tensor | None = None
    returns_BT: torch.Tensor | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Penalty:
    """KL penalty to the reference policy, subtracted from rewards."""

    coef: float
    estimator: Estimator
    compare: AdvantageEstimator = grpo
    """Estimator of the advantages of a group's samples, used if there is no value model."""
    mode: CreditMode = "trajectory"
    """Meaning of the samples' rewards for their turns, likewise."""

    def of(self, pass_: Pass) -> torch.Tensor:
        """Return the penalty of each token, [B, T]."""
        assert pass_.prox_BT is not None
        assert pass_.reference_BT is not None
        log_ratio_BT = log_ratio(pass_.prox_BT, pass_.reference_BT, pass_.batch.mask_BT)
        return torch.where(pass_.batch.mask_BT, self.coef * kl_estimate(log_ratio_BT, self.estimator), 0.0)


def compare_again(passes: Sequence[Pass], penalty: Penalty) -> None:
    """Write group advantages of rewards minus penalties into `passes`. Collective: a group may span several ranks, and
    so may the rows of a trajectory."""
    mine: dict[tuple[int, str, int], RowRewards] = {}
    for pass_ in passes:
        for sample, cost in zip(pass_.samples, penalty.of(pass_).sum(dim=1).tolist(), strict=True):
            mine[_key(sample)] = rewards_of_row(sample, cost)
    parts = [mine]
    if world()[1] > 1:
        parts = [{} for _ in range(world()[1])]
        distributed.all_gather_object(parts, mine)
    everything = {key: value for part in parts for key, value in part.items() if key[1]}
    if not everything:
        return
    groups: dict[int, dict[str, list[RowRewards]]] = {}
    for group, uid, number in sorted(everything):
        groups.setdefault(group, {}).setdefault(uid, []).append(everything[group, uid, number])
    returns = [[returns_of_rows(rows, penalty.mode) for rows in group.values()] for group in groups.values()]
    compared = compare_turns(returns, penalty.compare, penalty.mode)
    by_row = {
        (number, uid, row): advantages_K
        for (number, group), of_group in zip(groups.items(), compared, strict=True)
        for (uid, rows), whole_K in zip(group.items(), of_group, strict=True)
        for row, advantages_K in enumerate(advantages_of_rows(whole_K, rows, penalty.mode))
    }
    for pass_ in passes:
        samples = [credited(s, by_row[_key(s)], penalty.mode) if s.uid else s for s in pass_.samples]
        pass_.advantages = advantages_of(samples, pass_.batch.mask_BT.shape[1]).to(pass_.advantages.device)


def _key(sample: Trajectory) -> tuple[int, str, int]:
    """Return group, uid and number of a row."""
    return sample.group, sample.uid, sample.row.number if sample.row else 0


def correction_strength(passes: Sequence[Pass], settings: CorrectionSettings, config: LearnerConfig) -> float:
    """Return λ of a whole step (rl.corrections.strength). Collective."""
    assert settings.ess_floor is not None
    total = torch.zeros(3, dtype=torch.float64)
    for pass_ in passes:
        assert pass_.prox_BT is not None
        mask_BT = pass_.batch.mask_BT
        log_rho_BT = log_ratio(pass_.prox_BT, pass_.batch.behavior_BT, mask_BT)
        weight_BT = correct(log_rho_BT, mask_BT, settings).weight_BT
        total += moments(weight_BT, mask_BT & (weight_BT > 0))
    return strength(add_over_ranks(total, config), settings.ess_floor)


class Calibration:
    """Histograms of the noisy and the exact ratios of a step (rl.calibration)."""

    def __init__(self) -> None:
        nothing_BT = torch.zeros(0, 0)  # a rank without samples adds zeros
        self._noisy = self._exact = clip_histogram(nothing_BT, nothing_BT, nothing_BT.bool())

    @torch.no_grad()
    def add(self, logprobs_BT: torch.Tensor, pass_: Pass, shadow_BT: torch.Tensor | None = None) -> None:
        """Add the ratios of one pass, during its update.

        Args:
            shadow_BT: the same log-probs in full precision, in a unified flow. Their ratio to `pass_.shadow_BT` is then
                the exact ratio, and the ratio to the proximal policy is the noisy one. Without it, the ratio to the
                proximal policy is the exact one, and the ratio to the behavior policy is the noisy one.
        """
        assert pass_.prox_BT is not None
        adv_BT, mask_BT = per_token(pass_.advantages, logprobs_BT), pass_.batch.mask_BT
        proximal_BT = log_ratio(logprobs_BT, pass_.prox_BT, mask_BT)
        if shadow_BT is None:
            noisy_BT, exact_BT = log_ratio(logprobs_BT, pass_.batch.behavior_BT, mask_BT), proximal_BT
        else:
            assert pass_.shadow_BT is not None
            noisy_BT, exact_BT = proximal_BT, log_ratio(shadow_BT, pass_.shadow_BT, mask_BT)
        self._noisy = self._noisy.to(adv_BT.device) + clip_histogram(noisy_BT, adv_BT, mask_BT)
        self._exact = self._exact.to(adv_BT.device) + clip_histogram(exact_BT, adv_BT, mask_BT)

    def bounds(self, clip_low: float, clip_high: float, config: LearnerConfig) -> tuple[float, float]:
        """Return (clip_low, clip_high), to be used in place of the nominal ones. Collective."""
        noisy, exact = (add_over_ranks(histogram, config) for histogram in (self._noisy, self._exact))
        return calibrated(noisy, exact, clip_low, clip_high)
