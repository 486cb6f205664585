"""Sequence parallelism together with the rest of a learner: unified flows, ZeRO, values, equalization, calibration.

One rank with whole sequences is the reference. SGD stands for AdamW, so that a parameter moves by its gradient: AdamW's
first steps are signs, which rounding turns around.
"""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
from torch import distributed
from transformers import PreTrainedModel

from qurl_ray.config.learner import LearnerConfig
from qurl_ray.config.quantization import QuantizationConfig
from qurl_ray.learner import critic, deepspeed_backend, fsdp_backend, scorer, torch_backend
from qurl_ray.learner.backend import sequence_group
from qurl_ray.learner.batching import plan, to_tensors
from qurl_ray.learner.critic import Credit
from qurl_ray.learner.equalizer import equalizer_for
from qurl_ray.learner.learner import PolicyLearner, _real, make_learner
from qurl_ray.learner.passes import Pass
from qurl_ray.learner.scorer import Scorer
from qurl_ray.policy.load import load_model
from qurl_ray.policy.ranges import measuring
from qurl_ray.quant.equalize import equalized_sites
from qurl_ray.quant.units import units
from qurl_ray.types import Trajectory
from tests.learner.test_equalizer import exponents_of, scale_channels
from tests.learner.test_flow import KEEP, flow_of
from tests.learner.test_invariance import OBJECTIVES
from tests.learner.test_sequence import LAYOUTS
from tests.learner.test_torch_backend import groups
from tests.ranks import run_ranks

BACKENDS = {
    "torch": {"backend": "torch"},
    "fsdp": {"backend": "fsdp"},
    "zero 2": {"backend": "deepspeed", "zero_stage": 2},
    "zero 3": {"backend": "deepspeed", "zero_stage": 3},
}
FLOWS = {
    "int8": ("int8", "straight_through"),
    "fp8 blocks": ("fp8_block", "straight_through"),
    "fp8 blocks, quantized": ("fp8_block", "quantized"),
    "int4": ("int4", "full"),
}
NAMES = list(OBJECTIVES)


@dataclass(frozen=True, kw_only=True)
class Case:
    """What a learner does."""

    objective: str = NAMES[0]
    backend: str = "torch"
    layout: str = "packed"
    flow: str | None = None
    values: str = "none"
    equalized: bool = False
    calibrated: bool = False
    checkpointing: bool = False
    float64: bool = False
    aligned: bool = False
    """One long answer, of which each rank has whole groups of 128 tokens."""

    @property
    def name(self) -> str:
        return ", ".join(str(v) if isinstance(v, str) else k for k, v in asdict(self).items() if v and v != "none")


QUICK = [
    Case(backend="zero 2", layout="packed", objective=NAMES[0], values="separate"),
    Case(backend="zero 2", layout="prompts shared", objective=NAMES[1], flow="int8"),
    Case(backend="zero 3", layout="padded", objective=NAMES[1], values="shared", checkpointing=True),
    Case(backend="zero 3", layout="packed", objective=NAMES[2], flow="fp8 blocks", equalized=True),
    Case(backend="fsdp", layout="padded", objective=NAMES[3], flow="int8", values="shared", equalized=True),
    Case(backend="fsdp", layout="packed", objective=NAMES[2], float64=True),
    Case(backend="torch", layout="packed", objective=NAMES[0], flow="fp8 blocks, quantized"),
    Case(backend="torch", layout="packed", objective=NAMES[0], flow="fp8 blocks, quantized", aligned=True),
    Case(backend="torch", layout="prompts shared", objective=NAMES[3], flow="int8", calibrated=True),
]
REST = (
    [Case(backend=b, layout=layout, flow=f) for b in BACKENDS for layout in LAYOUTS for f in FLOWS]
    + [Case(backend=b, objective=o, values=v) for b in BACKENDS for o in OBJECTIVES for v in ("separate", "shared")]
    + [Case(backend=b, objective=o, flow="int8", layout="prompts shared") for b in BACKENDS for o in NAMES[1:]]
    + [Case(backend=b, objective=o, float64=True) for b in ("torch", "fsdp") for o in OBJECTIVES]
    + [Case(backend=b, layout=layout, flow="int8", equalized=True) for b in BACKENDS for layout in LAYOUTS]
    + [Case(backend=b, flow="fp8 blocks", calibrated=True) for b in BACKENDS]
    + [Case(backend=b, flow="int8", values=v, checkpointing=True) for b in BACKENDS for v in ("separate", "shared")]
)
SLOW = [case for case in dict.fromkeys(REST) if case not in QUICK]


