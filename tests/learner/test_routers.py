"""Losses and metrics of routers: published formulas, the same gradients from micro-batches, layouts and ranks."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers.models.mixtral.modeling_mixtral import load_balancing_loss_func

from qurl_ray.config import load_config
from qurl_ray.config.learner import LearnerConfig
from qurl_ray.errors import ConfigError
from qurl_ray.learner.batching import plan, to_tensors
from qurl_ray.learner.expert_parallel import ExpertParallel
from qurl_ray.learner.learner import PolicyLearner, make_learner
from qurl_ray.policy.experts import mixtures
from qurl_ray.policy.load import StoredWeights, load_model, unloaded_model
from qurl_ray.policy.tiny import tiny_outline
from qurl_ray.rl.diagnostics import policy_metrics
from qurl_ray.rl.objective import Denominators
from qurl_ray.training.driver.prepare import check_model
from tests.learner.test_experts import gpt_oss_spec as gpt_oss_spec  # a fixture
from tests.learner.test_experts import mixture_spec as mixture_spec  # a fixture
from tests.learner.test_sequence_combined import distance, plain_steps
from tests.learner.test_torch_backend import SETTINGS, groups
from tests.ranks import run_ranks

COEFS = {"router_balance_coef": 0.3, "router_z_coef": 0.05}
LAYOUTS = {
    "prompts shared": {},
    "padded": {"share_prompts": False},
    "packed": {"packing": True},
    "checkpointing": {"gradient_checkpointing": True},
}


def learner_of(spec, coefs=COEFS, **config) -> PolicyLearner:
    settings = LearnerConfig(**({"backend": "torch", "lr": 1.0, "grad_clip": 1e9} | config))
    model, rows = load_model(spec), None
    if settings.backend == "fsdp":
        model = unloaded_model(spec)
        rows = StoredWeights(spec, model).rows
    with plain_steps():
        return make_learner(model, settings, replace(SETTINGS, **coefs), temperature=1.0, total_updates=10, rows=rows)


def gradients(learner, samples, *, at_a_time: int | None = None) -> dict[str, torch.Tensor]:
    """Gradients of one update, whose samples have no advantage: those of routers' losses alone."""
    idle = [replace(sample, advantage=0.0) for sample in samples]
    tokens = sum(len(sample.token_ids) for sample in idle)
    size = at_a_time or len(idle)
    passes = [learner._make_pass(idle[first : first + size]) for first in range(0, len(idle), size)]
    learner._accumulate(passes, Denominators(tokens=tokens, sequences=len(idle)), 1.0, None)
    return {name: parameter.grad.clone() for name, parameter in learner._scorer.policy.named_parameters()}


def router_outputs(model, samples) -> list[torch.Tensor]:
    """Logits [n, E] of each layer at the tokens before an answer's: one sample after the other, by hooks."""
    outputs: list[list[torch.Tensor]] = [[] for _ in mixtures(model)]
    for sample in samples:
        ids = torch.from_numpy(np.concatenate([sample.prompt_ids, sample.token_ids])).long()[None]
        seen: list[torch.Tensor] = []
        handles = [m.gate.register_forward_hook(lambda _, __, out, to=seen: to.append(out)) for m in mixtures(model)]
        model(input_ids=ids[:, :-1], position_ids=torch.arange(ids.shape[1] - 1)[None], use_cache=False)
        for handle in handles:
            handle.remove()
        for layer, logits in zip(outputs, seen, strict=True):
            layer.append(logits[len(sample.prompt_ids) - 1 :])
    return [torch.cat(layer) for layer in outputs]


@pytest.fixture(scope="module")
def samples():
    return [sample for group in groups(count=3) for sample in group]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_gradients_are_those_of_the_published_losses_in_every_layout(mixture_spec, samples, layout):
    """Independent: transformers' load balancing loss of each layer, whose f adds up to k, and autograd."""
    model = load_model(mixture_spec)
    per_layer = router_outputs(model, samples)
    balance = sum(load_balancing_loss_func((logits,), num_experts=8, top_k=2) / 2 for logits in per_layer) / 2
    z = sum(logits.logsumexp(-1).square().mean() for logits in per_layer) / 2
    (COEFS["router_balance_coef"] * balance + COEFS["router_z_coef"] * z).backward()
    expected = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    learner = learner_of(mixture_spec, **LAYOUTS[layout])
    gradients(learner, samples)
    learner._routers.end_step(learner._config)  # f of these tokens
    learner._policy.step(0.0)
    for at_a_time in (None, 2):
        found = gradients(learner, samples, at_a_time=at_a_time)
        assert not any(found[name].any() for name in found.keys() - expected.keys())
        assert distance(found, expected, sorted(expected)) < 1e-5
        learner._policy.step(0.0)


