"""qurl_ray.rl against verl 0.9.1, an implementation by others: losses, gradients, advantages, metrics. `make oracle`.

All in float64. verl adds 1e-8 to most counts it divides by and we do not. Hence two tolerances: `EXACT` where no such
count takes part, `COUNTED` where one does.
"""

from dataclasses import dataclass

import numpy as np
import pytest
import torch

from qurl_ray.rl.advantages import advantages
from qurl_ray.rl.corrections import CorrectionSettings, correct
from qurl_ray.rl.diagnostics import policy_metrics
from qurl_ray.rl.objective import Denominators, ObjectiveSettings, objective
from qurl_ray.rl.ratios import kl_estimate, log_ratio
from qurl_ray.rl.reduce import as_floats, merge, moments
from qurl_ray.rl.surrogate import cispo, gspo, ppo
from qurl_ray.rl.value import gae, value_loss, whiten
from qurl_ray.tables import ADVANTAGES

core = pytest.importorskip("verl.trainer.ppo.core_algos")
mismatch = pytest.importorskip("verl.trainer.ppo.rollout_corr_helper")
from verl.workers.config import ActorConfig  # noqa: E402

pytestmark = pytest.mark.oracle

EXACT = {"rtol": 1e-12, "atol": 1e-14}
COUNTED = {"rtol": 1e-8, "atol": 1e-8}

SEEDS = range(3)
LOW, HIGH, DUAL = 0.2, 0.28, 2.0
WIDTH, FIXED_LENGTH = 20, 37
OFF = 1e30
"""A bound that nothing reaches."""

