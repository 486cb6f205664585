"""E4M3 codes and power-of-two scales of keys and values, against the format's definition in plain Python."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import LlamaConfig

from qurl_ray.policy.kv import (
    KVScales,
    MaximaRecorder,
    calibration_ids,
    dequantize_kv,
    power_of_two_scales,
    quantize_kv,
)
from qurl_ray.policy.kv import rounded as rounded_pair

# Sign, four bits of exponent with bias 7, three of mantissa; exponent 0 is subnormal, all ones is nan
# (https://arxiv.org/abs/2209.05433, table 1).
POSITIVE = sorted(
    (1 + m / 8) * 2.0 ** (e - 7) if e else m / 8 * 2.0**-6 for e in range(16) for m in range(8) if (e, m) != (15, 7)
)
FLOATS = st.floats(width=32, allow_nan=False, allow_infinity=False)


def nearest(x: float) -> float:
    """The closest value of E4M3, the even mantissa if two are as close; the largest beyond the last."""
    distances = [abs(abs(x) - value) for value in POSITIVE]
    best = min(distances)
    places = [i for i, distance in enumerate(distances) if distance == best]
    place = next((i for i in places if i % 2 == 0), places[0])  # neighbours count up bit by bit
    return math.copysign(POSITIVE[place], x)


def next_power_of_two(x: float) -> float:
    return 2.0 ** math.ceil(math.log2(x))


def shaped(values: list[float], heads: int = 1) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float32).view(1, heads, -1, 1)


def test_the_format_is_as_written_down():
    assert len(POSITIVE) == 127
    assert (POSITIVE[1], POSITIVE[-1]) == (2.0**-9, 448.0)
    codes = torch.arange(127, dtype=torch.uint8).view(torch.float8_e4m3fn)
    assert codes.float().tolist() == POSITIVE


@given(values=st.lists(st.floats(-1e4, 1e4, width=32), min_size=1, max_size=30), exponent=st.integers(-20, 20))
def test_values_become_the_nearest_of_the_grid(values, exponent):
    scale = torch.tensor([2.0**exponent])
    found = dequantize_kv(quantize_kv(shaped(values), scale), scale)
    expected = [nearest(value / 2.0**exponent) * 2.0**exponent for value in values]
    assert found.flatten().tolist() == expected


def test_each_head_has_its_own_scale():
    scale = torch.tensor([1.0, 64.0])
    codes = quantize_kv(shaped([3.3, 1000.0, 3.3, 1000.0], heads=2), scale)
    assert codes.dtype == torch.float8_e4m3fn
    assert dequantize_kv(codes, scale).flatten().tolist() == [3.25, 448.0, 3.25, 1024.0]


@pytest.mark.parametrize("value", [449.0, 500.0, 1e30, math.inf])
def test_what_is_too_large_saturates_and_nan_stays(value):
    one = torch.ones(1)
    found = dequantize_kv(quantize_kv(shaped([value, -value, math.nan]), one), one).flatten().tolist()
    assert found[:2] == [448.0, -448.0]
    assert math.isnan(found[2])


@given(maximum=st.floats(2.0**-100, 2.0**120, width=32))
def test_scales_are_the_power_of_two_that_leaves_twice_the_room(maximum):
    (scale,) = power_of_two_scales(torch.tensor([maximum])).tolist()
    assert scale == next_power_of_two(float(torch.tensor(maximum) / 224))
    assert maximum / scale <= 224 * (1 + 2**-23)
    assert maximum / scale > 111  # and no more than that


def test_scales_at_the_borders():
    found = power_of_two_scales(torch.tensor([[224.0, 225.0, 112.0], [0.0, math.inf, math.nan]]))
    assert found.tolist() == [[1.0, 2.0, 0.5], [1.0, 1.0, 1.0]]
    assert power_of_two_scales(torch.tensor([1e-44]))[0] > 0


@given(x=FLOATS)
def test_what_is_stored_is_stored_again_without_a_change(x):
    scales = KVScales(key=torch.tensor([0.25]), value=torch.tensor([8.0]))
    once = rounded_pair(shaped([x]), shaped([x]), scales)
    assert [part.item() for part in rounded_pair(*once, scales)] == [part.item() for part in once]


def test_bfloat16_holds_what_a_cache_gives_back():
    x = torch.randn(1, 2, 50, 4, generator=torch.Generator().manual_seed(0)).bfloat16()
    scales = KVScales(key=torch.tensor([0.5, 2.0]), value=torch.tensor([0.125, 4.0]))
    key, value = rounded_pair(x, x.float(), scales)
    assert (key.dtype, value.dtype) == (torch.bfloat16, torch.float32)
    assert torch.equal(key.float(), rounded_pair(x.float(), x.float(), scales)[0])


def test_a_recorder_measures_heads_apart_and_not_the_last_token():
    key = torch.zeros(1, 2, 4, 3)
    key[0, 0, 1, 2], key[0, 1, 2, 0], key[0, 1, 3, 0] = -300.0, 100.0, 1e6
    recorder = MaximaRecorder([7] * 4)
    assert recorder.update(key, 2 * key, 5)[0] is key
    (scales,) = recorder.scales().values()
    assert scales.key.tolist() == [2.0, 0.5]
    assert scales.value.tolist() == [4.0, 1.0]


@pytest.mark.parametrize(("context", "tokens"), [(4096, 65), (16, 16)])
def test_the_fixed_sequence_fits_vocabulary_and_context(context, tokens):
    config = LlamaConfig(vocab_size=50, max_position_embeddings=context)
    ids = calibration_ids(config)
    assert len(ids) == tokens
    assert set(ids) <= set(range(50))
    assert ids == calibration_ids(config)
    assert len(set(ids)) > 10
