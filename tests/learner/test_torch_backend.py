"""The torch learner: the update it makes does not depend on micro-batches, padding or the number of ranks."""

import math
from dataclasses import replace

import numpy as np
import pytest
import torch

from qurl_ray.config.learner import LearnerConfig
from qurl_ray.learner.batching import plan, to_tensors
from qurl_ray.learner.learner import PolicyLearner, make_learner
from qurl_ray.policy.load import load_model
from qurl_ray.policy.logprobs import token_logprobs
from qurl_ray.rl.corrections import CorrectionSettings
from qurl_ray.rl.diagnostics import policy_metrics
from qurl_ray.rl.objective import Denominators, ObjectiveSettings, objective
from qurl_ray.types import Trajectory
from tests.ranks import run_ranks

SETTINGS = ObjectiveSettings(
    correction=CorrectionSettings(weight="token", cap=2.0, adaptive_clip=True), clip_low=0.2, clip_high=0.28
)


def groups(count: int = 10, size: int = 4, *, turns: bool = False) -> list[list[Trajectory]]:
    """Random answers of different lengths, with log-probs of a policy that is not quite the learner's. With `turns`, an
    environment gave a third of their tokens."""
    rng, others = np.random.default_rng(0), np.random.default_rng(1)
    return [
        [
            Trajectory(
                uid=f"{p}/{g}",
                prompt_ids=rng.integers(3, 18, size=5).astype(np.int32),
                token_ids=rng.integers(3, 18, size=(n := rng.integers(1, 12))).astype(np.int32),
                logprobs=rng.uniform(-3.2, -2.2, size=n).astype(np.float32),
                reward=0.0,
                advantage=float(rng.normal()),
                versions=np.ones(n, dtype=np.int32),
                mask=others.permutation(n) >= n // 3 if turns else None,
            )
            for g in range(size)
        ]
        for p in range(count)
    ]


def learner(spec, **config) -> tuple[PolicyLearner, torch.nn.Module]:
    model = load_model(spec)
    return make_learner(
        model, LearnerConfig(**({"lr": 1e-3} | config)), SETTINGS, temperature=1.0, total_updates=11
    ), model


def parameters_after(
    spec, *, count=10, updates=3, token_budget=10_000, ranks=1, rank=0, turns=False, **config
) -> torch.Tensor:
    trained, model = learner(spec, **config)
    trained.learn(
        plan(groups(count, turns=turns), updates=updates, ranks=ranks, token_budget=token_budget, seed=3)[rank]
    )
    return torch.cat([p.detach().reshape(-1) for p in model.parameters()])


def start(spec) -> torch.Tensor:
    return torch.cat([p.detach().reshape(-1) for p in load_model(spec).parameters()])


@pytest.mark.sampled(2)
@pytest.mark.parametrize("turns", [False, True], ids=["one turn", "turns"])
@pytest.mark.parametrize("config", [{}, {"packing": True}, {"share_prompts": False}], ids=str)
def test_micro_batches_change_nothing(tiny_spec, turns, config):
    whole = parameters_after(tiny_spec, turns=turns)
    split = parameters_after(tiny_spec, turns=turns, token_budget=40, **config)
    moved = (whole - start(tiny_spec)).norm()
    assert moved > 0.1
    assert (whole - split).norm() <= 1e-3 * moved


