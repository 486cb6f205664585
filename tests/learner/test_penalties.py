"""What an objective may have besides its surrogate: KL to a reference, in the loss or in rewards, entropy, weakened
weights, calibrated bounds. One rank or two, each is the same."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from qurl_ray.config.learner import LearnerConfig
from qurl_ray.learner.batching import plan, to_tensors
from qurl_ray.learner.critic import Credit
from qurl_ray.learner.learner import PolicyLearner, make_learner
from qurl_ray.learner.passes import Penalty
from qurl_ray.policy.load import load_model
from qurl_ray.policy.logprobs import token_logprobs
from qurl_ray.rl.advantages import rloo
from qurl_ray.rl.corrections import CorrectionSettings
from qurl_ray.rl.diagnostics import policy_metrics
from qurl_ray.rl.objective import ObjectiveSettings
from qurl_ray.rl.reduce import merge
from tests.learner.test_torch_backend import SETTINGS, groups
from tests.ranks import run_ranks


def numbered(count: int = 6) -> list:
    """Groups that know which they are, with rewards of 0 and 1 and no advantages yet."""
    return [
        [replace(s, group=p, advantage=0.0, reward=float(s.token_ids[0] % 2)) for s in group]
        for p, group in enumerate(groups(count))
    ]


def learner(spec, settings=SETTINGS, *, lr=1e-3, **more) -> PolicyLearner:
    return make_learner(load_model(spec), LearnerConfig(lr=lr), settings, temperature=1.0, total_updates=1000, **more)


def shares(chosen, *, updates=2, ranks=1, rank=0):
    return plan(chosen, updates=updates, ranks=ranks, token_budget=60, seed=3)[rank]


def metrics(trained, mini_batches) -> dict[str, float]:
    return policy_metrics(trained.learn(mini_batches).sums)


def perturbed(spec):
    model = load_model(spec)
    noise = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.03 * torch.randn(parameter.shape, generator=noise))
    return model


@pytest.mark.sampled(2)
@pytest.mark.parametrize("estimator", ["k2", "k3"])
def test_a_kl_loss_draws_the_policy_back_to_its_reference(tiny_spec, estimator):
    settings = replace(SETTINGS, kl_coef=1.0, kl_estimator=estimator)
    trained = learner(tiny_spec, settings, reference=perturbed(tiny_spec))
    found = [metrics(trained, shares(numbered()))["policy/kl_reference"] for _ in range(6)]
    free = learner(tiny_spec, replace(settings, kl_coef=0.0), reference=perturbed(tiny_spec))
    still = [metrics(free, shares(numbered()))["policy/kl_reference"] for _ in range(2)]
    assert still[0] == still[1] > 0.005  # without advantages nothing else moves the policy
    assert still[0] > found[0] > 3 * found[-1]


def test_an_entropy_bonus_raises_the_entropy_that_is_logged(tiny_spec):
    batch = to_tensors([s for group in numbered() for s in group])
    with torch.no_grad():
        logits = load_model(tiny_spec)(batch.token_ids_BT[:, :-1]).logits[batch.mask_BT[:, 1:]].double()
    expected = torch.distributions.Categorical(logits=logits).entropy().mean()
    trained = learner(tiny_spec, replace(SETTINGS, entropy_coef=1.0))
    found = [metrics(trained, shares(numbered(), updates=1))["policy/entropy"] for _ in range(4)]
    assert found[0] == pytest.approx(float(expected), rel=1e-5)
    assert found[-1] > found[0]
    plain = learner(tiny_spec)
    assert metrics(plain, shares(numbered(), updates=1))["policy/entropy"] == pytest.approx(found[0], rel=1e-6)


def rewards_minus_kl(spec, coef: float) -> dict[str, float]:
    """By uid, from models that are run on whole answers: reward - coef · sum_t ½ log²(p/reference)."""
    policy, reference, found = load_model(spec), perturbed(spec), {}
    for group in numbered():
        for s in group:
            batch = to_tensors([s])
            with torch.no_grad():
                p, r = (token_logprobs(m, batch.token_ids_BT, batch.mask_BT, 1.0) for m in (policy, reference))
            found[s.uid] = s.reward - coef * float(((p - r).double() ** 2 / 2).sum())
    return found


PENALTY = Penalty(coef=3.0, estimator="k2", compare=rloo)


def assigned(trained: PolicyLearner, mini_batches) -> dict[str, float]:
    """By uid, the advantages with which a step would begin."""
    passes = [[trained._make_pass(samples) for samples in trained._shares(m)] for m in mini_batches]
    trained._before_the_first_update(passes)
    everything = [one for chosen in passes for one in chosen]
    return {s.uid: float(a) for one in everything for s, a in zip(one.samples, one.advantages, strict=True)}


def test_a_kl_in_the_reward_is_part_of_the_comparison_of_a_group(tiny_spec):
    found = assigned(learner(tiny_spec, reference=perturbed(tiny_spec), penalty=PENALTY), shares(numbered()))
    rewards = rewards_minus_kl(tiny_spec, coef=3.0)
    for group in numbered():
        for s in group:
            others = [rewards[other.uid] for other in group if other.uid != s.uid]
            assert found[s.uid] == pytest.approx(rewards[s.uid] - np.mean(others), abs=1e-4)
    assert len({round(a, 3) for a in found.values()}) > len(found) / 2  # the KL tells equal rewards apart


ADAPTIVE = replace(SETTINGS, correction=replace(SETTINGS.correction, cap=8.0, ess_floor=0.8))


def all_at_once(spec, **config) -> PolicyLearner:
    """Every part that a learner can have besides its policy, but for calibration and a second model."""
    return make_learner(
        load_model(spec),
        LearnerConfig(**({"lr": 1e-3} | config)),
        replace(ADAPTIVE, entropy_coef=0.01),
        temperature=1.0,
        total_updates=1000,
        credit=Credit(lr=1.0, gamma=1.0, lam=0.95, value_clip=0.5, coef=0.5),
        reference=perturbed(spec),
        penalty=Penalty(coef=0.1, estimator="k3"),
    )


def flat(trained: PolicyLearner) -> torch.Tensor:
    return torch.cat([parameter.detach().reshape(-1).clone() for _, parameter in trained.named_parameters()])


def _rank(rank: int, ranks: int, spec, out: str) -> None:
    for backend in ("deepspeed", "fsdp"):
        sharded = all_at_once(spec, backend=backend, zero_stage=3)
        sharded.learn(shares(numbered(), ranks=ranks, rank=rank))
        torch.save(flat(sharded), f"{out}/{backend}.{rank}.pt")
    with_penalty = learner(spec, reference=perturbed(spec), penalty=PENALTY)
    advantages = assigned(with_penalty, shares(numbered(), ranks=ranks, rank=rank))
    strength = learner(spec, ADAPTIVE).learn(shares(numbered(), ranks=ranks, rank=rank)).sums["max_strength"]
    calibrating = calibrated_learner(spec)
    calibrating.learn(shares(signed(), ranks=ranks, rank=rank))
    lonely = calibrated_learner(spec)  # the second rank has nothing to add, and does not wait for ever
    lonely.learn(shares([signed()[0][:1]], updates=1, ranks=ranks, rank=rank))
    assert lonely._bounds == (0.2, 0.2)
    torch.save((advantages, strength, calibrating._bounds), f"{out}/{rank}.pt")


@pytest.mark.slow
def test_two_ranks_agree_with_one_on_what_is_of_the_whole_step(tiny_spec, tmp_path):
    run_ranks(2, _rank, tiny_spec, str(tmp_path))
    (mine, strength, bounds), (other, *same) = (torch.load(tmp_path / f"{rank}.pt") for rank in range(2))
    alone = assigned(learner(tiny_spec, reference=perturbed(tiny_spec), penalty=PENALTY), shares(numbered()))
    assert mine | other == pytest.approx(alone, abs=1e-4)
    assert mine.keys() & other.keys() == set()
    expected = learner(tiny_spec, ADAPTIVE).learn(shares(numbered())).sums["max_strength"]
    assert [strength, bounds] == same
    assert strength == pytest.approx(expected, rel=1e-5)
    replicated = all_at_once(tiny_spec)
    start = flat(replicated)
    replicated.learn(shares(numbered()))
    for name in ("deepspeed.0", "deepspeed.1", "fsdp.0", "fsdp.1"):
        sharded = torch.load(tmp_path / f"{name}.pt")
        # Sums in another order: 1.5e-4 on a Zen 4, nearly all of it in 20 parameters whose gradients are near zero. One
        # rank that takes its samples one by one differs by 0.6e-4.
        assert (sharded - flat(replicated)).norm() <= 3e-4 * (flat(replicated) - start).norm()
    calibrating = calibrated_learner(tiny_spec)
    calibrating.learn(shares(signed()))
    assert bounds == pytest.approx(calibrating._bounds, abs=2e-3)


def test_weights_are_weakened_until_enough_samples_are_effective(tiny_spec):
    result = learner(tiny_spec, ADAPTIVE).learn(shares(numbered()))
    strength = policy_metrics(result.sums)["mismatch/strength"]
    assert 0 < strength < 1
    policy, weights = load_model(tiny_spec), []
    for group in numbered():
        batch = to_tensors(group)
        with torch.no_grad():
            p = token_logprobs(policy, batch.token_ids_BT, batch.mask_BT, 1.0)
        rho = (p - batch.behavior_BT)[batch.mask_BT].double().exp().clamp(max=8.0)
        weights.append(1 - strength + strength * rho)
    weight = torch.cat(weights)
    assert float(weight.sum() ** 2 / (len(weight) * weight.square().sum())) == pytest.approx(0.8, abs=1e-4)


# --- calibrated clipping ----------------------------------------------------------------------------------------


def signed():
    """Groups with advantages of both signs."""
    return [[replace(s, advantage=1.0 if g % 2 else -1.0) for g, s in enumerate(group)] for group in numbered()]


def calibrated_learner(spec) -> PolicyLearner:
    naive = ObjectiveSettings(correction=CorrectionSettings(ratio="behavior"), clip_low=0.2, clip_high=0.2)
    return learner(spec, naive, calibrate_every=2)


def test_calibrated_bounds_widen_with_the_mismatch_and_come_back_with_the_state(tiny_spec, tmp_path):
    trained = calibrated_learner(tiny_spec)
    first = metrics(trained, shares(signed()))
    assert (first["clip/calibrated_low"], first["clip/calibrated_high"]) == (0.2, 0.2)
    bounds = trained._bounds
    # The engine's log-probs are off by much and the policy has hardly moved, so hardly anything is to be cut.
    assert bounds[0] > 0.5
    assert first["clip/lower"] > 0.2
    assert metrics(trained, shares(signed()))["clip/lower"] < 0.5 * first["clip/lower"]
    assert trained._bounds == bounds  # every second step only
    trained.save(tmp_path)
    other = calibrated_learner(tiny_spec)
    other.load(tmp_path)
    assert (other._bounds, other._steps) == (bounds, 2)


# --- PPO --------------------------------------------------------------------------------------------------------


def test_ppos_returns_lose_the_kl_of_every_token_that_is_still_to_come(tiny_spec):
    credit = Credit(lr=1e-3, gamma=1.0, lam=1.0, value_clip=None)
    penalty = Penalty(coef=2.0, estimator="k1")
    trained = learner(
        tiny_spec, credit=credit, value_body=load_model(tiny_spec), reference=perturbed(tiny_spec), penalty=penalty
    )
    (share,) = shares(numbered(), updates=1)
    passes = [trained._make_pass(samples) for samples in share.micro_batches]
    trained._before_the_first_update([passes])
    policy, reference = load_model(tiny_spec), perturbed(tiny_spec)
    for one in passes:
        batch = one.batch
        with torch.no_grad():
            p, r = (token_logprobs(m, batch.token_ids_BT, batch.mask_BT, 1.0) for m in (policy, reference))
        for row, sample in enumerate(one.samples):
            start = len(sample.prompt_ids)
            kl = (p - r)[row, start : sample.length].tolist()
            expected = [sample.reward - 2.0 * sum(kl[t:]) for t in range(len(kl))]
            assert one.returns_BT[row, start : sample.length].tolist() == pytest.approx(expected, abs=1e-4)


SHARED = Credit(lr=1.0, gamma=1.0, lam=1.0, value_clip=None, coef=1.0)


@pytest.mark.slow
def test_a_shared_value_model_learns_and_stays_out_of_what_engines_get(tiny_spec, tmp_path):
    single = [[replace(group[0], reward=float(group[0].token_ids[0] % 2))] for group in numbered(12)]
    trained = learner(tiny_spec, lr=3e-3, credit=SHARED)
    assert {name for name, _ in trained.named_parameters()} == {n for n, _ in load_model(tiny_spec).named_parameters()}
    errors = []
    for step in range(25):
        result = trained.learn(plan(single, updates=2, ranks=1, token_budget=100, seed=step)[0])
        errors.append(result.sums["value_error"] / result.sums["tokens"])
    assert errors[-1] < 0.5 * errors[0]
    trained.save(tmp_path)
    other = learner(tiny_spec, credit=SHARED)
    other.load(tmp_path)
    head, same = (dict(t._policy.named_parameters())["value_head.weight"] for t in (trained, other))
    assert head.any()
    assert torch.equal(head, same)


def test_a_shared_value_models_loss_is_added_to_the_policys(tiny_spec):
    single = [[replace(group[0], reward=float(group[0].token_ids[0] % 2))] for group in numbered(12)]

    def head_gradient(coef: float) -> torch.Tensor:
        trained = learner(tiny_spec, credit=replace(SHARED, coef=coef))
        (share,) = plan(single, updates=1, ranks=1, token_budget=100, seed=0)[0]
        passes = [trained._make_pass(samples) for samples in share.micro_batches]
        trained._before_the_first_update([passes])
        trained._accumulate(passes, share.denominators, 1.0, None)
        return dict(trained._policy.named_parameters())["value_head.weight"].grad

    one, three = head_gradient(1.0), head_gradient(3.0)
    torch.testing.assert_close(three, 3 * one)
    # ½ Σ (V - G)² / tokens at V = 0: its gradient is -Σ G · state / tokens
    policy, total, tokens = load_model(tiny_spec), 0.0, 0
    for (s,) in single:
        batch = to_tensors([s])
        with torch.no_grad():
            states = policy.model(batch.token_ids_BT[:, :-1]).last_hidden_state[batch.mask_BT[:, 1:]]
        total, tokens = total - s.reward * states.sum(dim=0), tokens + len(s.token_ids)
    torch.testing.assert_close(one[0], total / tokens, rtol=1e-4, atol=1e-6)


def test_merged_figures_of_a_step_are_the_same_for_all_micro_batches():
    assert merge([{"max_strength": 0.5}, {"max_strength": 0.5}])["max_strength"] == 0.5