MODES = {"token": "token-mean", "sequence": "seq-mean-token-mean", "fixed": "seq-mean-token-sum-norm"}
TOLERANCES = {"token": EXACT, "sequence": COUNTED, "fixed": EXACT}
NAMES = {ppo: "vanilla", gspo: "gspo", cispo: "cispo"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Batch:
    """Log-probs, advantages and their mask, [B, T]. Where masked there are other numbers, which must not matter."""

    theta_BT: torch.Tensor
    prox_BT: torch.Tensor
    behavior_BT: torch.Tensor
    reference_BT: torch.Tensor
    adv_BT: torch.Tensor
    mask_BT: torch.Tensor

    @property
    def verl_mask(self) -> torch.Tensor:
        """[B, T], numbers."""
        return self.mask_BT.double()

    @property
    def log_rho(self) -> torch.Tensor:
        """[B, T], log(p/b)."""
        return log_ratio(self.prox_BT, self.behavior_BT, self.mask_BT)

    @property
    def denominators(self) -> Denominators:
        return Denominators(tokens=int(self.mask_BT.sum()), sequences=int(self.mask_BT.any(dim=1).sum()))

    def rows(self, chosen: slice) -> "Batch":
        return Batch(**{name: getattr(self, name)[chosen] for name in self.__slots__})


def ragged(generator: torch.Generator, *, rows: int, width: int, empty: bool) -> torch.Tensor:
    """bool [rows, width]: one stretch each, of 1 to `width` tokens; none in the last row if `empty`."""
    first = torch.randint(0, width // 2, (rows, 1), generator=generator)
    last = torch.randint(width // 2, width, (rows, 1), generator=generator)
    last[0] = first[0]
    at = torch.arange(width)[None]
    mask_BT = (at >= first) & (at <= last)
    if empty:
        mask_BT[-1] = False
    return mask_BT


def random_batch(seed: int, *, by_sequence: bool = False, moved: float = 0.4, empty: bool = True) -> Batch:
    """Ratios of many sizes; `by_sequence` makes an advantage the same all along its sequence."""
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    rows = 16
    mask_BT = ragged(generator, rows=rows, width=WIDTH, empty=empty)
    behavior_BT = -1.5 * normal(rows, WIDTH).abs()
    prox_BT = behavior_BT + 0.2 * normal(rows, WIDTH) + 0.05 * normal(rows, 1)
    return Batch(
        theta_BT=prox_BT + moved * normal(rows, WIDTH),
        prox_BT=prox_BT,
        behavior_BT=behavior_BT,
        reference_BT=prox_BT + 0.3 * normal(rows, WIDTH),
        adv_BT=normal(rows, 1).expand(rows, WIDTH) if by_sequence else normal(rows, WIDTH),
        mask_BT=mask_BT,
    )


def settings_of(correction: CorrectionSettings | None = None, **changed) -> ObjectiveSettings:
    values = {"clip_low": LOW, "clip_high": HIGH, "fixed_length": FIXED_LENGTH} | changed
    return ObjectiveSettings(correction=correction or CorrectionSettings(), **values)


def ours(batch: Batch, settings: ObjectiveSettings, **also):
    """Loss, its gradient at theta, metrics."""
    theta_BT = batch.theta_BT.clone().requires_grad_()
    policies = (theta_BT, batch.prox_BT, batch.behavior_BT)
    loss, sums = objective(*policies, batch.adv_BT, batch.mask_BT, batch.denominators, settings, **also)
    return loss.detach(), torch.autograd.grad(loss, theta_BT)[0], policy_metrics(as_floats(sums))


def verls(
    batch: Batch, settings: ObjectiveSettings, *, old_BT=None, mask_BT=None, weights_BT=None, counts=None, kl=None
):
    """The same three of verl; `counts` are denominators in place of the mask's own, `kl` a (coefficient, estimator)."""
    theta_BT = batch.theta_BT.clone().requires_grad_()
    mask_BT = batch.verl_mask if mask_BT is None else mask_BT
    mode, counts = MODES[settings.loss_mean], (counts or {}) | {"loss_scale_factor": settings.fixed_length}
    config = ActorConfig(
        strategy="fsdp",
        rollout_n=1,
        use_dynamic_bsz=True,
        clip_ratio_low=settings.clip_low,
        clip_ratio_high=settings.clip_high,
        clip_ratio_c=settings.dual_clip or OFF,
        global_batch_info=counts,
    )
    loss, metrics = core.get_policy_loss_fn(NAMES[settings.form])(
        batch.prox_BT if old_BT is None else old_BT, theta_BT, batch.adv_BT, mask_BT, mode, config, weights_BT
    )
    if kl is not None:
        coefficient, estimator = kl
        kl_BT = core.kl_penalty(theta_BT, batch.reference_BT, estimator)
        loss = loss + coefficient * core.agg_loss(kl_BT, mask_BT, mode, **counts)
    return loss.detach(), torch.autograd.grad(loss, theta_BT)[0], metrics


def assert_same(actual, expected, tolerance) -> None:
    for ours_is, verls_is in zip(actual[:2], expected[:2], strict=True):
        torch.testing.assert_close(ours_is, verls_is, **tolerance)


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("loss_mean", MODES)
@pytest.mark.parametrize("dual_clip", [None, DUAL])
def test_ppo_with_its_two_clips_and_every_mean(dual_clip, loss_mean, seed):
    batch, settings = random_batch(seed), settings_of(dual_clip=dual_clip, loss_mean=loss_mean)
    actual, expected = ours(batch, settings), verls(batch, settings)
    assert_same(actual, expected, TOLERANCES[loss_mean])
    metrics = actual[2]
    assert min(metrics["clip/upper"], metrics["clip/lower"], metrics["clip/upper_negative"]) > 0.02
    assert (metrics["clip/dual"] > 0.01) == (dual_clip is not None)
    clipped = metrics["clip/upper"] + metrics["clip/lower"]
    assert clipped == pytest.approx(expected[2]["actor/pg_clipfrac"], rel=1e-8)
    assert metrics["clip/dual"] == pytest.approx(expected[2]["actor/pg_clipfrac_lower"], rel=1e-8)
    assert metrics["policy/kl_k1"] == pytest.approx(expected[2]["actor/ppo_kl"], rel=1e-7)


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("loss_mean", MODES)
def test_micro_batches_add_up_to_verls_whole_batch(loss_mean, seed):
    batch, settings = random_batch(seed), settings_of(dual_clip=DUAL, loss_mean=loss_mean)
    loss, gradient_BT, _ = verls(batch, settings)
    theta_BT = batch.theta_BT.clone().requires_grad_()
    total, parts = torch.zeros((), dtype=torch.float64), []
    for rows in (slice(0, 3), slice(3, 16)):
        part = batch.rows(rows)
        policies = (theta_BT[rows], part.prox_BT, part.behavior_BT)
        value, sums = objective(*policies, part.adv_BT, part.mask_BT, batch.denominators, settings)
        total, parts = total + value, [*parts, as_floats(sums)]
    (total_gradient_BT,) = torch.autograd.grad(total, theta_BT)
    assert_same((total.detach(), total_gradient_BT), (loss, gradient_BT), TOLERANCES[loss_mean])
    assert policy_metrics(merge(parts)) == pytest.approx(ours(batch, settings)[2], rel=1e-12)


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("loss_mean", MODES)
@pytest.mark.parametrize(("moved", "low", "high"), [(0.4, 0.04, 0.06), (0.001, 3e-4, 4e-4)])
def test_gspo(moved, low, high, loss_mean, seed):
    """verl routes sg(s_i) through each token's log-prob: the gradient of s_i, for one advantage per sequence."""
    batch = random_batch(seed, by_sequence=True, moved=moved)
    settings = settings_of(form=gspo, clip_low=low, clip_high=high, loss_mean=loss_mean)
    actual, expected = ours(batch, settings), verls(batch, settings)
    assert_same(actual, expected, TOLERANCES[loss_mean])
    clipped = actual[2]["clip/upper"] + actual[2]["clip/lower"]
    assert clipped == pytest.approx(expected[2]["actor/pg_clipfrac"], rel=1e-8)
    assert 0 < clipped < 1


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("loss_mean", MODES)
@pytest.mark.parametrize(("low", "high"), [(LOW, HIGH), (1.0, 0.5)])
def test_cispo(low, high, loss_mean, seed):
    """Same gradient. The values differ by what is constant under autograd: verl has log theta, we have log(theta/p)."""
    batch = random_batch(seed)
    settings = settings_of(form=cispo, clip_low=low, clip_high=high, loss_mean=loss_mean)
    (loss, gradient_BT, _), (verls_loss, verls_gradient_BT, _) = ours(batch, settings), verls(batch, settings)
    clipped_BT = (batch.theta_BT - batch.prox_BT).exp().clamp(1 - low, 1 + high)
    constant_BT = clipped_BT * batch.adv_BT * batch.prox_BT
    constant = core.agg_loss(constant_BT, batch.verl_mask, MODES[loss_mean], loss_scale_factor=FIXED_LENGTH)
    assert_same((loss, gradient_BT), (verls_loss + constant, verls_gradient_BT), TOLERANCES[loss_mean])


WEIGHTS = {
    "decoupled": (CorrectionSettings(weight="token"), "token", OFF),
    "tis": (CorrectionSettings(weight="token", cap=1.2), "token", 1.2),
    "sequence_tis": (CorrectionSettings(weight="sequence", cap=1.5), "sequence", 1.5),
    "icepop": (CorrectionSettings(weight="token", band=(0.8, 1.25)), "token", "0.8_1.25"),
    "mis": (CorrectionSettings(weight="sequence", band=(0.5, 2.0)), "sequence", "0.5_2.0"),
}


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("form", NAMES)
@pytest.mark.parametrize("correction", WEIGHTS)
def test_weights_of_the_mismatch(correction, form, seed):
    """A token whose weight a band makes 0 stays in both denominators."""
    batch = random_batch(seed, by_sequence=True)
    settings, level, threshold = WEIGHTS[correction]
    weights_BT, metrics = mismatch.compute_rollout_correction_weights(batch.log_rho, batch.verl_mask, level, threshold)
    found_BT = torch.where(batch.mask_BT, correct(batch.log_rho, batch.mask_BT, settings).weight_BT, 0.0)
    torch.testing.assert_close(found_BT, weights_BT, **EXACT)
    assert ((weights_BT != batch.log_rho.exp()) & batch.mask_BT).any() == (correction != "decoupled")

    chosen = settings_of(settings, form=form, dual_clip=DUAL if form is ppo else None)  # verl's gspo has none
    actual, expected = ours(batch, chosen), verls(batch, chosen, weights_BT=weights_BT)
    if form is not cispo:  # see test_cispo
        torch.testing.assert_close(actual[0], expected[0], **EXACT)
    torch.testing.assert_close(actual[1], expected[1], **EXACT)
    if level == "token" and settings.band is None:  # for sequences, verl counts these and not their tokens
        assert actual[2]["mismatch/truncated"] == pytest.approx(metrics["rollout_is_ratio_fraction_high"], rel=1e-8)
    if settings.band is not None:
        assert actual[2]["mismatch/dropped"] == pytest.approx(metrics["rollout_is_oob_ratio"], rel=1e-8)


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("loss_mean", MODES)
def test_naive_importance_sampling_is_ppo_with_the_engine_as_old_policy(loss_mean, seed):
    batch = random_batch(seed)
    settings = settings_of(CorrectionSettings(ratio="behavior"), loss_mean=loss_mean)
    assert_same(ours(batch, settings), verls(batch, settings, old_BT=batch.behavior_BT), TOLERANCES[loss_mean])


@pytest.mark.parametrize("seed", SEEDS)
def test_the_geometric_weight_is_one_over_verls_perplexity_ratio(seed):
    """verl 0.9.1 has no geometric weights, but this metric is the mean of their inverses."""
    batch = random_batch(seed, empty=False)
    weights_BT = correct(batch.log_rho, batch.mask_BT, CorrectionSettings(weight="geometric")).weight_BT
    metrics = mismatch.compute_offpolicy_metrics(batch.prox_BT, batch.behavior_BT, batch.verl_mask)
    assert (1 / weights_BT[:, 0]).mean().item() == pytest.approx(metrics["ppl_ratio"], rel=1e-7)


REJECTIONS = {
    "geometric": (CorrectionSettings(reject="geometric", reject_low=1 / 1.06, reject_high=1.06), "seq_mean_k1", "1.06"),
    # verl's statistic is mean_t log(b/p), of which log(lo) to log(hi) is kept: p/b from 1/hi to 1/lo
    "geometric_skewed": (
        CorrectionSettings(reject="geometric", reject_low=1 / 1.1, reject_high=1 / 0.98),
        "seq_mean_k1",
        "0.98_1.1",
    ),
    "k2": (CorrectionSettings(reject="k2", reject_high=0.02), "seq_mean_k2", "0.02"),
    "k3": (CorrectionSettings(reject="k3", reject_high=0.02), "seq_mean_k3", "0.02"),
}


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("loss_mean", MODES)
@pytest.mark.parametrize("rule", REJECTIONS)
def test_rejected_sequences(rule, loss_mean, seed):
    """Given the counts of the whole batch, as in its bypass mode, verl too leaves rejected tokens in its denominators.

    In its decoupled mode they leave that of a mean over tokens, and its loss is larger by that factor.
    """
    batch = random_batch(seed)
    settings, option, threshold = REJECTIONS[rule]
    kept_BT, metrics = mismatch.compute_rollout_rejection_mask(batch.log_rho, batch.verl_mask, option, threshold)
    weight_BT = correct(batch.log_rho, batch.mask_BT, settings).weight_BT
    assert torch.equal((weight_BT != 0) & batch.mask_BT, kept_BT.bool())
    assert 0 < kept_BT.sum() < batch.mask_BT.sum()

    chosen, real = settings_of(settings, loss_mean=loss_mean), batch.denominators
    counts = {"batch_num_tokens": real.tokens, "global_batch_size": real.sequences}
    actual = ours(batch, chosen)
    assert_same(actual, verls(batch, chosen, mask_BT=kept_BT, counts=counts), TOLERANCES[loss_mean])
    assert actual[2]["mismatch/dropped"] == pytest.approx(metrics["rollout_rs_masked_fraction"], rel=1e-8)
    assert actual[2]["mismatch/rejected"] == pytest.approx(metrics[f"rollout_rs_{option}_seq_masked_fraction"])
    if loss_mean == "token":
        decoupled, *_ = verls(batch, chosen, mask_BT=kept_BT)
        torch.testing.assert_close(actual[0] * real.tokens / kept_BT.sum(), decoupled, **EXACT)


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("estimator", ["k1", "k2", "k3"])
def test_kl_estimates(estimator, seed):
    """verl bounds k3 by 10; these are far below."""
    batch = random_batch(seed)
    theta_BT = batch.theta_BT.clone().requires_grad_()
    expected_BT = core.kl_penalty(theta_BT, batch.reference_BT, estimator)
    actual_BT = kl_estimate(log_ratio(theta_BT, batch.reference_BT, torch.ones_like(batch.mask_BT)), estimator)
    gradients = [torch.autograd.grad(x_BT.sum(), theta_BT)[0] for x_BT in (actual_BT, expected_BT)]
    torch.testing.assert_close(actual_BT, expected_BT, **EXACT)
    torch.testing.assert_close(*gradients, **EXACT)
    assert expected_BT.max() < 10


@pytest.mark.parametrize("loss_mean", MODES)
@pytest.mark.parametrize("estimator", ["k1", "k2", "k3"])
def test_a_kl_loss_is_averaged_as_the_surrogate_and_not_weighted(estimator, loss_mean):
    batch, (correction, level, threshold) = random_batch(0), WEIGHTS["tis"]
    settings = settings_of(correction, loss_mean=loss_mean, kl_coef=0.3, kl_estimator=estimator)
    weights_BT, _ = mismatch.compute_rollout_correction_weights(batch.log_rho, batch.verl_mask, level, threshold)
    actual = ours(batch, settings, reference_BT=batch.reference_BT)
    assert_same(actual, verls(batch, settings, weights_BT=weights_BT, kl=(0.3, estimator)), TOLERANCES[loss_mean])


@pytest.mark.parametrize("seed", SEEDS)
def test_metrics_of_the_mismatch(seed):
    """verl's mean, maximum and effective sample size are those of the applied weights: here they are not bounded."""
    batch = random_batch(seed, empty=False)  # verl counts an empty sequence, with perplexity 1; we do not
    verl = mismatch.compute_offpolicy_metrics(batch.prox_BT, batch.behavior_BT, batch.verl_mask)
    verl |= mismatch.compute_rollout_correction_weights(batch.log_rho, batch.verl_mask, "token", OFF)[1]
    _, _, metrics = ours(batch, settings_of())
    expected = {
        "mismatch/kl": verl["k3_kl"],
        "mismatch/kl_k1": verl["kl"],
        "mismatch/chi2": verl["chi2_token"],
        "mismatch/perplexity_gap": verl["training_ppl"] - verl["rollout_ppl"],
        "mismatch/mean_rho": verl["rollout_is_mean"],
        "mismatch/max_rho": verl["rollout_is_max"],
        "mismatch/ess": verl["rollout_is_eff_sample_size"],
    }
    assert {name: metrics[name] for name in expected} == pytest.approx(expected, rel=1e-6)


def scored_answers(seed: int, *, groups: int = 6, size: int = 5):
    """Rewards [P, G], of which one group's are equal; for verl token rewards and mask, [B, T], and each row's group."""
    generator = torch.Generator().manual_seed(seed)
    rewards_PG = torch.rand(groups, size, generator=generator, dtype=torch.float64)
    rewards_PG[0] = 0.7
    mask_BT = ragged(generator, rows=groups * size, width=WIDTH, empty=False)
    last_BT = mask_BT & (mask_BT.flip(1).cumsum(1).flip(1) == 1)
    scores_BT = torch.where(last_BT, rewards_PG.flatten()[:, None], 0.0)
    return rewards_PG.numpy(), scores_BT, mask_BT, np.repeat(np.arange(groups), size)


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize(
    ("kind", "function", "also"),
    [
        ("grpo", "compute_grpo_outcome_advantage", {}),
        ("dr_grpo", "compute_grpo_outcome_advantage", {"norm_adv_by_std_in_grpo": False}),
        ("rloo", "compute_rloo_outcome_advantage", {}),
        ("rloo", "compute_rloo_vectorized_outcome_advantage", {}),
        ("reinforce_baseline", "compute_reinforce_plus_plus_baseline_outcome_advantage", {}),
    ],
)
def test_advantages(kind, function, also, seed):
    """In a group of equal rewards verl's are the rounding of a mean, over 1e-6 with grpo; ours are exactly 0."""
    rewards_PG, scores_BT, mask_BT, index_B = scored_answers(seed)
    expected_BT, _ = getattr(core, function)(scores_BT, mask_BT.double(), index_B, **also)
    found_PG = advantages(rewards_PG, ADVANTAGES.load(kind), mask_BT.sum(dim=1).reshape(rewards_PG.shape).numpy())
    actual_BT = torch.from_numpy(found_PG).reshape(-1, 1) * mask_BT
    torch.testing.assert_close(actual_BT, expected_BT, **COUNTED)


@pytest.mark.parametrize(
    ("kind", "function", "verls_is"),
    [
        ("grpo", "compute_grpo_outcome_advantage", 0.4),
        ("rloo", "compute_rloo_outcome_advantage", 0.4),
        ("rloo", "compute_rloo_vectorized_outcome_advantage", 0.0),
    ],
)
def test_a_group_of_one_is_worth_nothing_here_and_in_verl_mostly_its_reward(kind, function, verls_is):
    reward_BT, one_BT = torch.tensor([[0.4]], dtype=torch.float64), torch.ones(1, 1, dtype=torch.float64)
    expected_BT, _ = getattr(core, function)(reward_BT, one_BT, np.array([0]))
    assert expected_BT.item() == pytest.approx(verls_is)
    assert advantages(reward_BT.numpy(), ADVANTAGES.load(kind)).item() == 0


def long_answers(seed: int):
    """Values, their later ones, rewards of every token, and the mask, [B, T]: longer than our sums' blocks of 256."""
    generator = torch.Generator().manual_seed(seed)
    values_BT, moved_BT, rewards_BT = torch.randn(3, 8, 600, generator=generator, dtype=torch.float64)
    return values_BT, values_BT + 0.3 * moved_BT, rewards_BT, ragged(generator, rows=8, width=600, empty=True)


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize(("gamma", "lam"), [(1.0, 1.0), (1.0, 0.95), (0.99, 0.9)])
def test_gae_and_its_whitening(gamma, lam, seed):
    """verl divides by sqrt(var + 1e-8), we by std + 1e-8. What it returns where masked is not used."""
    values_BT, _, rewards_BT, mask_BT = long_answers(seed)
    arguments = (rewards_BT, values_BT, mask_BT.double(), gamma, lam)
    expected_BT, expected_returns_BT = core.compute_gae_advantage_return(*arguments)
    raw_BT, returns_BT = gae(rewards_BT, values_BT, mask_BT, gamma=gamma, lam=lam)
    white_BT = whiten(raw_BT, mask_BT, moments(raw_BT, mask_BT))
    torch.testing.assert_close(returns_BT[mask_BT], expected_returns_BT[mask_BT], rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(white_BT[mask_BT], expected_BT[mask_BT], **COUNTED)


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("clip", [None, 0.2])
def test_value_loss(clip, seed):
    old_BT, now_BT, returns_BT, mask_BT = long_answers(seed)
    losses, gradients, tokens = [], [], int(mask_BT.sum())
    for name in ("ours", "verl"):
        values_BT = now_BT.clone().requires_grad_()
        if name == "ours":
            loss, sums = value_loss(values_BT, old_BT, returns_BT, mask_BT, tokens=tokens, clip=clip)
        else:
            bound = OFF if clip is None else clip
            loss, clipped = core.compute_value_loss(values_BT, returns_BT, old_BT, mask_BT.double(), bound)
        losses.append(loss.detach())
        gradients.append(torch.autograd.grad(loss, values_BT)[0])
    torch.testing.assert_close(*losses, **EXACT)
    torch.testing.assert_close(*gradients, **EXACT)
    assert sums["value_clipped"].item() / tokens == pytest.approx(clipped.item(), rel=1e-8)
    assert (clipped > 0.1) == (clip is not None)
