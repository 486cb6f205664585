"""The codec: exact for any integers, an error for any damage, small for what training changes."""

import math
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from qurl_ray.errors import SyncError
from qurl_ray.weights.delta import Delta, decode_delta, encode_delta

TYPES = (np.uint8, np.uint16, np.uint32)


@st.composite
def pairs(draw):
    """Two arrays of one shape, equal in most places, in none or in all."""
    dtype, shape = draw(st.sampled_from(TYPES)), draw(hnp.array_shapes(max_dims=2, min_side=0, max_side=300))
    rng = np.random.default_rng(draw(st.integers(0, 2**32)))
    base, other = rng.integers(0, np.iinfo(dtype).max, (2, *shape), dtype=dtype, endpoint=True)
    changed = rng.random(shape) < draw(st.sampled_from([0.0, 0.01, 0.1, 1.0]))
    step = draw(st.sampled_from([1, -1, None]))
    return base, np.where(changed, other if step is None else base + dtype(step % 2 ** (8 * base.itemsize)), base)


@settings(deadline=None, max_examples=300)
@given(pairs())
def test_decoding_gives_back_what_was_encoded(pair):
    base, new = pair
    delta = encode_delta(base, new)
    if delta is None:  # allowed where it would not be smaller
        assert np.count_nonzero(base != new) > 0.01 * new.size or new.nbytes < 400
        return
    again = decode_delta(base, delta)
    assert again.dtype == new.dtype
    assert again.shape == new.shape
    assert (again == new).all()
    assert not np.shares_memory(again, base)
    assert delta.count == np.count_nonzero(base != new)
    assert delta.nbytes < new.nbytes


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("place", [0, 1, 500, 999])
@pytest.mark.parametrize("step", [1, -1, 100])
def test_a_single_change_anywhere_wraps_around(dtype, place, step):
    most = np.iinfo(dtype).max
    base = np.full(1000, most if step > 0 else 0, dtype)
    new = base.copy()
    new[place] = (int(base[place]) + step) % (most + 1)
    delta = encode_delta(base, new)
    assert delta.count == 1
    assert delta.nbytes < 40
    assert (decode_delta(base, delta) == new).all()


@pytest.mark.parametrize("dtype", TYPES)
def test_arrays_of_one_element_and_of_none_are_sent_whole(dtype):
    assert encode_delta(np.zeros(1, dtype), np.ones(1, dtype)) is None
    assert encode_delta(np.zeros(0, dtype), np.zeros(0, dtype)) is None
    assert (
        decode_delta(np.zeros(0, dtype), Delta(size=0, itemsize=np.dtype(dtype).itemsize, count=0, data=EMPTY)).size
        == 0
    )


EMPTY = encode_delta(np.zeros(100, np.uint8), np.zeros(100, np.uint8)).data


def test_there_is_no_delta_between_different_shapes_or_types():
    a = np.zeros((10, 100), np.uint8)
    assert encode_delta(a, a.reshape(100, 10)) is None
    assert encode_delta(a, a.astype(np.uint16)) is None
    assert (
        encode_delta(a, np.random.default_rng(0).integers(0, 256, a.shape, dtype=np.uint8)) is None
    )  # would be larger


def test_signed_zeros_and_nan_payloads_of_floats_survive():
    base = np.ones(1000, np.float32).view(np.uint32)
    new = base.copy()
    new[:6] = [0x7FC00001, 0xFFC12345, 0x7F800001, 0x80000000, 0x00000001, 0xFF800000]
    assert (decode_delta(base, encode_delta(base, new)) == new).all()


@pytest.fixture(scope="module")
def sample() -> tuple[np.ndarray, Delta]:
    rng = np.random.default_rng(3)
    base = rng.integers(0, 256, 5000, dtype=np.uint8)
    new = base.copy()
    new[rng.choice(5000, 50, replace=False)] += 1
    return base, encode_delta(base, new)


def test_a_truncation_anywhere_is_an_error(sample):
    base, delta = sample
    for length in range(len(delta.data)):
        with pytest.raises(SyncError, match="delta"):
            decode_delta(base, replace(delta, data=delta.data[:length]))
    with pytest.raises(SyncError, match="truncated"):
        decode_delta(base, replace(delta, data=delta.data + b"\0"))


def test_a_flipped_bit_anywhere_is_an_error_or_changes_nothing(sample):
    base, delta = sample
    right, unseen = decode_delta(base, delta), 0
    for bit in range(8 * len(delta.data)):
        data = bytearray(delta.data)
        data[bit // 8] ^= 1 << bit % 8
        try:
            assert (decode_delta(base, replace(delta, data=bytes(data))) == right).all()
            unseen += 1
        except SyncError:
            pass
    assert unseen <= 8  # padding, and hints in zlib's own header


@pytest.mark.parametrize(
    "wrong", [{"size": 4999}, {"itemsize": 2}, {"count": 49}, {"count": 51}, {"count": -1}, {"count": 5001}]
)
def test_numbers_that_disagree_with_base_or_data_are_an_error(sample, wrong):
    with pytest.raises(SyncError, match="delta"):
        decode_delta(sample[0], replace(sample[1], **wrong))


def test_a_delta_of_a_larger_array_cannot_reach_beyond_the_base():
    base = np.zeros(1000, np.uint8)
    new = base.copy()
    new[-1] = 1
    delta = encode_delta(base, new)
    with pytest.raises(SyncError, match="1000 elements"):
        decode_delta(base[:500], delta)
    with pytest.raises(SyncError, match="outside"):
        decode_delta(base[:500], replace(delta, size=500))


@pytest.mark.parametrize("share", [0.001, 0.01])
def test_a_changed_code_costs_little_more_than_its_entropy(share):
    """1 bit for the sign, and for the place the entropy of the share over the share: 12.4 and 9.1 together."""
    entropy = 1 - math.log2(share) - (1 - share) / share * math.log2(1 - share)
    rng = np.random.default_rng(0)
    base = rng.integers(0, 256, 2_000_000, dtype=np.uint8)
    at = rng.random(base.size) < share
    delta = encode_delta(
        base, base + np.where(at, rng.choice(np.array([1, 255], np.uint8), base.size), 0).astype(np.uint8)
    )
    assert 8 * delta.nbytes / delta.count < entropy + 1.2


def test_scales_that_nearly_all_move_a_little_cost_a_third():
    rng = np.random.default_rng(0)
    base = rng.uniform(0.001, 0.003, 30_000).astype(np.float32)
    new = (base * (1 + 1e-5 * rng.standard_normal(base.size))).astype(np.float32)
    delta = encode_delta(base.view(np.uint32), new.view(np.uint32))
    assert delta.count > 0.99 * base.size
    assert delta.nbytes < 0.31 * base.nbytes


def test_a_large_array_that_changed_nearly_everywhere_is_sent_whole():
    base = np.zeros(200_000, np.uint8)
    assert encode_delta(base, base + np.uint8(1)) is None  # though it would be small
    few = base.copy()
    few[:50_000] = 1
    assert (decode_delta(base, encode_delta(base, few)) == few).all()
