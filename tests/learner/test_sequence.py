"""Sequence parallelism against one rank: the same bits of every log-prob, and gradients that differ by rounding."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import distributed
from transformers import LlamaConfig, LlamaForCausalLM

from qurl_ray.config.learner import LearnerConfig
from qurl_ray.learner.backend import sequence_group
from qurl_ray.learner.batching import plan, to_tensors
from qurl_ray.learner.critic import Credit
from qurl_ray.learner.learner import make_learner
from qurl_ray.learner.scorer import Scorer
from qurl_ray.policy.attention import NAME
from qurl_ray.policy.load import load_model, with_row_rules
from qurl_ray.policy.sequence import SequenceGroup
from qurl_ray.types import Trajectory
from tests.learner.test_invariance import OBJECTIVES
from tests.learner.test_torch_backend import groups
from tests.ranks import run_ranks

HEADS = {"9 on 3": (9, 3), "8 on 2": (8, 2), "4 on 4": (4, 4)}
LAYOUTS = {"packed": {"packing": True}, "padded": {"share_prompts": False}, "prompts shared": {}}


def model_of(heads: int, keys: int, dtype: torch.dtype) -> LlamaForCausalLM:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=50,
        hidden_size=8 * heads,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=heads,
        num_key_value_heads=keys,
        attn_implementation=NAME,
        initializer_range=0.3,
    )
    return with_row_rules(LlamaForCausalLM(config)).eval().to(dtype)


def answers(count: int) -> list[Trajectory]:
    """Groups of two answers, one of them longer than a chunk of queries."""
    rng = np.random.default_rng(0)
    found = []
    for number in range(count):
        prompt = np.random.default_rng(number // 2).integers(3, 50, size=5 + number // 2).astype(np.int32)
        ids = rng.integers(3, 50, size=290 if number == 1 else int(rng.integers(1, 20))).astype(np.int32)
        found.append(
            Trajectory(
                uid=str(number),
                prompt_ids=prompt,
                token_ids=ids,
                logprobs=np.zeros(len(ids), np.float32),
                reward=0.0,
                advantage=0.0,
                versions=np.ones(len(ids), np.int32),
            )
        )
    return found


def scored(
    kind: str, layout: str, dtype: torch.dtype, samples: list[Trajectory], ranks: int = 1
) -> tuple[list[torch.Tensor], torch.Tensor]:
    """All fields of the scores, and the gradient of a sum with different weights, added over ranks."""
    config = LearnerConfig(workers=ranks, sequence_parallel=ranks, **LAYOUTS[layout])
    scorer = Scorer(
        model_of(*HEADS[kind], dtype),
        config,
        temperature=0.9,
        entropy_gradient=True,
        with_values=dtype == torch.float32,  # values are float32
        sequence=sequence_group(config),
    )
    if scorer.value_head:
        torch.nn.init.normal_(scorer.value_head.weight, generator=torch.Generator().manual_seed(1))
    fields = [field for field in scorer(to_tensors(samples)) if field is not None]
    weights = torch.rand(fields[0].shape, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    sum((field * (number + weights)).sum() for number, field in enumerate(fields)).backward()
    gradient = torch.cat([p.grad.reshape(-1) for p in scorer.parameters()])
    if ranks > 1:
        distributed.all_reduce(gradient)
    return [field.detach() for field in fields], gradient


CASES = [(kind, layout, dtype) for kind in HEADS for layout in LAYOUTS for dtype in (torch.float32, torch.float64)]


def score_all(rank: int, ranks: int, out: str) -> None:
    for number, (kind, layout, dtype) in enumerate(CASES):
        torch.save(scored(kind, layout, dtype, answers(6), ranks), f"{out}/{number}.{rank}.pt")
    # A pass with fewer tokens than ranks, as the placeholder of a rank without samples.
    nothing = np.zeros(0, np.int32)
    short = [replace(answers(1)[0], prompt_ids=np.zeros(2, np.int32), token_ids=nothing, logprobs=nothing)]
    fields, gradient = scored("4 on 4", "prompts shared", torch.float32, short, ranks)
    assert not any(field.any() for field in fields)
    assert not gradient.any()


@pytest.mark.slow
@pytest.mark.equal_bits
@pytest.mark.parametrize("ranks", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_ranks_that_share_tokens_find_the_bits_of_one(tmp_path, ranks):
    run_ranks(ranks, score_all, str(tmp_path))
    for number, (kind, layout, dtype) in enumerate(CASES):
        expected, gradient = scored(kind, layout, dtype, answers(6))
        for rank in range(ranks):
            fields, found = torch.load(tmp_path / f"{number}.{rank}.pt")
            tolerance = 1e-10 if dtype == torch.float64 else 1e-5
            for one, other in zip(fields, expected, strict=True):
                # Equal bits are promised in float32; float64 is for the gradient.
                assert torch.equal(one, other) or (dtype == torch.float64 and torch.allclose(one, other, atol=1e-10))
            assert (found - gradient).norm() <= tolerance * gradient.norm(), (kind, layout, dtype)


def learned(spec, objective: str, ranks: int, rank: int, each: int, **config) -> tuple[torch.Tensor, dict]:
    settings = OBJECTIVES[objective]
    model = load_model(spec)
    trained = make_learner(
        model,
        LearnerConfig(lr=1e-3, workers=ranks, sequence_parallel=each, **config),
        settings,
        temperature=1.0,
        total_updates=11,
        reference=load_model(spec) if settings.kl_coef else None,
        credit=Credit(lr=1e-3, gamma=1.0, lam=0.95, value_clip=0.5),
        value_body=load_model(spec),
    )
    shares = plan(groups(), updates=2, ranks=ranks // each, token_budget=60, seed=3)
    result = trained.learn(shares[rank // each])
    return torch.cat([p.detach().reshape(-1) for _, p in trained.named_parameters()]), result.sums


RUNS = [(objective, {}) for objective in OBJECTIVES] + [("acr", {"backend": "fsdp"})]


def learn_all(rank: int, ranks: int, spec, out: str) -> None:
    for number, (objective, config) in enumerate(RUNS):
        torch.save(learned(spec, objective, ranks, rank, 2, **config), f"{out}/{number}.{rank}.pt")


@pytest.mark.slow
def test_groups_of_two_ranks_make_the_updates_of_one_rank(tiny_spec, tmp_path):
    """Every objective, with a value model, and a reference where there is one; two groups that have other samples."""
    run_ranks(4, learn_all, tiny_spec, str(tmp_path))
    start = torch.cat([p.detach().reshape(-1) for p in load_model(tiny_spec).parameters()])
    for number, (objective, _) in enumerate(RUNS):
        alone, sums = learned(tiny_spec, objective, 1, 0, 1)
        found = [torch.load(tmp_path / f"{number}.{rank}.pt") for rank in range(4)]
        for rank, (parameters, reported) in enumerate(found):
            assert (parameters - alone).norm() <= 1e-3 * (alone - start).norm(), objective
            assert bool(reported) == (rank % 2 == 0), "one rank of a group reports"
        assert found[0][1]["tokens"] + found[2][1]["tokens"] == sums["tokens"]


def test_more_ranks_than_heads_are_refused():
    group = SequenceGroup(process_group=None, rank=0, ranks=3)
    division = group.division(torch.arange(6), torch.arange(5))
    heads = torch.zeros(1, 2, 2, 4)
    with pytest.raises(ValueError, match="3 ranks cannot share 2 heads"):
        division.to_heads(heads, heads, heads)
