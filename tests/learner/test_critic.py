"""PPO's learner: credit per token, the same from one rank or two, and nothing breaks where samples are missing."""

from dataclasses import replace

import pytest
import torch

from qurl_ray.config.learner import LearnerConfig
from qurl_ray.learner.batching import plan
from qurl_ray.learner.critic import Credit
from qurl_ray.learner.learner import PolicyLearner, make_learner
from qurl_ray.policy.load import load_model
from tests.learner.test_torch_backend import SETTINGS, groups
from tests.ranks import run_ranks

CREDIT = Credit(lr=1e-2, gamma=1.0, lam=1.0, value_clip=None)


def samples(count: int = 12):
    """Single answers whose reward can be read off their first token."""
    found = [group[0] for group in groups(count)]
    return [[replace(s, advantage=0.0, reward=float(s.token_ids[0] % 2))] for s in found]


def learner(spec, **config) -> PolicyLearner:
    return make_learner(
        load_model(spec),
        LearnerConfig(**({"lr": 1e-3} | config)),
        SETTINGS,
        temperature=1.0,
        total_updates=100,
        credit=CREDIT,
        value_body=load_model(spec),
    )


def flat(trained: PolicyLearner) -> torch.Tensor:
    both = [*trained.named_parameters(), *trained._critic.backend.named_parameters()]
    return torch.cat([parameter.detach().reshape(-1).clone() for _, parameter in both])


@pytest.mark.slow
def test_the_value_model_learns_what_answers_are_worth(tiny_spec):
    trained = learner(tiny_spec, lr=1e-12)
    errors = []
    for step in range(25):
        result = trained.learn(plan(samples(), updates=2, ranks=1, token_budget=100, seed=step)[0])
        errors.append(result.sums["value_error"] / result.sums["tokens"])
    rewards = [(group[0].reward, len(group[0].token_ids)) for group in samples()]
    tokens = sum(n for _, n in rewards)
    assert errors[0] == pytest.approx(sum(r * n for r, n in rewards) / tokens, rel=1e-6)  # values begin at zero
    assert errors[-1] < 0.5 * errors[0]  # the best constant would have 0.58


def test_advantages_are_whitened_over_the_whole_step(tiny_spec):
    trained = learner(tiny_spec)
    trained.learn(plan(samples(), updates=1, ranks=1, token_budget=100, seed=0)[0])
    mini_batches = plan(samples(), updates=3, ranks=1, token_budget=30, seed=0)[0]
    passes = [trained._make_pass(micro) for mini_batch in mini_batches for micro in mini_batch.micro_batches]
    trained._critic.estimate(passes, penalty=None)
    found = torch.cat([one.advantages[one.batch.mask_BT] for one in passes])
    assert found.mean().item() == pytest.approx(0, abs=1e-6)
    assert found.std().item() == pytest.approx(1, abs=1e-5)


def test_a_step_without_samples_changes_nothing(tiny_spec):
    trained = learner(tiny_spec)
    before = flat(trained)
    assert trained.learn([]).sums == {}
    assert torch.equal(flat(trained), before)


def _rank(rank: int, ranks: int, spec, out: str) -> None:
    for backend in ("torch", "fsdp", "deepspeed"):
        trained = learner(spec, backend=backend)
        trained.learn(plan(samples(), updates=3, ranks=ranks, token_budget=30, seed=3)[rank])
        torch.save(flat(trained), f"{out}/{backend}.{rank}.pt")
        # One answer per update: the second rank has none in the whole step.
        trained.learn(plan(samples(2), updates=2, ranks=ranks, token_budget=100, seed=3)[rank])
        torch.save(flat(trained), f"{out}/{backend}.few.{rank}.pt")


@pytest.mark.slow
def test_two_ranks_make_the_updates_of_one(tiny_spec, tmp_path):
    alone = learner(tiny_spec)
    start = flat(alone)
    alone.learn(plan(samples(), updates=3, ranks=1, token_budget=30, seed=3)[0])
    after = flat(alone)
    alone.learn(plan(samples(2), updates=2, ranks=1, token_budget=100, seed=3)[0])
    few = flat(alone)
    run_ranks(2, _rank, tiny_spec, str(tmp_path))
    for backend in ("torch", "fsdp", "deepspeed"):
        for name, expected in (("", after), (".few", few)):
            first, second = (torch.load(tmp_path / f"{backend}{name}.{rank}.pt") for rank in range(2))
            assert torch.equal(first, second)
            assert (first - expected).norm() <= 1e-3 * (expected - start).norm()