def test_metrics_are_those_of_the_routers_outputs(mixture_spec, samples):
    learner = learner_of(mixture_spec, coefs={})
    result = learner.learn(plan([[s] for s in samples], updates=1, ranks=1, token_budget=60, seed=1)[0])
    per_layer = [logits.detach().double() for logits in router_outputs(load_model(mixture_spec), samples)]
    metrics = policy_metrics(result.sums)
    balance = [load_balancing_loss_func((logits,), num_experts=8, top_k=2) / 2 for logits in per_layer]
    assert metrics["router/balance"] == pytest.approx(np.mean([float(value) for value in balance]), rel=1e-4)
    entropies = [torch.distributions.Categorical(logits=logits).entropy().mean().item() for logits in per_layer]
    assert metrics["router/entropy"] == pytest.approx(np.mean(entropies), rel=1e-4)
    assert metrics["router/z"] == pytest.approx(
        np.mean([logits.logsumexp(-1).square().mean().item() for logits in per_layer]), rel=1e-4
    )
    counts = torch.stack([logits.topk(2).indices.flatten().bincount(minlength=8) for logits in per_layer])
    assert metrics["router/load"] == pytest.approx(8 * (counts / counts.sum(1, keepdim=True)).max().item())
    assert metrics["router/idle_experts"] == pytest.approx((counts == 0).double().mean().item())


@pytest.mark.parametrize("coef", [0.0, 0.01])
def test_the_loss_spreads_what_a_router_had_concentrated(mixture_spec, samples, coef):
    learner = learner_of(mixture_spec, {"router_balance_coef": coef}, lr=0.1)
    with torch.no_grad():
        for mixture in mixtures(learner._scorer.policy):
            mixture.gate.weight.mul_(20)
    idle = [[replace(sample, advantage=0.0) for sample in samples]]
    shares = plan(idle, updates=1, ranks=1, token_budget=200, seed=1)[0]
    balances = [policy_metrics(learner.learn(shares).sums)["router/balance"] for _ in range(20)]
    assert balances[0] > 1.6
    assert (balances[-1] < 1.3) == bool(coef)


@pytest.mark.equal_bits
def test_without_losses_an_update_has_the_same_bits(mixture_spec, samples):
    moved = []
    for watched in (True, False):
        learner = learner_of(mixture_spec, coefs={})
        if not watched:
            for mixture in mixtures(learner._scorer.policy):
                mixture.watch = None
        learner.learn(plan([[s] for s in samples], updates=2, ranks=1, token_budget=60, seed=1)[0])
        moved.append(torch.cat([p.detach().flatten() for _, p in learner.named_parameters()]))
    assert torch.equal(*moved)


def test_a_resumed_learner_has_the_shares_of_the_step_before(mixture_spec, samples, tmp_path):
    shares = plan([[s] for s in samples], updates=1, ranks=1, token_budget=60, seed=1)[0]
    learner = learner_of(mixture_spec)
    learner.learn(shares)
    learner.save(tmp_path)
    resumed = learner_of(mixture_spec)
    resumed.load(tmp_path)
    assert resumed._routers.state() == learner._routers.state()
    assert np.sum(learner._routers.state()) == pytest.approx(2)
    for each in (learner, resumed):
        each.learn(shares)
    pairs = zip(learner.named_parameters(), resumed.named_parameters(), strict=True)
    assert all(torch.equal(one, other) for (_, one), (_, other) in pairs)


# --- ranks ------------------------------------------------------------------------------------------------------------

CASES = {
    "torch": {"backend": "torch"},
    "fsdp": {"backend": "fsdp", "packing": True, "gradient_checkpointing": True},
    "experts": {"backend": "fsdp", "expert_parallel": True},
    "experts, checkpointing": {
        "backend": "fsdp",
        "expert_parallel": True,
        "packing": True,
        "gradient_checkpointing": True,
    },
    "experts, sequence": {"backend": "fsdp", "expert_parallel": True, "sequence_parallel": 2},
    "zero 2": {"backend": "deepspeed", "zero_stage": 2},
    "zero 3": {"backend": "deepspeed", "zero_stage": 3, "packing": True},
    "sequence": {"backend": "fsdp", "sequence_parallel": 2},
}
FEW = ("torch", "experts, checkpointing", "zero 2")


