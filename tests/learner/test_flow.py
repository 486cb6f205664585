"""Unified flows: what is trained is what generates, bit for bit, on one rank and on several."""

from contextlib import nullcontext

import numpy as np
import pytest
import torch

from qurl_ray.config.learner import LearnerConfig
from qurl_ray.engines.torch.engine import TorchEngine
from qurl_ray.learner.batching import plan, to_tensors
from qurl_ray.learner.flow import UnifiedFlow
from qurl_ray.learner.learner import make_learner
from qurl_ray.learner.protocol import EnginePrecision
from qurl_ray.policy.load import load_model
from qurl_ray.quant.formats import get_format
from qurl_ray.quant.linear import weight_max_code
from qurl_ray.quant.units import units
from qurl_ray.rl.corrections import CorrectionSettings
from qurl_ray.rl.objective import ObjectiveSettings
from qurl_ray.types import Trajectory
from qurl_ray.weights.local import load_into
from tests.conftest import requests_for
from tests.learner.test_torch_backend import groups
from tests.ranks import run_ranks

KEEP = (r"lm_head\.", r"embed_tokens\.")
SETTINGS = ObjectiveSettings(correction=CorrectionSettings(), clip_low=0.2, clip_high=0.28)
BACKWARDS = {
    "fp8_block": "quantized",
    "int8": "straight_through",
    "fp8": "straight_through",
    "int4": "full",
    "nvfp4": "straight_through",
    "nvfp4_w4a4": "straight_through",
    "mxfp4": "straight_through",
    "mxfp8": "full",
}


def flow_of(model, format_name: str, backward: str | None = None) -> UnifiedFlow:
    fmt = get_format(format_name)
    return UnifiedFlow(
        fmt=get_format(format_name, weight_max_code(fmt, torch.device("cpu"))),
        quantized=units(model, KEEP),
        backward=backward or BACKWARDS[format_name],
    )


def learner_of(
    model, flow: UnifiedFlow | None, *, settings=SETTINGS, equalizer=None, calibrate_every: int = 0, **config
):
    options = LearnerConfig(**({"lr": 1e-3} | config))
    return make_learner(
        model,
        options,
        settings,
        temperature=1.0,
        total_updates=10,
        flow=flow,
        equalizer=equalizer,
        calibrate_every=calibrate_every,
    )


def trajectories(requests, completions, *, seed: int) -> list[Trajectory]:
    """Completions as samples, with advantages of either sign."""
    rng = np.random.default_rng(seed)
    return [
        Trajectory(
            uid=c.uid,
            prompt_ids=r.prompt_ids,
            token_ids=c.token_ids,
            logprobs=c.logprobs,
            reward=0.0,
            advantage=float(rng.normal()),
            versions=c.versions,
        )
        for c, r in zip(completions, requests, strict=True)
    ]


def generate(spec, tokenizer, learner, flow: UnifiedFlow, version: int) -> list[Trajectory]:
    """What an engine with the learner's weights draws, with advantages of either sign."""
    engine = TorchEngine(spec, slots=16)
    load_into(engine, learner.named_parameters(), flow.fmt, quantized=flow.quantized, version=version)
    requests = requests_for(tokenizer, count=6, samples=4)
    return trajectories(requests, engine.generate(requests, version=version), seed=version)


@pytest.mark.equal_bits
@pytest.mark.parametrize("format_name", BACKWARDS)
def test_trained_and_generated_log_probs_are_equal_to_the_bit(tiny_spec, tokenizer, model, format_name):
    """Before an update and after: one token at a time by the engine, all at once with gradients by the learner."""
    flow = flow_of(model, format_name)
    learner = learner_of(model, flow, lr=1e-2)
    for version in (1, 2):
        samples = generate(tiny_spec, tokenizer, learner, flow, version)
        batch = to_tensors(samples)
        found_BT, *_ = learner._policy(batch)
        assert found_BT.requires_grad
        assert torch.equal(found_BT[batch.mask_BT].detach(), batch.behavior_BT[batch.mask_BT])
        with learner._flow.full_precision(), torch.no_grad():
            plain_BT, *_ = learner._policy(batch)
        assert (plain_BT - found_BT)[batch.mask_BT].abs().max() > 1e-4, "a flow that changes nothing would pass"
        before = torch.cat([p.detach().reshape(-1).clone() for p in model.parameters()])
        result = learner.learn(plan([[s] for s in samples], updates=2, ranks=1, token_budget=80, seed=1)[0])
        assert result.sums["max_rho"] == 1.0
        assert not torch.equal(before, torch.cat([p.detach().reshape(-1) for p in model.parameters()]))


@pytest.mark.parametrize(("format_name", "near"), [("fp8_block", 0.25), ("int8", 0.1), ("fp8", 0.25)])
def test_gradients_point_where_full_precision_points(tiny_spec, model, format_name, near):
    """Not equal, as the function that is differentiated is another; of the same size and direction."""
    samples = groups()

    def gradient(flow: UnifiedFlow | None) -> torch.Tensor:
        learner = learner_of(model, flow)
        (share,) = plan(samples, updates=1, ranks=1, token_budget=10_000, seed=3)[0]
        passes = [learner._make_pass(chosen) for chosen in learner._shares(share)]
        learner._accumulate(passes, share.denominators, strength=1.0, calibration=None)
        found = torch.cat([p.grad.reshape(-1) for p in model.parameters()])
        model.zero_grad()
        for module in model.modules():
            module.__dict__.pop("forward", None)
        return found

    exact = gradient(None)
    assert 1e-4 * exact.norm() < (gradient(flow_of(model, format_name)) - exact).norm() < near * exact.norm()


