"""Optimizers by name: what they update, how far, and that a resumed one goes on as if nothing had been."""

import pytest
import torch

from qurl_ray.config.learner import LearnerConfig
from qurl_ray.learner.backend import make_optimizers
from qurl_ray.learner.batching import plan
from qurl_ray.learner.learner import make_learner
from qurl_ray.policy.load import load_model
from tests.learner.test_torch_backend import SETTINGS, groups


def learner(spec, **config):
    model = load_model(spec)
    made = make_learner(model, LearnerConfig(lr=1e-3, **config), SETTINGS, temperature=1.0, total_updates=9)
    return made, model


def step(trained, seed):
    return trained.learn(plan(groups(), updates=2, ranks=1, token_budget=1000, seed=seed)[0])


def test_muon_updates_the_blocks_matrices_and_adamw_all_else(tiny_spec):
    model = load_model(tiny_spec)
    muon, adamw = make_optimizers(model, LearnerConfig(optimizer="muon"))
    names = {parameter: name for name, parameter in model.named_parameters()}
    by_muon, by_adamw = ({names[p] for g in o.param_groups for p in g["params"]} for o in (muon, adamw))
    assert by_muon == {name for name in names.values() if name.endswith("proj.weight")}
    assert by_adamw == set(names.values()) - by_muon
    assert (type(muon), type(adamw)) == (torch.optim.Muon, torch.optim.AdamW)


def test_muons_first_update_has_no_large_direction_and_is_as_long_as_adamws(tiny_spec):
    """The largest singular values of an orthogonalised update are equal: about 0.2 times the rate and the root of the
    longer side, so that its root mean square is at most that of AdamW's, about 0.2 (arXiv 2502.16982, section 2.2)."""
    trained, model = learner(tiny_spec, optimizer="muon")
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    trained.learn(plan(groups(), updates=1, ranks=1, token_budget=1000, seed=0)[0])
    for name in ("model.layers.0.mlp.up_proj.weight", "model.layers.0.self_attn.o_proj.weight"):
        change = model.get_parameter(name).detach() - before[name]
        values = torch.linalg.svdvals(change) / (0.2e-3 * max(change.shape) ** 0.5)
        assert 0.6 < values[5] <= values[0] < 1.3


SCHEDULE = {"warmup_steps": 2, "schedule": "cosine", "lr_final_share": 0.1}


@pytest.mark.parametrize("config", [{}, {"optimizer": "muon"}, SCHEDULE], ids=["adamw", "muon", "schedule"])
def test_a_learner_that_resumes_goes_on_to_the_bit(tiny_spec, tmp_path, config):
    trained, model = learner(tiny_spec, **config)
    step(trained, 0)
    trained.save(tmp_path)
    rate = step(trained, 1).lr
    resumed, other = learner(tiny_spec, **config)
    resumed.load(tmp_path)
    assert step(resumed, 1).lr == rate
    for (name, one), (_, two) in zip(model.named_parameters(), other.named_parameters(), strict=True):
        assert torch.equal(one, two), name


def test_another_optimizer_learns_something_else(tiny_spec):
    (first, one), (second, two) = (learner(tiny_spec, optimizer=name) for name in ("adamw", "muon"))
    step(first, 0), step(second, 0)
    name = "model.layers.0.mlp.up_proj.weight"
    assert not torch.equal(one.get_parameter(name), two.get_parameter(name))