def answers(case: Case) -> list[list[Trajectory]]:
    """Random groups, the first of which has answers shorter than four ranks."""
    if case.aligned:
        (one, *_), *_ = groups()
        rng, tokens = np.random.default_rng(0), 4 * 128 + 1 - len(one.prompt_ids)
        ids, logprobs = rng.integers(3, 18, size=tokens), rng.uniform(-2.2, -1.2, size=tokens)  # below the clip
        grown = {"token_ids": ids.astype(np.int32), "logprobs": logprobs.astype(np.float32)}
        return [[replace(one, watched=True, versions=np.ones(tokens, np.int32), **grown)]]
    long, short = groups(count=5), []
    for index, sample in enumerate(long[0]):
        tokens = min(1 + index % 2, len(sample.token_ids))
        cut = {field: getattr(sample, field)[:tokens] for field in ("token_ids", "logprobs", "versions")}
        short.append(replace(sample, prompt_ids=sample.prompt_ids[:1], **cut))
    return [[replace(s, watched=True, reward=s.advantage) for s in group] for group in (short, *long[1:])]


@contextmanager
def plain_steps() -> Iterator[None]:
    """Context in which learners are made with SGD, and with value heads that are not zero."""

    def sgd(module: torch.nn.Module, config: LearnerConfig) -> list[torch.optim.Optimizer]:
        return [torch.optim.SGD(module.parameters(), lr=config.lr)]

    def filled(make: Callable = scorer.value_head, **arguments: Any) -> torch.nn.Linear:
        head = make(**arguments)
        torch.nn.init.normal_(head.weight, std=0.1, generator=torch.Generator().manual_seed(1))
        return head

    with ExitStack() as stack:
        for module in (torch_backend, fsdp_backend, deepspeed_backend):
            stack.enter_context(mock.patch.object(module, "make_optimizers", sgd))
        for module in (scorer, critic):
            stack.enter_context(
                mock.patch.object(module, "value_head", lambda model, device: filled(model=model, device=device))
            )
        yield


def learner_of(spec, case: Case, each: int, ranks: int) -> PolicyLearner:
    dtype = torch.float64 if case.float64 else torch.float32
    settings, model = OBJECTIVES[case.objective], load_model(spec).to(dtype)
    # theta/b is not 1 in the first update, as theta/p would be.
    settings = replace(settings, correction=replace(settings.correction, ratio="behavior"))
    reference = load_model(spec).to(dtype)
    with torch.no_grad():
        noise = torch.Generator().manual_seed(3)
        for parameter in reference.parameters():
            parameter.add_(0.02 * torch.randn(parameter.shape, generator=noise).to(dtype))
    if case.equalized:
        scale_channels(model)
    flow = flow_of(model, *FLOWS[case.flow]) if case.flow else None
    settings_of_codes = QuantizationConfig(equalize=True, equalize_every=1)
    # One big step, beside which the rounding of parameters is nothing; two small ones where a ratio must move.
    lr = 1e-2 if case.calibrated else 30.0
    return make_learner(
        model,
        LearnerConfig(
            lr=lr,
            grad_clip=1e9,
            workers=ranks,
            sequence_parallel=each,
            gradient_checkpointing=case.checkpointing,
            **LAYOUTS[case.layout],
            **(BACKENDS[case.backend] if ranks > 1 else {}),
        ),
        settings,
        temperature=1.0,
        total_updates=10,
        reference=reference if settings.kl_coef else None,
        credit=Credit(lr=lr, gamma=1.0, lam=0.95, value_clip=0.5) if case.values != "none" else None,
        value_body=load_model(spec) if case.values == "separate" else None,
        flow=replace(flow, equalized=case.equalized) if flow else None,
        equalizer=equalizer_for(model, settings_of_codes, flow.quantized, {flow.fmt.name}) if case.equalized else None,
        calibrate_every=int(case.calibrated),
    )


def flat(learner: PolicyLearner) -> dict[str, torch.Tensor]:
    """All parameters, the value model's too."""
    backends = {"": learner._policy} | ({"critic.": learner._critic.backend} if learner._critic else {})
    return {
        prefix + name.removeprefix("policy."): parameter.detach().clone().double()  # ZeRO-3 frees it before the next
        for prefix, backend in backends.items()
        if backend
        for name, parameter in backend.named_parameters()
    }


@dataclass(frozen=True)
class Found:
    """What a learner makes of a step."""

    moved: dict[str, torch.Tensor]
    logprobs: dict[str, np.ndarray]
    shadow: torch.Tensor | None
    sums: dict[str, float]
    bounds: tuple[float, float]
    exponents: dict[str, list[float]]


