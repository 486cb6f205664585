"""Direct transports from end to end, with real engines of vLLM: a mapped file for a GPU's memory, gloo for NCCL, as the
package itself has them on a CPU."""

import inspect

import pytest
from torch.multiprocessing import reductions

from qurl_ray.errors import StaleWeights
from qurl_ray.transfer import shared_memory as memory
from tests.weights.transfer_rig import Rig, in_a_process

pytest.importorskip("vllm", reason="needs the extra cpu or gpu")

TRANSPORTS = ["ipc", "nccl"]


def test_torch_takes_the_device_where_it_is_replaced():
    names = list(inspect.signature(reductions.rebuild_cuda_tensor).parameters)
    assert names[memory._DEVICE] == "storage_device"


@pytest.mark.slow
@pytest.mark.parametrize("transport", TRANSPORTS)
def test_two_engines_get_the_codes_of_two_ranks(tiny_spec, tmp_path, transport):
    formats = ["int8", "fp8", "fp8_block", "int4", "nvfp4", "mxfp8", "none"]
    in_a_process(like_the_object_store, tiny_spec, {"transport": transport, "ranks": 2, "engines": 2}, formats)


@pytest.mark.slow
@pytest.mark.parametrize("transport", TRANSPORTS)
def test_shards_of_an_engine_get_theirs(tiny_spec, tmp_path, transport):
    setting = {"transport": transport, "ranks": 2, "tensor_parallel": 2}
    in_a_process(like_the_object_store, tiny_spec, setting, ["int8", "fp8", "none"])


@pytest.mark.slow
@pytest.mark.parametrize("transport", TRANSPORTS)
def test_engines_in_bfloat16_get_the_codes_of_float32_parameters(tiny_spec, tmp_path, transport):
    setting = {"transport": transport, "dtype": "bfloat16", "probe": False}
    in_a_process(like_the_object_store, tiny_spec, setting, ["int8", "fp8_block", "none"])


def like_the_object_store(spec, setting, formats):
    with Rig(spec, **setting) as rig:
        rig.move(0.3)
        for format_name in formats:
            assert rig.send(format_name) == 0  # another format: the object store
            before = rig.answers(0) if rig.probed else None
            rig.move()
            assert rig.send(format_name) > 1  # several buckets
            rig.assert_resident()
            assert rig.gate.metrics["sync/refits"] == 0
            assert not rig.warnings, rig.warnings
            if not rig.probed:
                continue  # in bfloat16, see tests/engines/test_vllm_engine.py
            if "tensor_parallel" not in setting:  # its processes quantize by ranges of their own
                assert rig.gate.metrics["sync/probe_gap"] < 0.01
            found = rig.answers(0)
            assert found != before
            for index in range(1, len(rig.engines)):
                assert rig.answers(index) == found
            for sender in rig.senders:
                sender.sent = None  # all again, through the object store
            assert rig.send(format_name) == 0
            assert rig.answers(0) == found


@pytest.mark.slow
@pytest.mark.parametrize("transport", TRANSPORTS)
def test_what_a_bucket_lost_is_seen_and_comes_again(tiny_spec, tmp_path, transport):
    in_a_process(damaged, tiny_spec, {"transport": transport, "ranks": 2, "engines": 2})


def damaged(spec, setting):
    with Rig(spec, **setting) as rig:
        rig.send("int8")
        rig.move()
        rig.damage()
        assert rig.send("int8") > 1
        assert rig.gate.metrics["sync/refits"] > 0
        assert all("in the engine" in warning for warning in rig.warnings), rig.warnings  # a fingerprint, not the probe
        assert any("is in quarantine and gets weights 2 in full" in warning for warning in rig.warnings), rig.warnings
        rig.assert_resident()
        count = len(rig.warnings)
        rig.move()
        assert rig.send("int8") > 1  # and it goes on
        assert len(rig.warnings) == count
        rig.assert_resident()


@pytest.mark.slow
@pytest.mark.parametrize("transport", TRANSPORTS)
def test_an_engine_that_dies_in_the_middle_leaves_no_engine_half_new(tiny_spec, tmp_path, transport):
    in_a_process(killed, tiny_spec, {"transport": transport, "ranks": 2, "engines": 2, "timeout_s": 20.0})


def killed(spec, setting):
    with Rig(spec, **setting) as rig:
        rig.send("int8")
        rig.move()
        assert rig.send("int8") > 1
        rig.move()
        rig.kill_at_bucket(1, engine=1)
        rig.send("int8")
        assert rig.engines[0].version == rig.fleet.version == 3
        rig.assert_resident(rig.engines[:1])
        rig.move()
        assert rig.send("int8") > 1  # without the dead one; the group is another one
        rig.assert_resident(rig.engines[:1])


@pytest.mark.slow
@pytest.mark.parametrize("transport", TRANSPORTS)
def test_a_rank_that_stops_in_the_middle_leaves_engines_stale_until_a_whole_version(tiny_spec, tmp_path, transport):
    in_a_process(interrupted, tiny_spec, {"transport": transport})


def interrupted(spec, setting):
    with Rig(spec, **setting) as rig:
        rig.send("int8")
        rig.move()
        rig.fail_at_parameter(9)
        with pytest.raises(ZeroDivisionError):
            rig.send("int8")
        assert rig.engines[0].version is None
        with pytest.raises(StaleWeights, match="unverified weights"):
            rig.engines[0].generate(rig.requests, version=1)
        for sender in rig.senders:
            sender.sent = None  # a rank that has restarted knows no earlier version
        assert rig.send("int8") == 0
        rig.assert_resident()
        rig.move()
        assert rig.send("int8") > 1
        rig.assert_resident()
