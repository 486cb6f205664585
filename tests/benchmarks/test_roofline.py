"""The limits of a decode step that the GPU kit prints beside measured ones."""

import json
from pathlib import Path

import pytest

from benchmarks.gpu.page import PICTURES
from benchmarks.gpu.roofline import add_limits, gpu_named, limit_ms, saved_share
from qurl_ray.planning.machines import GPUS
from qurl_ray.planning.shapes import SHAPES

SEVEN_B, H200 = SHAPES["Qwen2.5-7B"], GPUS["h200"]
FIGURES = Path(__file__).parents[2] / "benchmarks/results/gpu_h200_speed.json"


def measured(format_name: str) -> dict:
    return json.loads(FIGURES.read_text())["vllm"][f"Qwen2.5-7B, graphs, {format_name}"]["batches"]


def test_a_device_is_known_by_its_data_sheet():
    assert gpu_named("NVIDIA H100 80GB HBM3") is GPUS["h100"]
    assert gpu_named("NVIDIA H200") is H200
    assert gpu_named("NVIDIA GeForce RTX 4090") is None


def test_limits_are_bytes_over_bandwidth_or_operations_over_the_peak():
    weights, head = 28 * (3584 * (3584 + 2 * 512 + 3584) + 3 * 3584 * 18944), 152064 * 3584
    one = limit_ms(SEVEN_B, H200, "fp8", 1, 512)
    assert one["linears"] == pytest.approx(1e3 * weights / 4.8e12)
    assert one["head"] == pytest.approx(1e3 * 2 * head / 4.8e12)
    assert one["keys"] == pytest.approx(1e3 * 28 * 2 * 512 * 512 * 2 / 4.8e12)
    assert one["sampling"] == pytest.approx(1e3 * 4 * 152064 / 4.8e12)
    many = limit_ms(SEVEN_B, H200, "none", 512, 512)
    assert many["linears"] == pytest.approx(1e3 * 2 * weights * 512 / 989e12)
    assert limit_ms(SEVEN_B, H200, "none", 512, 512, key_bytes=1)["keys"] == pytest.approx(many["keys"] / 2)
    # An A100 has no FP8 products: its codes are read, and multiplied in bfloat16.
    assert limit_ms(SEVEN_B, GPUS["a100"], "fp8", 512, 512)["linears"] == pytest.approx(
        1e3 * 2 * weights * 512 / 312e12
    )


def test_a_head_in_codes_takes_the_linears_bytes_and_its_own_count_as_saved():
    plain, coded = (limit_ms(SEVEN_B, H200, "fp8", 1, 512, head_in_codes=of_head) for of_head in (False, True))
    assert coded == plain | {"head": pytest.approx(plain["head"] / 2)}
    assert plain["head"] == pytest.approx(1e3 * 1.09e9 / 4.8e12, rel=0.01)
    assert limit_ms(SEVEN_B, H200, "none", 1, 512, head_in_codes=True) == limit_ms(SEVEN_B, H200, "none", 1, 512)
    params = SEVEN_B.block_params + SEVEN_B.head_params
    saved = 1e3 * params / 4.8e12
    whole = saved_share(SEVEN_B, H200, "fp8", 1, 512, ms=4 - saved, plain_ms=4, head_in_codes=True)
    assert whole == pytest.approx(1)


def test_the_shares_that_a_format_saves_are_those_of_the_docs():
    for format_name, shares in (("fp8", [0.84, 0.50, -0.44, 1.47]), ("int8", [0.79, 0.68, 0.17, 2.05])):
        batches = measured(format_name)
        add_limits(batches, measured("none"), SEVEN_B, "NVIDIA H200", format_name, context=512)
        assert [round(one["saved_share"], 2) for one in batches.values()] == shares
    plain = measured("none")
    add_limits(plain, measured("none"), SEVEN_B, "NVIDIA H200", "none", context=512)
    assert {one["saved_share"] for one in plain.values()} == {None}
    unknown = measured("fp8")
    add_limits(unknown, measured("none"), SEVEN_B, "some CPU", "fp8", context=512)
    assert unknown == measured("fp8")


def test_the_page_shows_limits_beside_measured_steps():
    batches = measured("fp8")
    add_limits(batches, measured("none"), SEVEN_B, "NVIDIA H200", "fp8", context=512)
    for one in batches.values():
        one["tokens_per_second"] = 1.0
    *_, table = PICTURES["vllm"]({"Qwen2.5-7B, graphs, fp8, head in codes": {"batches": batches}})
    assert "<td>fp8, head in codes</td>" in table
    assert "<td>3.57</td><td></td><td>1.59</td>" in table
    assert "<th>head</th>" in table
    assert "<td>-0.44</td>" in table