def learned(spec, case: Case, rank: int = 0, ranks: int = 1, each: int = 1) -> Found:
    with plain_steps():
        learner = learner_of(spec, case, each, ranks)
    learner.factors()
    before = flat(learner)
    updates = 2 if case.calibrated else 1
    shares = plan(
        answers(case),
        updates=updates,
        ranks=ranks // each,
        token_budget=60,
        seed=3,
        packed=case.layout == "packed",
    )[rank // each]
    shadow = learner._shadow(learner._make_pass(shares[0].micro_batches[0])) if case.flow else None
    result = learner.learn(shares)
    after = flat(learner)
    return Found(
        moved={name: after[name] - before[name] for name in after},
        logprobs=dict(result.proximal),
        shadow=shadow,
        sums=result.sums,
        bounds=learner._bounds,
        exponents=exponents_of(learner),
    )


def on_ranks(rank: int, ranks: int, spec, each: int, cases: list[Case], out: str) -> None:
    for number, case in enumerate(cases):
        torch.save(learned(spec, case, rank, ranks, each), f"{out}/{number}.{rank}.pt")
    if each == ranks:
        save_maxima(rank, ranks, spec, out)


SLOWLY = [pytest.mark.slow, pytest.mark.timeout(1800)]  # the first test of a run waits for all that its ranks do
GROUPS_OF_TWO = [case for case in QUICK if not case.aligned]
RUNS = {
    "2": (2, 2, QUICK),
    "2, the rest": (2, 2, SLOW),
    "4": (4, 4, QUICK + SLOW),
    "2 groups of 2": (4, 2, GROUPS_OF_TWO),
}


@pytest.fixture(scope="module")
def folder_of(tiny_spec, tmp_path_factory) -> Callable[[str], Path]:
    made: dict[str, Path] = {}

    def folder(run: str) -> Path:
        if run not in made:
            made[run] = tmp_path_factory.mktemp("ranks")
            ranks, each, cases = RUNS[run]
            run_ranks(ranks, on_ranks, tiny_spec, each, cases, str(made[run]))
        return made[run]

    return folder


@pytest.fixture(scope="module")
def alone_of(tiny_spec) -> Callable[[Case], Found]:
    made: dict[Case, Found] = {}

    def alone(case: Case) -> Found:
        if case not in made:
            made[case] = learned(tiny_spec, case)
        return made[case]

    return alone


def distance(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor], names: list[str]) -> float:
    one, other = (torch.cat([part[name].reshape(-1) for name in names]) for part in (found, expected))
    assert other.norm() > 0
    return float((one - other).norm() / other.norm())


@pytest.mark.slow
@pytest.mark.equal_bits
@pytest.mark.parametrize(
    ("run", "number"),
    [
        pytest.param(run, number, marks=[] if run == "2" else SLOWLY, id=f"{run}: {case.name}")
        for run, (_, _, cases) in RUNS.items()
        for number, case in enumerate(cases)
    ],
)
def test_ranks_that_share_tokens_do_what_one_does(tiny_spec, folder_of, alone_of, run, number):
    ranks, each, cases = RUNS[run]
    case = cases[number]
    alone = alone_of(case)
    of_ranks: list[Found] = [torch.load(folder_of(run) / f"{number}.{r}.pt", weights_only=False) for r in range(ranks)]
    for found in of_ranks:
        for uid, logprobs in found.logprobs.items():
            equal = np.allclose(logprobs, alone.logprobs[uid], atol=1e-6) if case.float64 else None
            assert equal or np.array_equal(logprobs, alone.logprobs[uid]), uid
        assert found.exponents == alone.exponents
        if ranks == each and case.flow:
            assert torch.equal(found.shadow, alone.shadow)
        assert found.bounds == pytest.approx(alone.bounds, rel=1e-3)
    if case.calibrated and run == "2":
        assert alone.bounds != pytest.approx((0.2, 0.28), rel=2e-3), "bounds that stay would pass"
    logprobs = [found.logprobs for found in of_ranks[::each]]
    assert sum(map(len, logprobs)) == len(alone.logprobs) == len(set().union(*logprobs))
    tokens = sum(found.sums["tokens"] for found in of_ranks[::each])
    assert tokens == alone.sums["tokens"]
    assert not any(found.sums for index, found in enumerate(of_ranks) if index % each)
    # One rounding of the parameters, and sums in another order; each bound is five times what was found, or more.
    tolerance = 1e-10 if case.float64 else 1e-3 if case.calibrated else 1e-5
    if case.flow != "fp8 blocks, quantized":
        assert all(distance(found.moved, alone.moved, list(alone.moved)) <= tolerance for found in of_ranks)
        return
    # A last bit may change the code of a gradient. Those of weights depend on which tokens share a group of 128, too.
    weights = units(load_model(tiny_spec), KEEP)
    for found in of_ranks:
        assert distance(found.moved, alone.moved, [name for name in alone.moved if name not in weights]) <= 1e-4
        off = distance(found.moved, alone.moved, sorted(weights))
        assert off <= 1e-4 if case.aligned else 1e-3 < off <= 0.1