def test_gradients_of_a_certificate_are_those_of_the_objective_and_change_nothing(tiny_spec):
    trained, model = learner(tiny_spec)
    first, second = (plan(part, updates=1, ranks=1, token_budget=40, seed=0)[0] for part in (groups(6), groups(10)[6:]))
    before = start(tiny_spec)
    found = trained.compare_gradients(first, second)
    gradients = []
    for part in (groups(6), groups(10)[6:]):
        reference = load_model(tiny_spec)
        batch = to_tensors([s for group in part for s in group])
        logprobs = token_logprobs(reference, batch.token_ids_BT, batch.mask_BT, 1.0)
        denominators = Denominators(tokens=int(batch.mask_BT.sum()), sequences=len(batch.mask_BT))
        loss, _ = objective(
            logprobs, logprobs.detach(), batch.behavior_BT, batch.advantages, batch.mask_BT, denominators, SETTINGS
        )
        loss.backward()
        gradients.append(torch.cat([p.grad.reshape(-1) for p in reference.parameters()]).double())
    cosine = torch.nn.functional.cosine_similarity(*gradients, dim=0)
    assert abs(cosine) < 0.9  # the two are told apart
    assert found["certificate/gradient_cosine"] == pytest.approx(float(cosine), rel=1e-3)
    ratio = gradients[1].norm() / gradients[0].norm()
    assert found["certificate/gradient_ratio"] == pytest.approx(float(ratio), rel=1e-3)
    same = trained.compare_gradients(first, first)
    assert list(same.values()) == pytest.approx([1.0, 1.0], abs=1e-12)
    assert torch.equal(torch.cat([p.detach().reshape(-1) for p in model.parameters()]), before)
    assert all(p.grad is None for p in model.parameters())
    assert trained.compare_gradients(first, []) == {}
    half, _ = learner(tiny_spec, compute="float16")
    assert half.compare_gradients(first, second) == {}


def _rank(rank: int, ranks: int, spec, out: str) -> None:
    torch.save(parameters_after(spec, ranks=ranks, rank=rank, token_budget=60), f"{out}/{rank}.pt")


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_several_ranks_make_the_update_of_one(tiny_spec, tmp_path, ranks):
    run_ranks(ranks, _rank, tiny_spec, str(tmp_path))
    first, *others = (torch.load(tmp_path / f"{rank}.pt") for rank in range(ranks))
    assert all(torch.equal(first, other) for other in others)
    alone = parameters_after(tiny_spec)
    assert (first - alone).norm() <= 1e-3 * (alone - start(tiny_spec)).norm()


@pytest.mark.parametrize("turns", [False, True], ids=["one turn", "turns"])
def test_an_update_is_the_adamw_step_of_the_objective(tiny_spec, turns):
    trained, model = learner(tiny_spec, grad_clip=0.5, weight_decay=0.1)
    reference = load_model(tiny_spec).double()
    samples = [s for group in groups(turns=turns) for s in group]
    batch = to_tensors(samples)
    logprobs = token_logprobs(reference, batch.token_ids_BT, batch.mask_BT, 1.0)
    # the shared log-softmax is float32, which bounds the agreement below
    denominators = Denominators(tokens=sum(s.drawn for s in samples), sequences=len(samples))
    loss, _ = objective(
        logprobs, logprobs.detach(), batch.behavior_BT, batch.advantages, batch.mask_BT, denominators, SETTINGS
    )
    loss.backward()
    norm = math.sqrt(sum(float(p.grad.square().sum()) for p in reference.parameters()))
    result = trained.learn(plan(groups(turns=turns), updates=1, ranks=1, token_budget=10_000, seed=0)[0])
    assert result.grad_norm == pytest.approx(norm, rel=1e-3)
    assert result.sums["tokens"] == denominators.tokens
    for (name, new), (_, old) in zip(model.named_parameters(), reference.named_parameters(), strict=True):
        grad = old.grad * min(1.0, 0.5 / (norm + 1e-6))
        decay = 0.1 if old.ndim >= 2 else 0.0
        expected = old * (1 - 1e-3 * decay) - 1e-3 * grad / (grad.abs() + 1e-8)  # AdamW's first step
        sure = grad.abs() > 1e-5  # elsewhere the sign of a tiny gradient decides
        torch.testing.assert_close(new.double()[sure], expected[sure], rtol=0, atol=5e-5, msg=name)


