"""vLLM's own weight transfer: its engines on both sides, from init to answers. Only the collective itself, NCCL or
CUDA's IPC, is replaced (tests/sync/cpu_collectives.py)."""

import time
from dataclasses import replace
from types import SimpleNamespace

import pytest

from qurl_ray.errors import DeadlineExceeded, StaleWeights, SyncError
from tests.sync.transfer_rig import Rig, in_a_process

pytest.importorskip("vllm", reason="needs the extra cpu or gpu")

ROUND = ["start_weight_update", "update_weights", "finish_weight_update"]
FORMATS = ["int8", "fp8", "fp8_block", "int4", "none"]


@pytest.mark.slow
def test_two_engines_get_all_codes_from_two_ranks_and_a_damaged_one_is_refitted(tiny_spec, tmp_path):
    in_a_process(dense, tiny_spec, tmp_path, {"transport": "nccl", "ranks": 2, "engines": 2}, FORMATS)


@pytest.mark.slow
@pytest.mark.parametrize("transport", ["nccl", "sparse_nccl"])
def test_shards_of_an_engine_get_theirs(tiny_spec, tmp_path, transport):
    scenario = dense if transport == "nccl" else sparse
    setting = {"transport": transport, "tensor_parallel": 2}
    in_a_process(scenario, tiny_spec, tmp_path, setting, ["int8", "fp8", "none"])


@pytest.mark.slow
def test_the_memory_of_one_gpu_is_handed_over(tiny_spec, tmp_path):
    in_a_process(dense, tiny_spec, tmp_path, {"transport": "ipc"}, ["int8", "none"])


def dense(spec, folder, setting, formats):
    with Rig(spec, folder, **setting) as rig:
        rig.move(0.3)
        for format_name in formats:
            assert rig.send(format_name) == []  # another format: the object store
            before = rig.answers(0)
            rig.move()
            init = ["init_weight_transfer_engine"] if format_name == formats[0] else []
            calls = rig.send(format_name)
            assert set(calls) == {*init, *ROUND}, calls
            assert_like_the_object_store(rig, format_name, before)
            assert not rig.warnings, rig.warnings
        for format_name in formats[:1] + formats[-1:]:
            assert_healed(rig, format_name, rank=len(rig.engines))


def assert_like_the_object_store(rig, format_name, before):
    rig.assert_resident()
    assert rig.refit.metrics["sync/refits"] == 0
    assert rig.refit.metrics["sync/probe_gap"] < 0.01
    found = rig.answers(0)
    assert found != before
    for index in range(1, len(rig.engines)):
        assert rig.answers(index) == found
    for sender in rig.senders:
        sender.sent = None  # all again, through the object store
    assert rig.send(format_name) == []
    assert rig.answers(0) == found


def assert_healed(rig, format_name, rank):
    rig.send(format_name)
    rig.warnings.clear()
    rig.move()
    rig.damage(rank)
    calls = rig.send(format_name)
    assert set(calls) == set(ROUND), calls
    assert rig.refit.metrics["sync/refits"] == 1
    (warning,) = rig.warnings
    assert "in the engine" in warning, warning  # a fingerprint, not the probe
    worker = len(rig.engines) - 1
    assert f"rollout worker {worker} is in quarantine and gets weights {rig.fleet.version} in full" in warning, warning
    rig.assert_resident()
    assert rig.answers(0) == rig.answers(worker)
    rig.move()
    assert set(rig.send(format_name)) == set(ROUND)  # and it goes on
    assert len(rig.warnings) == 1, rig.warnings
    rig.assert_resident()


@pytest.mark.slow
def test_changed_codes_are_few_changed_floats(tiny_spec, tmp_path):
    in_a_process(sparse, tiny_spec, tmp_path, {"transport": "sparse_nccl"}, FORMATS)


def sparse(spec, folder, setting, formats):
    with Rig(spec, folder, **setting) as rig:
        rig.move(0.3)
        for format_name in formats:
            assert rig.send(format_name) == []
            whole, before = rig.refit.metrics["sync/bytes"], rig.answers(0)
            rig.move()
            assert set(ROUND) <= set(rig.send(format_name))
            if format_name != "none":
                assert rig.refit.metrics["sync/bytes"] < whole / 2, (format_name, rig.refit.metrics, whole)
                assert rig.refit.metrics["sync/delta"] == 1
            assert_like_the_object_store(rig, format_name, before)
            assert not rig.warnings, rig.warnings
        assert_healed(rig, "int8", rank=1)
        assert rig.send("int8") == []  # nothing changed, nothing to carry
        assert rig.refit.metrics["sync/refits"] == 0
        rig.assert_resident()


@pytest.mark.slow
@pytest.mark.parametrize("transport", ["nccl", "sparse_nccl"])
def test_engines_in_bfloat16_get_the_codes_of_float32_parameters(tiny_spec, tmp_path, transport):
    in_a_process(resident_only, tiny_spec, tmp_path, {"transport": transport, "dtype": "bfloat16"}, FORMATS)


def resident_only(spec, folder, setting, formats):
    """Nothing is generated: see the test of bfloat16 in tests/rollout/test_vllm_engine.py."""
    with Rig(spec, folder, **setting, probe=False) as rig:
        rig.move(0.3)
        for format_name in formats:
            assert rig.send(format_name) == []
            rig.move()
            assert set(ROUND) <= set(rig.send(format_name))
            assert not rig.warnings, rig.warnings
            rig.assert_resident()


@pytest.mark.slow
def test_a_transfer_that_fails_ends_the_run_and_nothing_is_generated(tiny_spec, tmp_path):
    in_a_process(failing, tiny_spec, tmp_path)


def failing(spec, folder):
    with Rig(spec, folder, "ipc") as rig:
        rig.send("int8")
        (folder / "gpu").mkdir()  # no memory to hand over
        with pytest.raises(SyncError, match=r"vLLM's ipc transfer failed: \w+Error"):
            rig.send("int8")
        with pytest.raises(StaleWeights, match="unverified weights"):
            rig.engines[0].generate(rig.requests, version=1)
        with pytest.raises(SyncError, match="its process group cannot be used again"):
            rig.send("int8")
        from qurl_ray.sync.transfer import Shard, Transfer  # here: it imports vllm, which patches torch

        hanging = Transfer(replace(rig.senders[0]._transport._link, timeout_s=0.1))
        hanging._engine = SimpleNamespace(send_weights=lambda: time.sleep(9))
        hanging._shard = Shard(records=(), scales={}, patches=())
        with pytest.raises(DeadlineExceeded, match=r"waited 0\.1 s for vLLM's ipc transfer"):
            hanging.send()