# --- ranges of activations --------------------------------------------------------------------------------------------

PADDING, LAST = 0, 17


def raised(spec) -> PreTrainedModel:
    """A model in which padding and the last tokens of samples would be noticed: only they raise these channels."""
    model = load_model(spec)
    with torch.no_grad():
        weight = model.get_input_embeddings().weight
        weight[[PADDING, LAST]] = 0.0
        weight[PADDING, 3] = weight[LAST, 5] = 100.0
    return model


def samples_of(count: int, tokens: int | None = None) -> list[Trajectory]:
    """Samples, all of which have so many tokens, and end with the token LAST, which no other predicts from."""
    found = []
    for sample in (sample for group in groups() for sample in group):
        answer = sample.token_ids.clip(max=LAST - 1)
        answer[-1] = LAST
        prompt = sample.prompt_ids.clip(max=LAST - 1)
        if tokens:
            prompt, answer = prompt[: tokens - 1], answer[-1:]
        rest = {field: getattr(sample, field)[: len(answer)] for field in ("logprobs", "versions")}
        found.append(replace(sample, prompt_ids=prompt, token_ids=answer, **rest))
    return found[:count]


SAMPLES = {"one of two tokens": samples_of(1, 2), "one of five tokens": samples_of(1, 5), "eleven": samples_of(11)}


def maxima_of(scorer: Scorer, samples: list[Trajectory]) -> dict[str, torch.Tensor]:
    """max|x| of each channel, [K], by site, in a pass over the samples."""
    sites = equalized_sites(scorer.policy, units(scorer.policy, KEEP))
    one = Pass(samples=samples, batch=(batch := to_tensors(samples)), advantages=batch.advantages)
    found: dict[str, torch.Tensor] = {}
    with torch.no_grad(), measuring(scorer.policy, sites, found, _real(one)):
        scorer(one.batch)
    nothing = {site.writer: torch.zeros(site.readers[0].shape[-1]) for site in sites}
    return nothing | found


def save_maxima(rank: int, ranks: int, spec, out: str) -> None:
    for layout, options in LAYOUTS.items():
        for name, samples in SAMPLES.items():
            config = LearnerConfig(workers=ranks, sequence_parallel=ranks, **options)
            scorer = Scorer(raised(spec), config, temperature=1.0, sequence=sequence_group(config))
            found = maxima_of(scorer, samples)
            for largest in found.values():
                distributed.all_reduce(largest, op=distributed.ReduceOp.MAX)
            torch.save(found, f"{out}/{layout}.{name}.pt")


@pytest.mark.slow
@pytest.mark.equal_bits
@pytest.mark.parametrize("run", ["2", pytest.param("4", marks=SLOWLY)])
def test_ranges_are_those_of_all_tokens_that_predict_one_and_of_no_padding(tiny_spec, folder_of, run):
    model = raised(tiny_spec)
    sites = equalized_sites(model, units(model, KEEP))
    for name, samples in SAMPLES.items():
        expected: dict[str, torch.Tensor] = {}
        for sample in samples:  # each alone, without padding and without its last token
            with torch.no_grad(), measuring(model, sites, expected):
                ids = np.append(sample.prompt_ids, sample.token_ids[:-1])
                model.base_model(torch.tensor(ids[None].astype(np.int64)), position_ids=torch.arange(len(ids))[None])
        assert expected["model.layers.0.input_layernorm"][[3, 5]].max() < 10
        for layout, options in LAYOUTS.items():
            found = torch.load(folder_of(run) / f"{layout}.{name}.pt")
            one_rank = maxima_of(Scorer(raised(tiny_spec), LearnerConfig(**options), temperature=1.0), samples)
            for site, largest in expected.items():
                assert torch.equal(one_rank[site], largest), (layout, name, site)
                assert torch.equal(found[site], largest), (layout, name, site)
