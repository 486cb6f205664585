"""Syncs by each transport against arithmetic done here by hand, with rates that are easy to count with."""

from dataclasses import replace

import pytest

from qurl_ray.planning.machines import CONSTANTS, GPUS, Constants, Host
from qurl_ray.planning.shapes import SHAPES
from qurl_ray.planning.sync import Route, Sent, cpu_sync_parts, sent_weights, sync_parts, sync_s

SEVEN, H100 = SHAPES["Qwen2.5-7B"], GPUS["h100"]
CODES = 28 * (3584 * 3584 * 2 + 2 * 3584 * 512 + 3 * 3584 * 18944)
FLOATS = 2 * 152064 * 3584
SLOW = Host(
    quantize=1e9, fingerprint=2e9, compare=3e9, copy=4e9, put=4e9, changes=1e7, convert=5e9, pack=6e9, threads=2
)
ALONE = Route(transport="object_store", ranks=1, gpus=2, gathered=False)
FREE = Constants(
    bandwidth=1e9, link=1, pageable=1e10, gather_s=0, launch_s=0, call_s=0, objects=1e9
)  # a GPU's own work takes no time


def test_codes_travel_as_bytes_and_the_rest_in_bfloat16():
    assert sent_weights(SEVEN, "int8").bytes == CODES + 2 * FLOATS
    assert sent_weights(SEVEN, "int8").decoded == CODES + 4 * FLOATS
    assert sent_weights(SEVEN, "bf16").bytes == 2 * (CODES + FLOATS)
    assert sent_weights(SEVEN, "bf16", float_bytes=4).bytes == 4 * (CODES + FLOATS)


def test_the_object_store_has_hosts_handle_every_byte():
    found = sync_parts(SEVEN, H100, "int8", ALONE, host=SLOW, c=FREE)
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
    one, four = (sync_parts(SEVEN, H100, "int8", replace(ALONE, ranks=ranks), host=SLOW, c=FREE) for ranks in (1, 4))
    shared = {"copy to the host", "fingerprint", "compare", "put", "quantize"}
    assert {name for name in one if one[name] == pytest.approx(4 * four[name]) and one[name]} == shared
    assert (one["decode"], one["load"]) == (four["decode"], four["load"])
    direct = replace(ALONE, transport="ipc", ranks=4)
    whole = (4 * SEVEN.params + CODES + 2 * FLOATS) / (3.35e12 * 1e9)  # each rank reads and writes all of it
    assert sync_parts(SEVEN, H100, "int8", direct, host=SLOW, c=FREE)["quantize"] == pytest.approx(whole)


@pytest.mark.parametrize("transport", ["ipc", "nccl"])
def test_direct_transports_leave_hosts_a_copy_and_a_comparison(transport):
    route = replace(ALONE, transport=transport, ranks=8, gpus=8)
    found = sync_parts(SEVEN, H100, "int8", route, host=SLOW, c=FREE)
    sent = CODES + 2 * FLOATS
    expected = {"copy to the host": sent / 8 / 1e10, "compare": CODES / 8 / 3e9}
    if transport == "nccl":
        expected["send"] = sent / 450e9
    assert {name: seconds for name, seconds in found.items() if seconds > 1e-6} == pytest.approx(expected)


def test_across_nodes_bytes_go_through_the_network():
    far = replace(ALONE, gpus=16)
    assert sync_parts(SEVEN, H100, "int8", far, c=FREE)["network"] == (CODES + 2 * FLOATS) / 1e9
    assert sync_parts(SEVEN, H100, "int8", ALONE, c=FREE)["network"] == 0
    broadcast = replace(far, transport="nccl")
    assert sync_parts(SEVEN, H100, "int8", broadcast, c=FREE)["send"] == pytest.approx((CODES + 2 * FLOATS) / 50e9)


def test_zero_3_gathers_every_tensor():
    slow = replace(CONSTANTS, gather_s=0.01, link=1)
    found = sync_parts(SEVEN, H100, "int8", replace(ALONE, ranks=4, gathered=True), c=slow)["gather"]
    tensors = 28 * 9 + 3  # seven linears and two norms a layer; embedding, norm, head
    assert found == pytest.approx(4 * SEVEN.params * 3 / 4 / 450e9 + tensors * 0.01)


def test_launches_are_counted_once_a_tensor_and_calls_once_a_bucket():
    def added(route, **constants):
        return sync_s(SEVEN, H100, "int8", route, c=replace(FREE, **constants)) - sync_s(
            SEVEN, H100, "int8", route, c=FREE
        )

    per_tensor = (28 * 9 + 3) * 30 * 1e-3
    assert added(replace(ALONE, transport="ipc"), launch_s=1e-3) == pytest.approx(2 * per_tensor)  # both sides
    assert added(replace(ALONE, ranks=8), launch_s=1e-3) == pytest.approx((1 / 8 + 1) * per_tensor)
    buckets = -(-(CODES + 2 * FLOATS) // 2**25)
    assert added(ALONE, call_s=1e-2) == pytest.approx(buckets * 1e-2)


def test_a_delta_pays_where_the_network_is_slow_alone():
    near, far = ALONE, replace(ALONE, gpus=16)
    for route, pays in ((near, False), (far, True)):
        whole, changes = (
            sync_s(SEVEN, H100, "int8", replace(route, delta=delta), host=SLOW) for delta in (False, True)
        )
        assert (changes < whole) is pays
    found = sync_parts(SEVEN, H100, "int8", replace(far, delta=True), host=SLOW, c=FREE)
    assert found["network"] == pytest.approx(2 * SEVEN.params / 309 / 1e9)
    decoded = CODES + 4 * FLOATS
    assert found["decode"] == pytest.approx(2 * decoded / 4e9 + 4 * FLOATS / 5e9)


def test_a_full_sync_of_7b_takes_seconds_and_not_a_fifth_of_one():
    full = sync_s(SEVEN, H100, "int8", replace(ALONE, ranks=8, gpus=8, gathered=True))
    direct = sync_s(SEVEN, H100, "int8", Route(transport="ipc", ranks=8, gpus=8, gathered=True))
    assert 2 < full < 20
    assert 0.2 < direct < full / 2


def test_a_cpu_packs_codes_and_verifies_with_its_threads():
    sent = Sent(codes=600, floats=100, float_bytes=2, tensors=1)
    host = Host(quantize=4, fingerprint=10, compare=6, copy=8, put=4, changes=1, convert=2, pack=3, threads=2)
    assert cpu_sync_parts(sent, host) == {
        "quantize": 600 + 200,  # float32 codes at 4, and floats to bfloat16 at 2
        "fingerprint": 200 + 100,
        "compare": 100,
        "put": 200,
        "decode": 200,
        "place": 50 + 100,
        "verify": 50,
    }
    assert cpu_sync_parts(replace(sent, codes=0, float_bytes=4), host) == {
        "quantize": 50,
        "fingerprint": 40,
        "compare": 0,
        "put": 100,
        "decode": 0,
        "place": 50,
        "verify": 20,
    }