@pytest.mark.equal_bits
def test_a_probe_in_full_precision_leaves_the_flow(tiny_spec, tokenizer, model):
    """The evaluation before the first step: engines hold floats then, and the learner must compare with floats."""
    flow = flow_of(model, "int8")
    learner, engine = learner_of(model, flow), TorchEngine(tiny_spec, slots=4)
    probe = requests_for(tokenizer, count=1, samples=2)
    for fmt in (None, flow.fmt):
        load_into(engine, learner.named_parameters(), fmt, quantized=flow.quantized)
        drawn = engine.generate(probe, version=1)
        precision = EnginePrecision(fmt=fmt, quantized=flow.quantized, unquantized="float32")
        for own, completion in zip(learner.logprobs(drawn, probe[0].prompt_ids, precision), drawn, strict=True):
            assert np.array_equal(own, completion.logprobs)


@pytest.mark.parametrize("packing", [False, True])
def test_checkpointing_changes_no_gradient(tiny_spec, model, packing):
    def after(**config) -> torch.Tensor:
        copy = load_model(tiny_spec)
        copy.load_state_dict(model.state_dict())
        learner = learner_of(copy, flow_of(copy, "int8"), packing=packing, **config)
        learner.learn(plan(groups(), updates=2, ranks=1, token_budget=100, seed=3, packed=packing)[0])
        return torch.cat([p.detach().reshape(-1) for p in copy.parameters()])

    assert torch.equal(after(), after(gradient_checkpointing=True))


def test_autocast_computes_between_the_linears_in_bfloat16(tiny_spec, model):
    flow, seen = flow_of(model, "fp8_block"), []
    learner = learner_of(model, flow, compute="bfloat16")
    model.base_model.layers[0].mlp.down_proj.register_forward_hook(lambda _, x, y: seen.append((x[0].dtype, y.dtype)))
    samples = [sample for group in groups() for sample in group]
    learner._policy(to_tensors(samples))[0].sum().backward()
    assert seen == [(torch.bfloat16, torch.bfloat16)]
    assert all(p.grad.dtype == torch.float32 and p.grad.isfinite().all() for p in model.parameters())


# --- several ranks --------------------------------------------------------------------------------------------------

SHARDED = [{"backend": "deepspeed", "zero_stage": 2}, {"backend": "deepspeed", "zero_stage": 3}, {"backend": "fsdp"}]


def updates(rank: int, ranks: int, spec, **config) -> torch.Tensor:
    model = load_model(spec)
    learner = learner_of(model, flow_of(model, "fp8_block", "straight_through"), **config)
    learner.learn(plan(groups(), updates=2, ranks=ranks, token_budget=60, seed=3)[rank])
    return torch.cat([parameter.detach().reshape(-1).clone() for _, parameter in learner.named_parameters()])


def train(rank: int, ranks: int, spec, out: str) -> None:
    for number, backend in enumerate(SHARDED):
        found = updates(rank, ranks, spec, **backend)
        if rank == 0:
            torch.save(found, f"{out}/{number}.pt")


@pytest.mark.slow
def test_sharded_weights_give_the_updates_of_whole_ones(tiny_spec, tmp_path):
    run_ranks(2, train, tiny_spec, str(tmp_path))
    start = torch.cat([p.detach().reshape(-1) for p in load_model(tiny_spec).parameters()])
    alone = updates(0, 1, tiny_spec)
    for number, backend in enumerate(SHARDED):
        found = torch.load(tmp_path / f"{number}.pt")
        # AdamW's first steps are signs: where a sum's last bit changes a sign, the parameter moves the other way.
        assert (found - alone).norm() <= 1e-2 * (alone - start).norm(), backend


# --- calibrated clipping --------------------------------------------------------------------------------------------


def test_calibration_measures_the_noise_of_the_codes(tiny_spec, tokenizer, model):
    """Noise that pushes ratios away from 1 widens the bounds; where codes and floats agree they stay what they are."""

    def bounds(flow: UnifiedFlow, nothing_differs: bool) -> tuple[float, float]:
        copy = load_model(tiny_spec)
        copy.load_state_dict(model.state_dict())
        learner = learner_of(copy, flow, calibrate_every=1, lr=3e-3)
        samples = generate(tiny_spec, tokenizer, learner, flow, 1)
        if nothing_differs:
            learner._flow.full_precision = nullcontext
        learner.learn(plan([[s] for s in samples], updates=4, ranks=1, token_budget=1000, seed=1)[0])
        return learner._bounds

    flow = flow_of(model, "int4", "straight_through")
    nominal = (SETTINGS.clip_low, SETTINGS.clip_high)
    assert bounds(flow, True) == pytest.approx(nominal, abs=1e-6)
    assert bounds(flow, False) != pytest.approx(nominal, abs=1e-3)
