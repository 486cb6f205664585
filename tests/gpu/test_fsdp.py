"""FSDP2 on a GPU, one rank over NCCL: the updates of the torch backend, states that go on, and what leaves the device.

python -m pytest -m gpu tests/gpu/test_fsdp.py
"""

import pytest
import torch
from torch import distributed

from qurl_ray.config.learner import LearnerConfig
from qurl_ray.learner.backend import Resident
from qurl_ray.learner.batching import plan
from qurl_ray.learner.flow import UnifiedFlow
from qurl_ray.learner.learner import PolicyLearner, make_learner
from qurl_ray.policy.load import StoredWeights, load_model, unloaded_model
from qurl_ray.quant.formats import FORMATS
from qurl_ray.quant.units import units
from tests.learner.test_torch_backend import SETTINGS, groups

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]

OFF = {"float32": 1e-4, "bfloat16": 5e-2, "float16": 2e-2}
"""Difference of what two backends change, as a share of it. In 16 bits, fsdp gathers float32 and rounds elsewhere."""


@pytest.fixture(autouse=True)
def one_rank(tmp_path):
    distributed.init_process_group("nccl", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    yield
    distributed.destroy_process_group()


def learner(spec, backend: str, flow: str | None = None, **config) -> PolicyLearner:
    settings = LearnerConfig(backend=backend, device="cuda", lr=1e-3, **config)
    model, rows = load_model(spec), None
    names = units(model, (r"lm_head\.", r"embed_tokens\."))
    if backend == "fsdp":
        model = unloaded_model(spec)
        rows = StoredWeights(spec, model).rows
    made = UnifiedFlow(fmt=FORMATS[flow], quantized=names, backward="straight_through") if flow else None
    return make_learner(model, settings, SETTINGS, temperature=1.0, total_updates=11, rows=rows, flow=made)


def flat(trained: PolicyLearner) -> torch.Tensor:
    return torch.cat([parameter.detach().reshape(-1).cpu() for _, parameter in trained.named_parameters()])


def updates():
    return plan(groups(), updates=3, ranks=1, token_budget=60, seed=3)[0]


@pytest.mark.parametrize("flow", [None, "int8"])
@pytest.mark.parametrize("packing", [False, True])
@pytest.mark.parametrize("compute", OFF)
def test_updates_are_those_of_the_torch_backend(tiny_spec, compute, packing, flow):
    start, ends = flat(learner(tiny_spec, "torch")), {}
    for backend in ("torch", "fsdp"):
        trained = learner(tiny_spec, backend, flow, compute=compute, packing=packing)
        result = trained.learn(updates())
        assert result.skipped_updates == 0
        ends[backend] = flat(trained)
    moved = (ends["torch"] - start).norm()
    assert moved > 0.1
    assert (ends["fsdp"] - ends["torch"]).norm() < OFF[compute] * moved


def test_a_state_goes_on_after_the_learner_has_left_the_gpu(tiny_spec, tmp_path):
    first, second, third = updates()
    undisturbed, resumed = learner(tiny_spec, "fsdp"), learner(tiny_spec, "fsdp")
    undisturbed.learn([first, second])
    undisturbed.save(tmp_path)
    resumed.load(tmp_path)
    assert torch.equal(flat(resumed), flat(undisturbed))
    before = torch.cuda.memory_allocated()
    for resident in (Resident.PARAMETERS, Resident.NOTHING, Resident.PARAMETERS, Resident.NOTHING):
        resumed.keep_on_device(resident)
        if resident is Resident.NOTHING:
            assert torch.cuda.memory_allocated() < before - 2 * 4 * flat(undisturbed).numel()  # both of AdamW's moments
    resumed.keep_on_device(Resident.ALL)
    for one in (undisturbed, resumed):
        one.learn([third])
    torch.testing.assert_close(flat(resumed), flat(undisturbed), rtol=1e-4, atol=1e-6)