@pytest.mark.equal_bits
def test_proximal_logprobs_are_those_before_the_first_update(tiny_spec):
    # With behavior = the initial policy, rho is exactly 1 for every token of every mini-batch only if
    # prox is taken before anything moves: the engine's and the learner's numbers are the same bits.
    trained, model = learner(tiny_spec)
    exact = []
    for group in groups():
        for s in group:
            batch = to_tensors([s])
            with torch.no_grad():
                row = token_logprobs(model, batch.token_ids_BT, batch.mask_BT, 1.0)[batch.mask_BT]
            exact.append(replace(s, logprobs=row.numpy()))
    regrouped = [exact[i : i + 4] for i in range(0, len(exact), 4)]
    result = trained.learn(plan(regrouped, updates=4, ranks=1, token_budget=50, seed=0)[0])
    assert result.sums["abs_log_rho"] == 0
    assert result.sums["clipped_upper"] + result.sums["clipped_lower"] > 0  # and yet the policy moved in between


def test_a_gradient_that_is_not_finite_skips_the_update_and_is_counted(tiny_spec):
    trained, model = learner(tiny_spec)
    with torch.no_grad():
        model.model.norm.weight[0] = math.nan
    before = model.model.layers[0].mlp.up_proj.weight.clone()
    result = trained.learn(plan(groups(), updates=2, ranks=1, token_budget=1000, seed=0)[0])
    assert result.skipped_updates == 2
    assert torch.equal(model.model.layers[0].mlp.up_proj.weight, before)


def test_a_step_without_samples_changes_nothing(tiny_spec):
    trained, model = learner(tiny_spec)
    assert trained.learn([]).sums == {}
    assert torch.equal(torch.cat([p.detach().reshape(-1) for p in model.parameters()]), start(tiny_spec))


def test_the_rate_warms_up_linearly_over_updates(tiny_spec):
    trained, _ = learner(tiny_spec, warmup_steps=8)
    rates = [trained.learn(plan(groups(), updates=2, ranks=1, token_budget=1000, seed=i)[0]).lr for i in range(5)]
    assert rates == pytest.approx([2.5e-4, 5e-4, 7.5e-4, 1e-3, 1e-3])


def test_the_rate_falls_linearly_to_its_final_share(tiny_spec):
    trained, _ = learner(tiny_spec, lr_final_share=0.2)
    rates = [trained.learn(plan(groups(), updates=2, ranks=1, token_budget=1000, seed=i)[0]).lr for i in range(7)]
    # updates 1, 3, 5, 7, 9 of 0 … 10 are the second of each call; after the last the rate stays
    assert rates == pytest.approx([1e-3 * (1 - 0.8 * u / 10) for u in (1, 3, 5, 7, 9, 10, 10)])


@pytest.mark.parametrize("temperature", [0.5, 1.0, 2.0])
def test_logprobs_are_taken_at_the_rollouts_temperature(tiny_spec, temperature):
    settings, model = replace(SETTINGS, kl_coef=1.0), load_model(tiny_spec)
    options = {"temperature": temperature, "total_updates": 1, "reference": load_model(tiny_spec)}
    trained = make_learner(load_model(tiny_spec), LearnerConfig(), settings, **options)
    watched = [[replace(s, watched=True) for s in group] for group in groups(count=3)]
    result = trained.learn(plan(watched, updates=1, ranks=1, token_budget=10_000, seed=0)[0])
    for s in (s for group in watched for s in group):
        ids_T = torch.tensor([*s.prompt_ids, *s.token_ids], dtype=torch.int64)
        with torch.no_grad():
            logits_TV = model(ids_T[None]).logits[0].double()
        whole_T = (logits_TV / temperature).log_softmax(-1)[:-1].gather(1, ids_T[1:, None])[:, 0]
        found = result.proximal[s.uid]
        assert found == pytest.approx(whole_T[len(s.prompt_ids) - 1 :].numpy(), abs=1e-5)
    # the reference is the policy itself, so at the same temperature there is no divergence
    assert policy_metrics(result.sums)["policy/kl_reference"] == pytest.approx(0.0, abs=1e-8)
