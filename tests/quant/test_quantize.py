"""Quantizers, the quantized linear and fingerprints against definitions written out independently."""

import itertools
import math
from unittest import mock

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from qurl_ray.errors import QuantizationError
from qurl_ray.quant import fingerprint as fingerprints
from qurl_ray.quant.fingerprint import fingerprint
from qurl_ray.quant.formats import FORMATS, get_format
from qurl_ray.quant.kernels import kernel_for
from qurl_ray.quant.linear import QuantizedLinear, reference_linear, weight_max_code
from qurl_ray.quant.quantize import QTensor, dequantize, dequantize_rows, quantize, quantize_rows
from tests.conftest import arrays_of
from tests.quant.grid import E4M3

ALL = list(FORMATS.values())
PLAIN = [fmt for fmt in ALL if fmt.codec is None]  # test_blocks.py has the others
names = lambda fmt: fmt.name  # noqa: E731
CPU = torch.device("cpu")


def weight(seed: int, rows=24, columns=256) -> torch.Tensor:
    return torch.randn(rows, columns, generator=torch.Generator().manual_seed(seed)) * 0.05


def spread(q: QTensor) -> torch.Tensor:
    """The scale of each weight, by its place."""
    rows, columns = q.codes.shape
    places = [[(n // q.fmt.rows, k // (q.fmt.group or columns)) for k in range(columns)] for n in range(rows)]
    index = torch.tensor(places)
    return q.scale[index[..., 0], index[..., 1]]


def same_codes(one: QTensor, other: QTensor) -> bool:
    return torch.equal(one.codes.view(torch.uint8), other.codes.view(torch.uint8))


def test_fp8_codes_are_the_nearest_e4m3_values():
    w = weight(5).double()
    q = quantize(w.float(), FORMATS["fp8"])
    np.testing.assert_array_equal(q.codes.float().numpy(), nearest_code((w / q.scale.double()).numpy(), "fp8"))


@pytest.mark.parametrize("fmt", PLAIN, ids=names)
@settings(max_examples=40, deadline=None)
@given(seed=st.integers(0, 2**31), log2_gain=st.integers(-12, 12))
def test_error_is_at_most_half_a_step(fmt, seed, log2_gain):
    w = weight(seed) * 2.0**log2_gain
    q = quantize(w, fmt)
    step = spread(q)
    if fmt.dtype.is_floating_point:  # three bits after the leading one, down to 2^-6; 2^-9 below
        step = torch.maximum(w.abs() / 8, step * 2**-9)
    assert ((dequantize(q) - w).abs() <= 0.5 * step * (1 + 1e-5)).all()
    assert float(q.codes.float().abs().max()) == fmt.weight_max


@pytest.mark.parametrize("fmt", ALL, ids=names)
@settings(max_examples=40, deadline=None)
@given(seed=st.integers(0, 2**31), log2_gain=st.integers(-12, 12))
def test_powers_of_two_move_the_scale_and_not_the_codes(fmt, seed, log2_gain):
    """Q(a·w) = a·Q(w): the reason why UAQ alone cannot change the forward pass at step 0."""
    q, gained = quantize(weight(seed), fmt), quantize(weight(seed) * 2.0**log2_gain, fmt)
    assert same_codes(q, gained)
    assert torch.equal(dequantize(gained), dequantize(q) * 2.0**log2_gain)


def test_rows_of_zeros_stay_zero():
    w = weight(0)
    w[3] = 0
    for fmt in ALL:
        assert (dequantize(quantize(w, fmt))[3] == 0).all()
        assert (QuantizedLinear(quantize(w, fmt), None)(torch.zeros(2, 256)) == 0).all()


@pytest.mark.parametrize("fmt", ALL, ids=names)
def test_a_block_of_zeros_stays_zero_and_changes_no_other(fmt):
    w = weight(0, rows=256)
    w[200, 200] = 1  # the largest of a whole tensor, too
    others = dequantize(quantize(w, fmt))[128:]
    w[:128, :128] = 0
    found = dequantize(quantize(w, fmt))
    assert (found[:128, :128] == 0).all()
    assert found.isfinite().all()
    assert torch.equal(found[128:], others)


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_weights_that_are_not_finite_are_refused(bad):
    w = weight(0)
    w[[2, 5], 7] = bad
    with pytest.raises(QuantizationError, match="nan or inf in 2 of 24 rows"):
        quantize(w, FORMATS["int8"])


def test_widths_that_the_group_does_not_divide_are_refused():
    with pytest.raises(QuantizationError, match="width 200 is not a multiple of its group of 128"):
        quantize(weight(0, columns=200), FORMATS["int4"])


def nearest_code(values: np.ndarray, format_name: str) -> np.ndarray:
    if not format_name.startswith("fp8"):
        return np.round(values)
    return np.sign(values) * E4M3[np.abs(np.abs(values)[..., None] - E4M3).argmin(axis=-1)]


def by_hand(x: np.ndarray, q, bias: np.ndarray) -> np.ndarray:
    """Quantize, dequantize, multiply, in float64 and element by element."""
    out = np.zeros((len(x), len(q.codes)))
    w = (dequantize(q).double() if q.fmt.codec else q.codes.double() * spread(q)).numpy()
    for m, row in enumerate(x.astype(np.float64)):
        if q.fmt.activations:
            row[:] = dequantize(quantize(torch.tensor(row[None], dtype=torch.float32), FORMATS["nvfp4"]))[0]
        elif q.fmt.activation_max:
            size = q.fmt.activation_group or len(row)
            for part in (row[k : k + size] for k in range(0, len(row), size)):
                top = np.abs(part).max()
                part[:] = nearest_code(part / top * q.fmt.activation_max, q.fmt.name) * top / q.fmt.activation_max
        out[m] = w @ row + bias
    return out


@pytest.mark.parametrize("emulate", [True, False], ids=["emulation", "kernel"])
@pytest.mark.parametrize("fmt", ALL, ids=names)
def test_linear_computes_the_definition(fmt, emulate):
    q, x, bias = quantize(weight(1), fmt), 3 * torch.randn(5, 256), torch.randn(24)
    found = QuantizedLinear(q, bias, emulate=emulate)(x)
    expected = by_hand(x.numpy(), q, bias.numpy())
    np.testing.assert_allclose(found.numpy(), expected, rtol=1e-4, atol=1e-5)
    assert np.abs(expected - (x @ weight(1).T + bias).numpy()).max() > 1e-3  # quantized, not simply right


@pytest.mark.parametrize(("rows", "columns"), [(128, 128), (200, 300), (130, 64), (64, 576)])
def test_blocks_at_the_edge_are_smaller(rows, columns):
    w, fmt = weight(6, rows=rows, columns=columns), FORMATS["fp8_block"]
    q, x, bias = quantize(w, fmt), torch.randn(3, columns), torch.randn(rows)
    assert q.scale.shape == (-(-rows // 128), -(-columns // 128))
    for i, j in np.ndindex(*q.scale.shape):
        block = w[128 * i : 128 * (i + 1), 128 * j : 128 * (j + 1)]
        assert q.scale[i, j] == block.abs().max() / 448
    found = QuantizedLinear(q, bias)(x)
    np.testing.assert_allclose(found.numpy(), by_hand(x.numpy(), q, bias.numpy()), rtol=1e-4, atol=1e-5)


def test_an_outlier_stays_in_its_block():
    """A channel a hundred thousand times as large costs all others their precision, per token; here only its block."""
    w, x = weight(7, rows=128, columns=512), torch.randn(16, 512)
    x[:, 5] *= 1e5
    quiet = torch.arange(512) >= 128  # columns of the other blocks
    exact = x[:, quiet] @ w[:, quiet].T
    error = {}
    for name in ("fp8", "fp8_block"):
        codes, amax = quantize_rows(x, FORMATS[name])
        error[name] = (dequantize_rows((codes, amax), FORMATS[name])[:, quiet] @ w[:, quiet].T - exact).norm()
    assert error["fp8_block"] < 0.05 * exact.norm() < error["fp8"]


@pytest.mark.parametrize("columns", [128, 576, 1536, 4096])
@pytest.mark.parametrize("gain", [1e-3, 1.0, 37.0])
def test_the_integer_kernel_equals_its_emulation_bit_for_bit(columns, gain):
    fmt = FORMATS["int8"]
    if kernel_for(fmt, CPU) is None:
        pytest.skip("no INT8 kernel on this CPU: emulation is what runs")
    fmt = get_format("int8", weight_max_code(fmt, CPU))
    q, x, bias = quantize(weight(2, columns=columns), fmt), gain * torch.randn(200, columns), torch.randn(24)
    kernel, emulation = QuantizedLinear(q, bias), QuantizedLinear(q, bias, emulate=True)
    assert torch.equal(kernel(x), emulation(x))
    assert torch.equal(emulation(x), reference_linear(x, q, bias))
    assert torch.equal(kernel(x)[17:18], kernel(x[17:18]))


@pytest.mark.parametrize("emulate", [True, False], ids=["emulation", "kernel"])
@pytest.mark.parametrize("fmt", ALL, ids=names)
def test_resident_codes_are_those_that_were_given(fmt, emulate):
    q = quantize(weight(3), fmt)
    resident = QuantizedLinear(q, None, emulate=emulate).resident()
    assert all(map(torch.equal, resident.parts, q.parts))
    assert fingerprint(*resident.parts) == fingerprint(*q.parts)


@pytest.mark.parametrize("fmt", ALL, ids=names)
def test_codes_survive_a_journey_as_read_only_numpy_buffers(fmt):
    q = quantize(weight(4), fmt)
    parts = (np.frombuffer(part.tobytes(), part.dtype).reshape(part.shape) for part in arrays_of(q))
    arrived = QTensor.of([torch.from_numpy(part) for part in parts], fmt)
    assert arrived.codes.dtype == fmt.dtype
    assert all(map(torch.equal, arrived.parts, q.parts))


@pytest.mark.parametrize(("name", "top_code", "error"), [("int8", 127, 0.51 / 127), ("fp8", 448, 16.1 / 448)])
def test_activation_codes_come_from_the_row_alone(name, top_code, error):
    x = torch.randn(6, 64)
    codes, top = quantize_rows(x, FORMATS[name])
    louder = torch.cat([x, 1000 * x])
    assert torch.equal(quantize_rows(louder, FORMATS[name])[0][:6], codes)
    assert (codes.abs().amax(dim=1) == top_code).all()
    torch.testing.assert_close(codes * top / top_code, x, rtol=0, atol=float(top.max()) * error)


# --- fingerprints -----------------------------------------------------------------------------------------------


def splitmix(i: int) -> int:
    """splitmix64 from its published description, on Python integers."""
    mask = 2**64 - 1
    z = (i + 1) * 0x9E3779B97F4A7C15 & mask
    z = (z ^ z >> 30) * 0xBF58476D1CE4E5B9 & mask
    z = (z ^ z >> 27) * 0x94D049BB133111EB & mask
    return z ^ z >> 31


@settings(max_examples=60, deadline=None)
@given(st.binary(min_size=1, max_size=100))
def test_fingerprint_is_the_sum_of_words_times_odd_factors(data):
    words = [int.from_bytes(data[i : i + 8], "little") for i in range(0, len(data), 8)]
    expected = sum(word * (splitmix(i) | 1) for i, word in enumerate(words)) * (splitmix(0) | 1) % 2**64
    assert fingerprint(torch.frombuffer(bytearray(data), dtype=torch.uint8)) == expected


@settings(max_examples=60, deadline=None)
@given(seed=st.integers(0, 2**31), at=st.integers(0, 24 * 256 - 1), bit=st.integers(0, 7))
def test_any_flipped_bit_changes_the_fingerprint(seed, at, bit):
    q = quantize(weight(seed), FORMATS["int8"])
    damaged = q.codes.clone().view(torch.uint8).reshape(-1)
    damaged[at] ^= 1 << bit
    assert fingerprint(damaged, q.scale) != fingerprint(q.codes, q.scale)


def test_swapped_rows_and_swapped_parts_change_the_fingerprint():
    w = weight(0)
    assert fingerprint(w) != fingerprint(w[[1, 0, *range(2, 24)]])
    assert fingerprint(w[:12], w[12:]) != fingerprint(w[12:], w[:12])


TYPES = [torch.uint8, torch.int8, torch.float8_e4m3fn, torch.bfloat16, torch.float16, torch.float32, torch.int64]


@pytest.mark.parametrize("dtype", TYPES, ids=str)
@settings(max_examples=40, deadline=None)
@given(seed=st.integers(0, 2**31), count=st.integers(1, 300), data=st.data())
def test_fingerprints_of_shards_add_up_to_that_of_the_whole(dtype, seed, count, data):
    def of_bytes(number: int) -> torch.Tensor:
        generator = torch.Generator().manual_seed(seed + number)
        return torch.randint(256, (number * dtype.itemsize,), dtype=torch.uint8, generator=generator).view(dtype)

    whole, other = of_bytes(count), of_bytes(7)
    cuts = sorted({0, count, *data.draw(st.lists(st.integers(0, count), max_size=5))})
    shards = [(whole[a:b], a) for a, b in itertools.pairwise(cuts)]
    assert sum(fingerprint(part, offset=at) for part, at in shards) % 2**64 == fingerprint(whole)
    # of several tensors, each has its own offset: here the first shard comes with the end of the other tensor
    both = [fingerprint(part, other[3:] if not at else other[:0], offset=(at, 0 if at else 3)) for part, at in shards]
    rest = fingerprint(whole[:0], other[:3])
    assert (sum(both) + rest) % 2**64 == fingerprint(whole, other)


@settings(max_examples=60, deadline=None)
@given(seed=st.integers(0, 2**31), count=st.integers(0, 200), start=st.integers(0, 100), skipped=st.integers(0, 9))
def test_devices_sum_the_words_as_numpy_does(seed, count, start, skipped):
    generator = torch.Generator().manual_seed(seed)
    data = torch.randint(256, (skipped + count,), dtype=torch.uint8, generator=generator)[skipped:]
    with mock.patch.object(fingerprints, "_CHUNK", 64):
        found = fingerprints._sum_of_words_on_device(data, start)
    assert found == fingerprints._sum_of_words(data, start) % 2**64


def test_a_shard_has_an_offset_and_it_is_not_negative():
    w = weight(0)
    with pytest.raises(ValueError, match=r"each of 2 tensors, got \[3\]"):
        fingerprint(w, w, offset=[3])
    with pytest.raises(ValueError, match="at least 0"):
        fingerprint(w, offset=-1)
