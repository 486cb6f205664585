"""Sharded backends against the torch learner: the same updates from shards, and states that come back."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from deepspeed.runtime.zero.partition_parameters import ZeroParamStatus
from deepspeed.runtime.zero.partitioned_param_coordinator import PartitionedParameterCoordinator
from torch.distributed.fsdp._fully_shard import _fsdp_param_group

from qurl_ray.config.learner import LearnerConfig
from qurl_ray.errors import CheckpointError
from qurl_ray.learner import deepspeed_backend
from qurl_ray.learner.backend import Resident
from qurl_ray.learner.batching import MiniBatch, plan, to_tensors
from qurl_ray.learner.learner import PolicyLearner, make_learner
from qurl_ray.learner.state import SavedState, save_rows
from qurl_ray.policy import logprobs
from qurl_ray.policy.load import StoredWeights, load_model, unloaded_model
from qurl_ray.policy.logprobs import token_logprobs
from tests.learner.test_sequence import model_of
from tests.learner.test_torch_backend import SETTINGS, groups, parameters_after, start
from tests.ranks import run_ranks

CONFIGS = {
    "zero 0": {"zero_stage": 0},
    "zero 1": {"zero_stage": 1},
    "zero 2": {"zero_stage": 2},
    "zero 3": {"zero_stage": 3},
    "zero 2, optimizer offloaded": {"zero_stage": 2, "offload_optimizer": True},
    "zero 3, packed, checkpointing": {"zero_stage": 3, "packing": True, "gradient_checkpointing": True},
    "zero 2, offloaded while waiting": {"zero_stage": 2, "offload_while_waiting": True},
    "torch": {"backend": "torch"},
    "zero 3, offloaded while waiting": {"zero_stage": 3, "offload_while_waiting": True},
    "fsdp": {"backend": "fsdp"},
    "fsdp, packed, checkpointing": {"backend": "fsdp", "packing": True, "gradient_checkpointing": True},
}
CLIP = 0.05
UPDATES = 3


def learner(spec, **config):
    settings = LearnerConfig(**({"backend": "deepspeed", "lr": 1e-3, "grad_clip": CLIP} | config))
    model, rows = load_model(spec), None
    if settings.backend == "fsdp":
        model = unloaded_model(spec)
        rows = StoredWeights(spec, model).rows
    return make_learner(model, settings, SETTINGS, temperature=1.0, total_updates=11, rows=rows)


def flat(learner) -> torch.Tensor:
    return torch.cat([parameter.detach().reshape(-1).clone() for _, parameter in learner.named_parameters()])


def shares(rank: int, ranks: int) -> list[MiniBatch]:
    """Several micro-batches per update, with different numbers of tokens per rank."""
    return plan(groups(count=11), updates=UPDATES, ranks=ranks, token_budget=60, seed=3)[rank]


def leave_and_come_back(trained) -> None:
    """As in a colocated step, and in a refit in the middle of it."""
    before = flat(trained)
    for resident in (Resident.PARAMETERS, Resident.NOTHING, Resident.PARAMETERS, Resident.NOTHING, Resident.ALL):
        trained.keep_on_device(resident)
        if resident is not Resident.NOTHING:
            assert torch.equal(flat(trained), before)


def train_all(rank: int, ranks: int, spec, names: list[str], out: str) -> None:
    for name in names:
        config = CONFIGS[name]
        trained = learner(spec, **config)
        batches = shares(rank, ranks)
        if rank == 1:  # this rank has run out of samples where the other has not
            batches[0] = replace(batches[0], micro_batches=[*batches[0].micro_batches, []])
        else:
            *front, last = batches[0].micro_batches
            batches[0] = replace(batches[0], micro_batches=[*front, last[:1], last[1:]])
        waits = config.get("offload_while_waiting")
        if waits:
            leave_and_come_back(trained)
        result = trained.learn(batches)
        if waits:
            leave_and_come_back(trained)
        torch.save((flat(trained), result.sums["tokens"], result.grad_norm), f"{out}/{name}.{rank}.pt")


@pytest.fixture(scope="module")
def trained(request, tiny_spec, tmp_path_factory):
    """Folder of what two ranks made in each configuration that this session asks for."""
    out = tmp_path_factory.mktemp("trained")
    names = [item.callspec.params["name"] for item in request.session.items if "trained" in item.fixturenames]
    run_ranks(2, train_all, tiny_spec, names, str(out))
    return out


@pytest.mark.sampled(3)
@pytest.mark.parametrize("name", CONFIGS)
def test_two_ranks_make_the_updates_of_one_torch_rank(tiny_spec, trained, name):
    (first, first_tokens, norm), (second, second_tokens, _) = (
        torch.load(trained / f"{name}.{rank}.pt") for rank in range(2)
    )
    assert torch.equal(first, second)
    assert first_tokens != second_tokens, "ranks have different numbers of tokens"
    assert norm > CLIP, "clipping is active"
    alone = parameters_after(tiny_spec, count=11, updates=UPDATES, grad_clip=CLIP)
    # Sums in another order: 4e-6 to 1e-5 of the way on a Zen 3, where gradients are MKL's.
    assert (first - alone).norm() <= 3e-5 * (alone - start(tiny_spec)).norm()


def interrupt(rank: int, ranks: int, spec, out: str) -> None:
    for name in ("zero 0", "zero 2", "zero 3", "fsdp"):
        folder = Path(out) / name
        folder.mkdir(exist_ok=True)
        first, second, third = shares(rank, ranks)
        undisturbed = learner(spec, **CONFIGS[name])
        undisturbed.learn([first, second])
        torch.manual_seed(7)
        undisturbed.save(folder)
        undisturbed.learn([third])
        drawn = torch.rand(3)
        resumed = learner(spec, **CONFIGS[name])
        resumed.load(folder)
        assert torch.equal(torch.rand(3), drawn)
        resumed.learn([third])
        assert torch.equal(flat(resumed), flat(undisturbed))
        assert resumed._updates == UPDATES
        # An update whose gradient is not finite is left out, on every rank, and the next one is made.
        before = flat(resumed)
        if rank == 0:
            poisoned = replace(third.micro_batches[0][0], advantage=float("nan"))
            third = replace(third, micro_batches=[[poisoned], *third.micro_batches[1:]])
        assert resumed.learn([third]).skipped_updates == 1
        assert torch.equal(flat(resumed), before)
        assert resumed.learn([second]).skipped_updates == 0
        assert not torch.equal(flat(resumed), before)


@pytest.mark.slow
def test_a_saved_state_goes_on_as_if_nothing_had_happened(tiny_spec, tmp_path):
    run_ranks(2, interrupt, tiny_spec, str(tmp_path))


CHAINS = [
    [(1, "torch"), (2, "fsdp")],
    [(1, "fsdp"), (2, "fsdp"), (4, "fsdp"), (1, "fsdp")],
    [(1, "torch"), (2, "zero 3"), (3, "zero 3"), (2, "zero 1")],
    [(2, "zero 2"), (3, "fsdp"), (2, "zero 3"), (2, "torch")],
    [(3, "zero 2"), (1, "zero 2"), (2, "zero 0"), (3, "zero 2")],
]


def one_update(rank: int, ranks: int, spec, name: str, step: int, before: str, after: str) -> None:
    trained = learner(spec, **CONFIGS[name])
    if step:
        trained.load(Path(before))
    trained.learn(plan(groups(count=11), updates=4, ranks=ranks, token_budget=60, seed=3)[rank][step : step + 1])
    assert trained._updates == step + 1
    trained.save(Path(after))


@pytest.mark.slow
@pytest.mark.parametrize("chain", [CHAINS[0], *(pytest.param(chain, marks=pytest.mark.slow) for chain in CHAINS[1:])])
def test_a_state_is_loaded_by_any_number_of_ranks_of_any_backend(tiny_spec, tmp_path, chain):
    folders = [tmp_path / str(number) for number in range(len(chain) + 1)]
    for step, (ranks, name) in enumerate(chain):
        folders[step + 1].mkdir()
        run_ranks(ranks, one_update, tiny_spec, name, step, str(folders[step]), str(folders[step + 1]))
    alone = learner(tiny_spec, backend="torch")
    before = flat(alone)
    for mini_batch in plan(groups(count=11), updates=4, ranks=1, token_budget=60, seed=3)[0][: len(chain)]:
        alone.learn([mini_batch])  # each with a proximal policy of its own
    found = SavedState(folders[-1] / "policy")
    names = [f"policy.{name}" for name, _ in alone.named_parameters()]
    resumed = torch.cat([found.rows(name).reshape(-1) for name in names])
    assert (resumed - flat(alone)).norm() <= 3e-5 * (flat(alone) - before).norm()


def test_a_state_that_lacks_a_ranks_part_is_refused(tmp_path):
    rows = torch.arange(6.0).reshape(3, 2)
    save_rows(tmp_path, {"w": rows[:2], "w:step": torch.tensor(4.0)}, rank=0, ranks=2)
    with pytest.raises(CheckpointError, match="rank-0-of-2"):
        SavedState(tmp_path)
    save_rows(tmp_path, {"w": rows[2:], "w:step": torch.tensor(4.0)}, rank=1, ranks=2)
    saved = SavedState(tmp_path)
    assert saved.states("w") == ["step"]
    for first, end in ((0, 3), (1, 3), (0, 1), (2, 2), (3, 3)):
        assert torch.equal(saved.rows("w", first, end), rows[first:end])
    assert saved.rows("w:step", 1, 2) == 4
    with pytest.raises(CheckpointError, match="no v"):
        saved.rows("v")
    save_rows(tmp_path, {"w": rows}, rank=0, ranks=1)
    with pytest.raises(CheckpointError, match="all ranks"):
        SavedState(tmp_path)


# --- the head ---------------------------------------------------------------------------------------------------------


def with_head(backend: str) -> PolicyLearner:
    """Learner of a model whose head has a weight of its own, and whose logits take many pieces."""
    logprobs.HEAD_BYTES = 4 * 50 * 10
    config = LearnerConfig(backend=backend, zero_stage=3, lr=1e-3)
    return make_learner(model_of(4, 2, torch.float32), config, SETTINGS, temperature=1.0, total_updates=11)


def count_gathers(rank: int, ranks: int, out: str) -> None:
    settings = deepspeed_backend.zero_settings

    def nothing_stays(config: LearnerConfig) -> dict:
        found = settings(config)
        found["zero_optimization"] |= {
            "stage3_param_persistence_threshold": 0,
            "stage3_max_reuse_distance": 0,
            "stage3_max_live_parameters": 0,
        }
        return found

    deepspeed_backend.zero_settings = nothing_stays
    for backend in ("deepspeed", "fsdp"):
        trained, seen = with_head(backend), []
        head = trained._policy.module.policy.lm_head
        weight = head.weight  # to look it up within a pass would tell ZeRO that this module needs it, too

        if backend == "fsdp":
            gather = _fsdp_param_group.foreach_all_gather

            def counted(parameters, *rest, head=head, seen=seen, gather=gather):
                seen.extend(p for p in parameters if p._module_info.module is head)
                return gather(parameters, *rest)

            _fsdp_param_group.foreach_all_gather = counted
        else:
            name = "_PartitionedParameterCoordinator__all_gather_params_"
            fetch = getattr(PartitionedParameterCoordinator, name)

            def fetched(self, parameters, *rest, weight=weight, seen=seen, fetch=fetch, **more):
                missing = (p for p in parameters if p.ds_status is ZeroParamStatus.NOT_AVAILABLE)
                seen.extend(p for p in missing if p is weight)
                return fetch(self, parameters, *rest, **more)

            setattr(PartitionedParameterCoordinator, name, fetched)
        for step in range(2):  # in the first, ZeRO does not know the order of the modules
            seen.clear()
            trained.learn(plan(groups(), updates=1, ranks=ranks, token_budget=10_000, seed=step)[rank])
        torch.save((len(seen), flat(trained)), f"{out}/{backend}.{rank}.pt")


@pytest.mark.slow
def test_a_sharded_head_is_gathered_twice_a_pass_however_many_pieces_its_logits_have(tmp_path, monkeypatch):
    monkeypatch.setattr(logprobs, "HEAD_BYTES", logprobs.HEAD_BYTES)
    run_ranks(2, count_gathers, str(tmp_path))
    alone = with_head("torch")
    before = flat(alone)
    for step in range(2):
        alone.learn(plan(groups(), updates=1, ranks=1, token_budget=10_000, seed=step)[0])
    for backend in ("deepspeed", "fsdp"):
        gathers, found = torch.load(tmp_path / f"{backend}.0.pt")
        assert 1 <= gathers <= 2, backend
        assert (found - flat(alone)).norm() <= 3e-5 * (flat(alone) - before).norm(), backend


@pytest.mark.equal_bits
def test_watched_samples_come_back_with_their_proximal_logprobs(tiny_spec):
    chosen = [[replace(s, watched=s.uid in ("2/1", "5/0")) for s in group] for group in groups()]
    before = load_model(tiny_spec)
    torch_learner = make_learner(
        load_model(tiny_spec), LearnerConfig(lr=1e-2), SETTINGS, temperature=1.0, total_updates=11
    )
    result = torch_learner.learn(plan(chosen, updates=3, ranks=1, token_budget=40, seed=3)[0])
    assert set(result.proximal) == {"2/1", "5/0"}
    for p, g in ((2, 1), (5, 0)):
        sample = chosen[p][g]
        batch = to_tensors([sample])
        expected = token_logprobs(before, batch.token_ids_BT, batch.mask_BT, 1.0)[0, len(sample.prompt_ids) :]
        np.testing.assert_array_equal(result.proximal[sample.uid], expected.detach().numpy())
