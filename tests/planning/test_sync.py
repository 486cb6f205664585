"""Syncs by each transport against arithmetic done here by hand, with rates that are easy to count with."""

from dataclasses import replace

import pytest

from qurl_ray.planning.machines import CONSTANTS, GPUS, Constants
from qurl_ray.planning.memory import EngineSpec, Layout
from qurl_ray.planning.shapes import SHAPES
from qurl_ray.planning.sync import sent_bytes, sync_parts, sync_s
from qurl_ray.planning.workload import Workload

SEVEN, H100 = SHAPES["Qwen2.5-7B"], GPUS["h100"]
CODES = 28 * (3584 * 3584 * 2 + 2 * 3584 * 512 + 3 * 3584 * 18944)
FLOATS = 2 * 152064 * 3584
SLOW = Constants(fingerprint=2e9, compare=3e9, copy=4e9, put=4e9, changes=1e7, convert=5e9)
FREE = replace(SLOW, bandwidth=1e9, link=1, pageable=1e10, gather_s=0, launch_s=0, call_s=0, objects=1e9)
"""Constants with which a GPU's own work takes no time."""
STORE = Workload(transport="object_store", delta=False)
ALONE = Layout(placement="disaggregated", engines=1, tensor_parallel=1, ranks=1, stage=0)
SHARED = Layout(placement="colocated", engines=8, tensor_parallel=1, ranks=8, stage=0)
FAR = replace(ALONE, engines=15)
"""Two nodes."""


def in_int8(c=FREE):
    return EngineSpec(shape=SEVEN, gpu=H100, precision="int8", constants=c)


def test_codes_travel_as_bytes_and_the_rest_in_bfloat16():
    assert sent_bytes(SEVEN, "int8", Workload()) == CODES + 2 * FLOATS
    assert sent_bytes(SEVEN, "bf16", Workload()) == 2 * (CODES + FLOATS)
    assert sent_bytes(SEVEN, "nvfp4", Workload()) == CODES * 4.5 / 8 + 2 * FLOATS


def test_the_object_store_has_hosts_handle_every_byte():
    found = sync_parts(in_int8(), ALONE, STORE)
    sent, decoded = CODES + 2 * FLOATS, CODES + 4 * FLOATS
    expected = {
        "copy to the host": sent / 1e10,
        "fingerprint": 4 * FLOATS / 5e9 + decoded / 2e9,  # of float32 values, which are made of bfloat16
        "compare": CODES / 3e9,
        "put": sent / 4e9,
        "decode": 4 * FLOATS / 5e9 + decoded / 4e9,
        "load": decoded / 1e10,
    }
    assert {name: seconds for name, seconds in found.items() if seconds > 1e-6} == pytest.approx(expected)


def test_ranks_share_their_part_and_engines_take_all():
    one, four = (sync_parts(in_int8(), replace(ALONE, ranks=ranks), STORE) for ranks in (1, 4))
    shared = {"copy to the host", "fingerprint", "compare", "put", "quantize"}
    assert {name for name in one if one[name] == pytest.approx(4 * four[name]) and one[name]} == shared
    assert (one["decode"], one["load"]) == (four["decode"], four["load"])
    whole = (4 * SEVEN.params + CODES + 2 * FLOATS) / (3.35e12 * 1e9)  # each rank reads and writes all of it
    assert sync_parts(in_int8(), replace(ALONE, ranks=4), replace(STORE, transport="ipc"))["quantize"] == pytest.approx(
        whole
    )


@pytest.mark.parametrize("transport", ["ipc", "nccl"])
def test_direct_transports_leave_hosts_a_copy_and_a_comparison(transport):
    found = sync_parts(in_int8(), SHARED, replace(STORE, transport=transport))
    sent = CODES + 2 * FLOATS
    expected = {"copy to the host": sent / 8 / 1e10, "compare": CODES / 8 / 3e9}
    if transport == "nccl":
        expected["send"] = sent / 450e9
    assert {name: seconds for name, seconds in found.items() if seconds > 1e-6} == pytest.approx(expected)


def test_across_nodes_bytes_go_through_the_network():
    assert sync_parts(in_int8(), FAR, STORE)["network"] == (CODES + 2 * FLOATS) / 1e9
    assert sync_parts(in_int8(), ALONE, STORE)["network"] == 0
    assert sync_parts(in_int8(), FAR, replace(STORE, transport="nccl"))["send"] == pytest.approx(
        (CODES + 2 * FLOATS) / 50e9
    )


def test_zero_3_gathers_every_tensor():
    slow = in_int8(replace(CONSTANTS, gather_s=0.01, link=1))
    found = sync_parts(slow, replace(ALONE, ranks=4, stage=3), STORE)["gather"]
    tensors = 28 * 9 + 3  # seven linears and two norms a layer; embedding, norm, head
    assert found == pytest.approx(4 * SEVEN.params * 3 / 4 / 450e9 + tensors * 0.01)


def test_launches_are_counted_once_a_tensor_and_calls_once_a_bucket():
    def added(layout, work, **constants):
        slower = in_int8(replace(FREE, **constants))
        return sync_s(slower, layout, work) - sync_s(in_int8(), layout, work)

    per_tensor = (28 * 9 + 3) * 30 * 1e-3
    assert added(ALONE, replace(STORE, transport="ipc"), launch_s=1e-3) == pytest.approx(2 * per_tensor)  # both sides
    assert added(replace(ALONE, ranks=8), STORE, launch_s=1e-3) == pytest.approx((1 / 8 + 1) * per_tensor)
    buckets = -(-(CODES + 2 * FLOATS) // 2**25)
    assert added(ALONE, STORE, call_s=1e-2) == pytest.approx(buckets * 1e-2)


def test_a_delta_pays_where_the_network_is_slow_alone():
    for layout, pays in ((ALONE, False), (FAR, True)):
        whole, changes = (sync_s(in_int8(SLOW), layout, replace(STORE, delta=delta)) for delta in (False, True))
        assert (changes < whole) is pays
    found = sync_parts(in_int8(), FAR, replace(STORE, delta=True))
    assert found["network"] == pytest.approx(2 * SEVEN.params / 309 / 1e9)
    decoded = CODES + 4 * FLOATS
    assert found["decode"] == pytest.approx(2 * decoded / 4e9 + 4 * FLOATS / 5e9)


def test_a_full_sync_of_7b_takes_seconds_and_not_a_fifth_of_one():
    layout = replace(SHARED, stage=3)
    full = sync_s(in_int8(CONSTANTS), layout, STORE)
    direct = sync_s(in_int8(CONSTANTS), layout, replace(STORE, transport="ipc"))
    assert 2 < full < 20
    assert 0.2 < direct < full / 2