def made(spec, rank: int, ranks: int, **config) -> tuple[dict[str, torch.Tensor], dict[str, np.ndarray], dict]:
    """Parameters' movement in two steps, of which the first gives f; its log-probs by sample; the second's metrics."""
    learner = learner_of(spec, workers=ranks, **config)
    parallel = [isinstance(m.compute, ExpertParallel) for m in mixtures(learner._scorer.policy)]
    assert parallel == 2 * [config.get("expert_parallel", False)]
    each = config.get("sequence_parallel", 1)
    watched = [[replace(sample, watched=True) for sample in group] for group in groups(count=5)]
    shares = plan(watched, updates=1, ranks=ranks // each, token_budget=60, seed=3, packed=True)[rank // each]
    start = {name: p.detach().clone().double() for name, p in learner.named_parameters()}
    first, second = learner.learn(shares), learner.learn(shares)
    moved = {name: p.detach().double() - start[name] for name, p in learner.named_parameters()}
    return moved, dict(first.proximal), second.sums


def on_ranks(rank: int, ranks: int, spec, names: Sequence[str], out: str) -> None:
    for name in names:
        torch.save(made(spec, rank, ranks, **CASES[name]), f"{out}/{name}.{rank}.pt")


@pytest.mark.equal_bits
@pytest.mark.parametrize(
    ("kind", "ranks", "names"),
    [
        ("mixture_spec", 2, FEW),
        pytest.param("mixture_spec", 2, sorted(CASES.keys() - set(FEW)), marks=pytest.mark.slow),
        pytest.param("mixture_spec", 4, list(CASES), marks=pytest.mark.slow),
        pytest.param("gpt_oss_spec", 2, list(CASES), marks=pytest.mark.slow),
    ],
)
def test_ranks_make_the_updates_of_one(request, tmp_path, kind, ranks, names):
    spec = request.getfixturevalue(kind)
    alone, logprobs, sums = made(spec, 0, 1)
    run_ranks(ranks, on_ranks, spec, names, str(tmp_path))
    for name in names:
        answers = {}
        for rank in range(ranks):
            moved, own, of_rank = torch.load(Path(tmp_path) / f"{name}.{rank}.pt", weights_only=False)
            assert distance(moved, alone, sorted(alone)) < 1e-5, name
            answers |= own
            for key in ("max_router_balance", "max_router_load", "max_router_entropy"):
                if of_rank:
                    assert of_rank[key] == pytest.approx(sums[key], rel=1e-5)
        assert answers.keys() == logprobs.keys()
        assert all(np.array_equal(answers[uid], logprobs[uid]) for uid in logprobs)


def alone_at_work(rank: int, ranks: int, spec, out: str) -> None:
    """All tokens go to the first rank's experts: the other has none to compute."""
    torch.save(concentrated(spec, rank, ranks, backend="fsdp", expert_parallel=ranks > 1), f"{out}/{rank}.pt")


def concentrated(spec, rank: int, ranks: int, **config) -> dict[str, torch.Tensor]:
    learner = learner_of(spec, workers=ranks, **config)
    samples = [
        replace(s, routes=np.array([[[0, 1]] * 2] * (s.length - 1), np.uint8)) for g in groups(count=4) for s in g
    ]
    shares = plan([[s] for s in samples], updates=1, ranks=ranks, token_budget=60, seed=3)[rank]
    start = {name: p.detach().clone().double() for name, p in learner.named_parameters()}
    for _ in range(2):
        learner.learn(shares)
    return {name: p.detach().double() - start[name] for name, p in learner.named_parameters()}


def test_a_rank_whose_experts_have_no_tokens_goes_along(mixture_spec, tmp_path):
    alone = concentrated(mixture_spec, 0, 1, backend="torch")
    run_ranks(2, alone_at_work, mixture_spec, str(tmp_path))
    for rank in range(2):
        assert distance(torch.load(tmp_path / f"{rank}.pt"), alone, sorted(alone)) < 1e-5


def test_a_dense_policy_has_no_routers():
    for name in COEFS:
        config = load_config(None, [f"algorithm.{name}=0.1"])
        with pytest.raises(ConfigError, match=f"algorithm.{name} needs a mixture of experts"):
            check_model(config, tiny_outline(config.model).model)


def test_padding_and_prompts_are_not_counted(mixture_spec, samples):
    learner = learner_of(mixture_spec, coefs={}, share_prompts=False)
    learner._accumulate([learner._make_pass(samples)], Denominators(tokens=1, sequences=1), 1.0, None)
    (layer, *_) = learner._routers._layers
    answer_tokens = int(to_tensors(samples).mask_BT.sum())
    assert layer.sums_X[16].item() == answer_tokens
    assert layer.sums_X[:8].sum().item() == 2 * answer_tokens
